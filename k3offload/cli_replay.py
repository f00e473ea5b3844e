"""The command ``bench replay``: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .cli_options import Model, at_least_one
from .config import show_size
from .errors import UsageError
from .find import find_model
from .progress import Progress, write_out


def add_to(bench: typer.Typer) -> None:
    """Register ``replay``."""
    bench.command("replay")(replay)


def replay(
    model: Model,
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Folders or zip files.")],
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; lru if unset.")] = None,
    predictor: Annotated[list[str] | None, typer.Option(help="Repeatable; none if unset.")] = None,
    capacity: Annotated[
        list[str] | None, typer.Option(help="Like 25% or 64G; repeatable; 25% if unset.")
    ] = None,
    layer: Annotated[
        float, typer.Option(help="Seconds that computing a layer takes; it is slept.")
    ] = 0.002,
    rows: Annotated[int | None, typer.Option(help="Tokens of each trace; all if unset.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns of disk and model.")] = 3,
    seed: Annotated[int, typer.Option(help="Draws the pages that the disk is timed with.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each.")] = False,
) -> None:
    """Replay traces for real: read from MODEL what each asks for, beside modelled time."""
    from . import bench_policies, bench_replay
    from .checkpoint import Checkpoint
    from .machine import facts
    from .scheduler.replay_timed import Pace
    from .trace import read_trace

    at_least_one(("--rows", rows), ("--rounds", rounds))
    if not 0 <= layer < 1e4:
        raise UsageError(f"--layer is {layer}.", "Give seconds, from 0 on.")
    policies = bench_policies.chosen_names("policy", policy or ["lru"], True)
    predictors = bench_policies.chosen_names("predict", predictor, False)
    checkpoint = Checkpoint.open(find_model(model))
    about = {"benchmark": "replay", "version": __version__, **facts()}
    with Progress() as progress:
        for path in traces:
            recorded = read_trace(path, ["ahead", "latent"]).rows(slice(rows))
            if not len(recorded.best):
                raise UsageError(f"{path} holds no tokens.", "Record a run that comes to its end.")
            trace = bench_replay.as_in(recorded, checkpoint)
            rooms = [bench_policies.room(text, trace) for text in capacity or ["25%"]]
            known = {
                "trace": recorded.digest, "path": str(path), "rows": len(trace.best),
                "rounds": rounds, "layer_seconds": layer,
            }  # fmt: skip
            found = bench_replay.compare(
                trace, checkpoint, rooms, policies, predictors,
                Pace(layer, layer / 10), rounds, seed, progress.show,
            )  # fmt: skip
            for number, line in enumerate(found):
                progress.clear()
                if as_json:
                    write_out(json.dumps({**about, **known, **line}))
                else:
                    write_out("\n".join(_row({**known, **line}, number == 0)))


def _row(line: dict[str, Any], first: bool) -> list[str]:
    """One row of the table, under its head where a trace begins."""
    from .bench_replay import ENOUGH

    head = []
    if first:
        head = [
            f"{line['path']}: {line['rows']:,} tokens, digest {line['trace']}, pages of "
            f"{show_size(line['page_bytes'])}, {line['mode']} reads",
            *(f"note: {note}" for note in line["notes"]),
            f"{'capacity':<10}{'policy':<8}{'predictor':<10}{'bytes':>10}{'link':>11}{'first':>9}"
            f"{'real':>10}{'modelled':>10}{'ratio':>7}{'waits':>7}",
        ]
    return [
        *head,
        f"{line['capacity']:<10}{line['policy']:<8}{line['predictor']:<10}"
        f"{show_size(line['bytes']):>10}{line['rate'] / 1e9:>6.2f} GB/s"
        f"{line['latency'] * 1e3:>6.2f} ms{line['seconds']:>8.2f} s"
        f"{line['modelled_seconds']:>8.2f} s{line['ratio']:>7.3f}{line['waited_ratio']:>7.3f}"
        f"{'' if abs(line['ratio'] - 1) <= ENOUGH else f'  off by more than {ENOUGH:.0%}'}",
    ]
