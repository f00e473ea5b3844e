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
        begins = np.cumsum(counts) - counts
        self._uses = np.frombuffer(when, np.int32)[order].data  # of one page after another
        self._at = {page: int(begins[i]) for page, i in number.items()}  # its present use there
        self._end = {page: int(begins[i] + counts[i]) for page, i in number.items()}
        self._next: dict[PageId, int] = {}
        self._farthest: list[tuple[int, PageId]] = []  # (minus next use, page), some outdated

    def hit(self, page: PageId) -> None:
        self._at[page] = at = self._at[page] + 1
        # no use ever again lies behind all others
        self._next[page] = use = self._uses[at] if at < self._end[page] else self._never
        heapq.heappush(self._farthest, (-use, page))
        if len(self._farthest) > 4 * len(self._next) + 64:
            self._farthest = [(-use, page) for page, use in self._next.items()]
            heapq.heapify(self._farthest)

    insert = hit

    def forget(self, page: PageId) -> None:
        del self._next[page]

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        held = []
        while True:
            item = heapq.heappop(self._farthest)
            if self._next.get(item[1]) != -item[0]:
                continue
            if not busy(item[1]):
                break
            held.append(item)
        for other in held:
            heapq.heappush(self._farthest, other)
        del self._next[item[1]]
        return item[1]

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        """It knows already."""
