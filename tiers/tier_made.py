"""The made tier: invents the bytes of any page, and is the fault injector of the tests.

No file and no clock of its own: the bytes of a page follow from a seed, and a read ends when it is
told to (``release``) or when one of its threads gets to it, in an order drawn from the seed.
Reads can be broken, short (a part of the bytes lands, then the read fails), in several pieces,
begun and not ended, and slow.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .base import Buffer, Cancelled, PageId, Priority, Ticket


class _Read(Ticket):
    """A read of ``page``; its pieces wait in the tier until they are begun."""

    def __init__(
        self, tier: MadeTier, page: PageId, into: Buffer, priority: Priority, parts: int
    ) -> None:
        super().__init__(parts)
        self.page, self.into, self.priority = page, into, priority
        self._tier = tier

    def cancel(self) -> bool:
        dropped = self._tier.drop(self)
        if dropped:
            self.finish(Cancelled("cancelled"), parts=dropped)
        return dropped > 0

    def raise_to(self, priority: Priority) -> None:
        self.priority = min(self.priority, priority)


class _Fault:
    """What the next ``times`` reads of a page meet: ``landed`` of its bytes, then ``error``."""

    def __init__(self, error: BaseException, times: int, landed: int) -> None:
        self.error, self.times, self.landed = error, times, landed


class MadeTier:
    """Pages of ``size`` bytes (or of ``size(page)`` bytes) that exist nowhere.

    A read has ``parts`` pieces.  ``movers`` threads end them, each taking ``delay`` seconds for
    one of the most urgent that wait, drawn from ``seed``; with none, they wait for ``release``.
    """

    name = "made"

    def __init__(
        self,
        size: int | Callable[[PageId], int],
        seed: int = 0,
        movers: int = 0,
        parts: int = 1,
        delay: float = 0.0,
    ) -> None:
        self._size, self._seed, self._parts, self._delay = size, seed, parts, delay
        self._random = random.Random(seed)
        self._change = threading.Condition()
        self._waiting: list[tuple[_Read, int]] = []  # read, number of its piece
        self._under_way = 0
        self._faults: dict[PageId, _Fault] = {}
        self._contents: dict[PageId, Buffer] = {}
        self._closed = False
        self.started: list[PageId] = []  #: every read so far, in the order of their starts
        self.ended: list[PageId] = []  #: every piece that was not dropped, in the order of its end
        self.most_under_way = 0  #: pieces
        self._movers = [threading.Thread(target=self._move, daemon=True) for _ in range(movers)]
        for mover in self._movers:
            mover.start()

    # ---- a tier ----

    def size(self, page: PageId) -> int:
        return self._size if isinstance(self._size, int) else self._size(page)

    def order(self, page: PageId) -> Any:
        return page

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        """Start making ``page`` in the first ``size(page)`` bytes of ``into``."""
        assert into.size >= self.size(page)
        read = _Read(self, page, into, priority, self._parts)
        with self._change:
            self.started.append(page)
            self._waiting += [(read, part) for part in range(self._parts)]
            self._under_way += self._parts
            self.most_under_way = max(self.most_under_way, self._under_way)
            self._change.notify_all()
        return read

    def drop(self, read: _Read) -> int:
        """Forget the waiting pieces of ``read``; how many there were."""
        with self._change:
            before = len(self._waiting)
            self._waiting = [piece for piece in self._waiting if piece[0] is not read]
            dropped = before - len(self._waiting)
            self._under_way -= dropped
        return dropped

    # ---- what tests steer ----

    def content(self, page: PageId) -> Buffer:
        """The bytes of ``page``, the same for the same seed."""
        if page not in self._contents:
            key = np.random.SeedSequence((self._seed, page.layer + 1, page.expert + 1))
            words = key.generate_state(-(-self.size(page) // 4) or 1, np.uint32)
            words.flags.writeable = False
            self._contents[page] = words.view(np.uint8)[: self.size(page)]
        return self._contents[page]

    def fail(self, page: PageId, error: BaseException, times: int = 1, landed: int = 0) -> None:
        """Let the next ``times`` pieces of ``page`` fail after ``landed`` bytes."""
        self._faults[page] = _Fault(error, times, landed)

    def waiting(self) -> list[PageId]:
        """Pages of the pieces that have not begun, oldest first."""
        with self._change:
            return [read.page for read, _ in self._waiting]

    def priorities(self) -> list[Priority]:
        """Priorities of the pieces that have not begun, oldest first."""
        with self._change:
            return [read.priority for read, _ in self._waiting]

    def begin(self, index: int = 0) -> Callable[[], PageId]:
        """Begin the waiting piece number ``index``, so that it can no longer be dropped.  The
        function returned ends it; its caller's thread runs what follows."""
        with self._change:
            read, part = self._waiting.pop(index)
        return lambda: self._end(read, part)

    def release(self, index: int = 0) -> PageId:
        """Begin and end the waiting piece number ``index``."""
        return self.begin(index)()

    def release_any(self) -> PageId:
        """Begin and end one of the waiting pieces, drawn from the seed."""
        with self._change:
            read, part = self._waiting.pop(self._random.randrange(len(self._waiting)))
        return self._end(read, part)

    def close(self) -> None:
        """Let the movers end what waits, then stop them."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for mover in self._movers:
            mover.join()

    def _move(self) -> None:
        while True:
            with self._change:
                while not self._waiting:
                    if self._closed:
                        return
                    self._change.wait()
                first = min(read.priority for read, _ in self._waiting)
                urgent = [i for i, (read, _) in enumerate(self._waiting) if read.priority == first]
                read, part = self._waiting.pop(self._random.choice(urgent))
            time.sleep(self._delay)
            self._end(read, part)

    def _end(self, read: _Read, part: int) -> PageId:
        content, error = self.content(read.page), None
        step = -(-content.size // self._parts)
        place = slice(part * step, (part + 1) * step)
        content = content[place]
        with self._change:
            fault = self._faults.get(read.page)
            if fault is not None and fault.times > 0:
                fault.times -= 1
                content, error = content[: fault.landed], fault.error
        read.into[place.start : place.start + content.size] = content
        with self._change:
            self._under_way -= 1
            self.ended.append(read.page)
        read.finish(error, 0 if error else content.size)
        return read.page
