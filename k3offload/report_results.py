"""What a report says of a file of benchmark results: medians of repetitions, a table for each kind
of line, and curves where policies were compared.  Knows what ``bench_compare`` knows of lines."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from .bench_compare import by_kind, samples
from .config import show_size
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
    _add_policies(page, [some for some in kinds.values() if some[0].get("benchmark") == POLICIES])
    for some in kinds.values():
        if some[0].get("benchmark") != POLICIES:
            _add_kind(page, some)


def _add_policies(page: Page, kinds: list[list[dict[str, Any]]]) -> None:
    """A pair of curves for each trace, predictor, tier and modelled disk, of medians."""

    def key(line: dict[str, Any]) -> tuple[Any, ...]:
        modelled = (
            line.get(name, 0) for name in ("disk_rate", "latency", "layer_seconds", "page_seconds")
        )
        return (*(line[name] for name in ("trace", "predictor", "tier", "rows")), *modelled)

    middle = sorted(map(_middle, kinds), key=key)
    for (trace, predictor, tier, rows, rate, *_), same in groupby(middle, key):
        disk = f", a disk of {show_size(int(rate))}/s" if rate else ""
        page.section(
            f"Policies on {rows} tokens of trace {trace}, predictor {predictor}, tier {tier}{disk}"
        )
        some = sorted(same, key=lambda line: int(line["slots"]))
        most = max(line["lines"] for line in some)
        if most > 1:
            page.note(f"Medians of up to {most} lines.")
        policy_figures(page, some)


def _middle(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the medians of ``lines``, which are repeats of one another."""
    middle = {name: float(np.median(some)) for name, some in samples(lines).items()}
    whole = {name: int(x) if x.is_integer() else x for name, x in middle.items()}
    return {**lines[0], **whole, "lines": len(lines)}


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
