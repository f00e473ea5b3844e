"""The memory plan in words and as plain data.  Knows ``Plan`` and nothing of engines or torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .config import show_size
from .scheduler.plan import Plan


def lowered(plan: Plan, cache: int | None, sweep: int | None) -> list[str]:
    """What was asked for (``cache`` in bytes, ``sweep`` in tokens) and is less in the plan."""
    notes = []
    if cache is not None and not plan.experts:
        notes.append("--cache has no effect: this model has no routed experts.")
    elif cache is not None and plan.slots < min(plan.experts, cache // plan.slot_bytes):
        notes.append(
            f"--cache {cache:,} is lowered to {plan.slots * plan.slot_bytes:,} bytes, "
            f"{plan.slots:,} experts: more does not fit."
        )
    if sweep is not None and sweep > plan.sweep_rows:
        notes.append(f"--sweep is lowered to {plan.sweep_rows} tokens: more does not fit.")
    return notes


def plan_facts(plan: Plan, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The memory plan as plain data; sizes in bytes.  ``notes`` join those of the plan."""
    held = "ram" if plan.place == "RAM" else "device"
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
        "place": plan.place,
        "summaries_in_ram": plan.summaries,
        "latents": None if plan.latents is None else {held: plan.latents, "all": plan.all_latents},
        "device": None if plan.device is None else plan_facts(plan.device),
        "notes": [*plan.notes, *notes],
    }


def plan_lines(plan: Plan, notes: Sequence[str] = ()) -> list[str]:
    """The plan as a person reads it, printed before anything is loaded."""
    width = max(len(name) for name, _ in plan.purposes)
    lines = [f"note: {note}" for note in [*plan.notes, *notes]]
    if plan.device is not None:
        lines += plan_lines(plan.device)
    lines.append(f"memory plan of {plan.place}, {show_size(plan.limit)} allowed:")
    lines += [f"  {name:{width}}  {show_size(size):>8}" for name, size in plan.purposes if size]
    lines.append(f"  {'sum':{width}}  {show_size(plan.total):>8}")
    if plan.experts:
        share = 100 * plan.slots / plan.experts
        lines.append(f"  {plan.slots:,} of {plan.experts:,} experts fit ({share:.3g} %)")
    if plan.latents is not None:
        lines.append(f"  {_latents(plan, plan.latents)}")
    if plan.summaries is not None:
        lines.append(
            "  a part of a sweep's block summaries stays in RAM; the others go to files in "
            "--scratch, and each layer reads them twice"
        )
    streamed = len(plan.layer_sizes) - len(plan.resident_layers)
    if streamed:
        size = sum(s for i, s in enumerate(plan.layer_sizes) if i not in plan.resident_layers)
        how = "read" if plan.place == "RAM" else "copied"
        lines.append(
            f"  the trunk of {streamed} of {len(plan.layer_sizes)} layers is {how} anew for each "
            f"sweep ({show_size(size)})"
        )
    return lines


def _latents(plan: Plan, held: int) -> str:
    """What becomes of those that have no room."""
    every = f"{show_size(plan.all_latents)} of latents (at full context)"
    if plan.place != "RAM":
        return (
            f"of {every} the newest stay on the device; the others go to RAM, and each step copies "
            "them"
        )
    if held >= plan.all_latents:
        return f"{every} have room here, and none go to files in --scratch"
    return (
        f"of {every} the newest stay in RAM; the others go to files in --scratch, and each step "
        "reads them"
    )
