"""The command ``bench replay``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .bench_frame import Frame, Line
from .cli_bench_frame import LAYER, Bench, framed, rows_by_trace
from .cli_options import Model, at_least_one, takes
from .config import show_size
from .errors import UsageError
from .find import find_model
from .progress import Progress

_FIGURES = ("ratio", "waited_ratio", "seconds", "modelled_seconds", "rate", "latency", "bytes")


def add_to(bench: typer.Typer) -> None:
    """Register ``replay``."""
    bench.command("replay")(replay)


@takes(bench=Bench)
def replay(
    bench: Bench,
    model: Model,
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Folders or zip files.")],
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; lru if unset.")] = None,
    predictor: Annotated[list[str] | None, typer.Option(help="Repeatable; none if unset.")] = None,
    capacity: Annotated[
        list[str] | None, typer.Option(help="Like 25% or 64G; repeatable; 25% if unset.")
    ] = None,
    layer: Annotated[float, typer.Option(help=f"{LAYER}  It is slept.")] = 0.002,
    rows: Annotated[int | None, typer.Option(help="Tokens of each trace; all if unset.")] = None,
) -> None:
    """Replay traces for real: read from MODEL what each asks for, beside modelled time."""
    from . import bench_policies, bench_replay
    from .checkpoint import Checkpoint
    from .scheduler.replay_timed import Pace
    from .session_identity import weights_of
    from .trace import read_some

    at_least_one(("--rows", rows))
    if not 0 <= layer < 1e4:
        raise UsageError(f"--layer is {layer}.", "Give seconds, from 0 on.")
    policies = bench_policies.chosen_names("policy", policy or [bench_policies.BASELINE], True)
    predictors = bench_policies.chosen_names("predict", predictor, False)
    checkpoint, pace = Checkpoint.open(find_model(model)), Pace.of(layer)
    with Progress() as progress:
        with framed(
            "replay", bench, bench_replay.MEANINGS, progress, model=model, table=render
        ) as frame:
            for path in dict.fromkeys(traces):
                recorded = read_some(path, rows)
                trace = bench_replay.as_in(recorded, checkpoint)
                rooms = bench_policies.rooms(capacity or ["25%"], trace)
                about = {
                    "model": weights_of(checkpoint), "trace": recorded.digest,
                    "rows": len(trace.best),
                    "layer_seconds": pace.layer, "page_seconds": pace.page,
                }  # fmt: skip
                frame.about["path"] = str(path)
                bench_replay.compare(
                    frame, trace, checkpoint, rooms, policies, predictors, pace, about
                )


def render(frame: Frame) -> str:
    """Rows of medians, under a head for each trace, and whether they can be believed."""
    rows = rows_by_trace(frame, _FIGURES, _row)
    notes = [f"note: {note}" for note in dict.fromkeys(frame.notes)]
    return "\n".join([*rows, *notes, frame.verdict()])


def _row(line: Line, first: bool, repeats: int) -> list[str]:
    """One row of the table, under its head where a trace begins."""
    from .bench_replay import ENOUGH

    head = []
    if first:
        head = [
            f"{line['path']}: {line['rows']:,} tokens, digest {line['trace']}, pages of "
            f"{show_size(line['page_bytes'])}, {line['mode']} reads, medians of {repeats} repeats",
            f"{'capacity':<10}{'policy':<8}{'predictor':<10}{'bytes':>10}{'link':>11}{'first':>9}"
            f"{'real':>10}{'modelled':>10}{'ratio':>7}{'waits':>7}",
        ]
    waits = "-" if line["waited_ratio"] is None else f"{line['waited_ratio']:.3f}"
    return [
        *head,
        f"{line['capacity']:<10}{line['policy']:<8}{line['predictor']:<10}"
        f"{show_size(int(line['bytes'])):>10}{line['rate'] / 1e9:>6.2f} GB/s"
        f"{line['latency'] * 1e3:>6.2f} ms{line['seconds']:>8.2f} s"
        f"{line['modelled_seconds']:>8.2f} s{line['ratio']:>7.3f}{waits:>7}"
        f"{'' if abs(line['ratio'] - 1) <= ENOUGH else f'  off by more than {ENOUGH:.0%}'}",
    ]
