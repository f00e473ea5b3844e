"""The command ``bench read``: parse, call, print.  ``bench compare`` has a file of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from . import cli_compare
from .cli_options import AsJson, Model
from .config import show_size
from .errors import UsageError
from .find import find_model
from .progress import Progress, write_out

if TYPE_CHECKING:
    from .bench_read import Comparison


def add_to(app: typer.Typer) -> None:
    """Register ``bench`` and what it can measure."""
    bench = typer.Typer(help="Measure parts of this machine.", no_args_is_help=True)
    bench.callback()(_group)
    bench.command("read")(read)
    cli_compare.add_to(bench)
    app.add_typer(bench, name="bench")


def _group() -> None:
    """Measure parts of this machine."""


def read(
    model: Model,
    seconds: Annotated[float, typer.Option(help="Time of the whole measurement.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Draws the pages.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Read random pages of MODEL as a run does, beside fio where that is installed."""
    from .bench_read import compare
    from .checkpoint import Checkpoint

    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds is {seconds}.", "It must be more than 0 and at most 3600.")
    checkpoint = Checkpoint.open(find_model(model))
    with Progress() as progress:
        found = compare(checkpoint, seconds, seed, progress.show)
    write_out(json.dumps(found.to_dict()) if as_json else render(found))


def render(found: Comparison) -> str:
    """Two rates, their ratio and what to know about them."""
    from .bench_read import ENGINES, ENOUGH

    ours = found.ours
    lines = [
        f"read at random: {ours.pages:,} {ours.what} of {show_size(ours.page_bytes)}, "
        f"{show_size(ours.drawn_bytes)} in all",
        f"ours   {ours.rate / 1e9:6.3f} GB/s  {ours.mode} reads, {ours.reads:,} pages in "
        f"{ours.seconds:.1f} s, {ours.processors:.2f} processors busy",
    ]
    if found.fio is None or found.ratio is None:
        lines.append(f"not compared: {found.why_not}")
    else:
        at_once = ENGINES[found.engine]["numjobs"] * ENGINES[found.engine]["iodepth"]
        lines += [
            f"fio    {found.fio / 1e9:6.3f} GB/s  {found.engine}, {at_once} reads at once",
            f"ratio  {found.ratio:6.3f}       {found.verdict}: the median of {len(found.ratios)} "
            f"rounds; {ENOUGH} is enough",
        ]
    return "\n".join([*lines, *(f"note: {note}" for note in ours.notes)])
