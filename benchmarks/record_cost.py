"""What recording a trace costs: decode steps of one engine, with and without it, in turns.

    python -m benchmarks.record_cost [--model nano] [--tokens 12] [--turns 150] [--with PART ...]

Each turn decodes the same tokens twice from the same state, once while a trace is recorded and once
not; which comes first alternates.  All experts are in RAM, so nothing hides the cost.  What is
recorded is put into 8 bits and written when the engine is closed, which is timed apart.  Prints one
JSON object: ``listening``, the median over turns of (seconds with / seconds without) - 1, its
``quartiles``, ``writing``, the same of the seconds of closing, and their sum, ``cost``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import k3offload
from k3offload.machine import facts
from k3offload.session import Session
from k3offload.trace_record import record

PROMPT = "In the beginning God created the heaven and the earth."


def decode(session: Session, tokens: list[int]) -> float:
    """Seconds of decoding ``tokens``, one at a time."""
    begin = time.perf_counter()
    for token in tokens:
        session.append_sampled(token)
        session.logits()
    return time.perf_counter() - begin


def measure(model: str, count: int, turns: int, parts: list[str], folder: Path) -> dict[str, Any]:
    with k3offload.load(model, sessions=2, context=count + 64) as engine:
        assert engine.store is not None
        without = dict(vars(engine.hooks)), engine.store.watch
        record(engine, folder / "trace", parts)
        during = dict(vars(engine.hooks)), engine.store.watch
        session = engine.session()
        session.append(PROMPT)
        session.logits()
        tokens = []
        begun = session.snapshot()
        for _ in range(count):
            tokens.append(int(session.logits().argmax()))
            session.append_sampled(tokens[-1])
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(turns + 1):
            for on in (True, False) if turn % 2 else (False, True):
                hooks, engine.store.watch = during if on else without
                vars(engine.hooks).update(hooks)
                session.rewind(begun)
                taken = decode(session, tokens)
                if turn:  # the first warms up
                    seconds[on].append(taken)
        begin = time.perf_counter()
    closing = time.perf_counter() - begin
    ratios = [a / b - 1 for a, b in zip(seconds[True], seconds[False], strict=True)]
    token = statistics.median(seconds[False]) / count
    writing = closing / ((turns + 2) * count) / token
    return {
        "model": model,
        "parts": parts,
        "tokens": count,
        "turns": turns,
        "cost": statistics.median(ratios) + writing,
        "listening": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "writing": writing,
        "token_seconds": token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--with", dest="parts", action="append", default=[])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k3-record-") as folder:
        found = measure(given.model, given.tokens, given.turns, given.parts, Path(folder))
    print(json.dumps({"benchmark": "record_cost", **facts(), **found}))


if __name__ == "__main__":
    main()
