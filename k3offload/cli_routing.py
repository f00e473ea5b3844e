"""The command ``evaluate routing``: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_open import read_text
from .cli_options import AsJson, How, Model, at_least_one, loading_options, takes_how
from .errors import UsageError
from .progress import Progress, loading_libraries, write_out
from .rates import ASSUMED_DISK

if TYPE_CHECKING:
    from .evaluate_routing import Routing


def add_to(group: typer.Typer) -> None:
    """Register the command."""
    group.command("routing")(routing)


@takes_how("prefix_dir", "prefix_disk", "sweep", "trace", "trace_with")
def routing(
    how: How,
    model: Model,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="UTF-8 text of one kind, named by its file; repeatable. Made up if unset."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of each text.")] = 512,
    new: Annotated[int, typer.Option(help="Sampled tokens of each text and seed.")] = 32,
    seeds: Annotated[int, typer.Option(help="Sampled continuations of each text.")] = 3,
    seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    held: Annotated[float, typer.Option(help="Part of all experts that is in RAM, 0 to 1.")] = 0.1,
    disk_gbps: Annotated[float, typer.Option(help="Reads from disk, GB/s.")] = ASSUMED_DISK / 1e9,
    as_json: AsJson = False,
) -> None:
    """How evenly MODEL uses its experts for texts of several kinds, and what skew costs."""
    at_least_one(("--tokens", tokens), ("--seeds", seeds))
    if new < 2:
        raise UsageError(f"--new is {new}.", "Give 2 or more: the last one is never computed.")
    if seed < 0:
        raise UsageError(f"--seed is {seed}.", "Give 0 or more.")
    if not 0 <= held <= 1:
        raise UsageError(f"--held is {held}.", "It must be from 0 to 1.")
    if not 0 < disk_gbps < 1e9:
        raise UsageError(f"--disk-gbps is {disk_gbps}.", "It must be more than 0.")
    if text and len({path.name for path in text}) < len(text):
        raise UsageError("Two texts have the same name.", "Rename one: kinds go by file names.")
    with Progress() as progress:
        texts = None if not text else {path.name: read_text(path, progress) for path in text}
        with loading_libraries(progress):
            from .evaluate_routing import routing as measure
            from .options import Watch
        watch = Watch(warn=lambda line: progress.say(f"warning: {line}"))
        found = measure(
            model, texts, tokens=tokens, new=new, seeds=seeds, held=held, disk=disk_gbps * 1e9,
            seed=seed, show=progress.show, watch=watch, **loading_options(how),
        )  # fmt: skip
    write_out(json.dumps(found.to_dict()) if as_json else render(found))


def render(found: Routing) -> str:
    """Three tables: balance and latency of each kind, what kinds share, spread over seeds."""
    wide = max(10, *(len(kind.name) for kind in found.kinds)) + 2
    lines = [
        f"{found.experts} experts in each of {len(found.layers)} layers, {found.top_k} a token",
        f"{'':{wide}}tokens  entropy (even)   top 1 %  top 10 %  most/mean (even)  unused",
    ]
    for kind in found.kinds:
        own, even = kind.balance, kind.uniform
        lines.append(
            f"{kind.name:{wide}}{kind.tokens:6,}  {own.entropy:7.3f} {even.entropy:6.3f}"
            f"{own.top_1:10.1%}{own.top_10:10.1%}{own.overload:11.2f} {even.overload:6.2f}"
            f"{own.unused:8.1%}"
        )
    lines.append("even: what as many tokens would show that choose experts at random")
    lines += [
        f"reads of a token at {found.disk / 1e9:.3g} GB/s, the {found.held:.0%} most used experts "
        "of all texts in RAM",
        f"{'':{wide}}    mean      99 %   even: mean      99 %",
    ]
    for kind in found.kinds:
        t = kind.latency
        lines.append(
            f"{kind.name:{wide}}{t.mean:8.2g} s{t.p99:8.2g} s{t.uniform_mean:11.2g} s"
            f"{t.uniform_p99:8.2g} s"
        )
    lines.append("divergence in bits (0 alike, 1 nothing in common); with itself: two halves of it")
    names = [kind.name[:10] for kind in found.kinds]
    lines.append(" " * wide + "".join(f"{name:>12}" for name in names))
    for i, kind in enumerate(found.kinds):
        row = [kind.halves if i == j else d for j, d in enumerate(found.divergence[i])]
        lines.append(f"{kind.name:{wide}}" + "".join(f"{d:12.3f}" for d in row))
    lines.append(f"sampled, {len(found.kinds[0].sampled)} seeds: mean and standard deviation")
    lines.append(f"{'':{wide}}        entropy         top 10 %        most/mean")
    for kind in found.kinds:
        (e, de), (t10, dt), (o, do) = map(kind.spread, ("entropy", "top_10", "overload"))
        lines.append(
            f"{kind.name:{wide}}{e:8.3f} ±{de:6.3f}{t10:9.1%} ±{dt:6.1%}{o:9.2f} ±{do:6.2f}"
        )
    even = found.even_sampled
    lines.append(f"{'even':{wide}}{even.entropy:8.3f}{even.top_10:17.1%}{even.overload:17.2f}")
    return "\n".join(lines)
