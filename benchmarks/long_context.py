"""Long contexts with most latents on disk: the bits of a run that keeps them all, and the time.

    python -m benchmarks.long_context [prompt] [step] [wide]  [--tokens 65536] [--scratch DIR]

* ``prompt``: 65,536 tokens through the embedded model with 4 MB for latents, and with all of them;
  the logits of the last 64 tokens must have the same bits.
* ``step``: one decode step of the embedded model after 1,048,575 made-up latents a layer, with
  100 MB for latents, and with all of them; bits as above.
* ``wide``: the same step of a model of K3's widths (7 GB, made and deleted again; 1.2 GB of latents
  in its one MLA layer) with 200 MB for latents.  Its bound is the larger of (latent bytes read /
  line rate) and compute alone, the step with all of them.

Checked, not only reported: the bits, and that bytes went to disk and came back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import k3offload
from benchmarks.run import machine, note
from benchmarks.stream import need_room
from k3offload.bench_read import read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.engine import Engine
from k3offload.find import find_model
from k3offload.make_tiny import make_tiny
from k3offload.model import Run
from k3offload.run_logits import spans
from k3offload.state import SequenceState

MILLION = 1 << 20
APPEND = 1 << 14  #: made-up latents at a time
Rows = npt.NDArray[np.float32]


def prompt(engine: Engine, count: int, keep: int = 64) -> tuple[Rows, float]:
    """Logits of the last ``keep`` of ``count`` tokens, and seconds."""
    tokens = [(37 * i + i // 5) % engine.spec.vocab for i in range(count)]
    rows: list[Rows] = []
    state = engine.new_state()
    begin = time.perf_counter()
    for first, end, decode in spans(count, engine.plan.sweep_rows, None):
        run = Run(state, tokens[first:end], max(0, end - max(first, count - keep)), decode)
        engine.run([run], lambda i, position, row: rows.append(row.numpy().copy()))
        if run.error is not None:
            raise run.error
    return np.concatenate(rows), time.perf_counter() - begin


def made_up(engine: Engine, count: int) -> SequenceState:
    """A state after ``count`` tokens that nobody computed: seeded latents, no KDA history."""
    state = engine.new_state()
    for layer, latents in state.latents.items():
        g = torch.Generator().manual_seed(layer)
        for begin in range(0, count, APPEND):
            rows = torch.randn(min(APPEND, count - begin), engine.spec.mla.latent, generator=g)
            latents.append(rows.to(torch.bfloat16))
    state.position = count
    return state


def steps(engine: Engine, count: int, rounds: int) -> tuple[Rows, float, float]:
    """Logits of ``rounds`` decode steps after ``count`` latents; the median of their seconds and of
    the latent bytes that they read."""
    rows: list[Rows] = []
    seconds, read = [], []
    state = made_up(engine, count)
    for token in range(rounds):
        before, begin = spilled(engine)["read_bytes"], time.perf_counter()
        run = Run(state, [token], 1, True)
        engine.run([run], lambda i, position, row: rows.append(row.numpy().copy()))
        seconds.append(time.perf_counter() - begin)
        read.append(spilled(engine)["read_bytes"] - before)
        if run.error is not None:
            raise run.error
    return np.concatenate(rows), statistics.median(seconds), statistics.median(read)


def spilled(engine: Engine) -> dict[str, Any]:
    """What latents went to disk and came back; nothing if all stayed in RAM."""
    if engine.spilling is None:
        return {"written_bytes": 0, "read_bytes": 0}
    return engine.spilling.facts()["latents"]


def compare(
    folder: Path | str, latents: int, work: Callable[[Engine], Sequence[Any]], **how: Any
) -> dict[str, Any]:
    """``work`` with ``latents`` bytes for latents and with all of them.  Raises ``SystemExit``
    where the bits differ or nothing came back from disk."""
    with k3offload.load(folder, **how) as engine:
        base, alone, *_ = work(engine)
    with k3offload.load(folder, latents=latents, **how) as engine:
        rows, seconds, *rest = work(engine)
        facts = spilled(engine)
    if rows.tobytes() != base.tobytes():
        raise SystemExit("The bits differ from those of a run with all latents in RAM.")
    if not (facts["written_bytes"] and facts["read_bytes"]):
        raise SystemExit("No latents went to disk and came back.")
    return {
        "latents_in_ram": latents,
        "seconds": seconds,
        "seconds_with_all_in_ram": alone,
        "ratio": seconds / alone,
        "scratch": facts,
        **({"read_bytes_a_step": rest[0]} if rest else {}),
    }


def of_prompt(given: argparse.Namespace, how: dict[str, Any]) -> dict[str, Any]:
    found = compare(
        "nano", 4_000_000, lambda e: prompt(e, given.tokens), context=given.tokens, **how
    )
    return {"tokens": given.tokens, **found}


def of_step(given: argparse.Namespace, how: dict[str, Any]) -> dict[str, Any]:
    count = MILLION - given.rounds
    found = compare(
        "nano", 100_000_000, lambda e: steps(e, count, given.rounds), context=MILLION, **how
    )
    return bound("nano", found)


def of_wide(given: argparse.Namespace, how: dict[str, Any]) -> dict[str, Any]:
    need_room(10)
    with tempfile.TemporaryDirectory(prefix="k3-long-", dir=given.scratch) as made:
        folder, count = Path(made) / "model", MILLION - given.rounds
        make_tiny(folder, "wide")
        found = compare(
            folder, 200_000_000, lambda e: steps(e, count, given.rounds), context=MILLION, **how
        )
        return bound(folder, found)


def bound(folder: Path | str, found: dict[str, Any]) -> dict[str, Any]:
    """``found`` with its bound: what reading at the line rate takes, or compute alone."""
    rate = read_rate(Checkpoint.open(find_model(folder)), 2.0).rate
    read = found["read_bytes_a_step"] / rate
    ratio = found["seconds"] / max(read, found["seconds_with_all_in_ram"])
    return {**found, "line_rate": rate, "read_seconds": read, "ratio_to_bound": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=["prompt", "step", "wide"])
    parser.add_argument("--tokens", type=int, default=65_536, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=5, help="decode steps")
    parser.add_argument("--scratch", type=Path, help="folder on a disk")
    given = parser.parse_args()
    how = {"scratch": given.scratch}
    parts = {"prompt": of_prompt, "step": of_step, "wide": of_wide}
    for part in given.parts:
        line = {"benchmark": f"long_context {part}", **machine(), **parts[part](given, how)}
        print(json.dumps(line, indent=2), flush=True)
        note(line)


if __name__ == "__main__":
    main()
