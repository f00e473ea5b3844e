"""The real tier for replay: pages come from files through the disk tier, into memory of its own.

Nothing is computed: whoever would compute sleeps as long, and reads go on meanwhile.  Knows pages,
bytes and seconds, no policy and no model; which bytes of which file a page is, the disk tier knows.
"""

from __future__ import annotations

import time
from typing import Any

from ..tiers.base import Buffer, PageId, Priority, Ticket
from ..tiers.tier_disk import DiskTier
from .replay_tiers import _Tier


class RealTier(_Tier):
    """Pages of ``size`` bytes, all alike, of ``disk``.  Its clock begins when it is made; ``moved``
    and ``started`` are bytes that came and reads that were asked for."""

    name = "real"

    def __init__(self, size: int, disk: DiskTier) -> None:
        super().__init__(size)
        self._disk, self._begin = disk, time.perf_counter()
        self._reads: list[Ticket] = []
        self._asleep = 0.0  # seconds that were slept too little, or too long
        self.moved = self.started = 0
        self.over: float | None = None  #: when the last request was served

    @property
    def now(self) -> float:
        return time.perf_counter() - self._begin

    def read(self, page: PageId, into: Any, priority: Priority = Priority.DEMAND) -> Ticket:
        target: Buffer = into
        self.started += 1
        if len(self._reads) >= 64:
            self._collect()
        self._reads.append(ticket := self._disk.read(page, target, priority))
        return ticket

    def pass_time(self, seconds: float) -> None:
        """As if something were computed.  What one sleep took too long the next ones make up."""
        self._asleep += seconds
        if self._asleep > 0:
            begin = time.perf_counter()
            time.sleep(self._asleep)
            self._asleep -= time.perf_counter() - begin

    def settle(self) -> None:
        """All requests are served; wait for what was read ahead in vain."""
        self.over = self.now
        for ticket in self._reads:
            ticket.settle()
        self._collect()

    def _collect(self) -> None:
        self.moved += sum(ticket.landed for ticket in self._reads if ticket.done())
        self._reads = [ticket for ticket in self._reads if not ticket.done()]
