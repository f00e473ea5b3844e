"""What a run used, in numbers: the form ``--json`` prints and the lines a person reads."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import psutil

from .config import show_size
from .engine import Engine
from .kernels.choose import NATIVE
from .machine import peak_rss
from .tiers.spill_files import SpillCounts


def kernel_read_bytes() -> int:
    """Bytes the kernel says this process has read from storage (``/proc/self/io``)."""
    counters = psutil.Process().io_counters()
    return int(counters.read_bytes)


def tier_facts(engine: Engine) -> dict[str, Any]:
    """Requests, hits, late, misses, bytes and seconds waited: per tier and kind of page."""
    counts = engine.counts()
    disk = engine.disk.counts
    return {
        "ram": {kind: asdict(count) for kind, count in counts.items()},
        "disk": {
            "reads": disk.reads,
            "bytes": disk.bytes,
            "alignment_overhead_bytes": disk.overhead,
            "retries": disk.retries,
            "modes": dict(disk.modes),
        },
        "scratch": None if engine.spilling is None else engine.spilling.facts(),
        "device_latents": None if (c := _device_latents(engine)) is None else asdict(c),
    }


def _device_latents(engine: Engine) -> SpillCounts | None:
    """What left a device's memory and came back; None where all of it has room there."""
    there = engine.accelerator
    return None if there is None or there.latents is None else there.latents.counts


def kernel_facts(engine: Engine) -> dict[str, Any]:
    """What computes: the device, the instruction set and the backend of each operator."""
    kernels, there = engine.kernels, engine.accelerator
    return {
        "device": "cpu" if there is None else there.device.name,
        "device_why": engine.device_line,
        "isa": kernels.isa,
        "why": kernels.why,
        "operators": kernels.chosen,
        "placed": None if there is None else there.placed._asdict(),
        "device_operators": None if there is None else there.kernels.chosen,
        "compile_seconds": 0.0 if there is None else there.compile_seconds,
    }


def kernel_line(engine: Engine) -> str:
    """The same as a person reads it."""
    kernels, there = engine.kernels, engine.accelerator
    other = [f"{op}={backend}" for op, backend in kernels.chosen.items() if backend != NATIVE]
    if len(other) == len(kernels.chosen):
        cpu = f"torch kernels. {kernels.why}".rstrip()
    else:
        beside = f"; not native: {', '.join(other)}" if other else ""
        cpu = f"{kernels.why}{beside}"
    if there is None:
        return f"{engine.device_line}, {cpu}"
    layers, head, experts = there.placed
    parts = [f"{layers} of {len(engine.spec.layers)} layers"]
    parts += ["the head"] * head + ["the experts"] * experts
    compiled = f" (compiled in {there.compile_seconds:.1f} s)" if there.compile_seconds else ""
    return f"{engine.device_line} computes {', '.join(parts)}{compiled}; the cpu the rest: {cpu}"


def memory_facts(engine: Engine) -> dict[str, int]:
    """Planned and measured memory of this process, bytes."""
    return {"planned": engine.planned, "limit": engine.plan.limit, "peak_rss": peak_rss()}


def tier_lines(engine: Engine) -> list[str]:
    """The tier figures as a person reads them."""
    lines = []
    for kind, c in engine.counts().items():
        if c.requests:
            share = f"{100 * c.hits / c.requests:.1f} %"
            lines.append(
                f"{kind}: {c.requests:,} requests, {c.hits:,} hits ({share}), {c.late:,} late, "
                f"{c.misses:,} misses, {show_size(c.bytes)} read, {c.wait_seconds:.2f} s waited"
            )
        if c.prefetches:
            lines.append(
                f"  read ahead: {c.prefetches:,}, of these {c.useful:,} asked for, {c.wasted:,} "
                f"not ({show_size(c.prefetch_bytes)})"
            )
    disk = engine.disk.counts
    modes = ", ".join(sorted(set(disk.modes.values()))) or "nothing read"
    lines.append(
        f"disk: {disk.reads:,} reads ({modes}), {show_size(disk.bytes)}, alignment added "
        f"{show_size(disk.overhead)}"
    )
    if engine.spilling is not None:
        lines += [
            f"{what} on disk: {show_size(c['written_bytes'])} written, "
            f"{show_size(c['read_bytes'])} of the reads, {c['wait_seconds']:.2f} s waited"
            for what, c in engine.spilling.facts().items()
        ]
    if (moved := _device_latents(engine)) is not None:
        lines.append(
            f"latents of the device: {show_size(moved.written_bytes)} moved to RAM, "
            f"{show_size(moved.read_bytes)} copied back, {moved.wait_seconds:.2f} s waited"
        )
    memory = memory_facts(engine)
    lines.append(
        f"memory: {show_size(memory['planned'])} planned, {show_size(memory['peak_rss'])} at most"
    )
    return lines
