"""The command ``report``: parse, call, print."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .cli_options import at_least_one
from .config import show_size
from .errors import UsageError
from .paths import show_path
from .progress import Progress

RESULTS = (".jsonl", ".json")  #: how files of results end; all else is a trace


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("report")(report)


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE...", help="Traces, or .jsonl of benchmark results."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write, like R.html.")],
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="Like 25% or 64G, repeatable; 5, 12, 25, 50 and 75% if unset."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Or a policy_NAME.py; repeatable, all if unset.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Tokens of each trace to replay; all if unset.")
    ] = None,
    sweep: Annotated[
        list[int] | None, typer.Option(help="Whose timeline to draw, repeatable; three if unset.")
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Leave out results of runs that were not alone.")
    ] = False,
) -> None:
    """Write one page of HTML with curves, maps and tables of traces or results of benchmarks."""
    at_least_one(("--rows", rows))
    _check_place(out, sources)
    from .report_page import Page
    from .report_results import add_results
    from .report_trace import add_overview, add_trace

    names = ", ".join(path.name for path in sources)
    page = Page(f"k3offload report: {names}")
    lines = {}
    with Progress() as progress:
        for path in sources:
            if path.suffix in RESULTS:
                add_results(page, path, clean)
            else:
                made = add_trace(page, path, capacity, policy, rows, sweep, progress.show)
                lines[path.name if path.name not in lines else str(path)] = made
        if len(lines) > 1:
            with page.above():
                add_overview(page, lines)
        progress.clear()
        page.note(f"Made by k3offload {__version__}.")
        page.write(out)
        progress.say(f"{show_path(out)}, {show_size(out.stat().st_size)}")


def _check_place(out: Path, sources: list[Path]) -> None:
    """Before anything is computed.  Raises ``UsageError``."""
    real = Path(os.path.realpath(out))
    if real.is_dir():
        raise UsageError(f"{show_path(out)} is a folder.", "Name a file.")
    if not real.parent.is_dir():
        raise UsageError(
            f"{show_path(out)}: {show_path(real.parent)} is not a folder.", "Make it first."
        )
    for source in sources:
        there = Path(os.path.realpath(source))
        if real == there or there in real.parents:
            raise UsageError(
                f"{show_path(out)} would be written into {show_path(source)}, which it is about.",
                "Choose a place outside of it.",
            )
