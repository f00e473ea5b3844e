"""sure: what the next layer's router, asked one layer early, is clearly for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from k3offload.scheduler.hints import CHOSEN, Guess, Hints
from k3offload.tiers.base import PageId

SURE = CHOSEN + 32  #: of 255; from 128 on an expert is among the row's best


class Predictor:
    """Made with the numbers of the MoE layers, the experts of a layer and how many are chosen."""

    asks_router, asks_latent = True, False

    def __init__(self, layers: Sequence[int], experts: int, top_k: int) -> None:
        self._layers = frozenset(layers)

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        if hints.next_layer not in self._layers or hints.next_scores is None:
            return []
        scores = hints.next_scores.max(axis=0)  # of each expert, the best of all rows
        likely = [expert for expert in np.argsort(-scores.astype(int), kind="stable").tolist()
                  if scores[expert] >= SURE]  # fmt: skip
        pages = [(PageId(hints.next_layer, expert), scores[expert] / 255) for expert in likely]
        return [(page, float(sure)) for page, sure in pages if hints.absent(page)]

    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        """What was chosen in the end teaches it nothing."""
