"""The command ``evaluate operators``: parse, call, print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import AsJson, How, Model, loading_options, takes_how
from .progress import Progress, loading_libraries, write_out

if TYPE_CHECKING:
    from .evaluate_operators import Operators


def add_to(group: typer.Typer) -> None:
    """Register the command."""
    group.command("operators")(operators)


@takes_how("prefix_dir", "prefix_disk", "sweep", "latent_dtype", "predict", "policy", "latents",
           "summaries", "scratch", "adaptive_backend", "trace", "trace_with")  # fmt: skip
def operators(
    how: How,
    model: Model,
    seed: Annotated[int, typer.Option(help="Draws the rows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Every operator and format of MODEL against its reference, and what serves it."""
    with Progress() as progress:
        with loading_libraries(progress):
            from .evaluate_operators import operators as check
            from .options import Watch
        watch = Watch(warn=lambda line: progress.say(f"warning: {line}"))
        found = check(model, seed=seed, show=progress.show, watch=watch, **loading_options(how))
    write_out(json.dumps(found.to_dict()) if as_json else render(found))
    if not found.fine:
        raise typer.Exit(1)


def render(found: Operators) -> str:
    """A line for each operator, format and kind of rows, then verdicts."""
    isa = f"native kernels for {found.isa}" if found.isa else "no native kernels"
    lines = [
        f"activations in {found.dtype}, {isa}",
        f"{'operator':12}{'weights':18}{'rows':8}{'at':6}{'served by':11}{'error':>9}{'allowed':>9}"
        f"{'speed':>8}",
    ]
    for row in found.rows:
        error = "itself" if row.itself else f"{row.error:.1e}"
        lines.append(
            f"{row.part:12}{row.weights or '-':18}{row.kind:8}{row.where:6}{row.served_by:11}"
            f"{error:>9}{row.tolerance:9.1e}{row.speed:7.1f}x" + ("" if row.fine else "  TOO LARGE")
        )
    lines.append("error: the largest, of the largest value of the reference, computed in float32;")
    lines.append("speed: how many times faster than that")
    lines += [f"slow path: {line}" for line in found.slow]
    if not found.slow:
        lines.append("nothing fell back to a slow path")
    wrong = [row for row in found.rows if not row.fine]
    for row in wrong:
        lines.append(f"wrong: {row.part} by {row.served_by}, {row.weights} {row.worst}".rstrip())
    if not wrong:
        lines.append(f"all {len(found.rows)} are within what rounding allows")
    return "\n".join(lines)
