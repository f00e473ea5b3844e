"""router: what the next layer's own router would choose on the stream as it stands now.

The stream lacks this layer's routed experts and the next layer's attention, and the first ranks are
mostly right (on K3 others report 92 % at rank 1, 28 % at rank 16, with those experts);
beside full-attention layers it can fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..tiers.base import PageId
from .hints import Hints, Kind, Ranked, ranked


class Predictor(Ranked):
    """The top k of the next layer's router, rank by rank."""

    asks_router = True

    def rank(self, hints: Hints) -> Iterator[tuple[PageId, Kind]]:
        layer = hints.next_layer
        if layer is not None and hints.next_scores is not None:
            for expert, rank in ranked(hints.next_scores, self.top_k):
                yield PageId(layer, expert), (layer, rank)
