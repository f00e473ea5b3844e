"""The made tier: invents the bytes of any page, and is the fault injector of the tests.

No file and no clock: the bytes of a page follow from a seed, and a read ends when it is told to
(``release``) or when one of its threads gets to it, in an order drawn from the seed.  Reads can be
broken, and short: a part of the bytes lands, then the read fails.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from .base import Buffer, PageId, Ticket


class _Read(NamedTuple):
    page: PageId
    into: Buffer
    ticket: Ticket


class _Fault:
    """What the next ``times`` reads of a page meet: ``landed`` of its bytes, then ``error``."""

    def __init__(self, error: BaseException, times: int, landed: int) -> None:
        self.error, self.times, self.landed = error, times, landed


class MadeTier:
    """Pages of ``size`` bytes (or of ``size(page)`` bytes) that exist nowhere.

    ``movers`` threads end the reads, each time one of those that wait, drawn from ``seed``; with
    none, reads wait for ``release``.
    """

    name = "made"

    def __init__(self, size: int | Callable[[PageId], int], seed: int = 0, movers: int = 0) -> None:
        self._size, self._seed = size, seed
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._waiting: list[_Read] = []
        self._faults: dict[PageId, _Fault] = {}
        self._pool = ThreadPoolExecutor(movers, "k3-made") if movers else None
        self._under_way = 0
        self.started: list[PageId] = []  #: every read so far, in the order of their starts
        self.most_under_way = 0

    # ---- a tier ----

    def size(self, page: PageId) -> int:
        return self._size if isinstance(self._size, int) else self._size(page)

    def order(self, page: PageId) -> Any:
        return page

    def read(self, page: PageId, into: Buffer) -> Ticket:
        """Start making ``page`` in the first ``size(page)`` bytes of ``into``."""
        assert into.size >= self.size(page)
        ticket = Ticket(1)
        with self._lock:
            self.started.append(page)
            self._waiting.append(_Read(page, into, ticket))
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
        if self._pool is not None:
            self._pool.submit(self.release_any)
        return ticket

    # ---- what tests steer ----

    def content(self, page: PageId) -> Buffer:
        """The bytes of ``page``, the same for the same seed."""
        key = np.random.SeedSequence((self._seed, page.layer + 1, page.expert + 1))
        words = key.generate_state(-(-self.size(page) // 4) or 1, np.uint32)
        return words.view(np.uint8)[: self.size(page)]

    def fail(self, page: PageId, error: BaseException, times: int = 1, landed: int = 0) -> None:
        """Let the next ``times`` reads of ``page`` fail after ``landed`` bytes."""
        self._faults[page] = _Fault(error, times, landed)

    def waiting(self) -> list[PageId]:
        """Pages whose reads have not ended, oldest first."""
        with self._lock:
            return [read.page for read in self._waiting]

    def release(self, index: int = 0) -> PageId:
        """End the waiting read number ``index``; the caller's thread runs what follows it."""
        with self._lock:
            read = self._waiting.pop(index)
        self._end(read)
        return read.page

    def release_any(self) -> PageId:
        """End one of the waiting reads, drawn from the seed."""
        with self._lock:
            read = self._waiting.pop(self._random.randrange(len(self._waiting)))
        self._end(read)
        return read.page

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _end(self, read: _Read) -> None:
        content, error = self.content(read.page), None
        with self._lock:
            fault = self._faults.get(read.page)
            if fault is not None and fault.times > 0:
                fault.times -= 1
                content, error = content[: fault.landed], fault.error
        read.into[: content.size] = content
        with self._lock:
            self._under_way -= 1
        read.ticket.finish(error)
