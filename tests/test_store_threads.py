"""The expert store under several threads, and under drawn sequences of calls (R61)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from k3offload.errors import ReadError, SlotsExhausted
from k3offload.scheduler.lease import Batch
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import PageId
from tests.helpers_store import (
    SIZE,
    RandomPolicy,
    Tier,
    check,
    check_counts,
    check_state,
    flat,
    make,
    pages,
)

PATIENCE = 30.0  #: seconds after which a thread counts as stuck


def run_threads(tasks: list[Callable[[], None]]) -> None:
    """Run ``tasks`` at the same time; the first error of any, or an error if one is stuck."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(t,), daemon=True) for t in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    stuck = [thread for thread in threads if thread.is_alive()]
    if errors:
        raise errors[0]
    assert not stuck, f"{len(stuck)} threads never come back"


def threaded(slots: int, seed: int, movers: int = 2) -> tuple[ExpertStore, Tier]:
    tier = Tier(SIZE, seed, movers, parts=1 + seed % 2)
    buffers = [np.full(SIZE + 8, 0xA5, np.uint8) for _ in range(slots)]
    store = ExpertStore(tier, buffers, RandomPolicy(seed), prefetch_room=slots // 2)
    store.guess_bytes = [SIZE, 2 * SIZE, 100 * SIZE][seed % 3]
    return store, tier


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE * 1000)):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("never comes true")


def test_single_flight_two_threads_one_read() -> None:
    store, tier = threaded(2, 0, movers=0)
    got: list[bytes] = []

    def lease() -> None:
        with store.lease(pages(7)) as walk:
            got.extend(buffer[:SIZE].tobytes() for _, buffer in flat(walk))

    def release() -> None:
        wait_until(lambda: store.counts.requests == 2)
        assert tier.waiting() == pages(7)
        tier.release()

    run_threads([lease, lease, release])
    assert got == [tier.content(PageId(0, 7)).tobytes()] * 2
    c = store.counts
    assert (c.requests, c.hits, c.late, c.misses, c.bytes) == (2, 0, 1, 1, SIZE)
    assert len(tier.started) == 1


def test_failed_read_reaches_every_waiter() -> None:
    store, tier = threaded(1, 0, movers=0)
    page, error = PageId(0, 7), ReadError("part0 at offset 5")
    tier.fail(page, error, landed=10)
    caught: list[ReadError] = []

    def lease() -> None:
        try:
            with store.lease([page]) as walk:
                next(walk)
        except ReadError as seen:
            caught.append(seen)

    def release() -> None:
        wait_until(lambda: store.counts.requests == 3)
        tier.release()

    run_threads([lease, lease, lease, release])
    assert caught == [error] * 3
    assert not store.has(page)

    def again() -> None:
        with store.lease([page]) as walk:
            check(tier, *next(walk)[0])

    def release_again() -> None:
        wait_until(lambda: bool(tier.waiting()))
        tier.release()

    run_threads([again, release_again])
    assert (store.counts.late, store.counts.misses) == (2, 2)


@pytest.mark.parametrize("slots", [1, 2, 5, 40])
def test_no_lost_wake_ups(slots: int) -> None:
    """Four threads lease random pages while a fifth guesses and gives up guesses; waves, joins,
    cancels and evictions all happen at once."""
    for seed in range(3):
        store, tier = threaded(slots, seed)

        def work(number: int, store: ExpertStore = store, tier: Tier = tier) -> None:
            rng = random.Random(number)
            for _ in range(40):
                wanted = set(pages(*rng.sample(range(16), rng.choice([1, 4, 8]))))
                stop, got = rng.choice([2, 99, 99, 99]), 0
                with store.lease(wanted, rng.choice([1, 3])) as walk:
                    for batch in walk:
                        if rng.random() < 0.1:
                            threading.Event().wait(0.0002)
                        for page, buffer in batch:
                            check(tier, page, buffer)
                        got += len(batch)
                        if got >= stop:
                            break
                    else:
                        assert got == len(wanted)

        def guess(store: ExpertStore = store) -> None:
            rng = random.Random(99)
            for _ in range(80):
                store.prefetch(pages(*rng.sample(range(16), 3)))
                threading.Event().wait(0.0002)
                if rng.random() < 0.5:
                    store.drop_prefetches(0)

        run_threads([guess, *(lambda n=n, w=work: w(n) for n in range(4))])
        tier.close()
        check_counts(store, tier)
        check_state(store)
        assert not store._ending and not store._pins


def test_threads_meet_failures() -> None:
    """Some reads fail; every lease ends with all its pages or with that error."""
    store, tier = threaded(3, 1)
    error = ReadError("made to fail")
    tier.fail(PageId(0, 3), error, times=20)
    failures: list[tuple[ReadError, list[PageId]]] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(60):
            wanted = pages(*rng.sample(range(6), 3))
            try:
                with store.lease(wanted) as walk:
                    for page, buffer in flat(walk):
                        check(tier, page, buffer)
            except ReadError as seen:
                failures.append((seen, wanted))

    run_threads([lambda n=n: work(n) for n in range(4)])  # type: ignore[misc]
    tier.close()
    assert len(failures) >= 10  # each meets two broken pieces at most
    assert all(seen is error and PageId(0, 3) in wanted for seen, wanted in failures)
    check_counts(store, tier)


# ---- drawn sequences of calls, on one thread ----


class _Open(NamedTuple):
    context: AbstractContextManager[Iterator[Batch]]
    walk: Iterator[Batch]
    left: set[PageId]
    held: Batch


class StoreMachine(RuleBasedStateMachine):
    """Several leases of one thread, advanced and ended in any order, among guesses."""

    SLOTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.store, self.tier = make(self.SLOTS, policy=RandomPolicy(0), room=2, parts=2)
        self.leases: list[_Open] = []
        self.broken: set[PageId] = set()

    @rule(experts=st.sets(st.integers(0, 6), min_size=1), most=st.integers(1, 3))
    def open(self, experts: set[int], most: int) -> None:
        wanted = pages(*experts)
        context = self.store.lease(wanted, most)
        self.leases.append(_Open(context, context.__enter__(), set(wanted), []))

    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases))
        lease.held.clear()
        try:
            batch = next(lease.walk)
        except StopIteration:
            assert not lease.left
            self.end(lease)
        except SlotsExhausted:
            assert len(self.leases) > 1, "one lease alone goes in waves"
            self.end(lease)
        except ReadError:
            assert self.broken & lease.left
            self.end(lease)
        else:
            for page, _ in batch:
                lease.left.remove(page)
            lease.held.extend(batch)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.leases:
            self.end(data.draw(st.sampled_from(self.leases)))

    @rule(experts=st.lists(st.integers(0, 6), min_size=1, max_size=4))
    def guess(self, experts: list[int]) -> None:
        held = {page for lease in self.leases for page, _ in lease.held}
        self.store.prefetch(pages(*experts))
        assert all(self.store.has(page) for page in held)

    @rule()
    def give_up(self) -> None:
        self.store.drop_prefetches(0)
        assert not self.store._guarded

    @rule()
    def arrive(self) -> None:
        self.tier.step()

    @rule(expert=st.integers(0, 6))
    def break_next(self, expert: int) -> None:
        self.tier.fail(PageId(0, expert), ReadError("made to fail"), landed=3)
        self.broken.add(PageId(0, expert))

    def end(self, lease: _Open) -> None:
        lease.held.clear()
        lease.context.__exit__(None, None, None)
        self.leases = [other for other in self.leases if other is not lease]

    @invariant()
    def held_pages_are_whole(self) -> None:
        for lease in self.leases:
            for page, buffer in lease.held:
                check(self.tier, page, buffer)

    @invariant()
    def counts_add_up(self) -> None:
        check_counts(self.store, self.tier)
        check_state(self.store)

    def teardown(self) -> None:
        """Whatever happened, every slot can be used again."""
        for lease in list(self.leases):
            self.end(lease)
        self.tier.settle()
        with self.store.lease(pages(*range(6), layer=1)) as walk:
            for page, buffer in flat(walk):
                check(self.tier, page, buffer)
        assert sum(self.store.has(p) for p in pages(*range(6), layer=1)) == self.SLOTS


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=120, stateful_step_count=30)
