"""The device tier's lower side: pages come from a store in RAM and are copied to slots of a device.

``ExpertStore`` keeps the slots of the device as it keeps those of RAM; for it this is the tier that
it reads from.  A few threads lease a page from the store in RAM (which may have to read it from
disk), have the device copy it, and end the lease when the copy has landed: so many pages are in
flight at most, and a page never leaves RAM under a copy.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .base import Buffer, Cancelled, PageId, Priority, Ticket, Tier
from .device import Device, Mark

Pieces = Callable[[PageId, Buffer], Sequence[tuple[Buffer, int]]]
COPIERS = 8  #: pages on their way from disk or RAM to the device at a time


class Host(Protocol):
    """What is asked of the store in RAM."""

    @property
    def slots(self) -> int: ...

    def lease(self, pages: Sequence[PageId], *, priority: Priority) -> Any: ...

    def hasten(self, page: PageId) -> None: ...


class _Copy(Ticket):
    """A page on its way; one piece."""

    def __init__(
        self, tier: DeviceTier, page: PageId, into: torch.Tensor, priority: Priority
    ) -> None:
        super().__init__(1)
        self._tier, self.page, self.into, self.priority = tier, page, into, priority

    def cancel(self) -> bool:
        return self._tier.cancel(self)

    def raise_to(self, priority: Priority) -> None:
        self._tier.raise_to(self, priority)


class DeviceTier:
    """Pages of ``host`` for slots on ``device``.  ``pieces(page, bytes)`` cuts a page in RAM into
    what is copied and says where in the slot each piece goes; it may refuse the page."""

    name = "device"

    def __init__(
        self,
        host: Host,
        below: Tier,
        device: Device,
        pieces: Pieces = lambda page, memory: [(memory, 0)],
        copiers: int = COPIERS,
    ) -> None:
        self._host, self._below, self._device, self._pieces = host, below, device, pieces
        self._change = threading.Condition()
        self._waiting: list[tuple[int, int, _Copy]] = []  # heap by priority, then age
        self._number = 0
        self._last_use: dict[int, Mark] = {}  # by the address of a slot
        self._closing = False
        self._guesses = 0  # under way
        count = max(2, min(copiers, host.slots // 2))
        self._threads = [
            threading.Thread(target=self._run, name=f"k3-copier-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    # ---- as a tier ----

    def order(self, page: PageId) -> Any:
        return self._below.order(page)

    def size(self, page: PageId) -> int:
        return self._below.size(page)

    def read(self, page: PageId, into: Any, priority: Priority = Priority.DEMAND) -> Ticket:
        """Start bringing ``page`` into the device slot ``into``, once the kernels have passed that
        read what was there."""
        copy = _Copy(self, page, into, priority)
        with self._change:
            if self._closing:
                raise Cancelled("the device tier is closed")
            self._push(copy, priority)
        return copy

    def handed_out(self, slots: Sequence[Any]) -> None:
        """Kernels are about to read ``slots``."""
        for slot in slots:
            self._device.handed_out(slot)

    def given_back(self, slots: Sequence[Any]) -> None:
        """All kernels that read ``slots`` have been called, though perhaps not yet run."""
        if slots:
            mark = self._device.mark()
            self._last_use.update((slot.data_ptr(), mark) for slot in slots)

    def close(self) -> None:
        """Give up what has not begun and wait for the rest."""
        with self._change:
            self._closing = True
            left, self._waiting = self._waiting, []
            self._change.notify_all()
        for _, _, copy in left:
            copy.finish(Cancelled("the device tier is closed"))
        for thread in self._threads:
            thread.join()

    # ---- what tickets ask for ----

    def cancel(self, copy: _Copy) -> bool:
        with self._change:
            kept = [entry for entry in self._waiting if entry[2] is not copy]
            if len(kept) == len(self._waiting):
                return False
            self._waiting = kept
            heapq.heapify(self._waiting)
        copy.finish(Cancelled("nobody wants the page any more"))
        return True

    def raise_to(self, copy: _Copy, priority: Priority) -> None:
        with self._change:
            if priority >= copy.priority:
                return
            copy.priority = priority
            for i, (_, _, waiting) in enumerate(self._waiting):
                if waiting is copy:
                    del self._waiting[i]
                    heapq.heapify(self._waiting)
                    self._push(copy, priority)
                    return
        self._host.hasten(copy.page)  # it has begun: its read may still wait

    def _push(self, copy: _Copy, priority: Priority) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (int(priority), self._number, copy))
        self._change.notify()

    # ---- the copiers ----

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._may_begin() and not self._closing:
                    self._change.wait()
                if self._closing:
                    return
                copy = heapq.heappop(self._waiting)[2]
                guess = copy.priority is Priority.PREFETCH
                self._guesses += guess
            try:
                self._bring(copy)
            except BaseException as error:
                copy.finish(error)
            finally:
                with self._change:
                    self._guesses -= guess
                    self._change.notify_all()

    def _may_begin(self) -> bool:
        """Guesses never take all copiers: what somebody waits for finds one."""
        if not self._waiting:
            return False
        return self._waiting[0][0] != Priority.PREFETCH or self._guesses < len(self._threads) - 1

    def _bring(self, copy: _Copy) -> None:
        with self._host.lease([copy.page], priority=copy.priority) as arrivals:
            for batch in arrivals:
                pieces = self._pieces(copy.page, batch[0][1])
                after = self._last_use.pop(copy.into.data_ptr(), None)
                self._copy(copy, pieces, after)
        copy.finish(None, self.size(copy.page))

    def _copy(self, copy: _Copy, pieces: Sequence[tuple[Buffer, int]], after: Mark | None) -> None:
        """All ``pieces``, until they have landed."""
        landed = Ticket(len(pieces))
        for source, at in pieces:
            to = copy.into[at : at + source.nbytes]
            self._device.copy(source, to, after, landed.finish, copy.priority is Priority.DEMAND)
        landed.wait()
