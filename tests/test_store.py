"""The expert store over a made tier: right bytes, leases, single flight, counts (R61, R62)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from k3offload.errors import ReadError, SlotsExhausted
from k3offload.scheduler.policy_lru import Policy
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import Buffer, PageId, Priority, Ticket
from tests.helpers_store import (
    SIZE,
    RandomPolicy,
    Stepping,
    Tier,
    check,
    check_counts,
    check_state,
    flat,
    make,
    pages,
)

# ---- order, counts, bounds ----


def test_residents_come_before_arrivals() -> None:
    store, _ = make(4)
    with store.lease(pages(1, 3)) as walk:
        assert len(list(flat(walk))) == 2
    with store.lease(pages(0, 1, 2, 3)) as walk:
        assert [page.expert for page, _ in next(walk)] == [1, 3]
        assert {page.expert for page, _ in flat(walk)} == {0, 2}
    c = store.counts
    assert (c.requests, c.hits, c.late, c.misses, c.bytes) == (6, 2, 0, 4, 4 * SIZE)


def test_equal_pages_are_one_request() -> None:
    store, tier = make(2)
    with store.lease(pages(1, 1, 1)) as walk:
        assert [page for page, _ in flat(walk)] == pages(1)
    assert store.counts.requests == 1
    assert len(tier.started) == 1


def test_entering_starts_the_reads_in_the_tiers_order() -> None:
    store, tier = make(8)
    with store.lease(pages(5, 2, 7, 0, 3)) as walk:
        assert [page.expert for page in tier.waiting()] == [0, 2, 3, 5, 7]
        assert tier.priorities() == [Priority.DEMAND] * 5
        list(walk)
    assert [page.expert for page in tier.started] == [0, 2, 3, 5, 7]


def test_lists_hold_what_is_there() -> None:
    """No more than asked for, and in waves no more than half of the slots."""
    store, tier = make(8)
    with store.lease(pages(*range(8))) as walk:
        for _ in range(5):
            tier.release()
        assert [page.expert for page, _ in next(walk)] == [0, 1, 2, 3, 4]
        tier.settle()
        assert len(next(walk)) == 3
        assert list(walk) == []
    with store.lease(pages(*range(8)), most=3) as walk:
        assert [len(batch) for batch in walk] == [3, 3, 2]
    with store.lease(pages(*range(12))) as walk:  # 8 are there, 4 have no slot yet
        assert len(next(walk)) == 4
        assert tier.waiting() == []
        assert len(next(walk)) == 4
        assert tier.waiting() == pages(8, 9, 10, 11)


def test_a_page_keeps_its_slot_until_the_next_step() -> None:
    store, tier = make(2, parts=2)
    with store.lease(pages(*range(6))) as walk:
        for batch in walk:
            for _ in range(3):
                tier.step()
            for page, buffer in batch:
                check(tier, page, buffer)
    check_state(store)


def test_r62_misses_are_read_together() -> None:
    """16 misses at 5 ms each on 8 movers: two latencies, not sixteen."""
    latency, shortest = 0.005, 1.0
    for _ in range(5):
        tier = Tier(SIZE, movers=8, delay=latency)
        store = ExpertStore(tier, [np.zeros(SIZE, np.uint8) for _ in range(32)], Policy(32))
        begin = time.perf_counter()
        with store.lease(pages(*range(16))) as walk:
            assert len(list(flat(walk))) == 16
        shortest = min(shortest, time.perf_counter() - begin)
        assert 0 < store.counts.wait_seconds <= shortest + 1
        tier.close()
    assert 2 * latency <= shortest < 3 * latency


class Told(RandomPolicy):
    """Writes down what it is told and what it answers."""

    def __init__(self) -> None:
        super().__init__(0)
        self.calls: list[tuple[str, PageId]] = []
        self.news: list[tuple[int, list[int], list[int]]] = []

    def hit(self, page: PageId) -> None:
        self.calls.append(("hit", page))
        super().hit(page)

    def insert(self, page: PageId) -> None:
        self.calls.append(("insert", page))
        super().insert(page)

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        self.calls.append(("evict", victim := super().evict(busy)))
        return victim

    def note(self, layer: int, experts: Any, scores: Any) -> None:
        self.news.append((layer, experts.tolist(), scores.tolist()))


def policy_calls(slots: int, seed: int, kind: type[ExpertStore]) -> list[tuple[str, PageId]]:
    """What a fixed schedule of leases and guesses tells the policy; ``seed`` draws arrivals."""
    policy, rng = Told(), random.Random(5)
    store, tier = make(slots, seed, policy, kind, parts=2)
    for step in range(60):
        layer = step % 3
        count = rng.randrange(1, min(slots, 8))
        with store.lease(pages(*rng.sample(range(20), count), layer=layer)) as walk:
            store.prefetch(pages(*rng.sample(range(20), 3), layer=(layer + 1) % 3))
            for _ in walk:
                tier.step()
    assert any(call == "evict" for call, _ in policy.calls)
    return policy.calls


class EvictsGuesses(ExpertStore):
    """As soon as they are there."""

    def _arrived(self, page: PageId, *rest: Any) -> None:
        super()._arrived(page, *rest)
        if self.has(page) and page in self._guarded:
            self._guarded.pop(page)
            self._idle.add(page)


@pytest.mark.parametrize("slots", [40, 16, 9, 3])
def test_policy_calls_follow_the_schedule(slots: int) -> None:
    """Not the arrivals: any order of arrival leaves the same pages behind."""
    first, *others = (policy_calls(slots, seed, ExpertStore) for seed in range(4))
    assert all(calls == first for calls in others)
    if make(slots)[0].prefetch_room:
        first, *others = (policy_calls(slots, seed, EvictsGuesses) for seed in range(4))
        assert any(calls != first for calls in others), "the check does not see arrivals"


@pytest.mark.parametrize("slots", [2, 4, 6])
def test_waves_follow_the_schedule(slots: int) -> None:
    """Leases of up to three times as many pages as slots, some there and the others read."""

    def calls(seed: int) -> list[tuple[str, PageId]]:
        policy, rng = Told(), random.Random(7)
        store, tier = make(slots, seed, policy, parts=2)
        for step in range(30):
            wanted = rng.sample(range(20), rng.randrange(1, 3 * slots))
            with store.lease(pages(*wanted, layer=step % 2)) as walk:
                for _ in walk:
                    tier.step()
        return policy.calls

    first = calls(0)
    assert all(calls(seed) == first for seed in range(1, 6))


def test_news_of_the_router_reaches_the_policy() -> None:
    policy = Told()
    make(1, policy=policy)[0].note(3, np.array([5, 9]), np.array([200, 7], np.uint8))
    assert policy.news == [(3, [5, 9], [200, 7])]


def test_a_long_walk_costs_little_for_each_page() -> None:
    """A walk over all 896 experts of a layer looks at each a few times, not 896 times."""
    store, _ = make(16)
    looked = 0

    class Loading(dict[PageId, Ticket]):
        def __contains__(self, page: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(page)

    store._loading = Loading()
    with store.lease(pages(*range(896))) as walk:
        assert len(list(flat(walk))) == 896
    assert looked < 896 * 40


def test_a_store_needs_a_slot() -> None:
    with pytest.raises(SlotsExhausted):
        ExpertStore(Tier(SIZE), [], Policy(0))


# ---- leases that end otherwise ----


def test_lease_left_early_drops_what_has_not_begun() -> None:
    """And keeps what has; no slot is lost."""
    store, tier = make(4, parts=2)
    with store.lease(pages(0, 1, 2, 3)) as walk:
        tier.release()
        tier.release()
        half, rest = tier.begin(0), tier.begin(0)  # all of page 1
        part = tier.begin(0)  # half of page 2
        assert [page.expert for page, _ in next(walk)] == [0]
    assert tier.waiting() == []
    check_state(store)
    assert (store._ending, len(store._free)) == (1, 1)
    for end in (half, rest, part):
        end()
    assert [store.has(page) for page in pages(0, 1, 2, 3)] == [True, True, False, False]
    check_counts(store, tier)
    check_state(store)
    assert store.counts.bytes == 2 * SIZE + SIZE // 2
    with store.lease(pages(4, 5, 6, 7)) as walk:
        assert len(list(flat(walk))) == 4


def stumble(batch: list[tuple[PageId, Buffer]]) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_closed_walk_and_an_error_of_its_caller_free_the_slots(slots: int) -> None:
    store, tier = make(slots)
    with store.lease(pages(0, 1, 2, 3)) as walk:
        next(walk)
        walk.close()
        with pytest.raises(StopIteration):
            next(walk)
    with pytest.raises(ZeroDivisionError), store.lease(pages(0, 1, 2, 3)) as walk:
        stumble(next(walk))
    with store.lease(pages(4, 5, 6, 7)) as walk:
        assert len(list(flat(walk))) == 4
    check_counts(store, tier)


def test_walk_never_started() -> None:
    store, tier = make(1)
    with store.lease(pages(0, 1)):
        assert tier.waiting() == pages(0)
    assert tier.waiting() == []
    with store.lease(pages(2)) as walk:
        assert len(list(walk)) == 1
    check_counts(store, tier)


def test_failed_read_frees_its_slot_and_a_later_lease_tries_again() -> None:
    store, tier = make(1)
    error = ReadError("part0 at offset 5")
    tier.fail(PageId(0, 0), error, landed=10)
    with pytest.raises(ReadError) as caught, store.lease(pages(0)) as walk:
        next(walk)
    assert caught.value is error
    assert not store.has(PageId(0, 0))
    for page in pages(1, 0):
        with store.lease([page]) as walk:
            check(tier, *next(walk)[0])
    check_counts(store, tier)


def test_failure_ends_a_walk_at_its_next_step() -> None:
    """Whatever else is ready; what has not begun is not read."""
    store, tier = make(4)
    error = ReadError("made to fail")
    tier.fail(PageId(0, 1), error)
    with store.lease(pages(0, 1, 2, 3)) as walk:
        tier.release()
        assert next(walk)[0][0] == PageId(0, 0)
        tier.release()
        tier.release()
        with pytest.raises(ReadError) as caught:
            next(walk)
    assert caught.value is error
    assert tier.waiting() == [] and store.has(PageId(0, 2)) and not store.has(PageId(0, 3))
    with store.lease(pages(1)) as walk:
        check(tier, *next(walk)[0])
    check_counts(store, tier)
    check_state(store)


def test_read_that_cannot_start_is_a_failed_read() -> None:
    """Such as one of a tier that is closed."""

    class Closed(Tier):
        closed = True

        def read(self, page: PageId, into: Buffer, *rest: Any) -> Ticket:
            if self.closed:
                raise RuntimeError("the files are closed")
            return super().read(page, into, *rest)

    tier = Closed(SIZE)
    store = ExpertStore(tier, [np.zeros(SIZE, np.uint8)], Policy(1))
    store._change = Stepping(tier)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"), store.lease(pages(0)) as walk:
            next(walk)
    tier.closed = False
    with store.lease(pages(0)) as walk:
        assert (next(walk)[0][1] == tier.content(PageId(0, 0))).all()


# ---- nested leases ----


def test_nested_lease_of_all_slots_is_refused_naming_the_slots_needed() -> None:
    store, tier = make(2)
    with store.lease(pages(0, 1)) as outer:
        tier.release()
        next(outer)
        with (
            pytest.raises(SlotsExhausted, match=r"All 2 expert slots.*give 4 slots"),
            store.lease(pages(2, 3)) as inner,
        ):
            next(inner)
        assert next(outer)[0][0] == PageId(0, 1)


def test_nested_lease_of_held_pages_needs_no_slot() -> None:
    store, tier = make(1)
    with store.lease(pages(0)) as outer:
        page, buffer = next(outer)[0]
        with store.lease(pages(0)) as inner:
            assert next(inner)[0][1] is buffer
        check(tier, page, buffer)
    c = store.counts
    assert (c.requests, c.hits, c.misses) == (2, 1, 1)


def test_nested_lease_uses_the_other_slots() -> None:
    store, tier = make(3)
    with store.lease(pages(0)) as outer:
        page, buffer = next(outer)[0]
        for experts in ((1, 2, 3, 4), (5,), (1, 0, 2)):
            with store.lease(pages(*experts)) as inner:
                for held in flat(inner):
                    check(tier, *held)
                    check(tier, page, buffer)
    check_counts(store, tier)


def test_an_interrupt_while_a_read_is_queued_loses_one_slot_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody may get the slot: the read may be under way.  The page is not taken for resident."""
    store, tier = make(4)
    page = pages(0)[0]

    def interrupted(*args: Any) -> Ticket:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tier, "read", interrupted)
        with pytest.raises(KeyboardInterrupt), store.lease([page]):
            pass
        with pytest.raises(KeyboardInterrupt):
            store.prefetch(pages(1))
    assert not store.has(page) and store.absent(page)
    for other in (page, *pages(2), page):
        with store.lease([other]) as walk:
            assert [found for found, _ in flat(walk)] == [other]
