"""The part of a report that is about one trace: its sections, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError
from .report_page import Cell, Page
from .report_routing import (
    Tell,
    about_trace,
    add_experts,
    add_facts,
    add_margins,
    add_mixing,
    add_policies,
    add_precision,
    rooms_of,
)
from .report_tiers import add_timelines
from .trace import read_trace

PARTS = ("ahead", "margin", "mixing", "tiers")


def add_trace(
    page: Page,
    path: Path,
    capacities: Sequence[str] | None,
    policies: Sequence[str] | None,
    rows: int | None,
    sweeps: Sequence[int] | None,
    tell: Tell,
) -> list[dict[str, Any]]:
    """All that the trace at ``path`` allows.  Returns the lines of ``bench policies``.  Raises
    ``UsageError``."""
    trace = read_trace(path, PARTS)
    if not len(trace.best):
        raise UsageError(f"{path} holds no token.", "Record a whole sweep.")
    rooms = rooms_of(trace, capacities)
    page.part(path.name)
    page.say(about_trace(trace))
    add_facts(page, trace)
    lines = add_policies(page, trace, rooms, policies, rows, tell)
    add_precision(page, trace)
    add_experts(page, trace)
    add_timelines(page, trace, sweeps)
    add_mixing(page, trace)
    add_margins(page, trace)
    return lines


def add_overview(page: Page, found: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Which policy at which budget: of several traces, by name, lines of ``bench policies``."""
    page.part("Which policy at which budget")
    page.say(
        "Bytes that each policy reads, as a share of what LRU reads with the same budget: on each "
        "trace, and the mean over them. MIN is Belady's optimum, which knows the future."
    )
    shares: dict[tuple[str, str], dict[str, float]] = {}  # of a capacity and a policy, by trace
    for name, lines in found.items():
        for line in lines:
            for policy, size in ((line["policy"], line["bytes"]), ("MIN", line["min_bytes"])):
                of = shares.setdefault((line["capacity"], policy), {})
                of[name] = 100 * size / line["lru_bytes"]
    best: list[tuple[str, ...]] = []
    rows: list[tuple[Cell, ...]] = []
    for place in dict.fromkeys(place for place, _ in shares):
        here = {policy: of for (where, policy), of in shares.items() if where == place}
        means = {policy: sum(of.values()) / len(of) for policy, of in here.items()}
        bound = here.pop("MIN")
        least = [
            min(here, key=lambda p, n=name, h=here: h[p][n]) if name in bound else "-"  # type: ignore[misc]
            for name in found
        ]
        best.append((place, *least, min(here, key=means.__getitem__)))
        for policy, of in {**here, "MIN": bound}.items():
            rows.append((place, policy, *(of.get(name) for name in found), means[policy]))
    page.table("Fewest bytes", ("capacity", *found, "all"), best)
    page.table("Bytes, % of LRU's", ("capacity", "policy", *found, "mean"), rows)
