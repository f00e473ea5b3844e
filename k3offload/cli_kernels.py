"""The command ``kernels``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_open import as_text
from .cli_options import AsJson
from .errors import UsageError
from .paths import show_path
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
    known: Annotated[
        Path | None,
        typer.Option(help="An earlier --json; what is as it was there is not compiled."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile every GPU kernel at K3's sizes, without a GPU: registers, memory, spills."""
    from .kernels.triton_run import ARCHITECTURES
    from .kernels_offline import as_json as stored
    from .kernels_offline import compile_all, compile_candidates, read_json, render

    wanted = arch or list(ARCHITECTURES)
    if unknown := [a for a in wanted if a not in ARCHITECTURES]:
        every = ", ".join(map(str, ARCHITECTURES))
        raise UsageError(f"--arch {unknown[0]} is not known.", f"Use {every}.")
    if candidates and known is not None:
        raise UsageError("--known is about the usual table.", "Leave out --candidates, or it.")
    found = [] if known is None else read_json(as_text(known.read_bytes(), show_path(known)))
    rows = compile_candidates(wanted) if candidates else compile_all(archs=wanted, known=found)
    write_out(stored(rows).rstrip() if as_json else render(rows))
    if spilled := [row for row in rows if row.decode and row.spilled]:
        write_out(f"{len(spilled)} kernels that run for every token spill registers.")
        raise typer.Exit(1)
    if large := [row for row in rows if not row.occupancy]:
        write_out(f"{len(large)} kernels need more than the architecture has.")
        raise typer.Exit(1)
