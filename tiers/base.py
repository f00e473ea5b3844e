"""Words and shapes of the tiers: what a page, a location, a ticket, a buffer and a tier are.

This file knows bytes and nothing of models: a page is an id and a list of file extents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]  #: one-dimensional bytes


class PageId(NamedTuple):
    """The unit that moves: a routed expert of a layer, or (``expert == -1``) its trunk share."""

    layer: int
    expert: int


class Location(NamedTuple):
    """``length`` bytes at ``offset`` (from the file's first byte) of file number ``file``."""

    file: int
    offset: int
    length: int


class Priority(IntEnum):
    """What a read is for; a lower number goes first."""

    DEMAND = 0  #: an expert that the computation waits for
    TRUNK = 1  #: the next layer's trunk: certainly needed, and known early
    PREFETCH = 2  #: a guess


class Cancelled(Exception):
    """The error of a ticket whose copy was given up because nobody wants it any more."""


class Ticket:
    """A copy under way, made of ``parts`` pieces; done when the last of them has ended.

    ``look`` is called once all of it is in place, on the thread that ended it and before anybody
    hears of it; what it raises is the ticket's error.
    """

    def __init__(self, parts: int, look: Callable[[], object] | None = None) -> None:
        self._left, self._look = parts, look
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.landed = 0  #: bytes of the page in the pieces that were copied
        if parts == 0:
            self._event.set()

    def finish(self, error: BaseException | None = None, landed: int = 0, parts: int = 1) -> None:
        """``parts`` pieces have ended, with ``error`` or with ``landed`` bytes in place.  Pieces
        still under way keep their memory busy, so a failed ticket too is done only when all its
        pieces have ended."""
        with self._lock:
            self.error = self.error or error
            self.landed += landed
            self._left -= parts
            if self._left:
                return
        if self._look is not None and self.error is None:
            try:
                self._look()
            except Exception as error:
                self.error = error
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        """Block until the copy has ended; raises its error."""
        self._event.wait()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Block until the copy has ended, well or not: nothing writes to its memory any more."""
        self._event.wait()

    def then(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` when done (at once if it already is), on the thread that ended it."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def cancel(self) -> bool:
        """Drop the pieces that have not begun.  If there were any, the ticket ends with
        ``Cancelled`` once the others have ended, perhaps inside this call, and the answer is True.
        If all have begun or ended, the copy goes on and the answer is False."""
        return False

    def raise_to(self, priority: Priority) -> None:
        """Let what has not begun go at ``priority``, if that is before its present one."""


class Tier(Protocol):
    """A place that pages are read from."""

    name: str

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        """Start copying ``page`` to ``into``; never blocks on the copy."""
        ...

    def order(self, page: PageId) -> Any:
        """Sort key: pages read in this order move the disk's head the least."""
        ...

    def size(self, page: PageId) -> int:
        """Bytes of the page itself, without alignment overhead."""
        ...


class CachePolicy(Protocol):
    """Which page leaves a full tier.  Bookkeeping only; every call O(log n) or better.

    Calls come in the order of the schedule, never of the arrivals: a page is inserted when its
    read is started.
    """

    def hit(self, page: PageId) -> None:
        """``page``, which was inserted, is asked for (also while it is being read)."""
        ...

    def insert(self, page: PageId) -> None: ...

    def forget(self, page: PageId) -> None:
        """The read of ``page``, which was inserted, has failed or was cancelled."""
        ...

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        """Forget and return a page that is not ``busy``; there is at least one."""
        ...

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        """News of the router: the experts that one row chose or nearly chose, and their scores.
        Told to policies with an attribute ``hears_router`` that is true."""
        ...
