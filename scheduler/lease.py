"""One caller's walk through the pages that it asked of a store: what it still has to get, what it
holds, and what it cannot have.  The store moves pages from list to list; this file decides nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from ..errors import CheckpointError, K3Error, ReadError
from ..tiers.base import PageId, Priority

Lost = Callable[[PageId, K3Error], None]  #: a page that cannot be had, and why


class Lease:
    """``lost``: who is told of a page that cannot be read, or is damaged; with None its error ends
    the walk, as every other error does."""

    def __init__(self, pages: Iterable[PageId], priority: Priority, lost: Lost | None) -> None:
        self.priority, self.thread = priority, threading.get_ident()
        self.ready: deque[PageId] = deque()  # pinned, resident, not yet handed out
        self.coming: set[PageId] = set()  # pinned, loading
        self.wanted: deque[PageId] = deque(pages)  # neither
        self.held: list[PageId] = []
        self.error: BaseException | None = None
        self._lost = lost
        self.failed: list[tuple[PageId, K3Error]] = []  # of which nobody was told yet

    def pinned(self) -> set[PageId]:
        return {*self.ready, *self.coming, *self.held}

    def fail(self, page: PageId, error: BaseException) -> None:
        """``page``, which was coming, does not."""
        self.coming.discard(page)
        if self._lost is not None and isinstance(error, (ReadError, CheckpointError)):
            self.failed.append((page, error))
        else:
            self.error = self.error or error

    def tell(self, failed: Iterable[tuple[PageId, K3Error]]) -> None:
        """Tell of pages of ``failed``, outside the store's lock; what that raises ends the walk."""
        for page, error in failed:
            assert self._lost is not None
            self._lost(page, error)
