"""The expert store: slots, leases, single flight and exact counts over a slower tier.

It decides which page lies in which slot and moves no byte itself: the tier below does.  A page is
resident, loading, or absent.  A lease walks through its pages: residents first, then arrivals in
whatever order they come; each page keeps its slot while the caller holds it.  More pages than
slots are served in waves.  Counts follow one rule: hits + late + misses = requests, where late is
a page joined while another lease was already loading it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..errors import SlotsExhausted
from ..tiers.base import Buffer, CachePolicy, PageId, Ticket, Tier


@dataclass
class Counts:
    """What a tier was asked for.  ``bytes`` are page sizes of the reads started."""

    requests: int = 0
    hits: int = 0
    late: int = 0
    misses: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0

    def copy(self) -> Counts:
        return replace(self)


class _Lease:
    """One caller's walk: what it still has to get and what it holds."""

    def __init__(self, pages: Sequence[PageId]) -> None:
        self.thread = threading.get_ident()
        self.ready: deque[PageId] = deque()  # pinned, resident, not yet handed out
        self.coming: set[PageId] = set()  # pinned, loading
        self.wanted = list(pages)  # neither
        self.held: PageId | None = None
        self.looked = False  # at all wanted pages, once

    def pinned(self) -> set[PageId]:
        return {*self.ready, *self.coming, *([self.held] if self.held is not None else [])}


class ExpertStore:
    """``slots`` buffers over ``tier``.  Thread-safe."""

    def __init__(
        self, tier: Tier, slots: Sequence[Buffer], policy: CachePolicy, in_flight: int = 8
    ) -> None:
        if not slots:
            raise SlotsExhausted("An expert store needs at least one slot and got none.")
        self.name = "ram"
        self.counts = Counts()
        self._tier, self._slots, self._policy = tier, slots, policy
        self._in_flight = in_flight
        self._free = list(range(len(slots)))[::-1]
        self._slot: dict[PageId, int] = {}  # resident or loading
        self._loading: dict[PageId, Ticket] = {}
        self._failed: dict[PageId, BaseException] = {}
        self._pins: dict[PageId, int] = {}
        self._idle = 0  # resident pages without a pin: what can be evicted
        self._leases: set[_Lease] = set()
        self._change = threading.Condition()

    @property
    def slots(self) -> int:
        return len(self._slots)

    def has(self, page: PageId) -> bool:
        with self._change:
            return page in self._slot and page not in self._loading

    @contextmanager
    def lease(self, pages: Iterable[PageId]) -> Iterator[Iterator[tuple[PageId, Buffer]]]:
        """An iterator over (page, slot) for each of the distinct ``pages``.

        A page keeps its slot until the iterator is advanced or the ``with`` block ends.
        Raises the tier's ``ReadError``, or ``SlotsExhausted`` if this thread itself holds all.
        """
        lease = _Lease(sorted(set(pages), key=self._tier.order))
        with self._change:
            self._leases.add(lease)
        walk = self._walk(lease)
        try:
            yield walk
        finally:
            walk.close()
            with self._change:
                self._drop(lease)

    # ---- the walk ----

    def _walk(self, lease: _Lease) -> Generator[tuple[PageId, Buffer], None, None]:
        with self._change:
            self._take_residents(lease)
        while True:
            with self._change:
                self._release_held(lease)
                page = self._next(lease)
                if page is None:
                    return
                lease.held = page
                buffer = self._slots[self._slot[page]]
            yield page, buffer

    def _next(self, lease: _Lease) -> PageId | None:
        """The next page that is there, waiting if need be; None when the walk is over."""
        while True:
            self._start_reads(lease)
            if not lease.ready:
                self._collect_arrivals(lease)
            if lease.ready:
                return lease.ready.popleft()
            if not lease.coming:
                if not lease.wanted:
                    return None
                self._refuse_deadlock(lease)
            begin = time.perf_counter()
            self._change.wait()
            self.counts.wait_seconds += time.perf_counter() - begin

    def _take_residents(self, lease: _Lease) -> None:
        absent = []
        for page in lease.wanted:
            if page in self._slot and page not in self._loading:
                self._take(page, lease)
            else:
                absent.append(page)
        lease.wanted = absent

    def _take(self, page: PageId, lease: _Lease) -> None:
        self.counts.requests += 1
        self.counts.hits += 1
        self._policy.hit(page)
        self._pin(page)
        lease.ready.append(page)

    def _start_reads(self, lease: _Lease) -> None:
        """Join loads of others and start own ones while slots and the in-flight bound allow."""
        left, room = [], True
        # Only another lease can have changed what lies behind the first page without room; alone,
        # a walk over n pages must not look at all of them n times.
        alone = lease.looked and len(self._leases) == 1
        lease.looked = True
        for i, page in enumerate(lease.wanted):
            if alone and not room:
                left += lease.wanted[i:]
                break
            if page in self._loading:
                self.counts.requests += 1
                self.counts.late += 1
                self._pin(page)
                lease.coming.add(page)
            elif page in self._slot:  # another lease has brought it meanwhile
                self._take(page, lease)
            elif room and len(self._loading) < self._in_flight and self._has_empty_slot():
                self._begin(page, lease)
            else:
                room = False
                left.append(page)
        lease.wanted = left

    def _begin(self, page: PageId, lease: _Lease) -> None:
        size = self._tier.size(page)
        slot = self._free.pop() if self._free else self._evict()
        self.counts.requests += 1
        self.counts.misses += 1
        self.counts.bytes += size
        self._failed.pop(page, None)
        self._slot[page] = slot
        self._loading[page] = Ticket(0)  # the page counts as loading before its pin is set
        self._pin(page)
        lease.coming.add(page)
        try:
            ticket = self._tier.read(page, self._slots[slot])
        except BaseException as error:  # a closed tier: an end like that of any other failed read
            ticket = Ticket(1)
            ticket.finish(error)
        self._loading[page] = ticket
        ticket.then(lambda: self._arrived(page, ticket))

    def _arrived(self, page: PageId, ticket: Ticket) -> None:
        with self._change:
            del self._loading[page]
            if ticket.error is None:
                self._policy.insert(page)
                self._idle += page not in self._pins
            else:
                self._failed[page] = ticket.error
                self._free.append(self._slot.pop(page))
            self._change.notify_all()

    def _collect_arrivals(self, lease: _Lease) -> None:
        for page in [p for p in lease.coming if p not in self._loading]:
            lease.coming.discard(page)
            if page in self._slot:
                lease.ready.append(page)
                continue
            error = self._failed[page]
            self._unpin(page)
            raise error

    def _refuse_deadlock(self, lease: _Lease) -> None:
        """Nobody else can free a slot if the calling thread holds them all."""
        mine: set[PageId] = set()
        for other in self._leases:
            if other.thread == lease.thread:
                mine |= other.pinned()
        if len(mine) >= len(self._slots):
            raise SlotsExhausted(
                f"All {len(self._slots)} expert slots are leased by the caller that asks for "
                f"{len(lease.wanted)} more.",
                f"End the outer lease first, or give {len(mine) + len(lease.wanted)} slots.",
            )

    # ---- slots and pins ----

    def _has_empty_slot(self) -> bool:
        return bool(self._free) or self._idle > 0

    def _evict(self) -> int:
        self._idle -= 1
        return self._slot.pop(self._policy.evict(lambda page: page in self._pins))

    def _pin(self, page: PageId) -> None:
        count = self._pins.get(page, 0)
        self._pins[page] = count + 1
        if not count and page not in self._loading:
            self._idle -= 1

    def _unpin(self, page: PageId) -> None:
        self._pins[page] -= 1
        if not self._pins[page]:
            del self._pins[page]
            self._failed.pop(page, None)  # the last waiter is gone; a later lease may try again
            if page in self._slot and page not in self._loading:
                self._idle += 1
        self._change.notify_all()

    def _release_held(self, lease: _Lease) -> None:
        if lease.held is not None:
            self._unpin(lease.held)
            lease.held = None

    def _drop(self, lease: _Lease) -> None:
        """Let go of everything; loads under way end by themselves and stay as residents."""
        self._leases.discard(lease)
        self._release_held(lease)
        for page in [*lease.ready, *lease.coming]:
            self._unpin(page)
