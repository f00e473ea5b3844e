"""Long contexts with most latents on disk: the bits of a run that keeps them all, and the time.

    python -m benchmarks.long_context [prompt] [step] [wide]  [--tokens 65536] [--latents 4M]
        [--summaries 2M] [--latent-dtype int8] [--scratch DIR]

* ``prompt``: 65,536 tokens through the embedded model in sweeps of 8,192 with 4 MB for latents and
  2 MB for block summaries, and with all of them; the logits of the last 64 tokens must have the
  same bits.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import k3offload
from benchmarks.run import machine, need_room, note
from k3offload.bench_read import read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.config import parse_size
from k3offload.engine import Engine
from k3offload.find import find_model
from k3offload.kernels.latent_format import PRECISIONS
from k3offload.kernels.latents_reference import pack
from k3offload.make_tiny import make_tiny
from k3offload.model import Run
from k3offload.run_logits import spans
from k3offload.state import SequenceState

MILLION = 1 << 20
APPEND = 1 << 14  #: made-up latents at a time
Rows = npt.NDArray[np.float32]


class Found(NamedTuple):
    """Logits, and seconds of a prompt or the median of decode steps; the processor's seconds show
    how much of a difference is the machine's other work.  ``read``: latent bytes from disk."""

    rows: Rows
    seconds: float
    processor: float
    read: float


def prompt(engine: Engine, count: int, keep: int = 64) -> Found:
    """The last ``keep`` of ``count`` tokens."""
    tokens = [(37 * i + i // 5) % engine.spec.vocab for i in range(count)]
    rows: list[Rows] = []
    state = engine.new_state()
    begin, used = time.perf_counter(), time.process_time()
    for first, end, decode in spans(count, engine.plan.sweep_rows, None):
        run = Run(state, tokens[first:end], max(0, end - max(first, count - keep)), decode)
        engine.run([run], lambda i, position, row: rows.append(row.numpy().copy()))
        if run.error is not None:
            raise run.error
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    return Found(np.concatenate(rows), seconds, used, latents_on_disk(engine))


def made_up(engine: Engine, count: int) -> SequenceState:
    """A state after ``count`` tokens that nobody computed: seeded latents, no KDA history."""
    state = engine.new_state()
    for layer, latents in state.latents.items():
        g = torch.Generator().manual_seed(layer)
        for begin in range(0, count, APPEND):
            rows = torch.randn(min(APPEND, count - begin), engine.spec.mla.latent, generator=g)
            latents.append(pack(rows.to(torch.bfloat16), state.form))
    state.position = count
    return state


def steps(engine: Engine, count: int, rounds: int) -> Found:
    """``rounds`` decode steps after ``count`` latents."""
    rows: list[Rows] = []
    figures: list[tuple[float, float, float]] = []
    state = made_up(engine, count)
    for token in range(rounds):
        before = latents_on_disk(engine)
        begin, used = time.perf_counter(), time.process_time()
        run = Run(state, [token], 1, True)
        engine.run([run], lambda i, position, row: rows.append(row.numpy().copy()))
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        figures.append((seconds, used, latents_on_disk(engine) - before))
        if run.error is not None:
            raise run.error
    return Found(np.concatenate(rows), *map(statistics.median, zip(*figures, strict=True)))


def latents_on_disk(engine: Engine) -> float:
    """Bytes of latents that were read from disk so far."""
    facts = engine.spilling.facts() if engine.spilling else {}
    read: float = facts["latents"]["read_bytes"] if "latents" in facts else 0
    return read


def compare(
    folder: Path | str, caps: dict[str, Any], work: Callable[[Engine], Found], **how: Any
) -> dict[str, Any]:
    """``work`` with ``caps`` (options of ``load``) and with everything in RAM.  Raises
    ``SystemExit`` where the bits differ or nothing came back from disk."""
    with k3offload.load(folder, **how) as engine:
        base = work(engine)
    with k3offload.load(folder, **caps, **how) as engine:
        capped = work(engine)
        facts = engine.spilling.facts() if engine.spilling else {}
    if capped.rows.tobytes() != base.rows.tobytes():
        raise SystemExit("The bits differ from those of a run with everything in RAM.")
    if len(facts) < len(caps) or not all(f["read_bytes"] for f in facts.values()):
        raise SystemExit(f"Not everything went to disk and came back: {facts}")
    return {
        **caps,
        "seconds": capped.seconds,
        "seconds_with_all_in_ram": base.seconds,
        "ratio": capped.seconds / base.seconds,
        "processor_ratio": capped.processor / base.processor,
        "latent_bytes_read": capped.read,
        "scratch": facts,
    }


def of_prompt(given: argparse.Namespace, how: dict[str, Any]) -> dict[str, Any]:
    found = compare(
        "nano",
        {"latents": parse_size(given.latents), "summaries": parse_size(given.summaries)},
        lambda e: prompt(e, given.tokens),
        context=given.tokens,
        sweep=8192,
        **how,
    )
    return {"tokens": given.tokens, **found}


def of_step(given: argparse.Namespace, how: dict[str, Any]) -> dict[str, Any]:
    count = MILLION - given.rounds
    found = compare(
        "nano",
        {"latents": 100_000_000},
        lambda e: steps(e, count, given.rounds),
        context=MILLION,
        **how,
    )
    return bound("nano", found)


def of_wide(given: argparse.Namespace, how: dict[str, Any]) -> dict[str, Any]:
    need_room(10)
    with tempfile.TemporaryDirectory(prefix="k3-long-", dir=given.scratch) as made:
        folder, count = Path(made) / "model", MILLION - given.rounds
        make_tiny(folder, "wide")
        found = compare(
            folder,
            {"latents": 200_000_000},
            lambda e: steps(e, count, given.rounds),
            context=MILLION,
            **how,
        )
        return bound(folder, found)


def bound(folder: Path | str, found: dict[str, Any]) -> dict[str, Any]:
    """``found`` with its bound: what reading at the line rate takes, or compute alone."""
    rate = read_rate(Checkpoint.open(find_model(folder)), 2.0).rate
    read = found["latent_bytes_read"] / rate
    ratio = found["seconds"] / max(read, found["seconds_with_all_in_ram"])
    return {**found, "line_rate": rate, "read_seconds": read, "ratio_to_bound": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=["prompt", "step", "wide"])
    parser.add_argument("--latents", default="4M", help="of the prompt's, in RAM")
    parser.add_argument("--summaries", default="2M", help="the same")
    parser.add_argument("--tokens", type=int, default=65_536, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=5, help="decode steps")
    parser.add_argument("--scratch", type=Path, help="folder on a disk")
    parser.add_argument("--latent-dtype", choices=PRECISIONS, help="packed latents, in both runs")
    given = parser.parse_args()
    how = {"scratch": given.scratch, "latent_dtype": given.latent_dtype}
    parts = {"prompt": of_prompt, "step": of_step, "wide": of_wide}
    for part in given.parts:
        found = {"latent_dtype": given.latent_dtype, **parts[part](given, how)}
        line = {"benchmark": f"long_context {part}", **machine(), **found}
        print(json.dumps(line, indent=2), flush=True)
        note(line)


if __name__ == "__main__":
    main()
