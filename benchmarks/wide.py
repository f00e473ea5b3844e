"""Decode and prompts at released width with everything cached, against what this machine reaches.

    python -m benchmarks.wide [--model FOLDER] [--trunk int8 ...] [--torch]

Without ``--model`` a checkpoint of 4 layers of released width is made (7 GB) and deleted again.
For each trunk precision: bytes of weights a decode step touches over its time, as a share of what
a plain scan of memory reads with as many threads before and after; multiply-adds a second of a
prompt of 512 tokens, as a share of one large bfloat16 product of torch in the same process; and
the part of a decode step that the calling thread computes outside kernels.  ``--torch`` adds the
torch kernels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import k3offload
from benchmarks.run import machine, note
from k3offload.checkpoint import Checkpoint
from k3offload.engine import Engine
from k3offload.forecast_sizes import token_macs
from k3offload.kernels import native
from k3offload.kernels.choose import OPS, Kernels
from k3offload.kernels.workers import Workers
from k3offload.machine import default_threads
from k3offload.make_tiny import make_tiny

PROMPT, WARM, STEPS = 512, 6, 24
SCANNED = 1 << 30  #: bytes of one scan, more than any cache
REPEATS = 5


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def scan(workers: Workers, memory: torch.Tensor) -> float:
    """Bytes a second of a plain scan of memory."""
    return SCANNED / best(lambda: native.read(workers, memory.data_ptr(), SCANNED))


def large_product(threads: int) -> float:
    """Multiply-adds a second of one large bfloat16 product of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x, w = torch.randn(PROMPT, 7168).bfloat16(), torch.randn(12288, 7168).bfloat16()
    seconds = best(lambda: F.linear(x, w))
    torch.set_num_threads(before)
    return PROMPT * 7168 * 12288 / seconds


class Clock:
    """Processor time that the calling thread spends inside kernels: unlike time on the wall, what
    is left of it beside them is not stretched by whatever else the machine does."""

    def __init__(self, kernels: Kernels) -> None:
        self.seconds = 0.0
        self._inside = False
        for name, f in list(kernels._f.items()):
            kernels._f[name] = self._timed(f)
        kernels.finish = self._timed(kernels.finish)  # type: ignore[method-assign]

    def _timed(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            if self._inside:
                return f(*args, **rest)
            self._inside, begin = True, time.thread_time()
            try:
                return f(*args, **rest)
            finally:
                self.seconds += time.thread_time() - begin
                self._inside = False

        return call


def measure(engine: Engine) -> dict[str, float]:
    """Seconds of a prompt and of decode steps, every expert that they need already there."""
    vocab, seconds = engine.spec.vocab, list[float]()
    clock = Clock(engine.kernels)
    for start in (0, 1):  # the first brings the experts
        with engine.session() as session:
            session.append([(7 * i + start) % vocab for i in range(PROMPT)])
            begin = time.perf_counter()
            session.logits()
            prompt = time.perf_counter() - begin
            for step in range(WARM + STEPS):
                if step == WARM:
                    clock.seconds, seconds, processor = 0.0, [], time.thread_time()
                begin = time.perf_counter()
                session.append_sampled(83 * step % vocab)
                session.logits()
                seconds.append(time.perf_counter() - begin)
            outside = time.thread_time() - processor - clock.seconds
    return {
        "prompt_seconds": prompt,
        "decode_seconds": statistics.median(seconds),
        "decode_seconds_best": min(seconds),
        "outside_kernels": outside / sum(seconds),
    }


def run(folder: Path, trunk: str, kernels: dict[str, str]) -> dict[str, Any]:
    threads, memory = default_threads(), torch.ones(SCANNED, dtype=torch.uint8)
    workers = Workers(threads)
    before, product = scan(workers, memory), large_product(threads)
    checkpoint = Checkpoint.open(folder)
    spec = checkpoint.spec
    assert spec.moe is not None
    experts = len(spec.moe_layers) * spec.moe.top_k
    with k3offload.load(
        folder, trunk=trunk, kernels=kernels, context=PROMPT + 64, sweep=PROMPT
    ) as engine:
        found = measure(engine)
        touched = engine.weights.trunk_bytes + experts * checkpoint.expert_bytes
    memory_rate = statistics.mean((before, scan(workers, memory)))
    macs = PROMPT * token_macs(spec) / found["prompt_seconds"]
    workers.close()
    return {
        "trunk": trunk,
        "kernels": "torch" if kernels else "native",
        **found,
        "bytes_a_step": touched,
        "bytes_a_second": touched / found["decode_seconds"],
        "memory_bytes_a_second": memory_rate,
        "share_of_memory": touched / found["decode_seconds"] / memory_rate,
        "prompt_macs_a_second": macs,
        "torch_macs_a_second": product,
        "share_of_torch": macs / product,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--trunk", action="append")
    parser.add_argument("--torch", action="store_true")
    given = parser.parse_args()
    ways: list[tuple[str, dict[str, str]]] = [
        (trunk, {}) for trunk in given.trunk or ["bfloat16", "int8", "mxfp4"]
    ]
    if given.torch:
        ways.append(("bfloat16", dict.fromkeys(OPS, "reference")))
    if given.model is None and shutil.disk_usage(tempfile.gettempdir()).free < 10e9:
        raise SystemExit(f"10 GB are needed in {tempfile.gettempdir()} (set TMPDIR).")
    with tempfile.TemporaryDirectory(prefix="k3-wide-") as made:
        folder = given.model or Path(made) / "model"
        if given.model is None:
            make_tiny(folder, "wide")
        for trunk, kernels in ways:
            line = {"benchmark": "wide", **machine(), **run(folder, trunk, kernels)}
            print(json.dumps(line, indent=2))
            note(line)


if __name__ == "__main__":
    main()
