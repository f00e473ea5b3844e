"""A thousand drawn histories of the expert store, and stores with planted mistakes (R61).

Leases, prefetches, drops, failures, early ends, evictions and arrivals in drawn order; slots that
are given away hold canary bytes until the page is there.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from k3offload.errors import ReadError
from k3offload.scheduler.policy_lru import Policy
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import Buffer, Cancelled, PageId
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

TOP_K, EXPERTS = 4, 10


class _History:
    """One store and what happens to it, drawn from ``seed``."""

    def __init__(self, seed: int, kind: type[ExpertStore]) -> None:
        self.rng = rng = random.Random(seed)
        slots = [1, TOP_K - 1, TOP_K, 2 * EXPERTS][seed % 4]
        policy = RandomPolicy(seed) if seed % 3 else Policy(slots)
        room, parts = rng.choice([None, 1, slots]), rng.choice([1, 2, 3])
        self.store, self.tier = make(slots, seed, policy, kind, room, parts)
        self.store.guess_bytes = rng.choice([SIZE, 2 * SIZE, 100 * SIZE])
        self.broken: set[PageId] = set()

    def run(self, leases: int) -> None:
        for _ in range(leases):
            for _ in range(self.rng.randrange(3)):
                self.happen()
            self.lease()
        self.end()

    def happen(self) -> None:
        """Something beside the leases: a piece moves, a guess is made or given up."""
        rng, action = self.rng, self.rng.randrange(6)
        if action == 0:
            count = rng.choice([1, TOP_K])
            guess = pages(*rng.sample(range(EXPERTS), count), layer=rng.randrange(2))
            self.break_one(guess)
            self.store.prefetch(guess)
        elif action == 1:
            self.store.drop_prefetches(rng.randrange(2))
        else:
            self.tier.step()
        check_state(self.store)

    def break_one(self, some: list[PageId]) -> None:
        if self.rng.random() < 0.15:
            page = self.rng.choice(some)
            self.broken.add(page)
            self.tier.fail(page, ReadError("made to fail"), landed=self.rng.randrange(20))

    def lease(self) -> None:
        rng, store = self.rng, self.store
        count = rng.choice([1, TOP_K, EXPERTS])
        wanted = pages(*rng.sample(range(EXPERTS), count), layer=rng.randrange(2))
        self.break_one(wanted)
        stop = rng.randrange(count) if rng.random() < 0.2 else count + 1
        most = rng.choice([1, 3, 16])
        got: list[PageId] = []
        try:
            with store.lease(wanted, most) as walk:
                for batch in walk:
                    assert 0 < len(batch) <= most
                    self.hold(batch)
                    got += [page for page, _ in batch]
                    if len(got) >= stop:
                        break
                else:
                    assert sorted(got) == sorted(wanted), "each page once"
        except ReadError:
            assert self.broken & (set(wanted) - set(got))
        assert len(set(got)) == len(got)
        assert not self.store._leases and not self.store._pins
        self.check()

    def hold(self, batch: list[tuple[PageId, Buffer]]) -> None:
        """What is held stays whole while other things happen."""
        for _ in range(self.rng.randrange(3)):
            self.happen()
        for page, buffer in batch:
            check(self.tier, page, buffer)

    def check(self) -> None:
        check_counts(self.store, self.tier)
        check_state(self.store)

    def end(self) -> None:
        """Whatever happened, every slot can be used again."""
        store = self.store
        self.tier.settle()
        for layer in range(2):
            store.drop_prefetches(layer)
        self.check()
        assert not store._ending and not store._guarded and not store._loading
        with store.lease(pages(*range(22), layer=2)) as walk:
            for page, buffer in flat(walk):
                check(self.tier, page, buffer)
        self.check()
        assert len(store._slot) == store.slots


def simulate(seed: int, kind: type[ExpertStore] = ExpertStore) -> None:
    _History(seed, kind).run(4)


def test_r61_thousand_seeds() -> None:
    """Slots = 1, top-k - 1, top-k, all; random arrivals and evictions; canaries in freed slots."""
    for seed in range(1000):
        simulate(seed)


class IgnoresPins(ExpertStore):
    def _pin(self, pages: Any) -> None:
        for page in pages:
            self._pins[page] = self._pins.get(page, 0) + 1


class EvictsWhatLoads(ExpertStore):
    def _begin(self, page: PageId, *rest: Any) -> None:
        super()._begin(page, *rest)
        self._idle.add(page)


class HandsOutEarly(ExpertStore):
    def _begin(self, page: PageId, slot: int, *rest: Any) -> None:
        for lease in self._waiting.pop(page, ()):
            lease.have(page)
        super()._begin(page, slot, *rest)


class ReadsTwice(ExpertStore):
    def _begin(self, page: PageId, slot: int, *rest: Any) -> None:
        super()._begin(page, slot, *rest)
        self._tier.read(page, self._slots[slot])


class KeepsPins(ExpertStore):
    def _unpin(self, pages: Any) -> None:
        super()._unpin([page for page in pages if page.expert])


class CountsAhead(ExpertStore):
    def _take_present(self, lease: Any) -> None:
        self.counts.requests += 1
        super()._take_present(lease)


class FreesTooSoon(ExpertStore):
    """Gives a cancelled read's slot away while its last pieces still write there."""

    def _cancel(self, page: PageId) -> None:
        slot, ending = self._slot[page], self._ending
        super()._cancel(page)
        if self._ending > ending:
            self._free.append(slot)
            self._ending -= 1


class LosesCancelledSlots(ExpertStore):
    def _arrived(self, page: PageId, slot: int, *rest: Any) -> None:
        known = len(self._free)
        super()._arrived(page, slot, *rest)
        if page not in self._slot and len(self._free) > known:
            self._free.remove(slot)


class CancelsForOthers(ExpertStore):
    """A guess that was asked for meanwhile is given up with the others of its layer."""

    def drop_prefetches(self, layer: int) -> None:
        for page in [page for page in self._loading if page.layer == layer]:
            self._cancel(page)


class TellsNoPolicy(ExpertStore):
    def _forget(self, page: PageId) -> None:
        forget = self._policy.forget
        self._policy.forget = lambda page: None  # type: ignore[method-assign]
        super()._forget(page)
        self._policy.forget = forget  # type: ignore[method-assign]


class CountsCancelledWhole(ExpertStore):
    def _arrived(self, *rest: Any) -> None:
        before = self.counts.bytes
        super()._arrived(*rest)
        self.counts.bytes = before


#: How a wrong store gives itself away: a check, or its own accounts going wrong.
SEEN = (AssertionError, LookupError, RuntimeError, ValueError, StopIteration, Cancelled)
PLANTED = [
    IgnoresPins,
    EvictsWhatLoads,
    HandsOutEarly,
    ReadsTwice,
    KeepsPins,
    CountsAhead,
    FreesTooSoon,
    LosesCancelledSlots,
    CancelsForOthers,
    TellsNoPolicy,
    CountsCancelledWhole,
]


def simulate_many(seeds: int, kind: type[ExpertStore]) -> None:
    for seed in range(seeds):
        simulate(seed, kind)


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_wrong_stores_are_refused(kind: type[ExpertStore]) -> None:
    with pytest.raises(SEEN):
        simulate_many(200, kind)


@pytest.mark.parametrize("kind", [IgnoresPins, FreesTooSoon, HandsOutEarly])
def test_planted_faults_show_as_wrong_bytes(
    kind: type[ExpertStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with no look at the store's own accounts, a slot reused too soon is seen."""
    monkeypatch.setattr(_History, "check", lambda self: None)
    monkeypatch.setattr("tests.test_store_seeds.check_state", lambda store: None)
    wrong_bytes = 0
    for seed in range(200):
        try:
            simulate(seed, kind)
        except SEEN as error:
            wrong_bytes += isinstance(error, AssertionError) and "PageId" in str(error)
    assert wrong_bytes
