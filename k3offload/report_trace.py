"""The part of a report that is about one trace: its sections, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .errors import UsageError
from .report_page import Page
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
) -> None:
    """All that the trace at ``path`` allows.  Raises ``UsageError``."""
    trace = read_trace(path, PARTS)
    if not len(trace.best):
        raise UsageError(f"{path} holds no token.", "Record a whole sweep.")
    rooms = rooms_of(trace, capacities)
    page.part(path.name)
    page.say(about_trace(trace))
    add_facts(page, trace)
    add_policies(page, trace, rooms, policies, rows, tell)
    add_precision(page, trace)
    add_experts(page, trace)
    add_timelines(page, trace, sweeps)
    add_mixing(page, trace)
    add_margins(page, trace)
