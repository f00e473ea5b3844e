"""Whether reading ahead ever costs time: decode with and without it, in one process, in turns.

    python -m benchmarks.prefetch_scenarios [--rounds 24] [--only WORD] [--predict combined]

Two engines over the same checkpoint, one with ``--predict none``, take turns (A B B A) over the
same tokens, so that a machine that drifts favours neither.  Even two that are alike differ by up to
a tenth for as long as they live, by where their memory came to lie: so six pairs are made, each
with the other one first.  Scenarios, for two checkpoints:

* even: random weights, whose routing is close to uniform; 6 x 64 experts of 1.7 MB, so that a
  sweep is mostly reads (made, and deleted again); its tokens are arbitrary.
* nano: the embedded model, whose routing is real and whose experts are of 20 kB, so that a sweep
  is mostly computing; its tokens are what it wrote itself at temperature 1.

Caches: all experts; three quarters of them while four tokens are repeated, so that after the first
pass everything needed is there ("fits"); 50, 25 and 10 %; and fewer slots than one layer chooses.
"misled": the look-ahead is told scores of the wrong experts, as where a layer's attention changes
everything, and can only back off.

Prints seconds a sweep of both; the mean over pairs of the median ratio of paired turns, with an
interval that holds 95 % of bootstrap values; the ratio of all seconds, which holds every hiccup of
the machine; the share of requests that are missed without; pages read ahead by requests, and the
share of them that was asked for; the share of misses that are gone; and bytes read by those
without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import k3offload
from benchmarks.run import machine, need_room, note
from k3offload.bench_decode import walk
from k3offload.make_tiny import make_tiny
from k3offload.scheduler.counts import Counts
from k3offload.session import Session

F64 = npt.NDArray[np.float64]
LIMIT = 1.02  #: of the time with reading ahead over the time without
CONTEXT = 4096
TURNS = {"even": 4, "nano": 16}  #: sweeps of a turn: short, so that the two are close in time
BUILDS = 6  #: pairs of engines: alike, two differ by up to a tenth for as long as they live
WARM = 8  #: turns of each engine that are not measured
CYCLE = 4  #: tokens that are repeated in "fits"


PROMPTS = (
    "In the beginning God",
    "And Jesus said unto him,",
    "The LORD is my",
    "And it came to pass in those days, that",
    "Blessed are they that",
    "Now these are the names of the children of",
    "Hear, O Israel:",
    "And the priest shall",
)


class Scenario(NamedTuple):
    """``cache``: slots, or a share of all experts."""

    name: str
    model: str
    cache: int | float
    cycle: bool = False
    misled: bool = False


SCENARIOS = [
    Scenario("all", "even", 1.0),
    Scenario("fits", "even", 0.75, cycle=True),
    Scenario("50 %", "even", 0.5),
    Scenario("25 %", "even", 0.25),
    Scenario("10 %", "even", 0.1),
    Scenario("few slots", "even", 6),
    Scenario("25 %, misled", "even", 0.25, misled=True),
    Scenario("all", "nano", 1.0),
    Scenario("fits", "nano", 0.75, cycle=True),
    Scenario("50 %", "nano", 0.5),
    Scenario("25 %", "nano", 0.25),
    Scenario("10 %", "nano", 0.1),
    Scenario("few slots", "nano", 3),
    Scenario("25 %, misled", "nano", 0.25, misled=True),
]


class Misled:
    """A schedule that is told each expert's score as another's."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def ahead(self, layer: int, next_layer: int, scores: Any, latent: Any) -> None:
        half = 0 if scores is None else scores.shape[1] // 2
        wrong = None if scores is None else np.roll(scores, half, axis=1)
        self._schedule.ahead(layer, next_layer, wrong, latent)


class Side:
    """One of the two engines, with one session that goes on from turn to turn."""

    def __init__(self, folder: str, scenario: Scenario, slots: int, page: int, predict: str):
        self.engine = k3offload.load(
            folder, cache=slots * page, context=CONTEXT, sweep=64, predict=predict
        )
        if scenario.misled and self.engine._model._schedule is not None:
            model: Any = self.engine._model  # a schedule in name only stands in
            model._schedule = Misled(model._schedule)
        self.session: Session = self.engine.session()
        self.session.append([1, 2, 3])
        self.session.logits()
        self.seconds: list[float] = []  # of each measured turn, a sweep
        self._before = Counts()

    def turn(self, tokens: list[int]) -> None:
        self.seconds.append(statistics.mean(walk(self.session, tokens)))

    def begin(self) -> None:
        """Measure from here."""
        self.seconds.clear()
        self._before = self.engine.counts()["experts"]

    def counts(self) -> dict[str, float]:
        """What was counted since ``begin``."""
        now, before = vars(self.engine.counts()["experts"]), vars(self._before)
        return {name: now[name] - before[name] for name in now}

    def close(self) -> None:
        self.session.close()
        self.engine.close()


def ratios(a: F64, b: F64) -> tuple[float, float, float]:
    """b / a [builds, turns]: the mean (geometric) over builds of their medians, and the interval
    that holds 95 % of its values where builds, and turns of each, are drawn again."""
    logs, rng = np.log(b / a), np.random.default_rng(0)
    builds, turns = logs.shape
    some = rng.integers(builds, size=(2000, builds, 1))
    drawn = np.median(logs[some, rng.integers(turns, size=(2000, builds, turns))], axis=2)
    low, high = np.quantile(drawn.mean(axis=1), (0.025, 0.975))
    middle = np.median(logs, axis=1).mean()
    return float(np.exp(middle)), float(np.exp(low)), float(np.exp(high))


def pair(
    sides: Sequence[Side], tokens: list[int], turn: int
) -> tuple[list[list[float]], list[dict[str, float]]]:
    """Seconds and counts of both ``sides``, after ``WARM`` turns."""
    pieces = [tokens[i : i + turn] for i in range(0, len(tokens), turn)]
    for number, piece in enumerate(pieces):
        if number == WARM:
            for side in sides:
                side.begin()
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.turn(piece)
    return [side.seconds for side in sides], [side.counts() for side in sides]


def measure(
    scenario: Scenario, folder: str, tokens: list[int], rounds: int, predict: str
) -> dict[str, Any]:
    """The figures of one scenario.  ``tokens``: of one build's turns."""
    count, page = _size(folder)
    slots = scenario.cache if isinstance(scenario.cache, int) else round(scenario.cache * count)
    turn = TURNS[scenario.model]
    if scenario.cycle:
        tokens = (tokens[:CYCLE] * len(tokens))[: len(tokens)]
    seconds, counted, schedule = [], [Counter[str](), Counter[str]()], False
    for build in range(BUILDS):
        with ExitStack() as stack:
            sides = {}
            for ahead in (False, True) if build % 2 == 0 else (True, False):
                name = predict if ahead else "none"
                sides[ahead] = Side(folder, scenario, slots, page, name)
                stack.callback(sides[ahead].close)
            times, counts = pair([sides[False], sides[True]], tokens, turn)
            schedule = sides[True].engine._model._schedule is not None
        seconds.append(times)
        for total, of_build in zip(counted, counts, strict=True):
            total.update(of_build)
    each = np.array(seconds)
    a, b = each[:, 0], each[:, 1]
    without, with_it = counted
    middle, low, high = ratios(a, b)
    return {
        "model": scenario.model,
        "scenario": scenario.name,
        "slots": slots,
        "experts": count,
        "seconds_without": float(np.median(a)),
        "seconds_with": float(np.median(b)),
        "ratio": middle,
        "ratio_of_sums": float(b.sum() / a.sum()),
        "ratios_of_builds": np.exp(np.median(np.log(b / a), axis=1)).round(4).tolist(),
        "interval": [low, high],
        "looks_ahead": schedule,
        "missed_without": without["misses"] / without["requests"],
        "issued": with_it["prefetches"] / with_it["requests"],
        "useful": with_it["useful"] / with_it["prefetches"] if with_it["prefetches"] else None,
        "covered": 1 - with_it["misses"] / without["misses"] if without["misses"] else None,
        "bytes_a_sweep_without": without["bytes"] / a.size / turn,
        "bytes": with_it["bytes"] / without["bytes"] if without["bytes"] else None,
    }


def _size(folder: str) -> tuple[int, int]:
    """Experts, and bytes of a slot."""
    with k3offload.load(folder, context=64, sweep=64) as engine:
        return engine.plan.experts, engine.plan.slot_bytes


def written(count: int) -> list[int]:
    """``count`` tokens that the embedded model writes after its prompts."""
    tokens: list[int] = []
    each = -(-count // len(PROMPTS))
    with k3offload.load("nano", context=each + 64) as engine:
        for seed, prompt in enumerate(PROMPTS):
            with engine.session() as session:
                session.append(prompt)
                sampling = k3offload.Sampling(temperature=1.0, seed=seed, ignore_end=True)
                for _ in session.generate(each, sampling):
                    pass
                tokens += session.tokens[-each:]
    return tokens[:count]


def row(figures: dict[str, Any]) -> Iterator[str]:
    f = figures
    yield f"{f['model']:<5}{f['scenario']:<14}{f['slots']:>5} of {f['experts']:<4}"
    yield f"{f['seconds_without'] * 1e3:>9.2f}{f['seconds_with'] * 1e3:>9.2f} ms"
    yield f"{f['ratio']:>8.3f} [{f['interval'][0]:.3f}, {f['interval'][1]:.3f}]"
    yield f"{f['ratio_of_sums']:>8.3f}"
    for name in ("missed_without", "issued", "useful", "covered", "bytes"):
        yield "       -" if f[name] is None else f"{f[name]:>8.3f}"
    yield f"{f['bytes_a_sweep_without'] / 1e6:>9.2f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=24, help="turns A B B A, of all pairs")
    parser.add_argument("--only", help="scenarios with this word, like 'nano' or 'few'")
    parser.add_argument("--predict", default="combined")
    given = parser.parse_args()
    wanted = [s for s in SCENARIOS if (given.only or "") in f"{s.model} {s.name}"]
    count = {
        model: (WARM + 2 * (-(-given.rounds // BUILDS))) * turn for model, turn in TURNS.items()
    }
    tokens = {
        "even": [(37 * i) % 4001 for i in range(count["even"])],
        "nano": written(count["nano"]),
    }
    cases = []
    print(
        "ms a sweep without, with; ratio of pairs, of sums; missed, issued, useful, covered, bytes"
    )
    with tempfile.TemporaryDirectory(prefix="k3-prefetch-") as made:
        folders = {"nano": "nano", "even": str(Path(made) / "model")}
        if any(s.model == "even" for s in wanted):
            need_room(2)
            make_tiny(folders["even"], "io", layers=7, experts=64, topk=8)
        for s in wanted:
            cases.append(measure(s, folders[s.model], tokens[s.model], given.rounds, given.predict))
            print("".join(row(cases[-1])), flush=True)
    above = [f"{c['model']} {c['scenario']}" for c in cases if c["interval"][0] > LIMIT]
    print(f"slower by more than {LIMIT - 1:.0%}: {', '.join(above) or 'none'}")
    line = {"benchmark": "prefetch_scenarios", **machine(), "predict": given.predict}
    line |= {"rounds": given.rounds, "cases": cases}
    print(json.dumps(line))
    note(line)


if __name__ == "__main__":
    main()
