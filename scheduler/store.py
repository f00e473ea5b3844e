"""The expert store: slots, leases, prefetch, single flight and exact counts over a slower tier.

It decides which page lies in which slot; the tier below moves the bytes.  A page is resident,
loading or absent.  A lease starts its reads when entered and walks through its pages: residents,
then arrivals as they come; each keeps its slot while it is held.  More than slots come in waves.
The policy is called under the lock in the order of the schedule, and waves go on in that
order, so that without prefetches no eviction depends on which read ends first.  A prefetched page
that nobody has asked for is guarded: no other prefetch evicts it, and a demand only when nothing
else is left.  ``watch`` hears everything that happens, in the order of the lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

from ..errors import SlotsExhausted
from ..tiers.base import CachePolicy, Cancelled, PageId, Priority, Ticket, Tier
from ..tiers.tier_disk import BESIDE_GUESSES
from .counts import Counts
from .hints import Codes, Experts
from .lease import NO_PAGE, Batch, Event, Lease, Leased, Lost, Watch, refuse_deadlock, victim

MOST = 16  #: pages that a lease hands out at once
PREFETCH_ROOM = 64  #: prefetched pages waiting to be asked for, if the slots allow that many


class ExpertStore:
    """``slots`` buffers over ``tier``; thread-safe.  ``prefetch_room``: prefetched pages that may
    wait, else a quarter of the slots, 64 at most.  ``change``: how it sleeps, in simulated time."""

    def __init__(
        self,
        tier: Tier,
        slots: Sequence[Any],
        policy: CachePolicy,
        prefetch_room: int | None = None,
        change: threading.Condition | None = None,
    ) -> None:
        if not slots:
            raise SlotsExhausted("An expert store needs at least one slot and got none.")
        self.name, self.counts = "ram", Counts()
        quarter = min(len(slots) // 4, PREFETCH_ROOM)
        self.prefetch_room = quarter if prefetch_room is None else prefetch_room
        self.guess_bytes = BESIDE_GUESSES  #: of guesses under way, but for a single page
        self._tier, self._slots, self._policy = tier, slots, policy
        #: whether the policy makes anything of ``note``
        self.hears_router: bool = getattr(policy, "hears_router", False)
        # told of slots about to be used, and that all their users have been called
        self._handed_out = getattr(tier, "handed_out", None)
        self._given_back = getattr(tier, "given_back", None)
        self._free = list(range(len(slots)))[::-1]
        self._slot: dict[PageId, int] = {}  # resident or loading
        self._loading: dict[PageId, Ticket] = {}
        self._waiting: dict[PageId, list[Lease]] = {}  # who has a loading page in ``coming``
        self._pins: dict[PageId, int] = {}
        self._unused: set[PageId] = set()  # prefetched, here or loading, not yet asked for
        self._guarded: dict[PageId, None] = {}  # those of them that may still be; oldest first
        self._guesses: deque[PageId] = deque()  # the most wanted first; none has begun
        self._idle: set[PageId] = set()  # resident, without pin or guard: what can be evicted
        self._ending = 0  # slots of cancelled reads whose last pieces are still under way
        self._leases: set[Lease] = set()
        self._change = change or threading.Condition()
        self.watch: Watch = lambda event, page, size: None  # told under the lock

    @property
    def slots(self) -> int:
        return len(self._slots)

    def has(self, page: PageId) -> bool:
        with self._change:
            return page in self._slot and page not in self._loading

    def absent(self, page: PageId) -> bool:
        """Whether ``page`` is neither here nor being read."""
        with self._change:
            return page not in self._slot

    def seen(self) -> tuple[Counts, Set[PageId]]:
        """The counts, and the pages that are here, of one moment."""
        with self._change:
            return self.counts.copy(), self._slot.keys() - self._loading.keys()

    def hasten(self, page: PageId) -> None:
        """Somebody waits for ``page``, perhaps on its way as a guess."""
        with self._change:
            if page in self._loading:
                self._loading[page].raise_to(Priority.DEMAND)

    def note(self, layer: int, experts: Experts, scores: Codes) -> None:
        """Pass on to the policy what the router said about one row."""
        with self._change:
            self.watch(Event.NOTE, NO_PAGE, 0)
            self._policy.note(layer, experts, scores)

    # ---- leases ----

    def lease(
        self,
        pages: Iterable[PageId],
        most: int = MOST,
        priority: Priority = Priority.DEMAND,
        lost: Lost | None = None,
    ) -> Leased:
        """For a ``with`` block: an iterator over lists of (page, slot) that covers each of the
        distinct ``pages`` once.

        Entering starts the reads of all pages that find a slot, in the tier's order.  Each step
        waits for a page and hands out what is there, ``most`` at once; while more pages than slots
        are left, a few at once, in their order.  A page keeps its slot until the next step
        or the end of the block; then reads of this lease alone that have not begun are dropped.
        ``lost`` is told of a page that cannot be read as soon as that is known, on this thread, and
        the walk goes on without it.  Raises the tier's ``ReadError`` where ``lost`` is None, or
        ``SlotsExhausted`` if this thread itself holds all.
        """
        return Leased(self, Lease(dict.fromkeys(pages), priority, lost), most)

    def begin(self, lease: Lease) -> None:
        """Called by ``Leased``: it is entered."""
        with self._change:
            self.watch(Event.LEASE, NO_PAGE, 0)
            self._leases.add(lease)
            self._take_present(lease)
            self._start_reads(lease)

    def step(self, lease: Lease, most: int) -> Batch | None:
        """Called by ``Leased``: the next pages; None if none is left, empty if some were lost."""
        with self._change:
            self.watch(Event.STEP, NO_PAGE, 0)
            self._release_held(lease)
            lease.hold(self._next_pages(lease, most))
            self.watch(Event.TAKEN, NO_PAGE, 0)
            batch = [(page, self._slots[self._slot[page]]) for page in lease.held]
            failed, lease.failed = lease.failed, []
        lease.tell(failed)
        if batch and self._handed_out is not None:
            self._handed_out([slot for _, slot in batch])
        return batch if batch or failed else None

    def end(self, lease: Lease) -> None:
        """Called by ``Leased``: let go of everything.  What nobody else waits for and has not begun
        is not read."""
        with self._change:
            self.watch(Event.LEFT, NO_PAGE, 0)
            self._leases.discard(lease)
            self._release_held(lease)
            self._unpin(lease.ready)
            for page in list(lease.coming):
                self._waiting[page].remove(lease)
                self._unpin([page])
                if page not in self._pins:
                    self._cancel(page)

    def _next_pages(self, lease: Lease, most: int) -> list[PageId]:
        """Waits for pages to hand out; none if the walk is over, or pages were lost."""
        while True:
            self._start_reads(lease)
            if lease.error is not None:
                raise lease.error
            if (pages := lease.next(most, len(self._slots))) is not None:
                return pages
            if not lease.coming:
                refuse_deadlock(lease, self._leases, len(self._slots))
            begin = time.perf_counter()
            self._change.wait()
            self.counts.wait_seconds += time.perf_counter() - begin

    def _take_present(self, lease: Lease) -> None:
        """Pin all pages that are resident or loading before any page is evicted."""
        absent = [page for page in lease.wanted if page not in self._slot]
        self._take([page for page in lease.wanted if page in self._slot], lease)
        lease.wanted = deque(sorted(absent, key=self._tier.order))

    def _take(self, pages: Sequence[PageId], lease: Lease) -> None:
        """Requests for pages that have slots: hits, or late if they are still loading."""
        late = {page: self._loading[page] for page in pages if page in self._loading}
        self._pin(pages)
        lease.take(pages, late)
        for page in late:
            self._waiting.setdefault(page, []).append(lease)
        self.counts.requests += len(pages)
        self.counts.late += len(late)
        self.counts.hits += len(pages) - len(late)
        for page in self._unused.intersection(pages):
            self.counts.useful += 1
            self._unused.discard(page)
            self._guarded.pop(page, None)
        hit, watch = self._policy.hit, self.watch
        for page in pages:  # all of them are in order by now, whatever the policy raises
            hit(page)
            watch(Event.LATE if page in late else Event.HIT, page, 0)
        for ticket in late.values():
            ticket.raise_to(lease.priority)

    def _start_reads(self, lease: Lease) -> None:
        """Read absent pages in order while there are slots."""
        while lease.wanted:
            page = lease.wanted[0]
            if page in self._slot:  # another lease has asked for it meanwhile
                lease.wanted.popleft()
                self._take([page], lease)
                continue
            slot = self._slot_for_demand()
            if slot is None:
                return
            self._admit(page, slot)
            lease.wanted.popleft()
            self.counts.requests += 1
            self.counts.misses += 1
            self._pin([page])
            lease.take([page], [page])
            self._waiting.setdefault(page, []).append(lease)
            self._begin(page, slot, lease.priority)

    def _release_held(self, lease: Lease) -> None:
        if self._given_back is not None:
            self._given_back([self._slots[self._slot[page]] for page in lease.held])
        held, lease.held = lease.held, []
        self._unpin(held)

    # ---- prefetch ----

    def prefetch(self, pages: Iterable[PageId], sure: bool = False) -> int:
        """Start reading absent ``pages``, the most wanted first, behind all other reads.

        Stops where slots that nobody uses, or the room for them, end: twice as much if they are
        ``sure``.  Others take a slot only as those before them arrive, ``guess_bytes`` at a time
        (or a page): more would wait for the drive, and nothing need leave for that.
        Returns how many reads were started.  One that fails is read by a later lease.
        """
        with self._change:
            self.watch(Event.GUESS, NO_PAGE, 0)
            before, self._guesses = self.counts.prefetches, deque(pages)
            self._guess(sure)
            self._guesses = deque() if sure else self._guesses
            return self.counts.prefetches - before

    def _guess(self, sure: bool = False) -> None:
        """Begin the guesses that may, while nobody waits for a slot."""
        room, size = self.prefetch_room * (2 if sure else 1), self._tier.size
        while self._guesses and not any(lease.wanted for lease in self._leases):
            page = self._guesses[0]
            if page not in self._slot:
                ahead = sum(size(p) for p in self._guarded if p in self._loading)
                if not sure and ahead and ahead + size(page) > self.guess_bytes:
                    break
                if len(self._guarded) >= room or not (self._free or self._idle):
                    return self._guesses.clear()
                slot = self._free.pop() if self._free else self._evict(self._idle)
                self._admit(page, slot)
                self._unused.add(page)
                self._guarded[page] = None
                self.counts.prefetches += 1
                self._begin(page, slot, Priority.PREFETCH)
            if self._guesses and self._guesses[0] == page:  # or it went on when that read ended
                self._guesses.popleft()

    def drop_prefetches(self, layer: int) -> None:
        """The requests of ``layer`` are known: what else was prefetched for it is cancelled if it
        has not been read, and otherwise an ordinary page from now on."""
        with self._change:
            self.watch(Event.DROP, NO_PAGE, 0)
            self._guesses = deque(p for p in self._guesses if p.layer != layer)
            for page in [p for p in self._guarded if p.layer == layer]:
                self._unguard(page)

    def _unguard(self, page: PageId) -> None:
        del self._guarded[page]
        if page in self._loading:
            self._cancel(page)
        else:
            self._idle.add(page)
            self._change.notify_all()

    # ---- reads ----

    def _admit(self, page: PageId, slot: int) -> None:
        """Tell the policy of ``page``.  What it raises leaves ``slot`` free."""
        try:
            self._policy.insert(page)
        except BaseException:
            self._free.append(slot)
            raise

    def _begin(self, page: PageId, slot: int, priority: Priority) -> None:
        size, guess = self._tier.size(page), priority is Priority.PREFETCH
        self.counts.bytes += size
        self.counts.prefetch_bytes += size * guess
        self.watch(Event.PREFETCH if guess else Event.MISS, page, size)
        self._slot[page] = slot
        try:
            ticket = self._tier.read(page, self._slots[slot], priority)
        except Exception as error:  # a closed tier: an end like that of any other failed read
            ticket = Ticket(1)
            ticket.finish(error)
        except BaseException:
            self._abandon(page)
            raise
        self._loading[page] = ticket
        ticket.then(lambda: self._arrived(page, slot, ticket, size, guess))

    def _abandon(self, page: PageId) -> None:
        """An interrupt came while a read was queued: it may be under way, so its slot is lost."""
        del self._slot[page]
        self._pins.pop(page, None)
        self._guarded.pop(page, None)
        self._unused.discard(page)
        for lease in self._waiting.pop(page, ()):
            lease.lose(page)
        self._policy.forget(page)

    def _arrived(self, page: PageId, slot: int, ticket: Ticket, size: int, guess: bool) -> None:
        """A read has ended, on a thread of the tier or inside a call of ours."""
        with self._change:
            self.watch(Event.ENDED if ticket.error is None else Event.FAILED, page, ticket.landed)
            if isinstance(ticket.error, Cancelled):
                self.counts.bytes -= size - ticket.landed
                self.counts.prefetch_bytes -= (size - ticket.landed) * guess
            if self._loading.get(page) is not ticket:  # given up while its last pieces ran
                self._ending -= 1
                self._free.append(slot)
            elif ticket.error is None:
                del self._loading[page]
                if page not in self._pins and page not in self._guarded:
                    self._idle.add(page)
                for lease in self._waiting.pop(page, ()):
                    lease.have(page)
            else:
                self._free.append(slot)
                self._pins.pop(page, None)
                for lease in self._waiting.pop(page, ()):
                    lease.fail(page, ticket.error)
                self._forget(page)
            try:
                self._guess()
            except Exception as error:  # of the policy, on a thread that nobody hears of
                for lease in self._leases:
                    lease.error = lease.error or error
            self._change.notify_all()

    def _cancel(self, page: PageId) -> None:
        """Give up the read of a page that nobody waits for, unless all of it has begun."""
        ticket = self._loading.get(page)
        if ticket is not None and ticket.cancel() and self._loading.get(page) is ticket:
            self._ending += 1  # its slot is in use until the pieces under way have ended
            self._forget(page)

    def _forget(self, page: PageId) -> None:
        """``page`` has failed or was cancelled; its slot is no longer its own."""
        del self._loading[page], self._slot[page]
        self._waiting.pop(page, None)
        self._guarded.pop(page, None)
        self._count_wasted(page)
        self._policy.forget(page)

    # ---- slots and pins ----

    def _slot_for_demand(self) -> int | None:
        if self._free or self._idle:
            return self._free.pop() if self._free else self._evict(self._idle)
        if here := {page for page in self._guarded if page not in self._loading}:
            return self._evict(here)
        for page in reversed(list(self._guarded)):
            if self._free or self._ending:
                break
            self._cancel(page)
        return self._free.pop() if self._free else None

    def _evict(self, choice: Collection[PageId]) -> int:
        page = victim(self._policy, lambda page: page not in choice, self._slot)
        self.watch(Event.EVICTED, page, 0)
        self._idle.discard(page)
        self._guarded.pop(page, None)
        self._count_wasted(page)
        return self._slot.pop(page)

    def _count_wasted(self, page: PageId) -> None:
        self.counts.wasted += page in self._unused
        self._unused.discard(page)

    def _pin(self, pages: Sequence[PageId]) -> None:
        pins = self._pins
        for page in pages:
            pins[page] = pins.get(page, 0) + 1
        self._idle.difference_update(pages)

    def _unpin(self, pages: Collection[PageId]) -> None:
        pins, loading, idle = self._pins, self._loading, self._idle
        for page in pages:
            if left := pins.pop(page) - 1:
                pins[page] = left
            elif page not in loading:
                idle.add(page)
        if pages:
            self._change.notify_all()
