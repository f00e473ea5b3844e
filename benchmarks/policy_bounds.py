"""What a cache policy could at best reach: predictors fitted offline, and oracles that see ahead.

    python -m benchmarks.policy_bounds [TRACE] [--fit TRACE] [--split N]

TRACE is a folder or file of ``k3offload/trace.py`` (``traces/nano_held_out.zip``).  The decode
steps of its sequences are parted in two; every figure is of the second part, from a cold cache,
with the same requests and leases for all.  Beside LRU, ``reuse`` and Belady's MIN:

* fitted before: a ridge regression (what all routers said -> every page) and a network over it
  and over what is known of each page, trained on the first part only, and on ``--fit`` if given.
* fitted here: the same, trained on the very sequences it is then tried on, part of which it will
  know by heart: more than can be had.
* oracle N: knows exactly which pages are used within the next N tokens; beyond that it ranks by
  recency, or as the network fitted before does.

What the fits predict, and from what, is at the top of ``policy_fit.py``.  Their discount ``keep``
is chosen for each capacity by replay of the part that was fitted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.policy_fit import F32, KEEPS, Fit, Part, at, distance, online_values, part_of
from benchmarks.run import machine, note
from k3offload import registry
from k3offload.errors import UsageError
from k3offload.scheduler.belady import Belady
from k3offload.scheduler.replay import replay
from k3offload.tiers.base import CachePolicy, PageId
from k3offload.trace import Trace, read_trace

HELD_OUT = Path(__file__).with_name("traces") / "nano_held_out.zip"
CAPACITIES = (0.12, 0.25, 0.5)
LOOK = (0, 1, 2, 4, 8, 16, 32)  #: tokens that oracles see ahead
GOAL = 0.4  #: share of the gap between LRU and Belady that was asked for
SURE = np.float32(1e6)  #: worth of what an oracle sees, less the steps to it; above every rank


class Table:
    """A policy whose ranks are known beforehand: ``worth`` [steps, pages]; the least leaves."""

    hears_router = True  # a step begins when its router is heard

    def __init__(self, worth: F32, layers: Sequence[int]) -> None:
        experts = worth.shape[1] // len(layers)
        self._pages = [PageId(layer, expert) for layer in layers for expert in range(experts)]
        self._index = {page: i for i, page in enumerate(self._pages)}
        self._worth, self._step = worth, -1
        self._here = np.zeros(len(self._pages), bool)
        self._keys: F32 | None = None  # of this step, infinite where a page cannot leave

    def hit(self, page: PageId) -> None:
        """Its worth is known already."""

    def insert(self, page: PageId) -> None:
        self._here[self._index[page]] = True

    def forget(self, page: PageId) -> None:
        self._here[self._index[page]] = False

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        if self._keys is None:
            self._keys = np.where(self._here, self._worth[self._step], np.float32(np.inf))
        while True:
            least = int(self._keys.argmin())
            self._keys[least] = np.inf
            if not busy(self._pages[least]):
                self._here[least] = False
                return self._pages[least]

    def note(self, layer: int, experts: Any, scores: Any) -> None:
        self._step += 1
        self._keys = None


class Course:
    """A part, replayed again and again."""

    def __init__(self, part: Part) -> None:
        self.part, self.run = part, part.leases()
        count, self._layers, experts = part.shape
        self._steps = count * self._layers
        self.slots = [max(1, round(c * self._layers * experts)) for c in CAPACITIES]

    def misses(self, make: Callable[[int], CachePolicy]) -> list[int]:
        """Of each capacity."""
        return [replay(self.run, make(slots), slots).misses for slots in self.slots]

    def ranked(self, worth: npt.NDArray[Any]) -> list[int]:
        """Misses of each capacity by ``worth`` [T, L now, pages]."""
        flat = np.ascontiguousarray(worth.reshape(self._steps, -1), np.float32)
        return self.misses(lambda slots: Table(flat, self.part.trace.layers.tolist()))

    def discounted(self, worth: F32) -> npt.NDArray[np.int64]:
        """Misses [capacities, keeps]."""
        each = [self.ranked(worth[..., i]) for i in range(len(KEEPS))]
        return np.stack([np.array(of_keep, np.int64) for of_keep in each], axis=1)

    def farness(self) -> F32:
        """[T, L now, pages]: steps to the next use."""
        each = [distance(self.part, place) for place in range(self._layers)]
        return np.stack(each, axis=1).reshape(len(self.part.used), self._layers, -1)

    def recency(self) -> F32:
        """[T, L now, pages]: the step of the last use; equal pages of a lease by their number."""
        count, layers, experts = self.part.shape
        last = np.full((count + 1, layers, experts), -1, np.float32)
        own = np.arange(layers, dtype=np.float32)[:, None]
        order = np.arange(experts, dtype=np.float32) / experts
        for row, used in enumerate(self.part.used):
            last[row + 1] = np.where(used, row * layers + own + order, last[row])
        each = [at(last, place) for place in range(layers)]
        return np.stack(each, axis=1).reshape(count, layers, -1)


def fitted(name: str, fit: Fit, learned: Course, tried: Course) -> tuple[dict[str, list[int]], F32]:
    """Misses by the ridge and by the network with the ``keep`` best on ``learned``; the worth
    [T, L now, pages] of the network with the middle one."""
    result = {}
    before, here = fit.worths(learned.part), fit.worths(tried.part)
    for kind, worth in here.items():
        misses = tried.discounted(worth)
        chosen = misses if learned is tried else learned.discounted(before[kind])
        result[f"{kind} {name}"] = [int(m[c.argmin()]) for m, c in zip(misses, chosen, strict=True)]
    return result, here["network"][..., len(KEEPS) // 2]


def steps_of(trace: Trace) -> Trace:
    """Its decode steps of one row: ranks change at each, and policies hear of no others."""
    own = trace.rows(trace.decode)
    if not len(own.sweep) or (np.diff(own.sweep) == 0).any():
        raise UsageError(
            f"The trace from {trace.source} has no decode steps, or some of several sequences.",
            "Record one sequence after another: python -m benchmarks.record_routing.",
        )
    return own


def measure(trace: Trace, split: int, more: Trace | None) -> dict[str, Any]:
    trace, more = steps_of(trace), None if more is None else steps_of(more)
    reuse = online_values(trace)
    first = trace.sequence < split
    learn, test = (Course(part_of(trace, reuse, rows)) for rows in (first, ~first))
    policies = registry.implementations("scheduler", "policy")
    misses = {name: test.misses(policies[name].Policy) for name in ("lru", "reuse")}
    misses["belady"] = test.misses(lambda slots: Belady(test.run))
    far, recent = test.farness(), test.recency()
    assert test.ranked(-far) == misses["belady"], "a table of next uses replays Belady"
    parts = [learn.part]
    if more is not None:
        every = np.ones(len(more.chosen), bool)
        parts.append(part_of(more, online_values(more), every))
    before, worth = fitted("fitted before", Fit(parts, True), learn, test)
    here, _ = fitted("fitted here", Fit([test.part], False), test, test)
    misses |= before | here
    for name, beyond in (("recency", recent), ("network", worth)):
        for look in LOOK:
            seen = np.where(far <= look * test.part.shape[1], SURE - far, beyond)
            misses[f"oracle {look}, then {name}"] = test.ranked(seen)
    shares = {name: closed(m, misses["lru"], misses["belady"]) for name, m in misses.items()}
    return {
        "tokens": [len(learn.part.used), len(test.part.used)],
        "fitted_on": sum(len(part.used) for part in parts),
        "capacities": list(CAPACITIES),
        "misses": misses,
        "closed": shares,
        "look_for_goal": {name: look_for_goal(shares, name) for name in ("recency", "network")},
    }


def look_for_goal(shares: dict[str, list[float]], beyond: str) -> list[int]:
    """For each capacity the fewest tokens an oracle has to see ahead for ``GOAL``."""
    rungs = {look: shares[f"oracle {look}, then {beyond}"] for look in LOOK}
    return [
        next(look for look, share in rungs.items() if share[i] >= GOAL)
        for i in range(len(CAPACITIES))
    ]


def closed(misses: Sequence[int], worst: Sequence[int], best: Sequence[int]) -> list[float]:
    """Share of the gap between LRU and Belady, for each capacity."""
    return [round((w - m) / (w - b), 4) for m, w, b in zip(misses, worst, best, strict=True)]


def table(facts: dict[str, Any]) -> Iterator[str]:
    yield f"{'':<28}" + "".join(f"{capacity:>18.0%}" for capacity in facts["capacities"])
    for name, misses in facts["misses"].items():
        cells = zip(misses, facts["closed"][name], strict=True)
        yield f"{name:<28}" + "".join(f"{m:>11}{share:>7.1%}" for m, share in cells)
    for beyond, looks in facts["look_for_goal"].items():
        head = f"tokens for {GOAL:.0%}, {beyond}"
        yield f"{head:<28}" + "".join(f"{look:>18}" for look in looks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", nargs="?", type=Path, default=HELD_OUT)
    parser.add_argument("--fit", type=Path, help="another trace to fit on beside the first part")
    parser.add_argument("--split", type=int, help="first sequence of the second part (half)")
    given = parser.parse_args()
    trace = read_trace(given.trace)
    split = given.split or (int(trace.sequence.max()) + 1) // 2
    begin = time.perf_counter()
    facts = measure(trace, split, read_trace(given.fit) if given.fit else None)
    seconds = round(time.perf_counter() - begin)
    line = {"benchmark": "policy_bounds", **machine(), "seconds": seconds, **facts}
    print("\n".join(table(facts)))
    print(json.dumps(line))
    note(line)


if __name__ == "__main__":
    main()
