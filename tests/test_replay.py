"""Replay counts what the real store counts; Belady's MIN is the minimum; ``reuse`` keeps its word.

The routings in ``golden/routing_*.zip`` are 800 decoded tokens each of the embedded model: text it
was not trained on, and its own greedy continuation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from k3offload import registry
from k3offload.scheduler.belady import Belady
from k3offload.scheduler.counts import Counts
from k3offload.scheduler.policy_lru import Policy as Lru
from k3offload.scheduler.policy_reuse import SLACK
from k3offload.scheduler.policy_reuse import Policy as Reuse
from k3offload.scheduler.replay import Leases, Step, replay
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import CachePolicy, PageId
from k3offload.tiers.tier_made import MadeTier
from k3offload.trace import read_trace
from k3offload.trace_made import NANO, PATTERNS, pattern, trace_of

GOLDEN = Path(__file__).with_name("golden")
POLICIES: dict[str, Callable[[int], CachePolicy]] = {
    name: module.Policy for name, module in registry.implementations("scheduler", "policy").items()
}
SLOTS = (40, 84, 168)  #: 12, 25, 50 % of the embedded model's experts


@cache
def golden(name: str) -> tuple[Step, ...]:
    return tuple(read_trace(GOLDEN / f"routing_{name}.zip").leases())


def random_run(seed: int, tokens: int, layers: int, experts: int, k: int) -> list[Step]:
    rng = np.random.default_rng(seed)
    keys = rng.random((tokens, layers, experts)) ** rng.integers(1, 5)
    best = np.argsort(-keys, axis=2)[..., : 2 * k]
    codes = np.tile(np.linspace(255, 1, best.shape[2]).astype(np.uint8), (tokens, layers, 1))
    sweep = np.arange(tokens) // (1 + seed % 3)
    order = np.argsort(rng.random((layers, experts)), axis=1)
    return list(Leases(range(1, layers + 1), best[..., :k], sweep, (best, codes), None, order))


class Ordered(MadeTier):
    """Pages lie as ``run`` says."""

    def __init__(self, run: Sequence[Step], size: int) -> None:
        super().__init__(size, seed=1, movers=2)
        self._keys = {step.layer: step.order for step in run}

    def order(self, page: PageId) -> int:
        key = self._keys[page.layer]
        return page.expert if key is None else key(page)


def served(run: Sequence[Step], policy: CachePolicy, slots: int, size: int) -> Counts:
    """The counts of the real store over a made tier, where reads end in a drawn order."""
    tier = Ordered(run, size)
    store = ExpertStore(tier, [np.zeros(size, np.uint8) for _ in range(slots)], policy)
    for step in run:
        for experts, scores in step.rows:
            store.note(step.layer, experts, scores)
        with store.lease(step.pages) as arrivals:
            for _ in arrivals:
                pass
    tier.close()
    return store.counts


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_replay_counts_what_the_store_counts(name: str, seed: int) -> None:
    run = random_run(seed, 40, 3, 12, 3)
    for slots in (9, 16):
        real = served(run, POLICIES[name](slots), slots, 24)
        thought = replay(run, POLICIES[name](slots), slots, 24)
        real.wait_seconds = 0
        assert thought == real
        assert thought.bytes == 24 * thought.misses > 0


@pytest.mark.parametrize("name", POLICIES)
def test_leases_of_more_pages_than_slots_come_in_waves(name: str) -> None:
    """The same in each run, whatever read ends first."""
    run = random_run(2, 30, 2, 20, 6)
    for slots in (1, 2, 5):
        real = served(run, POLICIES[name](slots), slots, 8)
        thought = replay(run, POLICIES[name](slots), slots, 8)
        real.wait_seconds = 0
        assert thought == real


def least_misses(run: Sequence[Step], slots: int) -> int:
    """By trying every way to evict."""
    states = {frozenset[PageId](): 0}
    for step in run:
        after: dict[frozenset[PageId], int] = {}
        lease = frozenset(step.pages)
        for held, misses in states.items():
            missing = len(lease - held)
            room = slots - len(held | lease)
            for left in _ways(sorted(held - lease), -room):
                state = (held | lease) - left
                after[state] = min(after.get(state, 1 << 30), misses + missing)
        states = after
    return min(states.values())


def _ways(pages: list[PageId], count: int) -> list[frozenset[PageId]]:
    from itertools import combinations

    return [frozenset(c) for c in combinations(pages, max(0, count))]


@pytest.mark.parametrize("seed", range(12))
def test_belady_is_the_minimum(seed: int) -> None:
    run = random_run(seed, 9, 2, 5, 1 + seed % 2)
    for slots in (4, 5):
        if any(len(step.pages) > slots for step in run):
            continue
        assert replay(run, Belady(run), slots).misses == least_misses(run, slots)


@pytest.mark.parametrize("name", ["natural", "greedy"])
def test_no_policy_beats_belady(name: str) -> None:
    run = golden(name)[:2100]
    for slots in SLOTS:
        least = replay(run, Belady(run), slots).misses
        for make in POLICIES.values():
            assert replay(run, make(slots), slots).misses >= least


def closed(run: Sequence[Step], make: Callable[[int], CachePolicy], slots: int) -> float:
    lru, least, own = (
        replay(run, policy, slots).misses for policy in (Lru(slots), Belady(run), make(slots))
    )
    return (lru - own) / (lru - least)


@pytest.mark.parametrize(
    ("name", "shares"), [("natural", (0.2, 0.18, 0.18)), ("greedy", (0.45, 0.45, 0.24))]
)
def test_reuse_closes_the_gap_to_belady(name: str, shares: tuple[float, ...]) -> None:
    """From the first token on; ``bench policies`` has the figures of longer runs."""
    for slots, share in zip(SLOTS, shares, strict=True):
        assert closed(golden(name), Reuse, slots) > share


def test_the_router_is_what_makes_the_difference() -> None:
    """Unheard, it is LRU with the layers in a circle, and the check above fails."""
    unheard = [step._replace(rows=()) for step in golden("natural")]
    assert closed(unheard, Reuse, 84) < 0.12


@pytest.mark.parametrize("name", PATTERNS)
def test_reuse_is_never_worse_than_lru(name: str) -> None:
    run = list(trace_of(pattern(name, 320), NANO.experts).leases())
    for slots in SLOTS[:2]:
        assert replay(run, Reuse(slots), slots).misses <= replay(run, Lru(slots), slots).misses


class Adversary:
    """Asks for what LRU holds and the policy does not, whenever there is such a page."""

    def __init__(self, policy: CachePolicy, slots: int) -> None:
        self.policy, self.slots = policy, slots
        self.own: set[PageId] = set()
        self.lru: dict[PageId, None] = {}
        self.misses = self.lru_misses = 0

    def ask(self, page: PageId) -> None:
        self.lru_misses += page not in self.lru
        self.lru.pop(page, None)
        self.lru[page] = None
        if len(self.lru) > self.slots:
            del self.lru[next(iter(self.lru))]
        scores = np.array([255, 100], np.uint8)
        self.policy.note(page.layer, np.array([page.expert, (page.expert + 1) % 16]), scores)
        if page in self.own:
            self.policy.hit(page)
            return
        self.misses += 1
        if len(self.own) == self.slots:
            self.own.remove(self.policy.evict({page}.__contains__))
        self.policy.insert(page)
        self.own.add(page)

    def play(self, requests: int, seed: int, mercy: bool = True) -> None:
        rng = random.Random(seed)
        for turn in range(requests):
            layer = turn % 2
            hurting = [page for page in self.lru if page not in self.own and page.layer == layer]
            # a loop that LRU cannot hold, then malice, then noise; or malice alone
            kind = turn // 400 % 3 if mercy else 1
            if kind == 1 and hurting:
                self.ask(hurting[-1])
            elif kind == 0:
                self.ask(PageId(layer, turn // 2 % 10))
            else:
                self.ask(PageId(layer, rng.randrange(16)))


@pytest.mark.parametrize("seed", range(2))
def test_malice_costs_reuse_a_few_misses_in_all(seed: int) -> None:
    slots = 12
    game = Adversary(Reuse(slots), slots)
    game.play(3600, seed)
    assert game.misses <= game.lru_misses + SLACK
    cruel = Adversary(Reuse(slots), slots)
    cruel.play(1000, seed, mercy=False)
    assert cruel.misses <= cruel.lru_misses + SLACK


def test_malice_costs_an_unguarded_policy_much() -> None:
    policy = Reuse(12)
    policy._idle = False  # bold from the first request on, and for good
    policy._guard.floor = policy._best = -(10**9)
    game = Adversary(policy, 12)
    game.play(3000, 0, mercy=False)
    assert game.misses > game.lru_misses + 5 * SLACK


def test_a_lease_of_several_rows_is_the_union_of_them() -> None:
    chosen = np.array([[[0, 1]], [[1, 2]], [[3, 4]]])
    assert [step.pages for step in Leases([5], chosen, np.array([0, 0, 1]))] == [
        [PageId(5, 0), PageId(5, 1), PageId(5, 2)],
        [PageId(5, 3), PageId(5, 4)],
    ]


def test_missing_pages_are_read_in_the_order_of_the_file() -> None:
    chosen, seen = np.array([[[0, 1, 2, 3]]]), list[PageId]()
    backwards = Leases([5], chosen, order=np.array([[3, 2, 1, 0]]))
    replay(backwards, Lru(4), 4, below=seen.append)
    assert [page.expert for page in seen] == [3, 2, 1, 0]
