"""Prefetch in the expert store: bounds, late joins, cancels, failures, accounts (R59, R60)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from k3offload.errors import ReadError
from k3offload.scheduler.policy_lru import Policy
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import PageId, Priority
from tests.helpers_store import (
    SIZE,
    RandomPolicy,
    check,
    check_counts,
    check_state,
    flat,
    make,
    pages,
)


class Recording(Policy):
    """LRU that keeps what left, and can be broken."""

    def __init__(self) -> None:
        super().__init__(8)
        self.left: list[PageId] = []
        self.broken = False

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        if self.broken:
            raise ZeroDivisionError
        self.left.append(super().evict(busy))
        return self.left[-1]


def ask(store: ExpertStore, *experts: int, layer: int = 1) -> None:
    with store.lease(pages(*experts, layer=layer)) as walk:
        for _ in walk:
            pass


def test_a_guess_that_comes_true_in_time() -> None:
    store, tier = make(8)
    assert store.prefetch(pages(3, 1, layer=1)) == 2
    assert tier.waiting() == pages(3, 1, layer=1), "most wanted first"
    assert tier.priorities() == [Priority.PREFETCH] * 2
    tier.settle()
    assert not store.counts.requests
    with store.lease(pages(1, 3, layer=1)) as walk:
        for page, buffer in flat(walk):
            check(tier, page, buffer)
    c = store.counts
    assert (c.requests, c.hits, c.late, c.misses) == (2, 2, 0, 0)
    assert (c.prefetches, c.useful, c.wasted) == (2, 2, 0)
    assert c.bytes == c.prefetch_bytes == 2 * SIZE


def test_a_guess_that_comes_true_late_becomes_urgent() -> None:
    store, tier = make(8)
    store.prefetch(pages(1, 2, layer=1))
    with store.lease(pages(0, 1, layer=1)) as walk:
        assert tier.waiting() == pages(1, 2, 0, layer=1)
        assert tier.priorities() == [Priority.DEMAND, Priority.PREFETCH, Priority.DEMAND]
        assert len(list(flat(walk))) == 2
    c = store.counts
    assert (c.requests, c.hits, c.late, c.misses) == (2, 0, 1, 1)
    assert (c.prefetches, c.useful, c.wasted) == (2, 1, 0)
    assert (c.bytes, c.prefetch_bytes) == (3 * SIZE, 2 * SIZE)


def test_room_for_guesses_is_bounded() -> None:
    assert make(3)[0].prefetch_room == 0
    assert make(20)[0].prefetch_room == 5
    assert make(1000)[0].prefetch_room == 64
    store, tier = make(8, room=3)
    assert store.prefetch(pages(*range(8), layer=1)) == 3
    tier.settle()
    assert store.prefetch(pages(*range(8), layer=1)) == 0, "also when they are there"
    ask(store, 0)
    assert store.prefetch(pages(*range(8), layer=1)) == 1, "asked for, one makes room"
    store.drop_prefetches(2)
    assert store.prefetch(pages(7, layer=2)) == 0, "another layer's were dropped"
    store.drop_prefetches(1)
    assert store.prefetch(pages(7, layer=2)) == 1


def test_a_guess_evicts_what_nobody_uses_and_nothing_else() -> None:
    store, tier = make(4, room=4)
    with store.lease(pages(0, 1)) as walk:
        list(walk)
    with store.lease(pages(2, 3)) as walk:  # pinned: 2 and 3
        assert store.prefetch(pages(*range(4), layer=1)) == 2
        assert not store.has(PageId(0, 0)) and not store.has(PageId(0, 1))
        assert len(list(flat(walk))) == 2
    tier.settle()
    assert store.prefetch(pages(2, 3, layer=1)) == 2
    tier.settle()
    assert store.prefetch(pages(4, 5, layer=1)) == 0, "guesses never push out guesses"
    assert [store.has(page) for page in pages(*range(4), layer=1)] == [True] * 4
    check_state(store)


def test_no_guess_while_someone_waits_for_a_slot() -> None:
    store, tier = make(4, room=4)
    with store.lease(pages(*range(6))) as walk:
        assert store.prefetch(pages(0, layer=1)) == 0
        for _ in walk:
            pass
    assert not store.absent(PageId(1, 0)), "then it begins by itself"
    assert store.prefetch(pages(0, layer=1)) == 0
    check_counts(store, tier)


def test_guesses_take_slots_as_those_before_them_arrive() -> None:
    policy = Recording()
    store, tier = make(8, policy=policy, room=8)
    ask(store, *range(8), layer=0)
    store.guess_bytes = 2 * SIZE
    assert store.prefetch(pages(5, 4, 3, 2, 1, layer=1)) == 2
    assert tier.waiting() == pages(5, 4, layer=1) and policy.left == pages(0, 1)
    tier.begin(0)()
    assert tier.waiting() == pages(4, 3, layer=1) and policy.left == pages(0, 1, 2)
    with store.lease(pages(7, layer=0)) as walk:
        list(walk)
    store.drop_prefetches(0)
    assert tier.waiting() == pages(4, 3, layer=1), "another layer's guesses go on"
    store.drop_prefetches(1)
    tier.settle()
    assert not tier.waiting() and policy.left == pages(0, 1, 2), "what none was read for stays"
    c = store.counts
    assert (c.prefetches, c.prefetch_bytes, c.wasted) == (3, SIZE, 2)
    store.guess_bytes = 1
    assert store.prefetch(pages(8, 9, layer=1)) == 1, "at least a page"
    assert store.prefetch(pages(8, 9, layer=1), sure=True) == 1, "what is sure waits for nothing"
    tier.settle()
    assert store.has(PageId(1, 8)) and store.has(PageId(1, 9))
    check_counts(store, tier)
    check_state(store)


def test_new_guesses_take_the_place_of_those_that_wait() -> None:
    store, tier = make(8, room=8)
    store.guess_bytes = SIZE
    store.prefetch(pages(1, 2, layer=1))
    store.prefetch(pages(3, 4, layer=2))
    tier.settle()
    assert [store.has(p) for p in pages(1, 2, layer=1) + pages(3, 4, layer=2)] == [1, 0, 1, 1]


def test_a_policy_that_fails_when_a_guess_goes_on_fails_the_lease_that_waits() -> None:
    policy = Recording()
    store, tier = make(4, policy=policy, room=4)
    ask(store, *range(4), layer=0)
    store.guess_bytes = SIZE
    with store.lease(pages(0, layer=2)) as walk:
        store.prefetch(pages(1, 2, layer=1))
        policy.broken = True
        tier.settle()
        with pytest.raises(ZeroDivisionError):
            next(iter(walk))
    policy.broken = False
    tier.settle()
    ask(store, *range(4), layer=3)
    check_state(store)


def test_a_demand_takes_ordinary_pages_before_guesses() -> None:
    store, tier = make(4, policy=RandomPolicy(0), room=2)
    store.prefetch(pages(0, 1, layer=1))
    tier.settle()
    ask(store, 0, 1, layer=0)
    ask(store, 2, 3, layer=0)
    assert store.has(PageId(1, 0)) and store.has(PageId(1, 1))
    ask(store, 4, 5, 6, layer=0)
    assert store.counts.wasted == 1
    check_counts(store, tier)
    check_state(store)


def test_a_demand_gives_up_guesses_that_load_when_nothing_else_is_left() -> None:
    store, tier = make(2, room=2)
    store.prefetch(pages(0, 1, layer=1))
    with store.lease(pages(5)) as walk:
        assert tier.waiting() == [PageId(1, 0), PageId(0, 5)], "the last guess goes first"
        check(tier, *next(walk)[0])
    c = store.counts
    assert (c.prefetches, c.useful, c.wasted, c.prefetch_bytes, c.bytes) == (
        2,
        0,
        1,
        SIZE,
        2 * SIZE,
    )


def test_a_demand_waits_for_a_given_up_guess_to_let_go_of_its_slot() -> None:
    store, tier = make(1, room=1, parts=2)
    store.prefetch(pages(0, layer=1))
    tier.begun.append(tier.begin())
    with store.lease(pages(5)) as walk:
        assert (store._ending, tier.waiting()) == (1, [])
        check(tier, *next(walk)[0])
    check_counts(store, tier)
    check_state(store)
    assert store.counts.bytes == SIZE + SIZE // 2


def test_dropped_guesses() -> None:
    """Not begun: never read.  Begun in all its pieces, or there: an ordinary page.  Asked for:
    not touched.  Of another layer: not touched."""
    store, tier = make(8, room=8, parts=2)
    store.prefetch(pages(0, 1, 2, layer=1) + pages(9, layer=2))
    for _ in range(2):
        tier.release()
    begun = [tier.begin(), tier.begin()]
    store.drop_prefetches(1)
    assert tier.waiting() == pages(9, 9, layer=2)
    for end in begun:
        end()
    c = store.counts
    assert (c.prefetches, c.useful, c.wasted, c.prefetch_bytes) == (4, 0, 1, 3 * SIZE)
    assert [store.has(page) for page in pages(0, 1, 2, layer=1)] == [True, True, False]
    ask(store, 0)
    assert (c.useful, c.wasted) == (1, 1)
    store.prefetch(pages(3, layer=1))
    with store.lease(pages(3, layer=1)) as walk:
        store.drop_prefetches(1)
        check(tier, *next(walk)[0])
    assert (c.useful, c.wasted) == (2, 1)
    check_counts(store, tier)
    check_state(store)


def test_a_page_given_up_can_be_asked_for_at_once() -> None:
    """While the last piece of the former read still writes into the former slot."""
    store, tier = make(2, room=1, parts=2)
    store.prefetch(pages(0, layer=1))
    end = tier.begin()
    store.drop_prefetches(1)
    with store.lease(pages(0, layer=1)) as walk:
        page, buffer = next(walk)[0]
        end()
        check(tier, page, buffer)
    c = store.counts
    assert (c.requests, c.misses, c.late, c.useful, c.wasted) == (1, 1, 0, 0, 1)
    check_counts(store, tier)
    check_state(store)


def test_a_failed_guess_tells_nobody_and_is_read_again_on_demand() -> None:
    store, tier = make(2, policy=RandomPolicy(0), room=2)
    tier.fail(PageId(1, 0), ReadError("made to fail"), landed=5)
    store.prefetch(pages(0, layer=1))
    tier.settle()
    assert (store.counts.wasted, len(store._free)) == (1, 2)
    with store.lease(pages(0, layer=1)) as walk:
        check(tier, *next(walk)[0])
    assert store.counts.misses == 1
    check_counts(store, tier)
    check_state(store)


def test_a_guess_that_fails_after_it_was_asked_for_is_an_error() -> None:
    store, tier = make(4)
    tier.fail(PageId(1, 0), ReadError("made to fail"))
    store.prefetch(pages(0, layer=1))
    with store.lease(pages(0, layer=1)) as walk, pytest.raises(ReadError):
        next(walk)
    assert (store.counts.late, store.counts.useful, store.counts.wasted) == (1, 1, 0)
    check_counts(store, tier)
    check_state(store)
