"""One caller's walk through the pages of a lease, and the events that a store tells of."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

from ..tiers.base import PageId, Priority

NO_PAGE = PageId(-1, -1)


class Event(IntEnum):
    """What happened in a store, as traces number it.

    The first five concern a page: a request that found it, joined its read or began one, or a
    guess that began one; and that it had to leave.  ``ENDED`` and ``FAILED`` (also: cancelled) end
    its read.  The others are calls of the store as they begin, so that what ended before a call
    is known from what ended after it.  ``TAKEN``: a step hands out its pages.  ``ASKED``: the
    predictor is about to be, at the end of a layer (that of the page) about the next (its expert).
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


class Lease:
    """What a caller still has to get and what it holds."""

    def __init__(self, pages: Iterable[PageId], priority: Priority) -> None:
        self.priority, self.thread = priority, threading.get_ident()
        self.ready: dict[PageId, None] = {}  # pinned, resident, not yet handed out
        self.coming: set[PageId] = set()  # pinned, loading
        self.order: dict[PageId, None] = {}  # these two, in the order in which they were pinned
        self.wanted: deque[PageId] = deque(pages)  # neither
        self.held: list[PageId] = []
        self.error: BaseException | None = None

    def pinned(self) -> set[PageId]:
        return {*self.order, *self.held}

    def have(self, page: PageId) -> None:
        """``page`` is resident."""
        self.coming.discard(page)
        self.ready[page] = self.order[page] = None

    def await_(self, page: PageId) -> None:
        """``page`` is loading."""
        self.coming.add(page)
        self.order[page] = None

    def lose(self, page: PageId) -> None:
        """Its read has failed."""
        self.coming.discard(page)
        self.order.pop(page, None)

    def hold(self, pages: Iterable[PageId]) -> None:
        """Hand out ``pages``, which are ready."""
        for page in pages:
            del self.ready[page], self.order[page]
            self.held.append(page)
