"""The commands of ``trace``: what a trace holds, import, and made ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import AsJson, at_least_one, not_below_0
from .config import parse_size, show_size
from .errors import UsageError
from .progress import Progress, write_out
from .session_manifest import refuse_in_model

if TYPE_CHECKING:
    from .trace import Trace

Place = Annotated[Path, typer.Argument(help="Folder or zip file of a trace.")]
Out = Annotated[Path, typer.Option("-o", "--out", help="New folder of the trace.")]
PageBytes = Annotated[str, typer.Option(help="Bytes of one expert, like 17.5M.")]


def add_to(app: typer.Typer) -> None:
    """Register ``trace`` and what can be done with one."""
    trace = typer.Typer(help="Traces of routing: look, import, make.", no_args_is_help=True)
    trace.callback()(_group)
    trace.command("info")(info)
    trace.command("import")(import_)
    trace.command("make")(make)
    trace.command("like")(like)
    app.add_typer(trace, name="trace")


def _group() -> None:
    """Traces of routing; generate, batch, chat and logits record one with --trace DIR."""


def info(trace: Place, as_json: AsJson = False) -> None:
    """Say what TRACE holds."""
    from .trace import facts, read_trace

    found = facts(read_trace(trace))
    if as_json:
        write_out(json.dumps(found))
        return
    parts = ", ".join(found["parts"]) or "nothing more"
    write_out(
        f"{found['rows']:,} tokens of {found['sequences']:,} sequences in {found['sweeps']:,} "
        f"sweeps, {found['decode_rows']:,} tokens decoded\n"
        f"{found['layers']} layers of {found['experts']} experts, {found['top_k']} chosen, "
        f"{show_size(found['page_bytes'])} each; {found['near']} near misses\n"
        f"{found['requests']:,} requests for {found['distinct']:,} experts; with it {parts}\n"
        f"from {found['source'] or 'nobody'}, digest {found['digest']}"
    )


def import_(
    file: Annotated[Path, typer.Argument(help="CSV or JSONL: sequence,position,layer,experts.")],
    out: Out,
    experts: Annotated[int | None, typer.Option(help="Of a layer; as the file shows.")] = None,
    page_bytes: PageBytes = "1",
) -> None:
    """Make a trace of routing that another engine wrote down."""
    from .trace_import import import_trace

    at_least_one(("--experts", experts))
    _out_of_models(out)
    _write(out, import_trace(file, experts, parse_size(page_bytes)))


def make(
    kind: Annotated[str, typer.Argument(help="A pattern, like uniform; an unknown one names all.")],
    out: Out,
    tokens: Annotated[int, typer.Option("-n", "--tokens")] = 2000,
    layers: Annotated[int, typer.Option()] = 7,
    experts: Annotated[int, typer.Option(help="Of a layer.")] = 48,
    top_k: Annotated[int, typer.Option(help="Experts chosen.")] = 4,
    page_bytes: PageBytes = "1",
    seed: int = 0,
    skew: Annotated[float, typer.Option(help="Of kind drawn: how unequally popular.")] = 0.0,
    topic: Annotated[float, typer.Option(help="How much a sequence has its own.")] = 0.0,
    short: Annotated[float, typer.Option(help="Those of the last tokens again.")] = 0.0,
    long: Annotated[float, typer.Option(help="Those of the last dozens again.")] = 0.0,
    link: Annotated[float, typer.Option(help="Those that the layer above points to.")] = 0.0,
) -> None:
    """Make a trace of one KIND of routing that no model made."""
    from .trace_like import Likeness, drawn
    from .trace_made import PATTERNS, Size, pattern, trace_of

    at_least_one(("--tokens", tokens), ("--layers", layers), ("--top-k", top_k))
    if experts <= 4 * top_k or experts > 1 << 16 or tokens < 5:
        raise UsageError(
            f"{tokens} tokens choose {top_k} of {experts} experts.",
            "Take 5 tokens or more, and more than four times as many experts as are chosen.",
        )
    not_below_0(("--seed", seed))
    size, likeness = Size(layers, experts, top_k), Likeness(skew, topic, short, long, link)
    if kind == "drawn":
        _new(out)
        _write(out, drawn(likeness, size, [tokens], seed, parse_size(page_bytes)))
        return
    if kind not in PATTERNS or any(likeness):
        known = ", ".join(map(repr, (*PATTERNS, "drawn")))
        raise UsageError(
            f"There is no such pattern as {kind!r}.",
            f"Use {known}; --skew and so on with the last.",
        )
    _new(out)
    made = pattern(kind, tokens, size, seed)
    _write(out, trace_of(made, experts, seed, parse_size(page_bytes)))


def like(
    trace: Place,
    out: Out,
    tokens: Annotated[int | None, typer.Option("-n", "--tokens", help="As TRACE if unset.")] = None,
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """Make a trace like TRACE: fitted to the first half of its sequences."""
    from .trace import read_trace
    from .trace_like import drawn_like

    at_least_one(("--tokens", tokens))
    not_below_0(("--seed", seed))
    recorded = read_trace(trace, [])
    if not len(recorded.best):
        raise UsageError(f"{trace} holds no tokens.", "Record a run that comes to its end.")
    _new(out)
    found, report = drawn_like(recorded, tokens, seed)
    _write(out, found)
    if as_json:
        write_out(json.dumps(report))
        return
    for name in ("capacities", "recorded", "drawn", "held_out", "held_out_drawn"):
        write_out(f"{name:<15}" + "".join(f"{value:>8.1%}" for value in report[name]))
    write_out(
        f"the farthest of the LRU miss curve: {report['farthest']:.2%} of requests, "
        f"{report['held_out_farthest']:.2%} on the held-out half\n"
        + ", ".join(f"{name} {value:g}" for name, value in report["likeness"].items())
    )


def _new(out: Path) -> None:
    """Refuses a folder that cannot be, once all else is known to be right."""
    from .trace import new_folder

    _out_of_models(out)
    new_folder(out)


def _out_of_models(out: Path) -> None:
    real = Path(os.path.realpath(out))
    for home in (real, *real.parents):
        if (home / "config.json").is_file():
            refuse_in_model(out, home)


def _write(out: Path, trace: Trace) -> None:
    from .trace_made import write_trace

    write_trace(out, trace)
    with Progress() as progress:
        progress.say(f"{len(trace.best):,} tokens in {out}, digest {trace.digest}")
