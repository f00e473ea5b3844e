"""A prompt whose experts do not fit: every expert is read once a sweep, and time against its bound.

    python -m benchmarks.stream_prompt [--model FOLDER] [--tokens 512] [--sweep 512] [--cache 0.1]
    python -m benchmarks.stream_prompt --size io-real --tokens 4096 --ram 2G [--chunk 32]

Without ``--model`` a checkpoint of 3 MoE layers with 112 experts of released size each is made
(6 GB; with ``--size io-real`` one of 7 layers, 12 GB) and deleted again.  Without ``--sweep`` the
plan decides how long sweeps are; ``--ram`` is a budget of the whole process instead of a share of
the experts.  With ``--chunk`` the prompt is appended and computed so many tokens at a time, as
engines do that have no longer sweeps.

Each round loads the model anew, so that its cache is cold, and computes one prompt.  Checked, not
only reported: expert bytes read are exactly the distinct experts that the prompt's rows chose times
the page, in each sweep over again where there are several, less what was still in RAM from the
sweep before; and the kernel's own account of bytes read is ours, but for ``--slack`` of other
files.  The bound is the larger of (bytes read / line rate) and compute alone, which is the same
prompt with every expert in RAM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import k3offload
from benchmarks.run import machine, note
from benchmarks.stream import disk_bytes, need_room
from k3offload.bench_read import read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.engine import Engine
from k3offload.make_tiny import make_tiny
from k3offload.report import kernel_read_bytes
from k3offload.scheduler.sweep import Group

SLACK = 1 << 20  #: bytes the kernel may have read for this process beside the model's


class Touched:
    """Distinct experts of each sweep, as the routers chose them; hears ``on_route``."""

    def __init__(self, engine: Engine) -> None:
        self.sweeps: list[set[tuple[int, int]]] = []
        self._first = engine.spec.moe_layers[0]
        engine.hooks.on_route = self._on_route

    def _on_route(
        self,
        layer: int,
        group: Group,
        experts: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        if layer == self._first and group.begin == 0:
            self.sweeps.append(set())
        self.sweeps[-1] |= {(layer, expert) for expert in set(experts.view(-1).tolist())}

    @property
    def count(self) -> int:
        """Experts to be asked for in all sweeps."""
        return sum(map(len, self.sweeps))


def prompt(engine: Engine, count: int, chunk: int | None) -> float:
    """Seconds of a prompt of ``count`` tokens, ``chunk`` of them at a time."""
    tokens = [(37 * i + i // 5) % engine.spec.vocab for i in range(count)]
    with engine.session() as session:
        begin = time.perf_counter()
        for first in range(0, count, chunk or count):
            session.append(tokens[first : first + (chunk or count)])
            session.logits()
        return time.perf_counter() - begin


def compute_alone(given: argparse.Namespace, folder: Path, sweep: int) -> float:
    """The same prompt in the same sweeps with every expert in RAM."""
    with k3offload.load(folder, context=given.tokens + 64, sweep=sweep) as engine:
        if engine.plan.slots < engine.plan.experts:
            raise SystemExit("Compute alone cannot be measured: not all experts fit into RAM.")
        prompt(engine, given.tokens, given.chunk)  # brings every expert
        return statistics.median(
            prompt(engine, given.tokens, given.chunk) for _ in range(given.rounds)
        )


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One prompt over a cold cache.  Raises ``SystemExit`` where an account is not exact."""
    checkpoint, context, slack = Checkpoint.open(folder), given.tokens + 64, given.slack
    page = checkpoint.expert_bytes
    before = read_rate(checkpoint, 1.5).rate
    cache = None if given.ram else int(checkpoint.spec.expert_count * page * given.cache)
    with k3offload.load(
        folder, cache=cache, ram=given.ram, context=context, sweep=given.sweep
    ) as engine:
        touched, ours, kernel = Touched(engine), disk_bytes(engine), kernel_read_bytes()
        useful = engine.disk.counts.bytes
        seconds = prompt(engine, given.tokens, given.chunk)
        slots, rows = engine.plan.slots, engine.plan.sweep_rows
        ours, kernel = disk_bytes(engine) - ours, kernel_read_bytes() - kernel
        useful, counts = engine.disk.counts.bytes - useful, engine.counts()["experts"]
    rate = statistics.mean((before, read_rate(checkpoint, 1.5).rate))
    _check("experts asked for", counts.requests, touched.count)
    kept = counts.hits - (counts.useful - counts.late)  # what came early was read in this sweep
    _check("experts read in vain", counts.prefetches - counts.useful, 0)
    _check("expert bytes read", counts.bytes, (touched.count - kept) * page)
    if len(touched.sweeps) == 1:
        _check("experts of a cold cache", kept, 0)
    if abs(kernel - ours) > slack:
        raise SystemExit(f"The kernel has read {kernel:,} bytes and we {ours:,}.")
    return {
        "sweeps": len(touched.sweeps),
        "rows_of_a_sweep": rows,
        "slots": slots,
        "distinct_experts": touched.count,
        "page_bytes": page,
        "expert_bytes": counts.bytes,
        "bytes": useful,  # with the trunk's
        "our_bytes_with_alignment": ours,
        "kernel_bytes": kernel,
        "seconds": seconds,
        "waited_seconds": counts.wait_seconds,
        "line_rate": rate,
        "read_seconds": useful / rate,
    }


def _check(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise SystemExit(f"{what}: {found:,}, where {expected:,} was expected.")


def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rounds = [measure(given, folder) for _ in range(given.rounds)]
    alone = compute_alone(given, folder, rounds[0]["rows_of_a_sweep"])
    for one in rounds:
        one["ratio_to_bound"] = one["seconds"] / max(alone, one["read_seconds"])
    return {
        "tokens": given.tokens,
        "chunk": given.chunk,
        "ram": given.ram,
        "cache": None if given.ram else given.cache,
        "compute_alone_seconds": alone,
        "seconds": statistics.median(one["seconds"] for one in rounds),
        "ratio_to_bound": statistics.median(one["ratio_to_bound"] for one in rounds),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", choices=("small", "io-real"), default="small", help="made model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--sweep", type=int, help="prompt tokens in one pass; the plan's if unset")
    parser.add_argument("--chunk", type=int, help="compute so many tokens at a time")
    parser.add_argument("--ram", help="budget of the process, instead of --cache")
    parser.add_argument("--cache", type=float, default=0.1, help="share of the experts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slack", type=int, default=SLACK, help="bytes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k3-prompt-") as made:
        folder = given.model or Path(made) / "model"
        if given.model is None:
            need_room(14 if given.size == "io-real" else 8)
            fewer: dict[str, Any] = {} if given.size == "io-real" else {"layers": 4}
            make_tiny(folder, "io-real", **fewer)
        line = {"benchmark": "stream_prompt", **machine(), **run(given, folder)}
    print(json.dumps(line, indent=2))
    note(line)


if __name__ == "__main__":
    main()
