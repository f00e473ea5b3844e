"""An LRU cache in thought beside the real one, and what the real one may risk against it.

``ahead`` is how many misses fewer than LRU the real cache has had, ``lacking`` how many of the
pages that LRU holds are not in it.  Each of those can cost it one miss that LRU does not have, and
the page then comes in.  So while ``lacking <= ahead - floor`` holds, ``ahead`` never falls below
``floor``, whatever is asked for.  A choice that would break it is not allowed; there is always
another, for whenever a page comes in that LRU holds too, the full real cache holds one that LRU
does not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import filterfalse, islice

from ..tiers.base import PageId

LOOK = 16  #: pages looked at for the one worth least


class Guard:
    """``pages``: those in the real cache.  Tell it first that a page is asked for, then what came
    in and what left."""

    def __init__(self, slots: int) -> None:
        self.pages: set[PageId] = set()
        self.ahead = 0
        self.floor = 0  #: ``ahead`` is not to fall below
        self._slots = slots
        self._lru: OrderedDict[PageId, None] = OrderedDict()  # what LRU would hold, oldest first
        self._extra: OrderedDict[PageId, None] = OrderedDict()  # here, not there, oldest first

    def ask(self, pages: Iterable[PageId]) -> int:
        """A lease of ``pages``, in this order.  Returns how many of them LRU would miss."""
        lru, extra, here, absent = self._lru, self._extra, self.pages, []
        for page in pages:
            if page in lru:
                lru.move_to_end(page)
            else:
                absent.append(page)
        for page in absent:
            if len(lru) >= self._slots:
                gone, _ = lru.popitem(last=False)
                if gone in here:
                    extra[gone] = None
            lru[page] = None
            extra.pop(page, None)
        self.ahead += len(absent)
        return len(absent)

    def insert(self, page: PageId) -> None:
        self.ahead -= 1
        self.pages.add(page)

    def remove(self, page: PageId) -> None:
        self.pages.discard(page)
        self._extra.pop(page, None)

    def forget(self, page: PageId) -> None:
        """``page`` could not be read: LRU would not have it either."""
        self.remove(page)
        self._lru.pop(page, None)

    def allows(self, page: PageId) -> bool:
        """Whether ``page`` may leave to make room for one that is asked for."""
        lacking = len(self._lru) - len(self.pages) + len(self._extra)
        return page in self._extra or lacking < self.ahead - self.floor

    def spare(self, busy: Callable[[PageId], bool], worth: Callable[[PageId], float]) -> PageId:
        """Of the pages here that LRU let go longest ago, the one worth least; the safest if there
        is none."""
        extra = islice(filterfalse(busy, self._extra), LOOK)
        return min(extra, key=worth, default=None) or self.safest(busy)

    def safest(self, busy: Callable[[PageId], bool]) -> PageId:
        """The page here that LRU would have let go longest ago, or would let go next."""
        for pages in (self._extra, self._lru):
            for page in pages:
                if page in self.pages and not busy(page):
                    return page
        raise AssertionError("asked for a page to leave when every page is busy")
