"""Replay beside textbooks: MIN, the stack distance, hierarchies; and every predictor in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from k3offload import registry
from k3offload.scheduler.belady import Belady, fewest_misses
from k3offload.scheduler.counts import Counts
from k3offload.scheduler.policy_lru import Policy as Lru
from k3offload.scheduler.replay import Cache, Leases, Requests, Step, check, replay
from k3offload.scheduler.replay_tiers import Link, ModelTier
from k3offload.scheduler.replay_timed import Guessed, Pace, replay_timed
from k3offload.tiers.base import PageId
from tests.test_replay import POLICIES, random_run

Pages = list[PageId]


def single(seed: int, tokens: int = 150, experts: int = 12) -> Leases:
    """Leases of one page, of which textbooks speak; popular pages and a drifting few."""
    rng = np.random.default_rng(seed)
    popular = rng.zipf(1.5, (tokens, 2, 1)) % experts
    drift = (np.arange(tokens)[:, None, None] // 10 + rng.integers(0, 3, (tokens, 2, 1))) % experts
    return Leases((3, 5), np.where(rng.random((tokens, 2, 1)) < 0.5, popular, drift))


def flat(run: Leases) -> Pages:
    return [page for step in run for page in step.pages]


def textbook_min(requests: Pages, slots: int) -> int:
    """Belady's rule as written: evict the page whose next request is farthest in the future."""
    cache: set[PageId] = set()
    misses = 0
    for now, page in enumerate(requests):
        if page in cache:
            continue
        misses += 1
        if len(cache) == slots:
            future = requests[now + 1 :]
            cache.remove(
                max(cache, key=lambda p: future.index(p) if p in future else len(requests))
            )
        cache.add(page)
    return misses


def stack_distances(requests: Pages) -> list[int | None]:
    """Mattson: distinct pages since the last request for this one, itself included."""
    stack: Pages = []
    found: list[int | None] = []
    for page in requests:
        found.append(stack.index(page) + 1 if page in stack else None)
        if page in stack:
            stack.remove(page)
        stack.insert(0, page)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_the_textbook_and_nothing_beats_it(seed: int) -> None:
    run = single(seed)
    for slots in (1, 2, 5, 11):
        least = replay(run, Belady(run), slots).misses
        assert least == textbook_min(flat(run), slots)
        assert least >= run.distinct
        for make in POLICIES.values():
            assert replay(run, make(slots), slots).misses >= least


@pytest.mark.parametrize("seed", range(6))
def test_lru_is_mattsons_stack(seed: int) -> None:
    run = single(seed)
    distances = stack_distances(flat(run))
    for slots in (1, 2, 5, 11, 30):
        far = sum(1 for d in distances if d is None or d > slots)
        assert replay(run, Lru(slots), slots).misses == far


@pytest.mark.parametrize("seed", range(6))
def test_the_quick_way_to_the_minimum_is_as_belady_replayed(seed: int) -> None:
    """Sweeps of several rows, many blocks of leases, one page at a time; also in waves."""
    rng = np.random.default_rng(seed)
    many = np.argsort(rng.random((500, 3, 20)) ** 3, axis=2)[..., :4]
    runs: list[Iterable[Step]] = [
        single(seed), random_run(seed, 40, 3, 12, 3), Leases((1, 4, 5), many),
        Leases((1, 4, 5), many, np.arange(500) // 3),
    ]  # fmt: skip
    asked = Requests()
    for page in flat(single(seed)):
        asked.add(page)
    for run in [*runs, asked]:
        for slots in (2, 7, 15, 31, 90):
            assert fewest_misses(run, slots) == replay(run, Belady(run), slots).misses


def test_a_cache_of_everything_reads_each_page_once() -> None:
    run = single(3)
    assert replay(run, Lru(99), 99).misses == run.distinct == len(set(flat(run)))
    assert run.total == len(run.layers) * run.experts


def test_three_tiers() -> None:
    """What RAM sees is what the device misses, one by one; its counts are those of that alone."""
    run = Leases((1, 2), np.sort(np.random.default_rng(0).random((60, 2, 9)).argsort(2)[..., :3]))
    ram, seen = Cache(Lru(10), 10, 7), Requests()

    def ask(page: PageId) -> None:
        ram.request(page)
        seen.add(page)

    top = replay(run, Lru(4), 4, 7, ask)
    low = ram.result()
    assert low.requests == top.misses == len(seen) and 0 < low.misses < low.requests
    assert low == replay(seen, Lru(10), 10, 7)
    assert replay(seen, Belady(seen), 10, 7).misses <= low.misses
    assert seen.distinct == run.distinct <= low.misses


@pytest.mark.parametrize(
    "wrong",
    [
        {"hits": 1}, {"late": 1}, {"bytes": 8}, {"prefetches": 1}, {"useful": -2, "wasted": 2},
    ],
)  # fmt: skip
def test_planted_wrong_counts_are_found(wrong: dict[str, int]) -> None:
    good = {"requests": 9, "hits": 4, "late": 1, "misses": 4, "bytes": 56, "prefetches": 4,
            "useful": 2, "wasted": 1, "prefetch_bytes": 24}  # fmt: skip
    check(Counts(**good), 8, waiting=1)
    with pytest.raises(AssertionError):
        check(Counts(**{k: v + wrong.get(k, 0) for k, v in good.items()}), 8, waiting=1)


def guesses(run: Leases, tokens: int, seed: int, right: float) -> Guessed:
    """A router's guess of each layer: what it will choose, or anything."""
    rng = np.random.default_rng(seed)
    best = np.empty((tokens, len(run.layers), 4), np.uint16)
    for row in range(tokens):
        for place in range(len(run.layers)):
            truth = run.chosen(row, row + 1, place)[0]
            guess = rng.permutation(run.experts)[:4]
            best[row, place, :4] = guess
            if rng.random() < right:
                best[row, place, : len(truth)] = truth
                rest = np.setdiff1d(guess, truth)[: 4 - len(truth)]
                best[row, place, len(truth) : len(truth) + len(rest)] = rest
    codes = np.tile(np.array([255, 200, 60, 20], np.uint8), (tokens, len(run.layers), 1))
    return Guessed(best, codes)


@pytest.mark.parametrize("name", registry.names("scheduler", "predict"))
def test_predictors_in_modelled_time(name: str) -> None:
    """A link that is quick enough brings in time what was guessed, a slow one late."""
    rng = np.random.default_rng(4)
    chosen = np.sort(rng.random((120, 4, 24)).argsort(2)[..., :2], axis=2)
    run = Leases((1, 2, 3, 4), chosen)
    made = registry.implementation("scheduler", "predict", name).Predictor
    guessed = guesses(run, 120, 1, 0.9)

    def timed(rate: float) -> tuple[Counts, ModelTier]:
        tier = ModelTier(100, Link(rate, 1e-6, depth=1))
        predictor = made(run.layers, run.experts, 2)
        policy = POLICIES["lru"](24)
        return replay_timed(
            run, policy, predictor, 24, tier, guessed=guessed, pace=Pace(1e-3, 1e-5)
        ), tier

    quick, slow = timed(1e9)[0], timed(2e5)[0]
    again, tier = timed(2e5)
    assert again == slow and tier.moved == slow.bytes
    assert quick.requests == slow.requests == 120 * 4 * 2
    assert quick.wait_seconds < slow.wait_seconds
    without = replay(run, POLICIES["lru"](24), 24, 100)
    if name == "router":
        assert quick.late == 0 < slow.late and quick.misses < 0.4 * without.misses
        lame = timed(3e4)[0]  # so slow that guesses are given up before they begin
        assert lame.bytes < 100 * (lame.misses + lame.prefetches)
    if name == "none":
        assert quick.bytes == slow.bytes == without.bytes


def test_below_a_modelled_tier_there_may_be_another() -> None:
    run = Leases((1, 2), np.sort(np.random.default_rng(0).random((90, 2, 30)).argsort(2)[..., :3]))
    made = registry.implementation("scheduler", "predict", "none").Predictor
    waits = []
    for slots in (1, 20, 60):
        ram = Cache(Lru(slots), slots, 10)
        tier = ModelTier(10, Link(1e6), ram, Link(1e4, 1e-4))
        counts = replay_timed(run, Lru(6), made((1, 2), 30, 3), 6, tier)
        low = ram.result()
        assert low.requests == counts.misses and low.bytes == 10 * low.misses
        waits.append(counts.wait_seconds)
    assert waits[0] > waits[1] > waits[2]
    plain: Sequence[int] = [replay(run, Lru(6), 6, 10).bytes, counts.bytes]
    assert plain[0] == plain[1]


def test_runs_with_several_rows_a_sweep_are_walked_through_twice() -> None:
    run = random_run(2, 30, 2, 20, 6)
    assert len(run) == 2 * 10 and run[0].at == (0, 3, 0)
