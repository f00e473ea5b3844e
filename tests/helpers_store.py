"""A store over a made tier on one thread, where every order of arrival can be had again.

Where a lease would sleep, a waiting read begins or ends instead, drawn from a seed.  A lease that
waits while no read is under way is an error at once instead of a test that hangs.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from k3offload.scheduler.policy_lru import Policy
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import Buffer, CachePolicy, Cancelled, PageId, Priority, Ticket
from k3offload.tiers.tier_made import MadeTier

SIZE = 64
CANARY = 0xA5


class Tier(MadeTier):
    """Fills a slot with canary bytes the moment it is given away, and keeps all tickets."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.tickets: list[tuple[Ticket, Priority]] = []
        self.begun: list[Callable[[], PageId]] = []

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        into[:] = CANARY
        ticket = super().read(page, into, priority)
        self.tickets.append((ticket, priority))
        return ticket

    def step(self) -> None:
        """Begin a piece, end one that has begun, or both at once."""
        action, waiting = self._random.random(), len(self.waiting())
        if self.begun and (not waiting or action < 0.4):
            self.begun.pop(self._random.randrange(len(self.begun)))()
        elif waiting and action < 0.7:
            self.begun.append(self.begin(self._random.randrange(waiting)))
        elif waiting:
            self.release_any()

    def settle(self) -> None:
        """End everything."""
        while self.busy():
            self.step()

    def busy(self) -> bool:
        return bool(self.begun or self.waiting())


class Stepping(threading.Condition):
    """Lets the tier go on instead of sleeping."""

    def __init__(self, tier: Tier, arrive: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.tier, self.arrive, self.sleeps = tier, arrive or tier.step, 0

    def wait(self, timeout: float | None = None) -> bool:
        assert self.tier.busy(), "waits, and no read is under way"
        self.sleeps += 1
        self.arrive()
        return True


class RandomPolicy:
    """Evicts any page that may go; knows exactly the pages that have a slot."""

    def __init__(self, seed: int) -> None:
        self.random, self.pages = random.Random(seed), list[PageId]()

    def hit(self, page: PageId) -> None:
        assert page in self.pages

    def insert(self, page: PageId) -> None:
        assert page not in self.pages
        self.pages.append(page)

    def forget(self, page: PageId) -> None:
        self.pages.remove(page)

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        victim = self.random.choice([page for page in self.pages if not busy(page)])
        self.pages.remove(victim)
        return victim

    def note(self, layer: int, experts: Any, scores: Any) -> None:
        pass


def make(
    slots: int,
    seed: int = 0,
    policy: CachePolicy | None = None,
    kind: type[ExpertStore] = ExpertStore,
    room: int | None = None,
    parts: int = 1,
) -> tuple[ExpertStore, Tier]:
    """A store that runs on one thread, and its tier."""
    tier = Tier(SIZE, seed, parts=parts)
    buffers = [np.full(SIZE + 8, CANARY, np.uint8) for _ in range(slots)]
    store = kind(tier, buffers, policy or Policy(slots), room)
    store._change = Stepping(tier)
    return store, tier


def pages(*experts: int, layer: int = 0) -> list[PageId]:
    return [PageId(layer, e) for e in experts]


def flat(walk: Iterable[list[tuple[PageId, Buffer]]]) -> Iterator[tuple[PageId, Buffer]]:
    """Page by page; a list's other pages are held all the while."""
    for batch in walk:
        yield from batch


def check(tier: MadeTier, page: PageId, buffer: Buffer) -> None:
    assert (buffer[:SIZE] == tier.content(page)).all(), page
    assert (buffer[SIZE:] == CANARY).all()


def check_counts(store: ExpertStore, tier: Tier) -> None:
    """Every request, read and byte stands under exactly one name."""
    c = store.counts
    assert c.requests == c.hits + c.late + c.misses
    assert c.misses + c.prefetches == len(tier.started)
    assert c.prefetches == c.useful + c.wasted + len(store._unused)

    def moved(tickets: list[Ticket]) -> int:
        return sum(t.landed if isinstance(t.error, Cancelled) and t.done() else SIZE
                   for t in tickets)  # fmt: skip

    assert c.bytes == moved([t for t, _ in tier.tickets])
    # a prefetch whose priority was raised is one all the same
    assert c.prefetch_bytes == moved([t for t, p in tier.tickets if p is Priority.PREFETCH])


def check_state(store: ExpertStore) -> None:
    """Every slot has one use, and every page one state."""
    taken = list(store._slot.values())
    assert len(set(store._free)) == len(store._free)
    assert len(set(taken)) == len(taken)
    assert not set(taken) & set(store._free)
    assert len(taken) + len(store._free) + store._ending == store.slots
    here = set(store._slot)
    assert set(store._loading) | set(store._pins) | store._idle | set(store._guarded) <= here
    assert store._idle == here - set(store._loading) - set(store._pins) - set(store._guarded)
    assert set(store._guarded) <= store._unused <= here
    assert not set(store._guarded) & set(store._pins)
    assert len(store._guarded) <= store.prefetch_room
    if isinstance(store._policy, RandomPolicy):
        assert set(store._policy.pages) == here
