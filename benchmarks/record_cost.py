"""What recording a trace costs: steps computed twice from the same state, with it and without.

    python -m benchmarks.record_cost [--model nano] [--case decode] [--pairs 400] [--with PART ...]

``decode`` is one token, ``batch`` one each of 16 sessions, ``prompt`` 512 tokens of a new session;
all experts are in RAM, so nothing hides the cost.  Which of a pair comes first alternates.  Prints
one JSON object a case, whose figures are shares of a step without recording:

``listening``  the median over pairs of (with - without), and between which bounds the median lies
               in 95 of 100 samples drawn from these pairs
``writing``    putting what was heard into 8 bits, compressing and writing it, the end included, of
               many steps made of what was heard in one: most steps write nothing, a few much
``cost``       their sum; ``cost_at_most``, with the upper bound

and all of it twice: ``busy`` in processor time of the thread that computes (of all threads while
something is written), which other work beside it disturbs little, and ``wall`` in seconds.  Beside
them stand ``step_ms`` and what no step has part in: ``open_ms`` and ``close_ms``.  A part
of which a step tells nothing (``ahead`` and ``latent`` of prompts) is refused.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import k3offload
from k3offload.engine import Engine
from k3offload.machine import facts
from k3offload.session import Snapshot
from k3offload.trace import PARTS
from k3offload.trace_record import record
from k3offload.trace_rows import Recorder

PROMPT: Final = 512  #: tokens of a prompt
ROWS: Final = {"decode": 1, "batch": 16, "prompt": PROMPT}  #: of a step, by case
WARM: Final = 4  #: pairs before those that count
DRAWS: Final = 2000  #: samples that the bounds of a median are of
CHUNKS: Final = 4  #: of a trace that are written to see what writing costs
HOOKS: Final = ("on_sweep", "on_route", "on_ahead", "on_mix")  #: that a recorder may hear
Step = Callable[[], object]
Back = Callable[[], object]


class Span(NamedTuple):
    """Seconds of the clock, and of processors."""

    wall: float = 0.0
    busy: float = 0.0

    def less(self, other: Span) -> Span:
        return self.more(-other.wall, -other.busy)

    def more(self, wall: float, busy: float) -> Span:
        return Span(self.wall + wall, self.busy + busy)


class Watch:
    """Adds up what a recorder's writing takes, which happens within a few of the steps only:
    ``sum``, and ``here`` without what other threads did of it."""

    def __init__(self, recorder: Recorder) -> None:
        self.sum = self.here = Span()
        for name in ("write", "write_events", "close"):
            setattr(recorder, name, self._timed(getattr(recorder, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            sums = self.sum, self.here  # what is added inside is part of this
            begin = time.perf_counter(), time.process_time(), time.thread_time()
            call(*given)
            end = time.perf_counter(), time.process_time(), time.thread_time()
            wall, every, own = np.subtract(end, begin).tolist()
            self.sum, self.here = sums[0].more(wall, every), sums[1].more(wall, own)

        return timed


class Bench:
    """One engine that is recorded while ``on`` is told so."""

    def __init__(self, engine: Engine, folder: Path, parts: list[str]) -> None:
        assert engine.store is not None
        self.engine = engine
        self._without = dict(vars(engine.hooks)), engine.store.watch
        begin = time.perf_counter()
        self.recorder = record(engine, folder, parts)
        self.open_seconds = time.perf_counter() - begin
        self._during = dict(vars(engine.hooks)), engine.store.watch
        self.watch = Watch(self.recorder)

    def timed(self, step: Callable[[], object], on: bool) -> Span:
        """What ``step`` takes but for writing."""
        assert self.engine.store is not None
        hooks, self.engine.store.watch = self._during if on else self._without
        vars(self.engine.hooks).update(hooks)
        before, wall, busy = self.watch.here, time.perf_counter(), time.thread_time()
        step()
        took = Span(time.perf_counter() - wall, time.thread_time() - busy)
        return took.less(self.watch.here.less(before))

    @contextmanager
    def heard(self) -> Iterator[list[tuple[Callable[..., None], tuple[Any, ...]]]]:
        """What the recorder is called with inside the block."""
        assert self.engine.store is not None
        calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

        def also(call: Callable[..., None]) -> Callable[..., None]:
            def noted(*given: Any) -> None:
                calls.append((call, given))

            return noted

        hooks, watch = self._during
        vars(self.engine.hooks).update(hooks)
        for name in HOOKS:
            if hooks[name] is not None:
                setattr(self.engine.hooks, name, also(hooks[name]))
        if watch is not self._without[1]:
            self.engine.store.watch = also(watch)
        yield calls


def steps(case: str, engine: Engine, count: int) -> Iterator[tuple[Back, Step]]:
    """``count`` steps, each with what goes back to the state before it."""
    rng = np.random.default_rng(0)

    def tokens(some: int) -> list[int]:
        return [int(token) for token in rng.integers(0, 2000, some)]

    def prompt(text: list[int]) -> None:
        with engine.session() as session:
            session.append(text)
            session.logits()

    def decode(drawn: list[int]) -> None:
        for session, token in zip(sessions, drawn, strict=True):
            session.append_sampled(token)
        engine.sweep(sessions)

    def back(to: list[Snapshot]) -> None:
        for session, snapshot in zip(sessions, to, strict=True):
            session.rewind(snapshot)

    sessions = [engine.session() for _ in range(ROWS[case] if case != "prompt" else 0)]
    for session in sessions:
        session.append(tokens(20))
        session.logits()
    for _ in range(count):
        if case == "prompt":
            yield (lambda: None), partial(prompt, tokens(ROWS[case]))
        else:
            before = [session.snapshot() for session in sessions]
            yield partial(back, before), partial(decode, tokens(len(sessions)))


def paired(bench: Bench, case: str, pairs: int) -> tuple[list[Span], list[Span]]:
    """What steps took with recording, and without."""
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for number, (back, step) in enumerate(steps(case, bench.engine, pairs + WARM)):
        for on in (True, False) if number % 2 else (False, True):
            back()
            took = bench.timed(step, on)
            if number >= WARM:
                spans[on].append(took)
    return spans[True], spans[False]


def heard(bench: Bench, case: str) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    """What the recorder would be told in one step."""
    ((back, step),) = steps(case, bench.engine, 1)
    back()
    with bench.heard() as calls:
        step()
    return calls


def check_heard(bench: Bench, case: str, parts: list[str]) -> None:
    """End where a step tells nothing of one of ``parts``, which would seem to cost nothing."""
    places = {"ahead": 2, "latent": 3}  # in what ``on_ahead`` is given
    for part in places.keys() & set(parts):
        told = [given for call, given in heard(bench, case) if call == bench.recorder.on_ahead]
        if all(given[places[part]] is None for given in told):
            raise SystemExit(
                f"A step of the case {case} tells nothing of {part}. Measure it of another case "
                "(of prompts nobody asks), or of a model whose layers are in memory."
            )


def writing(bench: Bench, case: str) -> tuple[Span, Span]:
    """What writing takes for one step, and what ending the trace takes."""
    calls = heard(bench, case)
    watch, recorder = bench.watch, bench.recorder
    recorder.write()
    before, count = watch.sum, -(-CHUNKS * recorder.writer.step // ROWS[case])
    for _ in range(count):
        for call, given in calls:
            call(*given)
    recorder.write()
    whole = watch.sum
    recorder.close()
    ended = watch.sum.less(whole)
    wall, busy = watch.sum.less(before)
    return Span(wall / count, busy / count), ended


def shares(with_: list[float], without: list[float], wrote: float) -> dict[str, Any]:
    """``listening``, ``writing`` and ``cost`` of one clock, as shares of a step's median."""
    step = statistics.median(without)
    more = np.subtract(with_, without) / step
    drawn = np.random.default_rng(0).integers(0, len(more), (DRAWS, len(more)))
    low, high = np.quantile(np.median(more[drawn], axis=1), (0.025, 0.975)).tolist()
    middle, rest = float(np.median(more)), wrote / step
    return {
        "step_ms": 1e3 * step, "listening": middle, "between": [low, high], "writing": rest,
        "cost": middle + rest, "cost_at_most": high + rest,
    }  # fmt: skip


def measure(model: str, case: str, pairs: int, parts: list[str], folder: Path) -> dict[str, Any]:
    rows = ROWS[case]
    room = 1 if case == "prompt" else 2 * rows + 2  # a snapshot takes a session's room
    context = PROMPT + 8 if case == "prompt" else pairs + 64
    with k3offload.load(model, sessions=room, context=context) as engine:
        bench = Bench(engine, folder, parts)
        check_heard(bench, case, parts)
        gc.collect()
        on, off = paired(bench, case, pairs)
        each, ended = writing(bench, case)
        engine.closing.clear()  # it has ended
    clocks = {
        clock: shares(
            [getattr(span, clock) for span in on], [getattr(span, clock) for span in off],
            getattr(each, clock),
        )
        for clock in Span._fields
    }  # fmt: skip
    return {
        "model": model, "case": case, "parts": parts, "pairs": pairs, "rows": rows,
        "open_ms": 1e3 * bench.open_seconds, "close_ms": 1e3 * ended.wall, **clocks,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--case", choices=list(ROWS), action="append", help="all, if none is named")
    parser.add_argument("--pairs", type=int, help="400, or a tenth of that of prompts")
    parser.add_argument("--with", dest="parts", choices=PARTS, action="append", default=[])
    given = parser.parse_args()
    asked = {"ahead", "latent"} & set(given.parts)  # of decode rows alone
    for case in given.case or [case for case in ROWS if case != "prompt" or not asked]:
        pairs = given.pairs or (40 if case == "prompt" else 400)
        with tempfile.TemporaryDirectory(prefix="k3-record-") as folder:
            found = measure(given.model, case, pairs, given.parts, Path(folder) / "trace")
        print(json.dumps({"benchmark": "record_cost", **facts(), **found}), flush=True)


if __name__ == "__main__":
    main()
