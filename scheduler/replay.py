"""Replay: what cache policies would have done with the requests of a recorded run, no hardware.

Counts exactly what ``ExpertStore`` counts for the same leases without prefetch, since both call
the policy in the order of the schedule: the pages of a lease that are present are hits and stay,
the others are misses in the order of the file, each evicting where no slot is free, and all are
pinned until the lease ends.  Below one tier there may be others: each page missed is a lease of
its own there.  Knows pages and 8-bit router scores, no file format and no clock: a read ends when
it starts (``replay_timed.py`` has one that takes time, and predictors).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tiers.base import CachePolicy, PageId
from .counts import Counts
from .lease import victim
from .store import MOST

Experts = npt.NDArray[np.integer[Any]]
Scores = npt.NDArray[np.uint8]
At = tuple[int, int, int]  #: rows, from and to, and the number of a layer among those with experts
Row = tuple[Experts, Scores]  #: best experts of a row, and their scores
BLOCK = 256  #: rows that are turned into pages at a time


class Step(NamedTuple):
    """One lease: its distinct pages by rising number, and what the policy is told before it: for
    each row the experts it chose or nearly chose, best first, and their scores.  ``order``: the
    key by which missing pages are read; by number if it is None."""

    layer: int
    pages: Sequence[PageId]
    rows: Sequence[Row] = ()
    order: Callable[[PageId], int] | None = None
    at: At = (0, 0, 0)


class Leases:
    """The leases of recorded sweeps, made as they are walked through, again and again.

    ``chosen`` [T, L, k]: the experts of each row; ``sweep`` [T]: rows with the same number, which
    stand together, share leases (each row by itself if it is None); ``told``: (best, codes), each
    [T, L, M], what the policy hears of sweeps whose rows all ``decode``; ``order`` [L, E]: places
    in the file.
    """

    def __init__(
        self,
        layers: Sequence[int],
        chosen: Experts,
        sweep: Experts | None = None,
        told: tuple[Experts, Scores] | None = None,
        decode: npt.NDArray[np.bool_] | None = None,
        order: Experts | None = None,
    ) -> None:
        self.layers, self._chosen, self._told = tuple(layers), chosen, told
        count = len(chosen)
        ends = np.arange(1, count) if sweep is None else np.flatnonzero(np.diff(sweep)) + 1
        self._bounds = [0, *ends.tolist(), count] if count else [0]
        self._hears = np.ones(count, bool) if decode is None else decode
        experts = int(chosen.max()) + 1 if order is None else order.shape[1]
        self._pages = [[PageId(la, e) for e in range(experts)] for la in self.layers]
        self._order: list[Callable[[PageId], int] | None] = [None] * len(self.layers)
        for place, row in enumerate(() if order is None else order):
            if (np.diff(row.astype(np.int64)) < 0).any():
                self._order[place] = _placed(row.tolist())

    @property
    def total(self) -> int:
        """All pages there are."""
        return sum(map(len, self._pages))

    @property
    def distinct(self) -> int:
        """Pages that are asked for at all: no cache has fewer misses."""
        used = np.zeros((len(self.layers), self.total), bool)
        for place in range(len(self.layers)):
            used[place, self._chosen[:, place].ravel()] = True
        return int(used.sum())

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    def steps(self, told: bool = True) -> Iterator[Step]:
        """Without ``told`` the rows are left out, which takes less time."""
        told = told and self._told is not None
        block: list[list[list[int]]] = []
        at = -BLOCK
        for begin, end in zip(self._bounds, self._bounds[1:], strict=False):
            hears = told and bool(self._hears[begin:end].all())
            single = end - begin == 1
            if single and not at <= begin < at + BLOCK:
                at, block = begin, np.sort(self._chosen[begin : begin + BLOCK], axis=2).tolist()
            for place, pages in enumerate(self._pages):
                if single:
                    numbers = block[begin - at][place]
                else:
                    numbers = np.unique(self._chosen[begin:end, place]).tolist()
                rows = self._rows(begin, end, place) if hears else ()
                some = [pages[number] for number in numbers]
                at_rows = (begin, end, place)
                yield Step(self.layers[place], some, rows, self._order[place], at_rows)

    def _rows(self, begin: int, end: int, place: int) -> Sequence[Row]:
        told = self.told(begin, end, place)
        return () if told is None else tuple(zip(*told, strict=True))

    @property
    def top_k(self) -> int:
        return int(self._chosen.shape[2])

    @property
    def experts(self) -> int:
        """Of a layer."""
        return len(self._pages[0])

    @property
    def first(self) -> PageId:
        return self._pages[0][0]

    @property
    def orders(self) -> dict[int, Callable[[PageId], int] | None]:
        """Sort keys of pages by layer."""
        return dict(zip(self.layers, self._order, strict=True))

    def decodes(self, begin: int, end: int) -> bool:
        """Whether a sweep of these rows only decodes."""
        return bool(self._hears[begin:end].all())

    def chosen(self, begin: int, end: int, place: int) -> Experts:
        """[rows, k], by rising number."""
        return np.sort(self._chosen[begin:end, place], axis=1).astype(np.int64)

    def told(self, begin: int, end: int, place: int) -> tuple[Experts, Scores] | None:
        """What the policy hears of these rows."""
        if self._told is None:
            return None
        best, codes = self._told
        return best[begin:end, place].astype(np.int64), codes[begin:end, place]


def _placed(places: list[int]) -> Callable[[PageId], int]:
    return lambda page: places[page.expert]


class Requests:
    """One-page leases of pages in this order: what a tier asks of the one below.  8 bytes each."""

    def __init__(self) -> None:
        self._layers, self._experts = array("i"), array("i")

    def add(self, page: PageId) -> None:
        self._layers.append(page.layer)
        self._experts.append(page.expert)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Step]:
        return (Step(page.layer, (page,)) for page in map(PageId, self._layers, self._experts))

    @property
    def distinct(self) -> int:
        return len(set(zip(self._layers, self._experts, strict=True)))


class Cache:
    """Slots of a tier under a policy, over ``below``: another tier, or whatever hears of misses."""

    def __init__(
        self,
        policy: CachePolicy,
        slots: int,
        size: int = 1,
        below: Callable[[PageId], object] | None = None,
    ) -> None:
        self.counts, self.slots, self._policy, self._size = Counts(), slots, policy, size
        self._present: set[PageId] = set()
        self._evicted, self._below = 0, below
        self.hears: bool = getattr(policy, "hears_router", False)

    def lease(self, step: Step) -> None:
        """All of ``step``: what the policy hears, then its pages."""
        present, policy, slots = self._present, self._policy, self.slots
        if self.hears:
            for experts, scores in step.rows:
                policy.note(step.layer, experts, scores)
        missing = []
        for page in step.pages:
            if page in present:
                policy.hit(page)
            else:
                missing.append(page)
        if step.order is not None:
            missing.sort(key=step.order)
        counts = self.counts
        counts.requests += len(step.pages)
        counts.hits += len(step.pages) - len(missing)
        counts.misses += len(missing)
        counts.bytes += self._size * len(missing)
        if self._below is not None:
            for page in missing:
                self._below(page)
        if len(step.pages) > slots:
            self._waves(step.pages, missing)
            return
        busy = set(step.pages).__contains__
        for page in missing:
            if len(present) >= slots:
                self._evict(busy)
            policy.insert(page)
            present.add(page)

    def request(self, page: PageId) -> None:
        """A lease of one page."""
        self.lease(Step(page.layer, (page,)))

    def _evict(self, busy: Callable[[PageId], bool]) -> None:
        self._present.remove(victim(self._policy, busy, self._present))
        self._evicted += 1

    def _waves(self, pages: Sequence[PageId], missing: Sequence[PageId]) -> None:
        """A lease of more pages than slots: slots come free as pages are handed out and used."""
        present, slots = self._present, self.slots
        wanted = deque(missing)
        ready = deque(page for page in pages if page in present)
        pinned = set(ready)
        while wanted or ready:
            while wanted and (len(present) < slots or len(pinned) < len(present)):
                if len(present) >= slots:
                    self._evict(pinned.__contains__)
                page = wanted.popleft()
                self._policy.insert(page)
                present.add(page)
                pinned.add(page)
                ready.append(page)
            limit = min(MOST, max(1, slots // 2)) if wanted else MOST
            for _ in range(min(limit, len(ready))):
                pinned.remove(ready.popleft())

    def result(self) -> Counts:
        """The counts, once they have been checked against what came in and left."""
        check(self.counts, self._size)
        assert self.counts.misses == self._evicted + len(self._present)
        return self.counts


def check(counts: Counts, size: int, waiting: int = 0) -> None:
    """What holds of any counts of pages of ``size`` bytes of which ``waiting`` were read ahead
    and nobody has asked for yet."""
    c = counts
    assert c.hits + c.late + c.misses == c.requests, c
    assert c.bytes == c.misses * size + c.prefetch_bytes, c
    assert c.prefetches == c.useful + c.wasted + waiting, c
    assert c.prefetch_bytes <= c.prefetches * size, c
    assert c.late <= c.useful <= c.hits + c.late, c  # those useful in time are hits


def replay(
    run: Iterable[Step],
    policy: CachePolicy,
    slots: int,
    size: int = 1,
    below: Callable[[PageId], object] | None = None,
) -> Counts:
    """Counts of ``policy`` with ``slots`` slots for pages of ``size`` bytes."""
    cache = Cache(policy, slots, size, below)
    for step in run.steps(cache.hears) if isinstance(run, Leases) else run:
        cache.lease(step)
    return cache.result()
