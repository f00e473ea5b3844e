"""Everything about the GPU in one run of at most eight minutes, for a machine that has one.

    python -m benchmarks.gpu_suite [--seconds 480] [--only kernels|rule|budgets] [--tune] [--fake]

1. *kernels*: every operator by Triton at K3's sizes against its reference on the CPU, with fresh
   random inputs and memory that holds NaN; then its time over its floor, the longer of bytes over
   the measured bandwidth and multiply-adds over the measured rate.
2. *rule*: a small model in float32 and bfloat16 against the CPU's kernels, with all of the GPU's
   memory and with next to none of it: the same bits.
3. *budgets*: 4 layers of released width, and a checkpoint larger than its RAM budget, under 4, 8,
   16 and 24 GB of GPU memory: tokens a second, bytes of each tier, the shares of the measured rates
   of bus and disk, and how much of the copying was hidden (``gpu_budgets.py``).

``--tune`` measures the candidates of the tuning table instead and prints this GPU's entry.

One JSON line each, appended to ``benchmarks/results``, as soon as it is known; what is left out
for want of time or disk, and a kernel that fails, have lines too.  ``--fake`` runs the machinery on
the CPU, that of 1 and 2 with Triton's interpreter, at sizes that mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu_budgets import bus_rate, decode, disk_rate
from benchmarks.gpu_cases import SMALL, TOLERANCE, Case, cases, to
from benchmarks.gpu_tune import entry_text, tune
from benchmarks.run import machine, note
from k3offload.kernels.choose import OPS, TRITON, Kernels
from k3offload.kernels.triton_run import Sizes
from k3offload.kernels.workers import Workers
from k3offload.loading import load
from k3offload.make_tiny import make_tiny
from k3offload.open_device import open_device
from k3offload.tiers.device import Device
from k3offload.tiers.device_fake import FakeDevice

FAKE = "--fake" in sys.argv
BUDGETS = ("4G", "8G", "16G", "24G")
PROMPT, STEPS = 512, 16


def tell(line: dict[str, Any], device: Device) -> None:
    """Print a result and keep it."""
    line = {"benchmark": "gpu_suite", "device": device.name, **line}
    print(json.dumps(line), flush=True)
    if not FAKE:
        note({**machine(), **line})


def seconds_of(work: Callable[[], object], where: torch.device) -> float:
    """Seconds of one call, the least of a few, on the device's own clock."""
    if where.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    work()
    taken, event = list[float](), partial(cast(Any, torch.cuda.Event), enable_timing=True)
    for _ in range(7):
        first, last = event(), event()
        first.record()
        work()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) / 1e3)
    return min(taken)


def limits(device: Device) -> tuple[float, float]:
    """Bytes and multiply-adds a second that the device reaches in a plain copy and product."""
    size = 1 << 20 if FAKE else 1 << 30
    a = torch.empty(size, dtype=torch.uint8, device=device.where)
    b, n = torch.empty_like(a), 256 if FAKE else 8192
    x = torch.randn(n, n, device=device.where).bfloat16()
    moved = 2 * size / seconds_of(lambda: b.copy_(a), device.where)
    return moved, n**3 / seconds_of(lambda: x @ x, device.where)


def check(case: Case, reference: Kernels, kernels: Kernels, where: torch.device) -> float:
    """The largest error of a case over its largest value; fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        want = case.call(reference, to(case.inputs, torch.device("cpu")))
        got = case.call(kernels, to(case.inputs, where))
    finally:
        torch.use_deterministic_algorithms(False)
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        error = (a.cpu().double() - b.double()).abs().max() / b.double().abs().max()
        worst = max(worst, float(error) if torch.isfinite(error) else float("inf"))
    return worst


def run_tune(device: Device, left: Callable[[], float]) -> None:
    """What to put into ``kernels/tuning.json`` for this GPU."""
    kernels = Kernels(Workers(1), dict.fromkeys(OPS, TRITON) if FAKE else None, None, device.where)
    every = cases(SMALL if FAKE else Sizes(), seed=0, rows=64 if FAKE else PROMPT)
    where = device.where
    got = tune(
        every, kernels, where, lambda f: seconds_of(f, where), left, lambda line: tell(line, device)
    )
    tell(got, device)
    on_gpu = device.where.type == "cuda"
    name = torch.cuda.get_device_name(device.where) if on_gpu else device.name
    print(entry_text(name, got["entry"]))


def run_kernels(device: Device, left: Callable[[], float]) -> bool:
    """Part 1; whether every kernel was right."""
    workers, sizes = Workers(1), SMALL if FAKE else Sizes()
    kernels = Kernels(workers, dict.fromkeys(OPS, TRITON) if FAKE else None, None, device.where)
    reference = Kernels(workers, dict.fromkeys(OPS, "reference"))
    memory, macs = limits(device)
    tell({"part": "limits", "bytes_a_second": memory, "macs_a_second": macs}, device)
    fine = True
    for case in cases(sizes, seed=time.time_ns() % 2**31, rows=64 if FAKE else PROMPT):
        if left() < 0:
            tell({"part": "kernels", "stopped_before": case.name}, device)
            break
        try:
            error = check(case, reference, kernels, device.where)
            inputs = to(case.inputs, device.where)
            seconds = seconds_of(lambda: case.call(kernels, inputs), device.where)  # noqa: B023
        except Exception as failure:  # of one kernel says nothing of the others
            fine = False
            line = {"part": "kernels", "case": case.name, "right": False}
            tell({**line, "failed": repr(failure)[:300]}, device)
            continue
        floor = max(case.read / memory, case.macs / macs)
        right = error <= TOLERANCE
        fine &= right
        line = {"part": "kernels", "case": case.name, "error": error, "right": right}
        tell({**line, "seconds": seconds, "over_floor": seconds / floor}, device)
    return fine


def logits(folder: Path | str, steps: int, **options: Any) -> Any:
    """After a prompt and after each of a few tokens that are fed one by one."""
    with load(folder, context=256, **options) as engine, engine.session() as session:
        session.append([(7 * i) % 300 for i in range(20 if FAKE else 150)])
        rows = [session.logits()]
        for step in range(steps):
            session.append_sampled(11 * step + 3)
            rows.append(session.logits())
    return np.stack(rows)


def run_rule(make: Callable[[str], Device]) -> bool:
    """Part 2; whether the rule holds and budgets change no bit."""
    fine, kernels = True, dict.fromkeys(OPS, TRITON) if FAKE else {}
    with tempfile.TemporaryDirectory(prefix="k3-gpu-") as folder:
        make_tiny(Path(folder) / "m", "nano", layers=5, vision=False)
        for dtype, allowed in (("float32", 2e-4), ("bfloat16", 6e-2)):
            path, steps = Path(folder) / "m", 1 if FAKE else 4
            want = logits(path, steps, dtype=dtype, device="cpu")
            budgets = ("60M", "4M") if FAKE else ("2G", "640M")
            first, second = (
                logits(path, steps, dtype=dtype, device=make(vram), vram=vram, kernels=kernels)
                for vram in budgets
            )
            error = float(
                np.max(np.linalg.norm(first - want, axis=1) / np.linalg.norm(want, axis=1))
            )
            same = bool(np.array_equal(first, second))
            fine &= same and error <= allowed
            line = {"part": "rule", "dtype": dtype, "error": error, "same_bits": same}
            tell(line, make(budgets[0]))
    return fine


def run_budgets(make: Callable[[str], Device], left: Callable[[], float]) -> None:
    """Part 3."""
    models = [("nano", None, 0.0)] if FAKE else [("wide", None, 8e9), ("io-real", "6G", 14e9)]
    prompt, steps = (64, 4) if FAKE else (PROMPT, STEPS)
    for size, ram, need in models:
        room = shutil.disk_usage(tempfile.gettempdir()).free
        if left() < 60 or room < need:
            why = f"{left():.0f} seconds left, {room / 1e9:.0f} GB free, {need / 1e9:.0f} needed"
            tell({"part": "budgets", "model": size, "skipped": why}, make(""))
            continue
        with tempfile.TemporaryDirectory(prefix="k3-gpu-") as folder:
            make_tiny(Path(folder) / "m", size)
            bus = bus_rate(make(""), 1 << (16 if FAKE else 28))
            rates = bus, disk_rate(Path(folder) / "m", 0.1 if FAKE else 2.0)
            tell({"part": "rates", "model": size, "bus": rates[0], "disk": rates[1]}, make(""))
            for vram in ("5M", "9M") if FAKE else BUDGETS:
                if left() < 30:
                    skipped = {"vram": vram, "skipped": f"{left():.0f} seconds left"}
                    tell({"part": "budgets", "model": size, **skipped}, make(""))
                    continue
                device = make(vram)
                got = decode(Path(folder) / "m", device, rates, prompt, steps, vram=vram, ram=ram)
                tell({**got, "model": size, "vram": vram, "ram": ram}, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--only", choices=("kernels", "rule", "budgets"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--fake", action="store_true")
    given = parser.parse_args()
    if FAKE:  # read when a kernel's file is imported, which is when an engine chooses it
        os.environ["TRITON_INTERPRET"] = "1"
    end: float = time.monotonic() + given.seconds

    def left() -> float:
        return end - time.monotonic()

    def make(vram: str) -> Device:
        if FAKE:
            return FakeDevice(64 << 20)
        device, why = open_device("cuda")
        assert device is not None, why
        return device

    if given.tune:
        run_tune(make(""), left)
        return
    fine = True
    if given.only in (None, "kernels"):
        fine &= run_kernels(make(""), left)
    if given.only in (None, "rule"):
        fine &= run_rule(make)
    if given.only in (None, "budgets"):
        run_budgets(make, left)
    if not fine:
        raise SystemExit("A kernel or a rule does not hold: see the lines above.")


if __name__ == "__main__":
    main()
