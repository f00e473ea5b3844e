"""Belady's MIN: the page whose next use is farthest leaves.  Needs the future, so it is offered to
comparisons only (no ``policy_`` in the file's name: the registry does not find it)."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId
from .replay import Leases, Step


class Belady:
    """The fewest misses that any policy can have on ``run``, with the same leases.

    It must be replayed over exactly that run.  Pages are alike in size, so fewest misses are
    fewest bytes.  8 bytes for each request.
    """

    def __init__(self, run: Iterable[Step]) -> None:
        number: dict[PageId, int] = {}
        pages, when = array("i"), array("i")
        self._never = 0
        for self._never, step in enumerate(run.steps(False) if isinstance(run, Leases) else run, 1):
            for page in step.pages:
                pages.append(number.setdefault(page, len(number)))
                when.append(self._never - 1)
        order = np.argsort(np.frombuffer(pages, np.int32), kind="stable")
        counts = np.bincount(np.frombuffer(pages, np.int32), minlength=len(number))
        ends = np.cumsum(counts)
        self._uses = np.frombuffer(when, np.int32)[order].data  # of one page after another
        self._number = number
        self._at: list[int] = (ends - counts).tolist()  # of each page its present use there
        self._end: list[int] = ends.tolist()
        self._next = [-1] * len(number)  # the use after it; -1 where a page is not here
        # pages by rank, so that of pages with the same next use always the same one leaves
        self._pages = sorted(number)
        self._rank = [0] * len(number)
        for rank, page in enumerate(self._pages):
            self._rank[number[page]] = rank
        self._here = 0
        self._farthest: list[int] = []  # minus next use, and the rank; some outdated

    def hit(self, page: PageId) -> None:
        number = self._number[page]
        self._at[number] = at = self._at[number] + 1
        # no use ever again lies behind all others
        use = self._uses[at] if at < self._end[number] else self._never
        self._next[number] = use
        heapq.heappush(self._farthest, self._rank[number] - use * len(self._pages))
        if len(self._farthest) > 4 * self._here + 64:
            self._farthest = [
                self._rank[number] - use * len(self._pages)
                for number, use in enumerate(self._next)
                if use >= 0
            ]
            heapq.heapify(self._farthest)

    def insert(self, page: PageId) -> None:
        self._here += 1
        self.hit(page)

    def forget(self, page: PageId) -> None:
        self._next[self._number[page]] = -1
        self._here -= 1

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        held, count = [], len(self._pages)
        while True:
            item = heapq.heappop(self._farthest)
            page = self._pages[item % count]
            if self._next[self._number[page]] != -(item // count):
                continue
            if not busy(page):
                break
            held.append(item)
        for other in held:
            heapq.heappush(self._farthest, other)
        self.forget(page)
        return page

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        """It knows already."""
