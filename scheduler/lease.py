"""One caller's walk through the pages that it asked of a store: what it still has to get, what it
holds, and what it cannot have; and the events that a store tells of.  The store moves pages from
list to list; this file decides nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, K3Error, ReadError, SlotsExhausted, UsageError
from ..tiers.base import CachePolicy, PageId, Priority

if TYPE_CHECKING:
    from .store import ExpertStore

NO_PAGE = PageId(-1, -1)

WAVE = 4  #: pages handed out at once while more than slots are left

#: pages and their slots; on a device these are tensors
Batch = list[tuple[PageId, Any]]

Lost = Callable[[PageId, K3Error], None]  #: a page that cannot be had, and why


class Event(IntEnum):
    """What happened in a store, as traces number it.

    The first five concern a page: a request that found it, joined its read or began one, or a
    guess that began one; and that it had to leave.  ``ENDED`` and ``FAILED`` (also: cancelled) end
    its read.  The others are calls of the store as they begin, so that what ended before a call
    is known from what ended after it.  ``TAKEN``: a step hands out its pages.  ``ASKED``: the
    predictor is about to be, in a layer (that of the page) about the next (its expert).
    ``LEFT``: a lease ends, ``NOTE``: the policy hears of the router, after which a guess that goes
    on as another read ends may push out another page.
    """

    HIT = 0
    LATE = 1
    MISS = 2
    PREFETCH = 3
    EVICTED = 4
    ENDED = 5
    FAILED = 6
    LEASE = 7
    STEP = 8
    GUESS = 9
    DROP = 10
    ASKED = 11
    TAKEN = 12
    LEFT = 13
    NOTE = 14


Watch = Callable[[Event, PageId, int], None]  #: event, page, its bytes where they say something


def victim(policy: CachePolicy, busy: Callable[[PageId], bool], here: Container[PageId]) -> PageId:
    """Which of the pages ``here`` that are not ``busy`` the ``policy`` lets go of.  Raises
    ``UsageError`` if it is none of them: a busy one would be overwritten while it is read."""
    page = policy.evict(busy)
    if page in here and not busy(page):
        return page
    why = "in use" if page in here else "not there"
    raise UsageError(
        f"The cache policy lets go of {page}, which is {why}.",
        "Its evict must return a page that was inserted and is not busy: see "
        "examples/new_policy.md.",
    )


class Lease:
    """What a caller still has to get and what it holds.

    ``lost``: who is told of a page that cannot be read, or is damaged; with None its error ends
    the walk, as every other error does."""

    def __init__(self, pages: Iterable[PageId], priority: Priority, lost: Lost | None) -> None:
        self.priority, self.thread = priority, threading.get_ident()
        self.ready: dict[PageId, None] = {}  # pinned, resident, not yet handed out
        self.coming: set[PageId] = set()  # pinned, loading
        self.order: dict[PageId, None] = {}  # these two, in the order in which they were pinned
        self.wanted: deque[PageId] = deque(pages)  # neither
        self.held: list[PageId] = []
        self.error: BaseException | None = None
        self._lost = lost
        self.failed: list[tuple[PageId, K3Error]] = []  # of which nobody was told yet

    def pinned(self) -> set[PageId]:
        return {*self.order, *self.held}

    def take(self, pages: Sequence[PageId], coming: Collection[PageId]) -> None:
        """``pages`` are pinned, and resident but for those that are ``coming``."""
        self.order.update(dict.fromkeys(pages))
        if coming:
            self.coming.update(coming)
            pages = [page for page in pages if page not in coming]
        self.ready.update(dict.fromkeys(pages))

    def have(self, page: PageId) -> None:
        """``page``, which was coming, is resident."""
        self.coming.discard(page)
        self.ready[page] = None

    def lose(self, page: PageId) -> None:
        """``page``, which was coming, does not."""
        self.coming.discard(page)
        self.order.pop(page, None)

    def fail(self, page: PageId, error: BaseException) -> None:
        """Nor will it."""
        self.lose(page)
        if self._lost is not None and isinstance(error, (ReadError, CheckpointError)):
            self.failed.append((page, error))
        else:
            self.error = self.error or error

    def tell(self, failed: Iterable[tuple[PageId, K3Error]]) -> None:
        """Tell of pages of ``failed``, outside the store's lock; what that raises ends the walk."""
        for page, error in failed:
            assert self._lost is not None
            self._lost(page, error)

    def next(self, most: int, slots: int) -> list[PageId] | None:
        """What to hand out now, nothing if the walk is over or pages were lost; None is to wait.
        In waves number and order follow from the lease alone: what is held cannot be evicted."""
        if self.failed:
            return []
        if self.wanted:
            some = list(islice(self.order, min(most, WAVE, max(1, slots // 2))))
            return some if some and self.coming.isdisjoint(some) else None
        return list(islice(self.ready, most)) if self.ready or not self.coming else None

    def hold(self, pages: Sequence[PageId]) -> None:
        """Hand out ``pages``, which are ready."""
        if len(pages) == len(self.order):  # all there is, and nothing is coming
            self.ready.clear()
            self.order.clear()
        else:
            for page in pages:
                del self.ready[page], self.order[page]
        self.held += pages  # last: an interrupt before leaves no page in two places


class Leased:
    """A lease of ``store`` as its caller has it: a ``with`` block, and an iterator inside it over
    lists of at most ``most`` pages with their slots."""

    def __init__(self, store: ExpertStore, lease: Lease, most: int) -> None:
        self._store, self._lease, self._most = store, lease, most
        self._over = self._ended = False

    def __enter__(self) -> Leased:
        try:
            self._store.begin(self._lease)
            return self
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Leased:
        return self

    def __next__(self) -> Batch:
        over, self._over = self._over, True  # an error ends the walk
        while not over and (batch := self._store.step(self._lease, self._most)) is not None:
            if batch:
                self._over = False
                return batch
        raise StopIteration

    @property
    def complete(self) -> bool:
        """Whether nothing is left to wait for: all pages are there, or lost."""
        return not (self._lease.wanted or self._lease.coming)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the pages.  Twice is fine."""
        self._over = True
        if not self._ended:
            self._ended = True
            self._store.end(self._lease)


def refuse_deadlock(lease: Lease, leases: Iterable[Lease], slots: int) -> None:
    """Nobody else can free a slot if the calling thread holds them all."""
    mine = {p for other in leases if other.thread == lease.thread for p in other.pinned()}
    if len(mine) >= slots:
        raise SlotsExhausted(
            f"All {slots} expert slots are leased by the caller that asks for "
            f"{len(lease.wanted)} more.",
            f"End the outer lease first, or give {len(mine) + len(lease.wanted)} slots.",
        )
