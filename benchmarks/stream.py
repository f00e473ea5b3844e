"""Decode while experts stream from disk: how close a sweep comes to what bounds it.

    python -m benchmarks.stream [--model FOLDER] [--tokens 24] [--predict none --predict combined]

Without ``--model`` a checkpoint with experts of released size is made (12 GB) and deleted again.
For caches of 10, 25 and 50 % of the experts: seconds a sweep against the larger of (bytes read /
line rate) and compute alone, measured in the same run: the line rate by reading whole pages before
and after each case, compute alone with every expert in RAM.  The kernel's own account of bytes read
stands beside ours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import k3offload
from benchmarks.run import machine, note
from benchmarks.wide import Clock
from k3offload.bench_read import read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.engine import Engine
from k3offload.make_tiny import make_tiny
from k3offload.report import kernel_read_bytes
from k3offload.session import Session

SHARES = (0.10, 0.25, 0.50)
WARM = 8  #: tokens whose sweeps fill the cache and are not measured


def sweeps(engine: Engine, tokens: list[int]) -> list[float]:
    """Seconds of each decode sweep over ``tokens``, in a session of their own."""
    with engine.session() as session:
        session.append([1, 2, 3])
        session.logits()
        return decode(session, tokens)


def decode(session: Session, tokens: list[int]) -> list[float]:
    """Seconds of each decode sweep over ``tokens``."""
    seconds = []
    for token in tokens:
        begin = time.perf_counter()
        session.append_sampled(token)
        session.logits()
        seconds.append(time.perf_counter() - begin)
    return seconds


def disk_bytes(engine: Engine) -> int:
    """Bytes read so far by our account, what alignment added included."""
    return engine.disk.counts.bytes + engine.disk.counts.overhead


def measure(folder: Path, share: float, predict: str, tokens: list[int]) -> dict[str, Any]:
    """Figures of one cache size and predictor, the line rate measured before and after."""
    checkpoint = Checkpoint.open(folder)
    experts = checkpoint.spec.expert_count * checkpoint.expert_bytes
    before = read_rate(checkpoint, 1.5).rate
    with k3offload.load(
        folder, cache=int(experts * share), context=512, sweep=64, predict=predict
    ) as engine:
        sweeps(engine, tokens[:WARM])
        clock, processor = Clock(engine.kernels), time.thread_time()
        counts, disk, kernel = engine.counts()["experts"], disk_bytes(engine), kernel_read_bytes()
        seconds = sweeps(engine, tokens[WARM:])
        outside = time.thread_time() - processor - clock.seconds
        after = engine.counts()["experts"]
        ours, read = disk_bytes(engine) - disk, kernel_read_bytes() - kernel
    rate = statistics.mean((before, read_rate(checkpoint, 1.5).rate))
    asked = after.requests - counts.requests
    wasted = (after.wasted - counts.wasted) * checkpoint.expert_bytes
    total, moved = sum(seconds), after.bytes - counts.bytes
    return {
        "share": share,
        "predict": predict,
        "seconds_a_sweep": total / len(seconds),
        "hit_rate_by_requests": (after.hits - counts.hits) / asked,
        "late": (after.late - counts.late) / asked,
        "bytes": moved,
        "line_rate": rate,
        "read_seconds_a_sweep": moved / rate / len(seconds),
        "line_used": (moved - wasted) / (total * rate),
        "waited_share": (after.wait_seconds - counts.wait_seconds) / total,
        "outside_kernels": outside / total,  # processor time of the calling thread
        "our_bytes_with_alignment": ours,
        "kernel_bytes": read,
    }


def run(folder: Path, count: int, predictors: list[str]) -> dict[str, Any]:
    tokens = [(37 * i) % 4001 for i in range(WARM + count)]
    with k3offload.load(folder, context=512, sweep=64) as engine:
        sweeps(engine, tokens)  # brings every page
        alone = statistics.median(sweeps(engine, tokens)[WARM:])
        missing = engine.plan.experts - engine.plan.slots
    cases = [measure(folder, s, p, tokens) for s in SHARES for p in predictors]
    for case in cases:
        bound = max(alone, case["read_seconds_a_sweep"])
        case["ratio_to_bound"] = case["seconds_a_sweep"] / bound
    return {"compute_alone_seconds": alone, "experts_not_in_ram_then": missing, "cases": cases}


def need_room(gigabytes: int) -> None:
    """End where the folder for temporary files has less than that free."""
    if shutil.disk_usage(tempfile.gettempdir()).free < gigabytes * 1e9:
        raise SystemExit(f"{gigabytes} GB are needed in {tempfile.gettempdir()} (set TMPDIR).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--predict", action="append")
    given = parser.parse_args()
    predictors = given.predict or ["none", "combined"]
    if given.model is not None:
        facts = run(given.model, given.tokens, predictors)
    else:
        need_room(16)
        with tempfile.TemporaryDirectory(prefix="k3-stream-") as made:
            make_tiny(Path(made) / "model", "io-real")
            facts = run(Path(made) / "model", given.tokens, predictors)
    line = {"benchmark": "stream", **machine(), **facts}
    print(json.dumps(line, indent=2))
    note(line)


if __name__ == "__main__":
    main()
