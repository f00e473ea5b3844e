"""Leases that go on without the pages that cannot be had (R58)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from k3offload.errors import CheckpointError, K3Error, ReadError
from k3offload.tiers.base import PageId
from tests.helpers_store import check, check_counts, check_state, flat, make, pages


class Told:
    """Who is told of pages that are lost."""

    def __init__(self) -> None:
        self.all: list[tuple[PageId, K3Error]] = []

    def __call__(self, page: PageId, error: K3Error) -> None:
        self.all.append((page, error))


def test_a_lost_page_is_told_and_the_others_come() -> None:
    """In every order of arrival, with room for all of them and in waves."""
    for seed in range(60):
        store, tier = make(2 + seed % 4, seed=seed)
        gone = {PageId(0, seed % 7): ReadError("gone"), PageId(0, 6): CheckpointError("damaged")}
        for page, error in gone.items():
            tier.fail(page, error, landed=seed % 9)
        told, came = Told(), list[PageId]()
        with store.lease(pages(*range(7)), lost=told) as walk:
            for batch in walk:
                assert batch
                for page, slot in batch:
                    check(tier, page, slot)
                    came.append(page)
        assert dict(told.all) == gone and len(told.all) == len(gone)
        assert sorted(came) == [page for page in pages(*range(7)) if page not in gone]
        tier.settle()
        check_counts(store, tier)
        check_state(store)
        with store.lease(gone) as walk:  # and a later lease tries again
            assert sum(map(len, walk)) == len(gone)


def test_what_the_told_one_raises_ends_the_walk_at_once() -> None:
    """Before pages that are still coming; what has not begun is not read."""
    store, tier = make(4)
    tier.fail(PageId(0, 1), ReadError("gone"))

    def stop(page: PageId, error: K3Error) -> None:
        raise ReadError("all is gone") from error

    with store.lease(pages(0, 1, 2, 3), lost=stop) as walk:
        tier.release()
        assert next(walk)[0][0] == PageId(0, 0)
        tier.release()
        with pytest.raises(ReadError, match="all is gone"):
            next(walk)
    assert tier.waiting() == []
    check_counts(store, tier)
    check_state(store)


@pytest.mark.parametrize("told", ["hit", "insert", "evict"])
@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("nth", [1, 2])
def test_what_a_policy_raises_costs_no_slot(
    told: str, arrived: bool, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether guesses that a lease asks for have come or are on their way."""
    store, tier = make(4, room=3)
    store.prefetch(pages(0, 1, 2))
    if arrived:
        tier.settle()
    kept, calls = getattr(store._policy, told), itertools.count(1)

    def stumbles(*given: Any) -> Any:
        if next(calls) == nth:
            raise ZeroDivisionError
        return kept(*given)

    monkeypatch.setattr(store._policy, told, stumbles)
    with pytest.raises(ZeroDivisionError), store.lease(pages(0, 1, 2, 3, 4, 5)) as walk:
        list(walk)
    tier.settle()
    assert not store._pins and not store._leases
    check_state(store)
    check_counts(store, tier)
    with store.lease(pages(*range(8), layer=1)) as walk:
        for found in flat(walk):
            check(tier, *found)
    assert len(store._slot) == 4


def test_other_errors_end_the_walk() -> None:
    store, tier = make(2)
    tier.fail(PageId(0, 0), MemoryError("no page"))
    told = Told()
    with store.lease(pages(0, 1), lost=told) as walk:
        with pytest.raises(MemoryError):
            list(walk)
        assert list(walk) == []  # and it stays ended
    assert told.all == []
