"""How far from the line rate decode stays, and how much of that better guesses could change.

    python -m benchmarks.foresight MODEL [--share 25%] [--tokens 240] [--predict combined]

One engine decodes the same tokens twice.  The first time it keeps what each layer asks for; the
second time three ways to read ahead take turns of ``TURN`` steps in drawn order:

* none;
* the predictor ``--predict``, whether or not the engine finds that it pays;
* perfect: it knows what the next layer will ask for, at the moment at which the predictor is asked,
  and reads all of it.

What even perfect reads of one layer ahead leave idle, no predictor of the next layer can fill:
layers that miss more than their share wait for the disk, and others leave it nothing known to read.

Prints for each: seconds a step; bytes a step by (seconds x line rate), the line rate measured with
whole pages between the turns; milliseconds a step in which no read was under way, and that experts
were waited for; processor time of the calling thread; pages read ahead, and how many came true.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import k3offload
from benchmarks.run import machine, tell
from k3offload.bench_decode import walk
from k3offload.bench_engine import cache_bytes, line_rate, model_of, tokens_of
from k3offload.engine import Engine
from k3offload.scheduler.hints import Guess, Hints
from k3offload.tiers.base import PageId, Priority

TURN = 6  #: steps
CONTEXT, WARM = 64, 16  #: tokens of the prompt, and steps that are not measured
EVERYTHING = 1 << 62


class Perfect:
    """A predictor that knows: ``steps[n][layer]`` are the experts that step ``n`` chose."""

    asks_router = asks_latent = False

    def __init__(self) -> None:
        self.steps: list[dict[int, list[int]]] = []
        self.known: list[dict[int, list[int]]] = []
        self._first = EVERYTHING

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        step = len(self.steps) - (layer >= self._first)
        if step >= len(self.known) or hints.next_layer is None:
            return []
        pages = [PageId(hints.next_layer, e) for e in self.known[step][hints.next_layer]]
        return [(page, 1.0) for page in pages if hints.absent(page)]

    def learn(self, layer: int, experts: Any) -> None:
        if layer <= self._first:
            self._first = layer
            self.steps.append({})
        self.steps[-1][layer] = sorted(set(experts.ravel().tolist()))

    def again(self) -> None:
        """The same steps come once more."""
        self.known, self.steps = self.steps, []


class Both:
    """``told`` and ``named`` both learn; ``guesses`` is the one that is asked."""

    def __init__(self, told: Any, named: Any) -> None:
        self._all = told, named
        self.guesses: Any = told

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        found: list[Guess] = self.guesses.guess(layer, hints)
        return found

    def learn(self, layer: int, experts: Any) -> None:
        for predictor in self._all:
            predictor.learn(layer, experts)


class Idle:
    """Seconds in which no read was under way."""

    def __init__(self) -> None:
        self.seconds, self._under_way, self._since = 0.0, 0, time.perf_counter()

    def change(self, priority: Priority | None, by: int) -> None:
        if not self._under_way:
            self.seconds += time.perf_counter() - self._since
        self._under_way += by
        self._since = time.perf_counter()

    def begin(self) -> None:
        self.seconds, self._since = 0.0, time.perf_counter()

    def end(self) -> float:
        self.change(None, 0)
        return self.seconds


class Turns:
    """One engine whose schedule asks whom it is told to."""

    def __init__(self, engine: Engine) -> None:
        model: Any = engine._model
        self.engine, self.idle, self.perfect = engine, Idle(), Perfect()
        self._schedule, self._store = model._schedule, engine.store
        self._named = self._schedule._predictor
        self._both = Both(self.perfect, self._named)
        self._schedule._predictor, self._schedule._trial = self._both, None
        assert self._store is not None
        self._bytes = self._store.guess_bytes
        engine.disk.watch(self.idle.change)
        self.use("none")

    def use(self, way: str) -> None:
        assert self._store is not None
        self._schedule.asks = lambda: way != "none"
        asked = self.perfect if way == "perfect" else self._named
        self._both.guesses = asked
        self._schedule.asks_router, self._schedule.asks_latent = (
            asked.asks_router,
            asked.asks_latent,
        )
        self._store.guess_bytes = EVERYTHING if way == "perfect" else self._bytes

    def turn(self, session: k3offload.Session, tokens: Sequence[int]) -> dict[str, float]:
        """What ``tokens`` took."""
        before, processor = vars(self.engine.counts()["experts"].copy()), time.thread_time()
        self.idle.begin()
        seconds = sum(walk(session, tokens))
        found = {"seconds": seconds, "idle": self.idle.end(), "steps": len(tokens)}
        found["processor"] = time.thread_time() - processor
        now = vars(self.engine.counts()["experts"])
        return found | {name: now[name] - before[name] for name in now}


def measure(engine: Engine, tokens: list[int], named: str) -> dict[str, dict[str, float]]:
    """Sums of each way, and the line rate."""
    turns, rng = Turns(engine), np.random.default_rng(0)
    ways, sums, lines = ["none", named, "perfect"], dict[str, Counter[str]](), []
    turns.use(named)  # it learns from all steps
    with engine.session() as session:
        session.append(tokens[:CONTEXT])
        session.logits()
        walk(session, tokens[CONTEXT:])
    turns.perfect.again()
    with engine.session() as session:
        session.append(tokens[:CONTEXT])
        session.logits()
        walk(session, tokens[CONTEXT : CONTEXT + WARM])
        at = CONTEXT + WARM
        while at + TURN * len(ways) <= len(tokens):
            lines.append(line_rate(engine.checkpoint, at))
            for way in rng.permutation(ways).tolist():
                turns.use(way)
                piece = tokens[at : at + TURN]
                sums.setdefault(way, Counter()).update(turns.turn(session, piece))
                at += TURN
    return {way: figures(sums[way], statistics.mean(lines)) for way in ways}


def figures(c: Counter[str], line: float) -> dict[str, float]:
    """A step's."""
    return {
        "seconds": c["seconds"] / c["steps"],
        "line_used": c["bytes"] / c["seconds"] / line,
        "bytes": c["bytes"] / c["steps"],
        "idle_ms": c["idle"] / c["steps"] * 1e3,
        "waited_ms": c["wait_seconds"] / c["steps"] * 1e3,
        "processor_ms": c["processor"] / c["steps"] * 1e3,
        "prefetched": c["prefetches"] / c["steps"],
        "useful": c["useful"] / c["steps"],
        "line_rate": line,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", default="25%", help="of the experts that have room")
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--predict", default="combined")
    given = parser.parse_args()
    checkpoint = model_of(given.model, {})
    count = CONTEXT + WARM + given.tokens
    cache = cache_bytes(checkpoint, float(given.share.rstrip("%")) / 100)
    sizes = {"context": count + 8, "sessions": 1}
    with k3offload.load(given.model, cache=cache, predict=given.predict, **sizes) as engine:
        tokens = tokens_of(engine.tokenizer, None, count, 0)
        found = measure(engine, tokens, given.predict)
    for way, of_way in found.items():
        print(f"{way:10}", "  ".join(f"{name} {value:.4g}" for name, value in of_way.items()))
    tell({"benchmark": "foresight", **machine(), "share": given.share, "ways": found})


if __name__ == "__main__":
    main()
