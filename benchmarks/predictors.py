"""Predictors on recorded routing: what reading ahead would have been worth, without a disk.

    python benchmarks/predictors.py [TRACE] [--fit TRACE] [--predict NAME ...] [--policy NAME]

TRACE is a folder or file of ``k3offload/trace.py``; each of its rows counts as one decode sweep.
Without it, ``traces/nano_held_out.zip``: the embedded model decoding 6,645 tokens of eight Bible
chapters that it was not trained on, written by ``record_routing.py``.
Pages guessed for a layer are read before its requests, as far as the store would let them.  Prints
one JSON object: for each capacity (share of all experts) and predictor

    issued      pages read ahead, by requests
    useful      share of these asked for before they left
    covered     share of the misses there are without a predictor that are gone
    bytes       pages read in all, by those without a predictor
    idle        the same two figures when only ``--window`` reads fit in before a layer's requests

and of the router's guess, by layer and rank: how often it is right, and how often for absent pages.
``--fit`` names another trace, with latents, from which the latent predictor is fitted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from k3offload import registry
from k3offload.scheduler.hints import Hints, Predictor
from k3offload.scheduler.predict_latent import fit, save_fit
from k3offload.scheduler.store import PREFETCH_ROOM
from k3offload.tiers.base import CachePolicy, PageId
from k3offload.trace import Trace, read_trace

HELD_OUT = Path(__file__).with_name("traces") / "nano_held_out.zip"
CAPACITIES = (0.12, 0.25, 0.5)
Watch = Callable[
    [int, int, Callable[[PageId], bool]], None
]  #: row, place, whether a page is absent


@dataclass
class Cache:
    """Slots and a policy; counts only.  ``guarded`` are pages read ahead for the coming layer,
    ``unused`` are all that nobody has asked for yet."""

    slots: int
    policy: CachePolicy
    held: set[PageId] = field(default_factory=set)
    guarded: set[PageId] = field(default_factory=set)
    unused: set[PageId] = field(default_factory=set)
    requests: int = 0
    misses: int = 0
    issued: int = 0
    useful: int = 0

    def absent(self, page: PageId) -> bool:
        return page not in self.held

    def prefetch(self, pages: Sequence[PageId]) -> None:
        room = min(self.slots // 4, PREFETCH_ROOM)
        for page in pages:
            if page in self.held or len(self.guarded) >= room:
                continue
            self._insert(page, self.guarded)
            self.guarded.add(page)
            self.unused.add(page)
            self.issued += 1

    def demand(self, pages: Sequence[PageId]) -> None:
        """One lease: pages that are there first, then the others, in waves if need be."""
        self.requests += len(pages)
        self.guarded = {page for page in self.guarded if page.layer != pages[0].layer}
        there = [page for page in pages if page in self.held]
        for page in there:
            self.policy.hit(page)
            self.useful += page in self.unused
            self.unused.discard(page)
        leased = set(there)
        for page in pages:
            if page in leased:
                continue
            if len(leased) >= self.slots:
                leased.clear()
            self.misses += 1
            self._insert(page, leased)
            leased.add(page)

    def _insert(self, page: PageId, busy: set[PageId]) -> None:
        if len(self.held) == self.slots:
            keep = busy | self.guarded
            victim = self.policy.evict((keep if len(keep) < self.slots else busy).__contains__)
            self.held.remove(victim)
            self.guarded.discard(victim)
            self.unused.discard(victim)
        self.held.add(page)
        self.policy.insert(page)


def simulate(
    trace: Trace,
    predictor: Predictor,
    cache: Cache,
    window: int | None = None,
    watch: Watch = lambda row, place, absent: None,
) -> Cache:
    """Run the whole trace.  ``window``: most pages that can be read before a layer's requests."""
    layers = trace.layers.tolist()
    for row in range(len(trace.chosen)):
        latent = None
        for place, layer in enumerate(layers):
            watch(row, place, cache.absent)
            before = layer - 1 if place == 0 else layers[place - 1]
            hints = Hints(before, layer, trace.ahead(row, place), latent, cache.absent)
            guesses = predictor.guess(before, hints)
            cache.prefetch([page for page, _ in guesses][:window])
            chosen = trace.chosen[row, place].astype(np.int64)
            predictor.learn(layer, chosen[None])
            cache.policy.note(layer, trace.best[row, place], trace.codes[row, place])
            cache.demand([PageId(layer, expert) for expert in chosen.tolist()])
            if "latent" in trace.more:
                latent = trace.more["latent"][row, place, None].astype(np.float32)
    return cache


def figures(cache: Cache, without: Cache) -> dict[str, float]:
    """The four figures of one predictor."""
    return {
        "issued": round(cache.issued / cache.requests, 4),
        "useful": round(cache.useful / cache.issued, 4) if cache.issued else 0.0,
        "covered": round(1 - cache.misses / without.misses, 4),
        "bytes": round((cache.issued + cache.misses) / without.misses, 4),
    }


def by_rank(trace: Trace, predictor: Predictor, cache: Cache) -> dict[str, list[list[float]]]:
    """[L][k]: how often the router's guess of a rank is right, of all and of absent pages."""
    shape = (len(trace.layers), trace.top_k)
    right, total = np.zeros((2, *shape)), np.zeros((2, *shape))

    def watch(row: int, place: int, absent: Callable[[PageId], bool]) -> None:
        chosen = set(trace.chosen[row, place].tolist())
        layer = int(trace.layers[place])
        for rank, expert in enumerate(trace.more["ahead_best"][row, place, : trace.top_k].tolist()):
            for kind in (0, 1) if absent(PageId(layer, expert)) else (0,):
                total[kind, place, rank] += 1
                right[kind, place, rank] += expert in chosen

    simulate(trace, predictor, cache, watch=watch)
    shares = (right / np.maximum(total, 1)).round(3).tolist()
    return {"of_all": shares[0], "of_absent": shares[1]}


def compare(
    trace: Trace,
    names: Sequence[str],
    policy: Callable[[int], CachePolicy],
    fitted: str | None,
    window: int,
) -> dict[str, Any]:
    """All figures, by capacity and predictor."""
    modules = registry.implementations("scheduler", "predict")
    pages = len(trace.layers) * trace.experts

    def make(name: str) -> Predictor:
        path = (fitted,) if fitted is not None and name == "latent" else ()
        sizes = (trace.layers.tolist(), trace.experts, trace.top_k)
        made: Predictor = modules[name].Predictor(*sizes, *path)
        return made

    result: dict[str, Any] = {}
    for capacity in CAPACITIES:
        slots = max(1, round(capacity * pages))

        def cache(slots: int = slots) -> Cache:
            return Cache(slots, policy(slots))

        without = simulate(trace, make("none"), cache())
        of_capacity: dict[str, Any] = {
            "hit_rate_without": round(1 - without.misses / without.requests, 4),
            "router_by_layer_and_rank": by_rank(trace, make("none"), cache()),
        }
        for name in names:
            of_capacity[name] = figures(simulate(trace, make(name), cache()), without)
            idle = figures(simulate(trace, make(name), cache(), window), without)
            of_capacity[name]["idle"] = {key: idle[key] for key in ("useful", "covered")}
        result[str(capacity)] = of_capacity
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    every = registry.names("scheduler", "predict")
    parser.add_argument("trace", nargs="?", default=HELD_OUT)
    parser.add_argument("--fit", help="trace with latents")
    parser.add_argument("--predict", nargs="+", default=every, choices=every)
    parser.add_argument("--policy", default="lru", choices=registry.names("scheduler", "policy"))
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--rows", type=int, help="of the trace, from its start (all)")
    given = parser.parse_args()
    policy = registry.implementations("scheduler", "policy")[given.policy].Policy
    with tempfile.TemporaryDirectory(prefix="k3-predict-") as folder:
        path = None
        if given.fit:
            seen = read_trace(given.fit)
            path = str(Path(folder) / "fit.npz")
            save_fit(path, fit(seen.layers.tolist(), seen.more["latent"], seen.dense()))
        trace = read_trace(given.trace).rows(slice(given.rows))
        facts = {"rows": len(trace.chosen), "policy": given.policy, "window": given.window}
        result = compare(trace, given.predict, policy, path, given.window)
        print(json.dumps({**facts, "capacity": result}, indent=1))


if __name__ == "__main__":
    main()
