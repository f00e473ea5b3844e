"""``k3offload doctor``: what this machine can do for this program, each fact with a verdict.

System facts come from ``doctor_system``, speeds from ``measure``; with a model also its reads and
whether it fits.  Figures are held against what the machine itself reaches in a plain scan or one
large product, never against another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from . import doctor_system as system
from .config import show_size
from .doctor_system import Fact
from .errors import DoesNotFit
from .rates import EXPERTS, FORMATS, Rates
from .scheduler.plan import Plan

ENOUGH: Final = 0.6  #: of what the machine reaches, for kernels
REBUILD: Final = "Install again with a C++ compiler: pip install --force-reinstall k3offload."
BUSY: Final = "End other programs and try again; with fewer threads if some processors are shared."


def system_facts(
    origins: Mapping[str, tuple[Any, str]], root: Path = system.ROOT, why_no_gpu: str = ""
) -> list[Fact]:
    """Facts that need no measurement.  ``why_no_gpu``: empty if one computes."""
    return [
        system.memory(root),
        *system.limits(root),
        system.numa(root),
        system.gpu(root, why_no_gpu),
        system.settings(origins),
    ]


def kernel_fact(isas: Sequence[str], isa: str | None, why: str, chosen: Mapping[str, str]) -> Fact:
    """Which kernels serve: ``isa`` None means the torch reference, ``why`` says the reason."""
    data = {"isas": list(isas), "isa": isa, "chosen": dict(chosen)}
    if isa is None:
        return Fact("kernels", "slow", f"torch only: {why}", REBUILD, data)
    plain = sorted(op for op, backend in chosen.items() if backend != "native")
    text = f"native, {isa} (of {', '.join(isas)})"
    if plain:
        text += f"; torch for {', '.join(plain)}"
    return Fact("kernels", "good", text, "", data)


def speed_facts(
    threads: int, copy: float, products: Mapping[str, float], rates: Rates, native: bool
) -> list[Fact]:
    """Speeds of memory, torch products and our own kernels; rates in units a second."""
    gb, g = 1e9, 1e9
    facts = [
        Fact(
            "memory bandwidth",
            "good",
            f"{rates.ram / gb:.1f} GB/s read, {copy / gb:.1f} GB/s copied, {threads} threads",
            "",
            {"read": rates.ram, "copy": copy, "threads": threads},
        ),
        Fact(
            "large products",
            "good",
            ", ".join(f"{name} {rate / g:.0f} GMAC/s" for name, rate in products.items()),
            "",
            dict(products),
        ),
    ]
    remedy = BUSY if native else REBUILD
    for kind in (*FORMATS, EXPERTS):
        share = rates.stream[kind] / rates.ram
        text = f"{rates.stream[kind] / gb:.1f} GB/s of weights, {100 * share:.0f} % of a plain scan"
        data = {"rate": rates.stream[kind], "share": share}
        facts.append(_judged(f"decode, {_named(kind)}", text, share, remedy, data))
    mark = max(products.values())
    for kind in (*FORMATS, EXPERTS):
        share = rates.macs[kind] / mark
        text = f"{rates.macs[kind] / g:.0f} GMAC/s, {100 * share:.0f} % of a large product"
        data = {"rate": rates.macs[kind], "share": share}
        facts.append(_judged(f"prompt, {_named(kind)}", text, share, remedy, data))
    return facts


def _named(kind: str) -> str:
    return "experts" if kind == EXPERTS else f"{kind} trunk"


def _judged(name: str, text: str, share: float, remedy: str, data: Mapping[str, Any]) -> Fact:
    fine = share >= ENOUGH
    return Fact(name, "good" if fine else "slow", text, "" if fine else remedy, data)


def model_facts(
    plan: Callable[[], Plan], rate: float, mode: str, notes: Sequence[str] = ()
) -> list[Fact]:
    """Whether a model fits (``plan`` raises ``DoesNotFit``), and its reads: bytes a second, direct
    or buffered, and what to know about the figure."""
    try:
        made = plan()
        text = f"fits: {show_size(made.total)} of {show_size(made.limit)}, {made.slots:,} experts"
        data = {"total": made.total, "limit": made.limit, "slots": made.slots}
        fits = Fact("plan", "good", text, "", data)
    except DoesNotFit as error:
        data = {"missing": error.missing}
        fits = Fact("plan", "problem", error.problem, error.remedy, data)
    text = " ".join([f"{rate / 1e9:.2f} GB/s by our own pattern, {mode} reads.", *notes])
    remedy = "This file system refuses direct reads; put the model on a local disk (ext4, xfs)."
    reads: dict[str, Any] = {"rate": rate, "mode": mode, "notes": list(notes)}
    if mode == "direct":
        return [fits, Fact("reads", "good", text, "", reads)]
    return [fits, Fact("reads", "slow", text, remedy, reads)]


def fine(facts: Sequence[Fact]) -> bool:
    """Whether nothing makes running impossible."""
    return all(fact.verdict != "problem" for fact in facts)


def to_dict(facts: Sequence[Fact]) -> dict[str, Any]:
    """The form ``doctor --json`` prints."""
    device = next((fact.data["device"] for fact in facts if fact.name == "device"), "cpu")
    return {"device": device, "fine": fine(facts), "facts": [asdict(fact) for fact in facts]}


def render(facts: Sequence[Fact]) -> str:
    """A line for each fact, its remedy below."""
    width = max(len(fact.name) for fact in facts)
    lines = []
    for fact in facts:
        lines.append(f"{fact.verdict:8}{fact.name:{width}}  {fact.text}")
        if fact.remedy:
            lines.append(f"{'':8}{'':{width}}  -> {fact.remedy}")
    lines.append("Nothing keeps it from running." if fine(facts) else "It cannot run like this.")
    return "\n".join(lines)
