"""The commands ``bench policies`` and ``bench predictors``: parse, call, print."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from .bench_frame import Frame, Line, grouped
from .cli_bench_frame import LAYER, AsLines, Bench, Out, framed, rows_by_trace, warnings
from .cli_open import read_text
from .cli_options import How, at_least_one, loading_options, takes, takes_how
from .config import parse_size, show_size
from .contention import Background
from .errors import UsageError
from .progress import Progress, loading_libraries

if TYPE_CHECKING:
    from .bench_policies import Speeds
    from .trace import Trace

Capacities = Annotated[
    list[str] | None, typer.Option(help="Like 25%, 64G, or 8G+64G for GPU and RAM; repeatable.")
]
FromTrace = Annotated[
    Path | None,
    typer.Option("--from-trace", help="Of a run instead; the repeats are equal parts of it."),
]
Rows = Annotated[int | None, typer.Option(help="Tokens of each trace; all if unset.")]
#: figures of ``bench policies``, each a number of its lines
_FIGURES = (
    "bytes", "lru_bytes", "min_bytes", "compulsory_bytes", "gap_closed", "requests", "hits",
    "late", "misses", "waited_seconds", "resident", "prefetched_in_time", "prefetches",
    "prefetch_bytes", "replay_seconds", "sequences",
)  # fmt: skip
#: options of loading that say nothing of what is recorded, or that are what is measured
_BUT = ("prefix_dir", "prefix_disk", "trace", "trace_with", "cache", "predict", "sweep")


class Modelled(NamedTuple):
    """A machine in modelled time, as it is typed."""

    rate: Annotated[
        str | None, typer.Option(help="Bytes a second of the disk, for predictors; 6G if unset.")
    ] = None
    latency: Annotated[
        float | None, typer.Option(help="Seconds until its first byte comes; 0.0001 if unset.")
    ] = None
    layer: Annotated[float | None, typer.Option(help=LAYER)] = None


def add_to(bench: typer.Typer) -> None:
    """Register the commands."""
    bench.command("policies")(policies)
    bench.command("predictors")(predictors)


@takes(modelled=Modelled)
def policies(
    modelled: Modelled,
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Folders or zip files.")],
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; all if unset.")] = None,
    predictor: Annotated[
        list[str] | None, typer.Option(help="Repeatable, in modelled time; none if unset.")
    ] = None,
    capacity: Capacities = None,
    rows: Rows = None,
    repeats: Annotated[
        int, typer.Option(help="Equal parts of each trace, each replayed by itself.")
    ] = 1,
    out: Out = None,
    as_json: AsLines = False,
) -> None:
    """Replay traces: bytes of policies and predictors beside LRU, MIN and the compulsory bound."""
    from . import bench_policies as bench
    from .bench_predictors import equal_parts
    from .trace import read_some

    at_least_one(("--rows", rows))
    some = bench.chosen_names("policy", policy, True)
    guessing = bench.chosen_names("predict", predictor, False)
    timed = any(name != bench.NOTHING for name in guessing)
    speeds = _speeds(bench.Speeds(), timed, modelled)
    given = Bench(repeats, warmup=0, out=out, as_json=as_json)
    with Progress() as progress:
        with framed("policies", given, {}, progress, timed=False, table=_table) as frame:
            for path in dict.fromkeys(traces):
                trace = read_some(path, rows)
                rooms = bench.rooms(capacity or bench.CAPACITIES, trace)
                frame.about["path"] = str(path)
                for i, part in enumerate(equal_parts(trace, repeats)):
                    watch = Background()
                    for line in bench.compare(part, rooms, some, guessing, speeds, progress.show):
                        line["trace"] = trace.digest
                        if timed:
                            line |= _told(speeds)
                        figures = {name: line.pop(name) for name in _FIGURES}
                        frame.add(line, figures, watch.read(), i)


@takes_how(*_BUT, "warmup", "wait", bench=Bench, modelled=Modelled)
def predictors(
    how: How,
    bench: Bench,
    modelled: Modelled,
    model: Annotated[
        str | None, typer.Argument(help="Folder, hub id in the local cache, or 'nano' (if unset).")
    ] = None,
    trace: FromTrace = None,
    predictor: Annotated[
        list[str] | None, typer.Option(help="Repeatable; all that can be made if unset.")
    ] = None,
    capacity: Capacities = None,
    fit: Annotated[
        Path | None, typer.Option(help="Trace with latents that the latent predictor learns from.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("-n", "--tokens", help="Of a repeat of a model; 256 if unset.")
    ] = None,
    rows: Rows = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text to decode; the embedded held-out text if unset."),
    ] = None,
) -> None:
    """What reading ahead would be worth to MODEL: guesses that come true, misses that are gone."""
    at_least_one(("--tokens", tokens), ("--rows", rows))
    given = {"MODEL": model, "--tokens": tokens, "--text": text, "--seed": bench.seed or None}
    _refuse_inert(how, trace, rows, given)
    with Progress() as progress:
        words = None if text is None else read_text(text, progress)
        with loading_libraries(progress):
            from . import bench_predictors as kinds
            from .bench_policies import Speeds, rooms
            from .options import POLICY
            from .trace import read_some
        speeds = _speeds(Speeds(), True, modelled)
        model = model or "nano"
        with (
            kinds.fitted(fit) as made,
            tempfile.TemporaryDirectory(prefix="k3-routing-") as folder,
            framed("predictors", bench, kinds.MEANINGS, progress, model=model,
                   timed=False, table=_predictor_table) as frame,
        ):  # fmt: skip
            chosen = kinds.chosen_predictors(predictor, made)
            if trace is not None:
                whole = read_some(trace, rows)
                about: dict[str, Any] = {"trace": whole.digest}
                frame.about["path"] = str(trace)
            else:
                whole, about = _recorded(
                    how, model, words, tokens or 256, chosen, Path(folder), frame, progress
                )  # fmt: skip
            places = rooms(capacity or kinds.CAPACITIES, whole)
            if any(len(one.slots) > 1 for one in places):
                raise UsageError("A capacity is of two tiers.", "Give one: --capacity 25%.")
            parts = kinds.equal_parts(whole, bench.repeats)
            kinds.predictors(
                frame, parts, places, chosen, how.policy or POLICY, speeds,
                {**about, **_told(speeds), **_learned(fit)},
            )  # fmt: skip


def _learned(fit: Path | None) -> dict[str, Any]:
    """The setting that says what the latent predictor has learned from."""
    from .trace import read_trace

    return {} if fit is None else {"fit": read_trace(fit, []).digest}


def _recorded(
    how: How, model: str, words: str | None, tokens: int, chosen: list[str], folder: Path,
    frame: Frame, progress: Progress,
) -> tuple[Trace, dict[str, Any]]:  # fmt: skip
    """A text for each repeat, decoded and recorded, and the settings that this makes."""
    from .bench_engine import about_model, digest
    from .bench_routing import record_routing
    from .checkpoint import Checkpoint
    from .find import find_model
    from .scheduler.schedule import predictor_named

    options = loading_options(how)
    latent = any(predictor_named(name)[0].asks_latent for name in chosen)
    often = frame.often
    trace = record_routing(
        model, folder, [words] * often.repeats, tokens, ("ahead",) + ("latent",) * latent,
        seed=often.seed, show=progress.show, watch=warnings(progress), **options,
    )  # fmt: skip
    checkpoint = Checkpoint.open(find_model(model))
    about = about_model(checkpoint, {**options, "policy": None})
    return trace, {**about, "tokens": tokens, "text": digest(words)}


def _refuse_inert(how: How, trace: Path | None, rows: int | None, given: dict[str, Any]) -> None:
    """Raise ``UsageError`` for an option that would do nothing."""
    if trace is None:
        if rows is not None:
            raise UsageError("--rows is about a trace.", "Use --tokens, or give --from-trace.")
        return
    inert = [name for name, value in given.items() if value is not None]
    for name, usual in How._field_defaults.items():
        variable = f"K3_{name.upper()}" in os.environ  # meant for other commands
        if name != "policy" and getattr(how, name) != usual and not variable:
            inert.append(f"--{name.replace('_', '-')}")
    if inert:
        raise UsageError(f"{inert[0]} does nothing with --from-trace.", "Leave one of them out.")


def _told(speeds: Speeds) -> dict[str, Any]:
    """Settings of modelled time."""
    disk, pace = speeds.links[0], speeds.pace
    return {
        "disk_rate": disk.rate, "latency": disk.latency,
        "layer_seconds": pace.layer, "page_seconds": pace.page,
    }  # fmt: skip


def _speeds(usual: Speeds, timed: bool, modelled: Modelled) -> Speeds:
    """Raises ``UsageError`` for what is out of range, or means nothing where nothing is timed."""
    for name, value in modelled._asdict().items():
        if value is not None and not timed:
            raise UsageError(f"--{name} does nothing without a predictor.", "Give --predictor too.")
    rate, latency, layer = modelled
    disk, pace = usual.links[0], usual.pace
    if rate is not None:
        disk = disk._replace(rate=float(parse_size(rate)))
    if latency is not None:
        disk = disk._replace(latency=latency)
    if layer is not None:
        pace = type(pace).of(layer)
    if not (0 <= disk.latency < 1e9 and 0 <= pace.layer < 1e9 and disk.rate > 0):
        raise UsageError(
            "A time is below 0 or no number, or --rate is 0.", "Give seconds, and bytes a second."
        )
    return usual._replace(links=(disk, usual.links[1]), pace=pace)


def _table(frame: Frame) -> str:
    return "\n".join(rows_by_trace(frame, _FIGURES, _row))


def _predictor_table(frame: Frame) -> str:
    """The usual table, and for each case the shares by rank and layer."""
    rows = [frame.table(), "useful and covered, % (medians of the repeats)"]
    for own, lines in grouped(frame.lines):
        rows.append(f"{own['predictor']}, capacity {own['capacity']}")
        for name in ("useful_by_rank", "covered_by_rank", "useful_by_layer", "covered_by_layer"):
            middle = map(statistics.median, zip(*(line[name] for line in lines), strict=True))
            cells = "".join(f"{100 * share:5.0f}" for share in middle)
            rows.append(f"  {name.replace('_', ' '):17}{cells}")
    rows.append("by rank: the first guess first, the last column all further ones; covered counts")
    rows.append("the guesses up to that one.  by layer: the layers with experts, in their order")
    return "\n".join(rows)


def _row(line: Line, first: bool, parts: int) -> list[str]:
    """One row of the table, under its head where a trace begins."""
    head = []
    if first:
        of = f", medians of {parts} parts" if parts > 1 else ""
        head = [
            f"{line['path']}: {line['rows']:,} tokens, {line['layers']} x {line['top_k']} of "
            f"{line['experts']}, digest {line['trace']}{of}",
            f"{'capacity':<10}{'tier':<5}{'policy':<8}{'predictor':<10}{'bytes':>10}{'LRU':>10}"
            f"{'MIN':>10}{'once':>10}{'closed':>8}{'hit':>7}{'late':>7}{'miss':>7}{'waits':>10}",
        ]
    share = [f"{line[name] / line['requests']:>7.1%}" for name in ("hits", "late", "misses")]
    names = ("bytes", "lru_bytes", "min_bytes", "compulsory_bytes")
    sizes = "".join(f"{show_size(int(line[name])):>10}" for name in names)
    waits = f"{line['waited_seconds']:>8.1f} s" if line["predictor"] != "none" else f"{'-':>10}"
    return [
        *head,
        f"{line['capacity']:<10}{line['tier']:<5}{line['policy']:<8}{line['predictor']:<10}{sizes}"
        f"{line['gap_closed']:>8.1%}{''.join(share)}{waits}",
    ]
