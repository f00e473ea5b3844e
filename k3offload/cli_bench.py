"""The command ``bench read``: parse, call, print.  The others of ``bench`` have their own files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from . import cli_bench_engine, cli_bench_replay, cli_compare, cli_replay
from .bench_frame import Frame, Line, median
from .cli_bench_frame import Bench, framed
from .cli_options import Model, takes
from .config import show_size
from .errors import UsageError
from .find import find_model
from .paths import show_path
from .progress import Progress


def add_to(app: typer.Typer) -> None:
    """Register ``bench`` and what it can measure."""
    bench = typer.Typer(help="Measure a model on this machine.", no_args_is_help=True)
    bench.callback()(_group)
    bench.command("read")(read)
    cli_bench_engine.add_to(bench)
    cli_bench_replay.add_to(bench)
    cli_compare.add_to(bench)
    cli_replay.add_to(bench)
    app.add_typer(bench, name="bench")


def _group() -> None:
    """Measure a model on this machine, and parts of it; compare policies and results."""


@takes(bench=Bench)
def read(
    bench: Bench,
    model: Model = "nano",
    seconds: Annotated[
        float, typer.Option(help="Of all repeats together, ours and fio's; warm-up comes on top.")
    ] = 10.0,
) -> None:
    """Read random pages of MODEL as a run does, beside fio where that is installed."""
    from .bench_read import MEANINGS, Turns
    from .checkpoint import Checkpoint
    from .session_identity import weights_of

    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds is {seconds}.", "It must be more than 0 and at most 3600.")
    with Progress() as progress:
        with framed("read", bench, MEANINGS, progress, model=model, table=render) as frame:
            checkpoint = Checkpoint.open(find_model(model))
            each = seconds / bench.repeats
            with Turns(checkpoint, bench.seed) as turns:
                ours = turns.ours
                what = {
                    "model": weights_of(checkpoint),
                    "what": ours.what, "pages": ours.pages, "page_bytes": ours.page_bytes,
                    "window_bytes": ours.window_bytes, "drawn_bytes": ours.drawn_bytes,
                }  # fmt: skip
                frame.about |= {
                    "path": show_path(checkpoint.folder), "beside": turns.why_not or "fio",
                }  # fmt: skip
                frame.notes += turns.ours.notes
                frame.case(what, lambda seed: turns.turn(each, seed))


def render(frame: Frame) -> str:
    """The table, and what it says of our reads."""
    lines = [verdict(frame.lines)]
    first = frame.lines[0]
    head = (
        f"read at random: {first['pages']:,} {first['what']} of {show_size(first['page_bytes'])}, "
        f"{show_size(first['drawn_bytes'])} in all, {first['mode']} reads"
    )
    return "\n".join([head, frame.table(), *lines])


def verdict(lines: Sequence[Line]) -> str:
    """Whether our reads are as fast as fio's: one line."""
    from .bench_read import ENGINES, ENOUGH, faster_engine

    engine = faster_engine(lines)
    if engine is None:
        return f"not compared: {lines[0]['beside']}"
    ratio = median(lines, f"of_fio_{engine}")
    at_once = ENGINES[engine]["numjobs"] * ENGINES[engine]["iodepth"]
    return (
        f"{'good' if ratio >= ENOUGH else 'slow'}: {ratio:.3f} of the rate of fio with {engine} "
        f"and {at_once} reads at once, the faster; {ENOUGH} is enough"
    )
