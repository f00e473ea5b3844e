"""The device tier under 1,000 drawn schedules, on a device that delays, reorders, fails (R61).

Leases are opened, advanced and left in any order among guesses, while files, RAM and the device go
on in threads of their own.  A slot is poisoned the moment it is given to another page, so whoever
still reads it sees that.  What is drawn never depends on what the threads have done so far: the
same schedules in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from k3offload.errors import ReadError, SlotsExhausted
from k3offload.scheduler.lease import Batch
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import Buffer, PageId, Priority, Ticket
from k3offload.tiers.device import DeviceError
from k3offload.tiers.device_fake import POISON, FakeDevice
from k3offload.tiers.tier_device import DeviceTier
from tests.helpers_store import SIZE, RandomPolicy, Tier, check_state, flat, pages

EXPERTS = st.integers(0, 6)
LEASES = 3  #: open at a time


class Poisoning(DeviceTier):
    """Spoils a slot when it is given away."""

    def read(self, page: PageId, into: Any, priority: Priority = Priority.DEMAND) -> Ticket:
        into.fill_(POISON)
        return super().read(page, into, priority)


def halves(page: PageId, memory: Buffer) -> Sequence[tuple[Buffer, int]]:
    """A page goes to the device in two copies, the second half first."""
    return [(memory[SIZE // 2 : SIZE], SIZE // 2), (memory[: SIZE // 2], 0)]


@dataclass(eq=False)
class Open:
    context: AbstractContextManager[Iterator[Batch]]
    walk: Iterator[Batch]
    left: set[PageId]
    held: Batch = field(default_factory=list)


class Schedules(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**16), ram=st.sampled_from([1, 2, 5, 30]),
        slots=st.sampled_from([1, 3, 4, 9]),
    )  # fmt: skip
    def build(self, seed: int, ram: int, slots: int) -> None:
        self.files = Tier(SIZE, seed, movers=2, parts=2)
        buffers = [np.zeros(SIZE + 8, np.uint8) for _ in range(ram)]
        self.host = ExpertStore(self.files, buffers, RandomPolicy(seed))
        self.device = FakeDevice(slots * SIZE + 10, seed, 2e-4)
        self.tier = Poisoning(self.host, self.files, self.device, halves)
        memory = self.device.allocate(slots * SIZE).view(slots, SIZE)
        self.store = ExpertStore(self.tier, list(memory), RandomPolicy(seed + 1), prefetch_room=2)
        self.leases: list[Open] = []
        self.broken: set[PageId] = set()
        self.failing = False  # copies, some time so far

    # ---- what a sweep does ----

    @rule(experts=st.sets(EXPERTS, min_size=1), most=st.integers(1, 3))
    def open(self, experts: set[int], most: int) -> None:
        if len(self.leases) < LEASES:
            wanted = pages(*experts)
            context = self.store.lease(wanted, most)
            self.leases.append(Open(context, context.__enter__(), set(wanted)))

    @rule(which=st.integers(0, LEASES - 1))
    def advance(self, which: int) -> None:
        self.device.let_go()  # or this thread would wait for good
        if which >= len(self.leases):
            return
        lease = self.leases[which]
        lease.held = []
        try:
            batch = next(lease.walk)
        except StopIteration:
            assert not lease.left
        except SlotsExhausted:
            assert len(self.leases) > 1, "one lease alone goes in waves"
        except ReadError:
            assert self.broken & lease.left
        except DeviceError:
            assert self.failing
        else:
            lease.left -= {page for page, _ in batch}
            lease.held = batch
            return
        self.leave(which)

    @rule(which=st.integers(0, LEASES - 1))
    def leave(self, which: int) -> None:
        if which < len(self.leases):
            self.leases.pop(which).context.__exit__(None, None, None)

    @rule(experts=st.lists(EXPERTS, min_size=1, max_size=4))
    def guess(self, experts: list[int]) -> None:
        self.store.prefetch(pages(*experts))

    @rule()
    def give_up_guesses(self) -> None:
        self.store.drop_prefetches(0)

    # ---- what goes wrong ----

    @rule()
    def hold(self) -> None:
        self.device.hold()

    @rule(expert=EXPERTS)
    def break_a_page(self, expert: int) -> None:
        self.files.fail(PageId(0, expert), ReadError("made to fail"), landed=3)
        self.broken.add(PageId(0, expert))

    @rule(at_once=st.booleans())
    def break_a_copy(self, at_once: bool) -> None:
        self.device.fail_next(at_once)
        self.failing = True

    @rule(more=st.integers(1, 99))
    def ask_for_too_much(self, more: int) -> None:
        free = self.device.free_bytes()
        with pytest.raises(DeviceError, match="Give a smaller --vram"):
            self.device.allocate(free + more)
        assert self.device.free_bytes() == free

    # ---- what must hold ----

    def whole(self, page: PageId, slot: Any) -> None:
        assert np.array_equal(slot.numpy(), self.files.content(page)), page

    @invariant()
    def held_pages_are_whole(self) -> None:
        for lease in getattr(self, "leases", ()):
            for page, slot in lease.held:
                self.whole(page, slot)

    def teardown(self) -> None:
        """Whatever happened, every slot of both stores can be used again."""
        if not hasattr(self, "leases"):
            return
        while self.leases:
            self.leave(0)
        self.device.heal()
        self.device.let_go()
        seen, wanted = [], pages(*range(9), layer=1)
        with self.store.lease(wanted) as walk:
            for page, slot in flat(walk):
                self.whole(page, slot)
                seen.append(page)
        assert sorted(seen) == wanted
        self.tier.close()
        self.device.close()
        self.files.close()
        for store in (self.store, self.host):
            check_state(store)
            assert not (store._ending or store._pins or store._loading)
            c = store.counts
            assert c.requests == c.hits + c.late + c.misses
            assert c.prefetches == c.useful + c.wasted + len(store._unused)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=1000, stateful_step_count=20)
