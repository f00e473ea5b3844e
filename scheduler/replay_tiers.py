"""Tiers for replay, on one thread: reads end in modelled time, or as a log of a real run says.

Whoever would sleep in the store (``Sleep``) lets the tier go on instead.  Nothing is copied.  Knows
pages, bytes and seconds, no policy.
"""

from __future__ import annotations

import heapq
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import UsageError
from ..tiers.base import Cancelled, PageId, Priority, Ticket
from ..tiers.tier_disk import BESIDE_GUESSES, PIECE, READERS
from .lease import NO_PAGE, Event
from .replay import Cache
from .store import ExpertStore

ENDS = (Event.ENDED, Event.FAILED)


class Link(NamedTuple):
    """How a tier moves bytes: ``rate`` bytes a second in all, the first after ``latency`` seconds,
    pieces of ``piece`` bytes or less, ``depth`` of them at once, ``guesses`` with one of them."""

    rate: float
    latency: float = 0.0
    depth: int = READERS
    piece: int = PIECE
    guesses: int = BESIDE_GUESSES // PIECE


class Stepped(Protocol):
    def step(self) -> None:
        """Go on until something has ended."""
        ...


class Sleep(threading.Condition):
    """For ``ExpertStore``: instead of sleeping, let the tier go on."""

    def __init__(self, tier: Stepped) -> None:
        super().__init__()
        self._tier = tier

    def wait(self, timeout: float | None = None) -> bool:
        self._tier.step()
        return True

    def notify_all(self) -> None:
        """Nobody sleeps."""


class _Read(Ticket):
    def __init__(
        self, tier: ModelTier | LoggedTier, page: PageId, priority: Priority, parts: int = 1
    ) -> None:
        super().__init__(parts)
        self.page, self.priority, self._tier = page, priority, tier
        self.parts, self.left, self.number = parts, parts, 0  #: ``left`` have not begun

    def cancel(self) -> bool:
        return self._tier.cancel(self)

    def raise_to(self, priority: Priority) -> None:
        if priority < self.priority:
            self.priority = priority
            self._tier.hurry(self)


class _Tier:
    """Pages of ``size`` bytes, all alike."""

    def __init__(self, size: int) -> None:
        self._size = size
        #: sort keys of pages by layer; by number where there is none
        self.orders: Mapping[int, Callable[[PageId], int] | None] = {}

    def size(self, page: PageId) -> int:
        return self._size

    def order(self, page: PageId) -> int:
        key = self.orders.get(page.layer)
        return page.expert if key is None else key(page)


class ModelTier(_Tier):
    """Pages of ``size`` bytes that come over ``link``, in pieces as the disk's reads are: what has
    begun is read to its end.  If there is a ``below``, which holds pages nearer, only those that it
    misses come over its link ``deeper`` first, and pages are whole."""

    name = "model"

    def __init__(
        self, size: int, link: Link, below: Cache | None = None, deeper: Link | None = None
    ) -> None:
        super().__init__(size)
        self._link, self._below, self._deeper = link, below, deeper
        self.now = self.waited = 0.0
        self._free = self._free_below = 0.0  # when the links are
        self._number = self._begun = self._under_way = 0
        self._parts = 1 if below is not None else max(1, -(-size // link.piece))
        self._queue: list[tuple[int, int, _Read]] = []  # some outdated
        self._ends: list[tuple[float, int, int, _Read]] = []  # when, number, bytes
        self.moved = self.started = 0  #: bytes that came, and reads that were asked for
        self.over: float | None = None  #: when the last request was served

    def read(self, page: PageId, into: Any, priority: Priority = Priority.DEMAND) -> Ticket:
        read = _Read(self, page, priority, self._parts)
        self.started += 1
        self._number += 1
        read.number = self._number
        self.hurry(read)
        self._begin()
        return read

    def hurry(self, read: _Read) -> None:
        """(Again) into the queue, by its priority."""
        heapq.heappush(self._queue, (int(read.priority), read.number, read))

    def cancel(self, read: _Read) -> bool:
        dropped, read.left = read.left, 0
        if dropped:
            read.finish(Cancelled("nobody wants it"), parts=dropped)
        return dropped > 0

    def pass_time(self, seconds: float) -> None:
        """Something else is computed meanwhile."""
        until = self.now + seconds
        while self._ends and self._ends[0][0] <= until:
            self._end()
        self.now = until

    def step(self) -> None:
        before = self.now
        self._end()
        self.waited += self.now - before

    def settle(self) -> None:
        """All requests are served; end what was read ahead in vain."""
        self.over = self.now
        while self._ends:
            self._end()

    def _end(self) -> None:
        when, _, size, read = heapq.heappop(self._ends)
        self.now = max(self.now, when)
        self._under_way -= 1
        self.moved += size
        read.finish(None, size)
        self._begin()

    def _begin(self) -> None:
        while self._queue and self._under_way < self._link.depth:
            read = self._queue[0][2]
            if not read.left:
                heapq.heappop(self._queue)
                continue
            if read.priority is Priority.PREFETCH and self._under_way >= self._link.guesses:
                return
            done = read.parts - read.left
            read.left -= 1
            size = self._size * (done + 1) // read.parts - self._size * done // read.parts
            self._under_way += 1
            self._begun += 1
            heapq.heappush(self._ends, (self._arrival(read.page, size), self._begun, size, read))

    def _arrival(self, page: PageId, size: int) -> float:
        """When a piece of ``size`` bytes that begins now ends."""
        ready = self.now
        if self._below is not None and self._deeper is not None:
            before = self._below.counts.misses
            self._below.request(page)
            if self._below.counts.misses > before:
                first = max(ready + self._deeper.latency, self._free_below)
                ready = self._free_below = first + self._size / self._deeper.rate
        first = max(ready + self._link.latency, self._free)
        self._free = first + size / self._link.rate
        return self._free


class LoggedTier(_Tier):
    """Reads end where the log of a real run says; whatever happens otherwise than there is an
    error.  ``log``: (event, layer, expert, bytes) of one store, in order."""

    name = "logged"

    def __init__(self, size: int, log: Sequence[tuple[int, int, int, int]]) -> None:
        super().__init__(size)
        self._log, self._at = log, 0
        self._reads: dict[PageId, deque[_Read]] = {}
        self._ends: dict[PageId, deque[int]] = {}  # of each page: events that end its reads
        self._silent = {Event.LEFT, Event.NOTE} - {kind for kind, *_ in log}
        for kind, layer, expert, _ in log:
            if kind in ENDS:
                self._ends.setdefault(PageId(layer, expert), deque()).append(kind)

    def read(self, page: PageId, into: Any, priority: Priority = Priority.DEMAND) -> Ticket:
        read = _Read(self, page, priority)
        self._reads.setdefault(page, deque()).append(read)
        if self._at < len(self._log) and self.next()[:2] == (Event.ENDED, page):
            self._deliver()  # it had come before anybody could wait for it
        return read

    def follow(self, store: ExpertStore) -> None:
        """Check what ``store`` does.  Before version 4 of traces no lease's end was told, and all
        guesses took slots at once."""
        store.watch = self.watch
        if Event.LEFT in self._silent:
            store.guess_bytes = sys.maxsize

    def hurry(self, read: _Read) -> None:
        """The log knows how soon it came."""

    def cancel(self, read: _Read) -> bool:
        place = self._reads[read.page].index(read)
        if self._ends[read.page][place] != Event.FAILED:
            return False
        if self.next()[0] == Event.FAILED and self.next()[1] == read.page:
            self._deliver()
        return True

    def pass_time(self, seconds: float) -> None:
        """The log knows no seconds."""

    def next(self) -> tuple[int, PageId, int]:
        """What comes next in the log."""
        if self._at >= len(self._log):
            raise _diverged(self._at, "goes on behind its end")
        kind, layer, expert, size = self._log[self._at]
        return kind, PageId(layer, expert), size

    def settle(self) -> None:
        """End what has ended before the next call of the store."""
        while self._at < len(self._log) and self._log[self._at][0] in ENDS:
            self._deliver()

    def step(self) -> None:
        if self.next()[0] not in ENDS:
            raise _diverged(self._at, "waits")
        self.settle()

    def asks(self) -> bool:
        """Whether the predictor is asked next."""
        self.settle()
        return self._at < len(self._log) and self._log[self._at][0] == Event.ASKED

    def guesses(self) -> list[PageId] | None:
        """The pages that the call of ``prefetch`` which comes next began to read; None if another
        call comes next."""
        self.settle()
        if self._at >= len(self._log) or self._log[self._at][0] != Event.GUESS:
            return None
        pages, at = [], self._at + 1
        while at < len(self._log) and self._log[at][0] in (Event.EVICTED, Event.PREFETCH):
            kind, layer, expert, _ = self._log[at]
            if kind == Event.PREFETCH:
                pages.append(PageId(layer, expert))
            at += 1
        return pages

    def watch(self, event: Event, page: PageId, size: int) -> None:
        """What the store does in replay."""
        if event in ENDS or event in self._silent:
            return  # told of by ``_deliver``, or not at all
        if page == NO_PAGE or event is Event.ASKED:
            self.settle()
        if self.next()[:2] != (event, page):
            kind, there, _ = self.next()
            raise _diverged(self._at, f"does {event.name} {page}, not {Event(kind).name} {there}")
        self._at += 1

    def _deliver(self) -> None:
        kind, page, landed = self.next()
        self._at += 1
        if not self._reads.get(page):
            raise _diverged(self._at, f"has not asked for {page}")
        self._ends[page].popleft()
        error = Cancelled("as in the log") if kind == Event.FAILED else None
        self._reads[page].popleft().finish(error, landed)


def _diverged(at: int, what: str) -> UsageError:
    return UsageError(
        f"The replay {what} at event {at} of the log.",
        "Replay it with the policy, the predictor and the slots of the run that was recorded.",
    )


def log_of(events: Mapping[str, Any], tier: int = 0) -> list[tuple[int, int, int, int]]:
    """The events of a trace that concern one store."""
    own = np.asarray(events["event_tier"]) == tier
    names = ("event_kind", "event_layer", "event_expert", "event_bytes")
    return list(zip(*(np.asarray(events[name])[own].tolist() for name in names), strict=True))
