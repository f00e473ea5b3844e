"""LFRU: frequency and recency in one number.  Each time a page is asked for it earns one, and what
it earned halves every ``HALF * slots`` requests; the page with the least leaves.

Pages keep what they earned after they left.  (LRFU: D. Lee and others, IEEE Transactions on
Computers 50(12), 2001.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId

HALF = 8  #: about the best of 1, 2, 4, 8, 16 on routing of the embedded model


class Policy:
    """Earnings are kept as the logarithm of what they would be worth at request 0: a number that
    does not change while nothing is earned, so a heap can hold it."""

    def __init__(self, slots: int) -> None:
        self._half = float(HALF * max(1, slots))
        self._requests = 0
        self._earned: dict[PageId, float] = {}
        self._here: set[PageId] = set()
        self._heap: list[tuple[float, PageId]] = []  # some entries are outdated

    def hit(self, page: PageId) -> None:
        self._requests += 1
        now, before = self._requests / self._half, self._earned.get(page)
        value = now if before is None else max(now, before) + log2(1 + 2.0 ** -abs(now - before))
        self._earned[page] = value
        heapq.heappush(self._heap, (value, page))
        if len(self._heap) > 4 * len(self._here) + 64:
            self._heap = [(self._earned[page], page) for page in sorted(self._here)]
            heapq.heapify(self._heap)

    def insert(self, page: PageId) -> None:
        self._here.add(page)
        self.hit(page)

    def forget(self, page: PageId) -> None:
        self._here.remove(page)

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        held = []
        while True:
            item = heapq.heappop(self._heap)
            value, page = item
            if page not in self._here or value != self._earned[page]:
                continue
            if not busy(page):
                break
            held.append(item)
        for other in held:
            heapq.heappush(self._heap, other)
        self._here.remove(page)
        return page

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        """What the router says changes nothing here."""
