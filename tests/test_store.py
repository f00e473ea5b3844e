"""The expert store over a made tier: right bytes, leases, single flight, counts (R61, R62).

Most tests run on one thread: where a lease would sleep, one of the waiting reads ends instead,
drawn from a seed.  So every order of arrival can be had again, and a lease that waits for a read
that nobody has started is an error at once instead of a test that hangs.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator

import numpy as np
import pytest

from k3offload.errors import ReadError, SlotsExhausted
from k3offload.scheduler.policy_lru import Policy
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import Buffer, CachePolicy, PageId, Ticket
from k3offload.tiers.tier_made import MadeTier

SIZE = 64
CANARY = 0xA5


class Tier(MadeTier):
    """Fills a slot with canary bytes the moment it is given away."""

    def read(self, page: PageId, into: Buffer) -> Ticket:
        into[:] = CANARY
        return super().read(page, into)


class Stepping(threading.Condition):
    """Ends a read instead of sleeping: ``release`` says which."""

    def __init__(self, tier: MadeTier, release: Callable[[], object]) -> None:
        super().__init__()
        self.tier, self.arrive, self.sleeps = tier, release, 0

    def wait(self, timeout: float | None = None) -> bool:
        assert self.tier.waiting(), "waits, and no read is under way"
        self.sleeps += 1
        self.arrive()
        return True


class RandomPolicy:
    """Evicts any page that may go."""

    def __init__(self, seed: int) -> None:
        self.random, self.pages = random.Random(seed), list[PageId]()

    def hit(self, page: PageId) -> None:
        assert page in self.pages

    def insert(self, page: PageId) -> None:
        assert page not in self.pages
        self.pages.append(page)

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        victim = self.random.choice([page for page in self.pages if not busy(page)])
        self.pages.remove(victim)
        return victim


def make(
    slots: int,
    seed: int = 0,
    policy: CachePolicy | None = None,
    kind: type[ExpertStore] = ExpertStore,
    in_flight: int = 8,
) -> tuple[ExpertStore, Tier]:
    """A store that runs on one thread, and its tier."""
    tier = Tier(SIZE, seed)
    buffers = [np.full(SIZE + 8, CANARY, np.uint8) for _ in range(slots)]
    store = kind(tier, buffers, policy or Policy(), in_flight)
    store._change = Stepping(tier, tier.release_any)
    return store, tier


def check(tier: MadeTier, page: PageId, buffer: Buffer) -> None:
    assert (buffer[:SIZE] == tier.content(page)).all(), page
    assert (buffer[SIZE:] == CANARY).all()


def check_counts(store: ExpertStore, tier: MadeTier) -> None:
    c = store.counts
    assert c.requests == c.hits + c.late + c.misses
    assert c.misses == len(tier.started)
    assert c.bytes == c.misses * SIZE


def pages(*experts: int, layer: int = 0) -> list[PageId]:
    return [PageId(layer, e) for e in experts]


TOP_K, EXPERTS = 4, 12


def simulate(seed: int, kind: type[ExpertStore] = ExpertStore) -> None:
    """Leases of random pages with random evictions, arrivals, failures and early ends."""
    rng = random.Random(seed)
    slots = [1, TOP_K - 1, TOP_K, EXPERTS][seed % 4]
    policy = RandomPolicy(seed) if seed % 3 else Policy()
    store, tier = make(slots, seed, policy, kind, rng.choice([1, 3, 8]))
    for _ in range(8):
        count = rng.choice([1, TOP_K, EXPERTS])
        wanted = set(pages(*rng.sample(range(EXPERTS), count)))
        broken = rng.choice(sorted(wanted)) if rng.random() < 0.15 else None
        if broken is not None:
            tier.fail(broken, ReadError("made to fail"), landed=rng.randrange(SIZE))
        stop = rng.randrange(count) if rng.random() < 0.2 else count + 1
        got: list[PageId] = []
        try:
            with store.lease(wanted) as walk:
                for page, buffer in walk:
                    check(tier, page, buffer)
                    for _ in range(rng.randrange(3)):  # others arrive while this one is used
                        if tier.waiting():
                            tier.release_any()
                    check(tier, page, buffer)
                    check_counts(store, tier)
                    got.append(page)
                    if len(got) == stop:
                        break
                else:
                    assert sorted(got) == sorted(wanted), "each page once"
        except ReadError:
            assert broken is not None
            assert broken not in got
        if broken is not None:
            tier.fail(broken, ReadError("made to fail"), times=0)
        assert len(set(got)) == len(got)
        check_counts(store, tier)
    assert tier.most_under_way <= store._in_flight


def simulate_many(seeds: int, kind: type[ExpertStore] = ExpertStore) -> None:
    for seed in range(seeds):
        simulate(seed, kind)


def test_r61_thousand_seeds() -> None:
    """Slots = 1, top-k - 1, top-k, all; random arrivals and evictions; canaries in freed slots."""
    simulate_many(1000)


class IgnoresPins(ExpertStore):
    def _evict(self) -> int:
        self._idle -= 1
        return self._slot.pop(self._policy.evict(lambda page: False))


class HandsOutEarly(ExpertStore):
    def _collect_arrivals(self, lease: object) -> None:
        for page in list(lease.coming):  # type: ignore[attr-defined]
            lease.coming.discard(page)  # type: ignore[attr-defined]
            lease.ready.append(page)  # type: ignore[attr-defined]


class ReadsTwice(ExpertStore):
    def _begin(self, page: PageId, lease: object) -> None:
        super()._begin(page, lease)  # type: ignore[arg-type]
        self._tier.read(page, self._slots[self._slot[page]])


class KeepsPins(ExpertStore):
    def _unpin(self, page: PageId) -> None:
        if page.expert:
            super()._unpin(page)


class CountsAhead(ExpertStore):
    def _take_residents(self, lease: object) -> None:
        self.counts.requests += 1
        super()._take_residents(lease)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [IgnoresPins, HandsOutEarly, ReadsTwice, KeepsPins, CountsAhead])
def test_planted_wrong_stores_are_refused(kind: type[ExpertStore]) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError, RuntimeError)):
        simulate_many(200, kind)


# ---- order, counts, bounds ----


def test_residents_come_before_arrivals() -> None:
    store, _ = make(4)
    with store.lease(pages(1, 3)) as walk:
        assert len(list(walk)) == 2
    with store.lease(pages(0, 1, 2, 3)) as walk:
        got = [page.expert for page, _ in walk]
    assert sorted(got[:2]) == [1, 3]
    c = store.counts
    assert (c.requests, c.hits, c.late, c.misses, c.bytes) == (6, 2, 0, 4, 4 * SIZE)


def test_equal_pages_are_one_request() -> None:
    store, tier = make(2)
    with store.lease(pages(1, 1, 1)) as walk:
        assert [page for page, _ in walk] == pages(1)
    assert store.counts.requests == 1
    assert len(tier.started) == 1


def test_reads_start_in_the_tiers_order() -> None:
    store, tier = make(8)
    with store.lease(pages(5, 2, 7, 0, 3)) as walk:
        list(walk)
    assert [page.expert for page in tier.started] == [0, 2, 3, 5, 7]


def test_r62_misses_are_read_together_within_the_bound() -> None:
    """16 misses, 8 in flight: two latencies, not sixteen."""
    store, tier = make(32)

    def all_waiting() -> None:
        for _ in tier.waiting():
            tier.release()

    change = Stepping(tier, all_waiting)
    store._change = change
    with store.lease(pages(*range(16))) as walk:
        assert len(list(walk)) == 16
    assert change.sleeps <= 3
    assert tier.most_under_way == 8


@pytest.mark.parametrize("bound", [1, 3])
def test_r62_in_flight_bound(bound: int) -> None:
    store, tier = make(32, in_flight=bound)
    with store.lease(pages(*range(16))) as walk:
        list(walk)
    assert tier.most_under_way == bound


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
        assert len(list(walk)) == 896
    assert looked < 896 * 40


def test_a_store_needs_a_slot() -> None:
    with pytest.raises(SlotsExhausted):
        ExpertStore(Tier(SIZE), [], Policy())


# ---- leases that end otherwise ----


def test_lease_left_early_keeps_what_arrives() -> None:
    store, tier = make(4, in_flight=2)
    with store.lease(pages(0, 1, 2, 3)) as walk:
        page, _ = next(walk)
    check_counts(store, tier)
    while tier.waiting():
        tier.release()
    assert all(store.has(started) for started in tier.started)
    with store.lease(pages(4, 5, 6, 7)) as walk:  # nothing is pinned any more
        assert len(list(walk)) == 4
    assert store.counts.misses == len(tier.started)
    assert not store.has(page)


def stumble(page: PageId, buffer: Buffer) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_generator_closed_and_consumer_error_free_the_slots(slots: int) -> None:
    store, tier = make(slots)
    with store.lease(pages(0, 1, 2, 3)) as walk:
        next(walk)
        assert isinstance(walk, Generator)
        walk.close()
        with pytest.raises(StopIteration):
            next(walk)
    with pytest.raises(ZeroDivisionError), store.lease(pages(0, 1, 2, 3)) as walk:
        stumble(*next(walk))
    with store.lease(pages(4, 5, 6, 7)) as walk:
        assert len(list(walk)) == 4
    check_counts(store, tier)


def test_walk_never_started() -> None:
    store, tier = make(1)
    with store.lease(pages(0, 1)):
        pass
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
            check(tier, *next(walk))
    check_counts(store, tier)


def test_failure_that_nobody_waits_for_is_forgotten() -> None:
    store, tier = make(2)
    store._change = Stepping(tier, tier.release)
    tier.fail(PageId(0, 1), ReadError("made to fail"))
    with store.lease(pages(0, 1)) as walk:
        store._change = Stepping(tier, tier.release)
        assert next(walk)[0] == PageId(0, 0)
        tier.release()
    assert not store._failed
    with store.lease(pages(1)) as walk:
        check(tier, *next(walk))


def test_read_that_cannot_start_is_a_failed_read() -> None:
    """Such as one of a tier that is closed."""

    class Closed(Tier):
        closed = True

        def read(self, page: PageId, into: Buffer) -> Ticket:
            if self.closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            return super().read(page, into)

    tier = Closed(SIZE)
    store = ExpertStore(tier, [np.zeros(SIZE, np.uint8)], Policy())
    store._change = Stepping(tier, tier.release_any)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shutdown"), store.lease(pages(0)) as walk:
            next(walk)
    tier.closed = False
    with store.lease(pages(0)) as walk:
        assert (next(walk)[1] == tier.content(PageId(0, 0))).all()


# ---- nested leases ----


def test_nested_lease_of_all_slots_is_refused_naming_the_slots_needed() -> None:
    store, _ = make(2)
    with store.lease(pages(0, 1)) as outer:
        next(outer)
        with (
            pytest.raises(SlotsExhausted, match=r"All 2 expert slots.*give 4 slots"),
            store.lease(pages(2, 3)) as inner,
        ):
            next(inner)
        assert next(outer)[0] in pages(0, 1)


def test_nested_lease_of_held_pages_needs_no_slot() -> None:
    store, tier = make(1)
    with store.lease(pages(0)) as outer:
        page, buffer = next(outer)
        with store.lease(pages(0)) as inner:
            assert next(inner)[1] is buffer
        check(tier, page, buffer)
    c = store.counts
    assert (c.requests, c.hits, c.misses) == (2, 1, 1)


def test_nested_lease_uses_the_other_slots() -> None:
    store, tier = make(3)
    with store.lease(pages(0)) as outer:
        page, buffer = next(outer)
        for experts in ((1, 2, 3, 4), (5,), (1, 0, 2)):
            with store.lease(pages(*experts)) as inner:
                for held in inner:
                    check(tier, *held)
                    check(tier, page, buffer)
    check_counts(store, tier)
