"""Belady's MIN: the page whose next use is farthest leaves.  Needs the future, so it is offered to
comparisons only (no ``policy_`` in the file's name: the registry does not find it)."""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId
from .replay import BLOCK, Leases, Step, replay

I32 = npt.NDArray[np.int32]
GONE = 1  #: key of a page that is not here; all others are below 0


class _Asked(NamedTuple):
    """Requests of a run: all its pages in order, and of each request the place of its page there
    and the number of its lease; ``sizes`` of the leases."""

    pages: list[PageId]
    rank: I32
    lease: I32
    sizes: I32


def _asked(run: Iterable[Step]) -> _Asked:
    number: dict[PageId, int] = defaultdict(count().__next__)  # as they come
    asked, sizes = array("i"), array("i")
    for step in run.steps(False) if isinstance(run, Leases) else run:
        asked.extend(map(number.__getitem__, step.pages))
        sizes.append(len(step.pages))
    pages, each = sorted(number), np.array(sizes, np.int32)
    rank = np.empty(len(pages), np.int32)
    rank[[number[page] for page in pages]] = np.arange(len(pages))
    return _Asked(
        pages, rank[np.array(asked, np.int32)],
        np.repeat(np.arange(len(each), dtype=np.int32), each), each,
    )  # fmt: skip


def fewest_misses(run: Iterable[Step], slots: int) -> int:
    """``replay(run, Belady(run), slots).misses``, in a third of the time: whoever is asked for in a
    lease cannot leave in it, so all that leave are chosen at once.  About 30 bytes a request."""
    pages, rank, lease, sizes = _asked(run)
    if sizes.max(initial=0) > slots:  # leases in waves
        return replay(run, Belady(run), slots).misses
    many = len(pages)
    order = np.argsort(rank, kind="stable")
    after = np.full(len(rank), len(sizes), np.int64)  # the lease of the next use of the same page
    same = np.diff(rank[order]) == 0
    after[order[:-1][same]] = lease[order[1:][same]]
    del order, lease
    after *= -many
    after += rank
    ends = np.cumsum(sizes)
    now, farthest = [GONE] * many, list[int]()  # keys, as Belady has them
    here = misses = begin = 0
    for block in range(0, len(ends), BLOCK):
        bounds = ends[block : block + BLOCK].tolist()
        first, keys = begin, after[begin : bounds[-1]].tolist()
        for end in bounds:
            some = keys[begin - first : end - first]
            begin = end
            for key in some:
                page = key % many
                if now[page] == GONE:
                    here += 1
                    misses += 1
                now[page] = key
            while here > slots:
                key = heapq.heappop(farthest)
                if now[key % many] == key:
                    now[key % many] = GONE
                    here -= 1
            for key in some:
                heapq.heappush(farthest, key)
        if len(farthest) > 4 * here + 64:
            farthest = [key for key in now if key != GONE]
            heapq.heapify(farthest)
    return misses


class Belady:
    """The fewest misses that any policy can have on ``run``, with the same leases.

    It must be replayed over exactly that run.  Pages are alike in size, so fewest misses are
    fewest bytes.  4 bytes for each request, and 24 while it is made.
    """

    def __init__(self, run: Iterable[Step]) -> None:
        # by rank, so that of pages with the same next use always the same one leaves
        self._pages, ranks, leases, sizes = _asked(run)
        self._rank = {page: rank for rank, page in enumerate(self._pages)}
        times = np.bincount(ranks, minlength=len(self._pages))
        ends = np.cumsum(times)
        # of one page after another; no use ever again lies behind all others
        self._uses = np.insert(leases[np.argsort(ranks, kind="stable")], ends, len(sizes)).data
        self._at: list[int] = (ends - times + np.arange(len(ends))).tolist()  # present uses there
        self._key = [GONE] * len(ends)  # of each page there is: its rank, minus its next use
        self._here = 0
        self._farthest: list[int] = []  # keys; some outdated

    def hit(self, page: PageId) -> None:
        rank = self._rank[page]
        self._at[rank] = at = self._at[rank] + 1
        self._key[rank] = key = rank - self._uses[at] * len(self._pages)
        heapq.heappush(self._farthest, key)
        if len(self._farthest) > 4 * self._here + 64:
            self._farthest = [key for key in self._key if key != GONE]
            heapq.heapify(self._farthest)

    def insert(self, page: PageId) -> None:
        self._here += 1
        self.hit(page)

    def forget(self, page: PageId) -> None:
        self._key[self._rank[page]] = GONE
        self._here -= 1

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        held, pages, keys = [], self._pages, self._key
        while True:
            key = heapq.heappop(self._farthest)
            rank = key % len(pages)
            if keys[rank] != key:
                continue
            if not busy(pages[rank]):
                break
            held.append(key)
        for other in held:
            heapq.heappush(self._farthest, other)
        keys[rank] = GONE
        self._here -= 1
        return pages[rank]

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        """It knows already."""
