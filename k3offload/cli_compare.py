"""The command ``bench compare``: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import AsJson
from .progress import write_out

if TYPE_CHECKING:
    from .bench_compare import Comparison, Side


def add_to(bench: typer.Typer) -> None:
    """Register the command."""
    bench.command("compare")(compare)


def compare(
    a: Annotated[Path, typer.Argument(help="Results before: a JSON object a line.")],
    b: Annotated[Path, typer.Argument(help="Results after.")],
    clean: Annotated[
        bool, typer.Option("--clean", help="Leave out lines of runs that were not alone.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Draws the samples.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Whether the figures of B differ from those of A, beyond what repetitions differ by."""
    from .bench_compare import compare as judge

    found = judge(a, b, clean=clean, seed=seed)
    write_out(json.dumps(found.to_dict()) if as_json else render(found))


def render(found: Comparison) -> str:
    """A table for each kind of line."""
    from .bench_compare import FEW

    lines = []
    for kind in found.kinds:
        lines.append(f"{_told(kind.settings)}: A {_side(kind.a)}, B {_side(kind.b)}")
        wide = max((len(figure.name) for figure in kind.figures), default=0)
        for one in kind.figures:
            ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
            sure = "" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
            lines.append(
                f"  {one.name:{wide}}{one.a:14.6g}{one.b:14.6g}{ratio:>9}  {sure:18}{one.verdict}"
            )
    lines.append("columns: median of A, median of B, B over A, its 95 % interval, verdict")
    judged = sum(
        one.verdict != FEW for kind in found.kinds if not kind.counted for one in kind.figures
    )
    if judged:
        lines.append(f"where nothing changed, about {judged / 20:.0f} of {judged} would differ too")
    for side, rest in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"only in {side}, not compared: {_told(settings)}" for settings in rest]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _told(settings: dict[str, Any]) -> str:
    rest = [f"{name} {value}" for name, value in settings.items() if name != "benchmark"]
    return ", ".join([str(settings.get("benchmark", "no named benchmark")), *rest])


def _side(side: Side) -> str:
    """Like ``4 lines (1 contended)``."""
    marks = [f"{n} {what}" for n, what in
             ((side.contended, "contended"), (side.unknown, "not said")) if n]  # fmt: skip
    return f"{side.lines} lines" + (f" ({', '.join(marks)})" if marks else "")
