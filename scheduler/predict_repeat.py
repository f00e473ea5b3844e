"""repeat: a layer asks again for what it asked for in the sweep before.

Needs no hint but which layer is next.  Where a cache holds at least one sweep's pages and drops
the oldest, those pages are still there and nothing is left to guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId
from .hints import Hints, Kind, Ranked


class Predictor(Ranked):
    """The experts of the sweep before, by rising number."""

    def __init__(self, layers: Sequence[int], experts: int, top_k: int) -> None:
        super().__init__(layers, experts, top_k)
        self._last: dict[int, list[int]] = {}

    def rank(self, hints: Hints) -> Iterator[tuple[PageId, Kind]]:
        layer = hints.next_layer
        if layer is not None:
            for expert in self._last.get(layer, ()):
                yield PageId(layer, expert), (layer,)

    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        super().learn(layer, experts)
        self._last[layer] = sorted(set(experts.ravel().tolist()))
