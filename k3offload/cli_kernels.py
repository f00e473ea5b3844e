"""The command ``kernels``: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_options import AsJson
from .errors import UsageError
from .progress import write_out


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(kernels)


def kernels(
    arch: Annotated[
        list[int] | None, typer.Option(help="Compute capability, like 89; all five if unset.")
    ] = None,
    candidates: Annotated[
        bool, typer.Option(help="What may stand in the tuning table beside the default.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compile every GPU kernel at K3's sizes, without a GPU: registers, memory, spills."""
    from .kernels.triton_run import ARCHITECTURES
    from .kernels_offline import as_json as stored
    from .kernels_offline import compile_all, compile_candidates, render

    wanted = arch or list(ARCHITECTURES)
    if unknown := [a for a in wanted if a not in ARCHITECTURES]:
        known = ", ".join(map(str, ARCHITECTURES))
        raise UsageError(f"--arch {unknown[0]} is not known.", f"Use {known}.")
    rows = compile_candidates(wanted) if candidates else compile_all(archs=wanted)
    write_out(stored(rows).rstrip() if as_json else render(rows))
    if spilled := [row for row in rows if row.decode and row.spilled]:
        write_out(f"{len(spilled)} kernels that run for every token spill registers.")
        raise typer.Exit(1)
    if large := [row for row in rows if not row.occupancy]:
        write_out(f"{len(large)} kernels need more than the architecture has.")
        raise typer.Exit(1)
