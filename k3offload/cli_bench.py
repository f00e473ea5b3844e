"""The commands ``bench read`` and ``bench policies``: parse, call, print.  ``bench compare`` has a
file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__, cli_compare
from .cli_options import AsJson, Model, at_least_one
from .config import parse_size, show_size
from .errors import UsageError
from .find import find_model
from .progress import Progress, write_out

if TYPE_CHECKING:
    from .bench_policies import Speeds
    from .bench_read import Comparison


def add_to(app: typer.Typer) -> None:
    """Register ``bench`` and what it can measure."""
    bench = typer.Typer(help="Measure parts of this machine.", no_args_is_help=True)
    bench.callback()(_group)
    bench.command("read")(read)
    bench.command("policies")(policies)
    cli_compare.add_to(bench)
    app.add_typer(bench, name="bench")


def _group() -> None:
    """Measure parts of this machine; compare policies."""


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


def policies(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Folders or zip files.")],
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; all if unset.")] = None,
    predictor: Annotated[
        list[str] | None, typer.Option(help="Repeatable, in modelled time; none if unset.")
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="Like 25%, 64G, or 8G+64G for GPU and RAM; repeatable."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Bytes a second of the disk, for predictors; 6G if unset.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="Seconds until its first byte comes; 0.0001 if unset.")
    ] = None,
    layer: Annotated[
        float | None, typer.Option(help="Seconds of computing a layer takes; 0.002 if unset.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Tokens of each trace; all if unset.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each.")] = False,
) -> None:
    """Replay traces: bytes of policies and predictors beside LRU, MIN and the compulsory bound."""
    from . import bench_policies as bench
    from .machine import facts
    from .trace import read_trace

    at_least_one(("--rows", rows))
    some = bench.chosen_names("policy", policy, True)
    predictors = bench.chosen_names("predict", predictor, False)
    timed = any(name != bench.NOTHING for name in predictors)
    speeds = _speeds(bench.Speeds(), timed, rate, latency, layer)
    about = {"benchmark": "policies", "version": __version__, **facts()}
    with Progress() as progress:
        for path in traces:
            trace = read_trace(path, ["ahead", "latent"]).rows(slice(rows))
            if not len(trace.best):
                raise UsageError(f"{path} holds no tokens.", "Record a run that comes to its end.")
            rooms = [bench.room(text, trace) for text in capacity or bench.CAPACITIES]
            found = bench.compare(trace, rooms, some, predictors, speeds, progress.show)
            for number, line in enumerate(found):
                progress.clear()
                if as_json:
                    write_out(json.dumps({**about, "path": str(path), **line}))
                else:
                    write_out("\n".join(_row(line, path if number == 0 else None)))


def _speeds(
    usual: Speeds, timed: bool, rate: str | None, latency: float | None, layer: float | None
) -> Speeds:
    """Raises ``UsageError`` for what is out of range, or means nothing where nothing is timed."""
    given = {"--rate": rate, "--latency": latency, "--layer": layer}
    for name, value in given.items():
        if value is not None and not timed:
            raise UsageError(f"{name} does nothing without a predictor.", "Give --predictor too.")
    disk, pace = usual.links[0], usual.pace
    if rate is not None:
        disk = disk._replace(rate=float(parse_size(rate)))
    if latency is not None:
        disk = disk._replace(latency=latency)
    if layer is not None:
        pace = pace._replace(layer=layer)
    if not (0 <= disk.latency < 1e9 and 0 <= pace.layer < 1e9 and disk.rate > 0):
        raise UsageError(
            "A time is below 0 or no number, or --rate is 0.", "Give seconds, and bytes a second."
        )
    return usual._replace(links=(disk, usual.links[1]), pace=pace)


def _row(line: dict[str, Any], path: Path | None) -> list[str]:
    """One row of the table, under its head where a trace begins."""
    head = []
    if path is not None:
        head = [
            f"{path}: {line['rows']:,} tokens, {line['layers']} x {line['top_k']} of "
            f"{line['experts']}, digest {line['trace']}",
            f"{'capacity':<10}{'tier':<5}{'policy':<8}{'predictor':<10}{'bytes':>10}{'LRU':>10}"
            f"{'MIN':>10}{'once':>10}{'closed':>8}{'hit':>7}{'late':>7}{'miss':>7}{'waits':>10}",
        ]
    share = [f"{line[name] / line['requests']:>7.1%}" for name in ("hits", "late", "misses")]
    names = ("bytes", "lru_bytes", "min_bytes", "compulsory_bytes")
    sizes = "".join(f"{show_size(line[name]):>10}" for name in names)
    waits = f"{line['waited_seconds']:>8.1f} s" if line["predictor"] != "none" else f"{'-':>10}"
    return [
        *head,
        f"{line['capacity']:<10}{line['tier']:<5}{line['policy']:<8}{line['predictor']:<10}{sizes}"
        f"{line['gap_closed']:>8.1%}{''.join(share)}{waits}",
    ]


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
