"""What a run used, in numbers: the form ``--json`` prints and the lines a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import psutil

from .config import show_size
from .engine import Engine
from .kernels.choose import NATIVE
from .machine import peak_rss
from .scheduler.plan import Plan


def kernel_read_bytes() -> int:
    """Bytes the kernel says this process has read from storage (``/proc/self/io``)."""
    counters = psutil.Process().io_counters()
    return int(counters.read_bytes)


def lowered(plan: Plan, cache: int | None, sweep: int) -> list[str]:
    """What was asked for (``cache`` in bytes, ``sweep`` in tokens) and is less in the plan."""
    notes = []
    if cache is not None and not plan.experts:
        notes.append("--cache has no effect: this model has no routed experts.")
    elif cache is not None and plan.slots < min(plan.experts, cache // plan.slot_bytes):
        notes.append(
            f"--cache {cache:,} is lowered to {plan.slots * plan.slot_bytes:,} bytes, "
            f"{plan.slots:,} experts: more does not fit."
        )
    if sweep > plan.sweep_rows:
        notes.append(f"--sweep is lowered to {plan.sweep_rows} tokens: more does not fit.")
    return notes


def plan_facts(plan: Plan, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The memory plan as plain data; sizes in bytes.  ``notes`` join those of the plan."""
    return {
        "limit": plan.limit,
        "total": plan.total,
        "purposes": dict(plan.purposes),
        "expert_slots": plan.slots,
        "experts": plan.experts,
        "resident_layers": sorted(plan.resident_layers),
        "embed_resident": plan.embed_resident,
        "head_resident": plan.head_resident,
        "sweep_tokens": plan.sweep_rows,
        "notes": [*plan.notes, *notes],
    }


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
    }


def kernel_facts(engine: Engine) -> dict[str, Any]:
    """What computes: the device, the instruction set and the backend of each operator."""
    kernels = engine.kernels
    return {"device": "cpu", "isa": kernels.isa, "why": kernels.why, "operators": kernels.chosen}


def kernel_line(engine: Engine) -> str:
    """The same as a person reads it."""
    kernels = engine.kernels
    other = [f"{op}={backend}" for op, backend in kernels.chosen.items() if backend != NATIVE]
    if len(other) == len(kernels.chosen):
        return f"device: cpu, torch kernels. {kernels.why}".rstrip()
    beside = f"; not native: {', '.join(other)}" if other else ""
    return f"device: cpu, {kernels.why}{beside}"


def memory_facts(engine: Engine) -> dict[str, int]:
    """Planned and measured memory of this process, bytes."""
    return {"planned": engine.planned, "limit": engine.plan.limit, "peak_rss": peak_rss()}


def plan_lines(plan: Plan, notes: Sequence[str] = ()) -> list[str]:
    """The plan as a person reads it, printed before anything is loaded."""
    width = max(len(name) for name, _ in plan.purposes)
    lines = [f"note: {note}" for note in [*plan.notes, *notes]]
    lines.append(f"memory plan, {show_size(plan.limit)} allowed:")
    lines += [f"  {name:{width}}  {show_size(size):>8}" for name, size in plan.purposes if size]
    lines.append(f"  {'sum':{width}}  {show_size(plan.total):>8}")
    if plan.experts:
        share = 100 * plan.slots / plan.experts
        lines.append(f"  {plan.slots:,} of {plan.experts:,} experts fit in RAM ({share:.3g} %)")
    streamed = len(plan.layer_sizes) - len(plan.resident_layers)
    if streamed:
        size = sum(s for i, s in enumerate(plan.layer_sizes) if i not in plan.resident_layers)
        lines.append(
            f"  the trunk of {streamed} of {len(plan.layer_sizes)} layers is read anew for each "
            f"sweep ({show_size(size)})"
        )
    return lines


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
    memory = memory_facts(engine)
    lines.append(
        f"memory: {show_size(memory['planned'])} planned, {show_size(memory['peak_rss'])} at most"
    )
    return lines
