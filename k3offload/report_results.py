"""What a report says of a file of benchmark results: medians of repetitions, a table for each kind
of line, and curves where policies were compared.  Knows what ``bench_compare`` knows of lines."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from .bench_compare import by_kind, samples
from .errors import UsageError
from .report_page import Page
from .report_routing import policy_figures

POLICIES = "policies"  #: the name of this benchmark


def add_results(page: Page, path: Path, clean: bool) -> None:
    """All of ``path``.  Raises ``UsageError`` where it holds no results."""
    kinds = by_kind(path, clean)
    if not kinds:
        raise UsageError(f"{path} holds no results.", "Give a JSON object a line.")
    page.part(f"{path.name}: results of benchmarks")
    lines = [line for some in kinds.values() for line in some]
    _add_policies(page, [line for line in lines if line.get("benchmark") == POLICIES])
    for some in kinds.values():
        if some[0].get("benchmark") != POLICIES:
            _add_kind(page, some)


def _add_policies(page: Page, lines: list[dict[str, Any]]) -> None:
    """A pair of curves for each trace, predictor and tier."""

    def key(line: dict[str, Any]) -> tuple[str, str, int]:
        return line["trace"], line["predictor"], line["tier"]

    for (trace, predictor, tier), some in groupby(sorted(lines, key=key), key):
        page.section(f"Policies on trace {trace}, predictor {predictor}, tier {tier}")
        policy_figures(page, sorted(some, key=lambda line: int(line["slots"])))


def _add_kind(page: Page, lines: list[dict[str, Any]]) -> None:
    first = lines[0]
    page.section(str(first.get("benchmark", "Results of no named benchmark")))
    found = samples(lines)
    told = {
        name: value
        for name, value in first.items()
        if isinstance(value, str | bool | int) and name not in (*found, "benchmark")
        if all(line.get(name) == value for line in lines)
    }
    page.note(", ".join(f"{name} {value}" for name, value in told.items()))
    beside = sum(line.get("clean") is False for line in lines)
    if beside:
        page.note(f"{beside} of {len(lines)} runs were not alone on the machine.")
    page.table(
        "Figures",
        ("figure", "lines", "median", "least", "most"),
        [
            (name, len(some), float(np.median(some)), min(some), max(some))
            for name, some in found.items()
        ],
    )
