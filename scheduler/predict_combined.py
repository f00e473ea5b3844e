"""combined: reads ahead only what pays, by layer and by rank.

Its sources are the next layer's router and, where that one is bad or has nothing, what the layer
chose in the sweep before.  Every rank of every layer has its own running precision among absent
pages; what lies under the bar is not read.  The bar rests at ``PAYS`` and rises while fewer than
four in five of the pages read ahead come true.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId
from .hints import PAYS, Hints, Kind, Ranked
from .predict_repeat import Predictor as Repeat
from .predict_router import Predictor as Router

HIGHEST = 0.95  #: of the bar
GOAL = 0.8  #: share of the pages read ahead that shall be asked for by the layer they are for
STEP = 1 / 128  #: how fast the bar moves


class Predictor(Ranked):
    """The ranks of all sources, each only while its precision is above the bar."""

    asks_router = True
    tried = True  # not asked at all in sweeps where even asking does not pay

    def __init__(self, layers: Sequence[int], experts: int, top_k: int) -> None:
        super().__init__(layers, experts, top_k)
        self.bar = PAYS
        self._sources: tuple[Ranked, ...] = (
            Router(layers, experts, top_k),
            Repeat(layers, experts, top_k),
        )

    def rank(self, hints: Hints) -> Iterator[tuple[PageId, Kind]]:
        for source in self._sources:  # their kinds differ in length
            yield from source.rank(hints)

    def outcome(self, hit: bool) -> None:
        self.bar = min(max(self.bar + STEP * (GOAL - hit), PAYS), HIGHEST)

    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        super().learn(layer, experts)
        for source in self._sources:
            source.learn(layer, experts)
