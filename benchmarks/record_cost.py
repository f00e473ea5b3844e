"""What recording a trace costs: decode steps of one engine, with and without it, in turns.

    python -m benchmarks.record_cost [--model nano] [--tokens 64] [--turns 40] [--with PART ...]

Each turn decodes the same tokens twice from the same state, once while a trace is recorded and once
not; which comes first alternates.  All experts are in RAM, so nothing hides the cost.  Prints one
JSON object: ``cost``, the median over turns of (seconds with / seconds without) - 1, its
``quartiles``, ``in_all``, the same of all seconds together (in which chunks of the trace are
written, at times), and seconds of a token of each kind.
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
                session.logits()
                taken = decode(session, tokens)
                if turn:  # the first warms up
                    seconds[on].append(taken)
    ratios = [a / b - 1 for a, b in zip(seconds[True], seconds[False], strict=True)]
    return {
        "model": model,
        "parts": parts,
        "tokens": count,
        "turns": turns,
        "cost": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "in_all": sum(seconds[True]) / sum(seconds[False]) - 1,
        "token_seconds": statistics.median(seconds[False]) / count,
        "token_seconds_recording": statistics.median(seconds[True]) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--with", dest="parts", action="append", default=[])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k3-record-") as folder:
        found = measure(given.model, given.tokens, given.turns, given.parts, Path(folder))
    print(json.dumps({"benchmark": "record_cost", **facts(), **found}))


if __name__ == "__main__":
    main()
