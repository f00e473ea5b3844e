"""What every cache policy must pass.  Policies are found by file name; this file needs no edit.

Each check takes a way to make a policy, so that planted wrong policies show that it can fail.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload import registry
from k3offload.tiers.base import CachePolicy, PageId

Make = Callable[[int], CachePolicy]  #: from the slots
Busy = Callable[[PageId], bool]

POLICIES: dict[str, Make] = {
    name: module.Policy for name, module in registry.implementations("scheduler", "policy").items()
}


class Watched:
    """A policy beside the set of pages it must know; checks every answer."""

    def __init__(self, make: Make, slots: int) -> None:
        self.policy, self.known = make(slots), set[PageId]()

    def insert(self, page: PageId) -> None:
        self.policy.insert(page)
        self.known.add(page)

    def hit(self, page: PageId) -> None:
        self.policy.hit(page)

    def forget(self, page: PageId) -> None:
        self.policy.forget(page)
        self.known.remove(page)

    def note(self, layer: int, rng: random.Random, experts: int) -> None:
        """What a router of ``experts`` experts might say."""
        best = rng.sample(range(experts), min(experts, 4))
        scores = sorted((rng.randrange(128) for _ in best), reverse=True)
        scores[: (len(best) + 1) // 2] = [255] * ((len(best) + 1) // 2)
        self.policy.note(layer, np.array(best), np.array(scores, np.uint8))

    def evict(self, busy: set[PageId]) -> PageId:
        victim = self.policy.evict(busy.__contains__)
        assert victim in self.known, f"{victim} is not a page that lies in the tier"
        assert victim not in busy, f"{victim} is busy"
        self.known.remove(victim)
        return victim


def workload(make: Make, rng: random.Random, steps: int, pages: int) -> list[PageId]:
    """Random news, inserts, hits, failed reads and evictions, then everything out; returns the
    victims in order."""
    watched, victims = Watched(make, 3 * pages), []
    for _ in range(steps):
        if rng.random() < 0.3:
            watched.note(rng.randrange(3), rng, pages)
        page = PageId(rng.randrange(3), rng.randrange(pages))
        if page in watched.known:
            watched.hit(page)
        else:
            watched.insert(page)
        if rng.random() < 0.1:
            watched.forget(page)
        busy = {p for p in sorted(watched.known) if rng.random() < 0.5}
        if rng.random() < 0.4 and len(busy) < len(watched.known):
            victims.append(watched.evict(busy))
    while watched.known:  # each inserted page leaves exactly once
        victims.append(watched.evict(set()))
    return victims


def check_workloads(make: Make) -> None:
    for seed in range(150):
        workload(make, random.Random(seed), 60, 1 + seed % 12)


def check_only_choice(make: Make) -> None:
    """Whatever the history, the one page that is not busy is the one that leaves."""
    pages = [PageId(layer, expert) for layer in range(2) for expert in range(10)]
    for left in pages:
        watched = Watched(make, len(pages))
        for page in pages:
            watched.insert(page)
        for page in pages[::3]:
            watched.hit(page)
        assert watched.evict(set(pages) - {left}) == left


def check_return(make: Make) -> None:
    """A page may come back after it left, and leaves again."""
    watched, page = Watched(make, 1), PageId(1, 1)
    for _ in range(5):
        watched.insert(page)
        watched.hit(page)
        assert watched.evict(set()) == page


def check_deterministic(make: Make) -> None:
    """The same calls give the same victims."""
    for seed in range(20):
        runs = [workload(make, random.Random(seed), 200, 30) for _ in range(2)]
        assert runs[0] == runs[1]


class CountedPage(PageId):
    """A page that counts how often it is compared or hashed."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedPage.compared += 1
        return tuple.__eq__(self, other)

    def __lt__(self, other: Any) -> bool:
        CountedPage.compared += 1
        return tuple.__lt__(self, other)

    def __hash__(self) -> int:
        CountedPage.compared += 1
        return tuple.__hash__(self)


def cost(make: Make, pages: int, limit: float = float("inf")) -> float:
    """Operations of one call (executed opcodes, comparisons and hashes of pages), over the calls
    of one token of K3 (1,472 requests) against a tier that holds ``pages`` pages.  Gives up once
    ``limit`` is certain to be passed."""
    rng, policy, calls, opcodes = random.Random(1), make(pages), 1472, 0
    held = [CountedPage(0, i) for i in range(pages)]
    for page in held:
        policy.insert(page)

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal opcodes
        frame.f_trace_opcodes = True
        opcodes += event == "opcode"
        return count

    CountedPage.compared, former = 0, sys.gettrace()
    sys.settrace(count)
    try:
        for i in range(calls):
            if i % 3:
                policy.hit(held[rng.randrange(pages)])
            else:
                policy.insert(policy.evict(_none_busy))
            if opcodes + CountedPage.compared > limit * calls:
                break
    finally:
        sys.settrace(former)
    return (opcodes + CountedPage.compared) / calls


def _none_busy(page: PageId) -> bool:
    return False


def check_cost(make: Make) -> None:
    """16 times the pages: log n grows from 6 to 10 steps, a scan 16-fold."""
    small = cost(make, 64)
    assert cost(make, 1024, 3 * small) < 3 * small, f"{small:.0f} operations with 64 pages"


CHECKS = [check_workloads, check_only_choice, check_return, check_deterministic, check_cost]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", POLICIES)
def test_policy(name: str, check: Callable[[Make], None]) -> None:
    check(POLICIES[name])


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60)
@given(data=st.data())
def test_policy_under_drawn_workloads(name: str, data: st.DataObject) -> None:
    watched = Watched(POLICIES[name], 18)
    page = st.builds(PageId, st.integers(0, 2), st.integers(0, 5))
    for _ in range(data.draw(st.integers(1, 30))):
        drawn = data.draw(page)
        (watched.hit if drawn in watched.known else watched.insert)(drawn)
        busy = data.draw(st.sets(st.sampled_from(sorted(watched.known))))
        if len(busy) < len(watched.known):
            watched.evict(busy)


def test_every_policy_file_is_found() -> None:
    files = Path(registry.__file__).with_name("scheduler").glob("policy_*.py")
    assert sorted(POLICIES) == sorted(f.stem.removeprefix("policy_") for f in files)
    assert {"lru", "lfru", "s3fifo", "reuse"} <= set(POLICIES)
    assert "belady" not in POLICIES  # it needs the future


def test_lru_evicts_the_least_recently_used() -> None:
    policy = POLICIES["lru"](3)
    a, b, c = (PageId(0, i) for i in range(3))
    for page in (a, b, c):
        policy.insert(page)
    policy.hit(a)
    assert [policy.evict(lambda p: False) for _ in range(3)] == [b, c, a]


# ---- planted wrong policies ----


class _Right:
    def __init__(self, slots: int) -> None:
        self.pages: OrderedDict[PageId, int] = OrderedDict()
        self.clock = 0

    def hit(self, page: PageId) -> None:
        self.pages.move_to_end(page)

    def insert(self, page: PageId) -> None:
        self.pages[page] = 0

    def forget(self, page: PageId) -> None:
        del self.pages[page]

    def evict(self, busy: Busy) -> PageId:
        victim = next(page for page in self.pages if not busy(page))
        del self.pages[victim]
        return victim

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        pass


class RemembersForgotten(_Right):
    def forget(self, page: PageId) -> None:
        pass


class EvictsNews(_Right):
    """Lets go of what the router does not want, here or not."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.far: list[PageId] = []

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        self.far.append(PageId(layer, int(experts[-1])))

    def evict(self, busy: Busy) -> PageId:
        for page in self.far:
            self.far.remove(page)
            if not busy(page):
                self.pages.pop(page, None)
                return page
        return super().evict(busy)


class EvictsBusy(_Right):
    def evict(self, busy: Busy) -> PageId:
        return super().evict(lambda page: False)


class EvictsUnknown(_Right):
    def evict(self, busy: Busy) -> PageId:
        victim = super().evict(busy)
        return PageId(victim.layer, victim.expert + 1)


class EvictsTwice(_Right):
    def evict(self, busy: Busy) -> PageId:
        return next(page for page in self.pages if not busy(page))


class ForgetsInserts(_Right):
    def insert(self, page: PageId) -> None:
        if page.expert % 4:
            super().insert(page)

    def hit(self, page: PageId) -> None:
        if page in self.pages:
            super().hit(page)


class LosesOnHit(_Right):
    def hit(self, page: PageId) -> None:
        self.pages.pop(page, None)


class ComesBackOnHit(_Right):
    """Hits through a list that keeps pages which have left."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.ghosts: list[PageId] = []

    def evict(self, busy: Busy) -> PageId:
        for ghost in self.ghosts[:1]:
            self.ghosts.clear()
            if not busy(ghost):
                return ghost
        victim = super().evict(busy)
        self.ghosts.append(victim)
        return victim


class Undetermined(_Right):
    def evict(self, busy: Busy) -> PageId:
        victim = random.choice([page for page in self.pages if not busy(page)])
        del self.pages[victim]
        return victim


class ScansOnEvict(_Right):
    def hit(self, page: PageId) -> None:
        self.clock += 1
        self.pages[page] = self.clock

    def evict(self, busy: Busy) -> PageId:
        victim = min((p for p in self.pages if not busy(p)), key=lambda p: (self.pages[p], p))
        del self.pages[victim]
        return victim


class ScansOnHit(_Right):
    """The scan is inside a list, where no opcode sees it, but every comparison does."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.row: list[PageId] = []

    def insert(self, page: PageId) -> None:
        self.row.append(page)

    def hit(self, page: PageId) -> None:
        self.row.remove(page)
        self.row.append(page)

    def evict(self, busy: Busy) -> PageId:
        return self.row.pop(next(i for i, page in enumerate(self.row) if not busy(page)))


PLANTED: list[tuple[Make, Callable[[Make], None]]] = [
    (EvictsBusy, check_workloads),
    (EvictsBusy, check_only_choice),
    (EvictsUnknown, check_workloads),
    (EvictsTwice, check_workloads),
    (RemembersForgotten, check_workloads),
    (EvictsNews, check_workloads),
    (LosesOnHit, check_return),
    (ForgetsInserts, check_workloads),
    (ForgetsInserts, check_only_choice),
    (LosesOnHit, check_workloads),
    (ComesBackOnHit, check_workloads),
    (Undetermined, check_deterministic),
    (ScansOnEvict, check_cost),
    (ScansOnHit, check_cost),
]


@pytest.mark.parametrize(("make", "check"), PLANTED)
def test_planted_wrong_policies_are_refused(make: Make, check: Callable[[Make], None]) -> None:
    with pytest.raises((AssertionError, StopIteration, KeyError)):
        check(make)


def test_the_planted_base_is_right() -> None:
    """So what the planted ones are refused for is what they changed."""
    for check in CHECKS:
        check(_Right)
