"""The commands about a model's files: inspect, check, make-tiny."""

from __future__ import annotations

import dataclasses
import inspect as signatures
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import AsJson, Model, show_parameters
from .config import show_size
from .errors import UsageError
from .find import find_model
from .progress import Progress, write_out


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(inspect)
    app.command()(check)
    app.command("make-tiny")(_size_options(make_tiny_command))


def inspect(model: Model, as_json: AsJson = False) -> None:
    """Say what a model folder holds: layers, bytes per group, tiers needed."""
    from .inspect import inspect as look
    from .inspect import render

    facts = look(find_model(model))
    write_out(json.dumps(facts.to_dict()) if as_json else render(facts))


def check(
    model: Model,
    full: Annotated[bool, typer.Option("--full", help="Read every byte and check values.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a model folder; every finding comes with its remedy."""
    from .check import check as verify
    from .check import has_errors

    with Progress() as progress:
        findings = verify(
            find_model(model),
            full,
            lambda done, total: progress.show(f"read {show_size(done)} of {show_size(total)}"),
        )
    if as_json:
        write_out(json.dumps([finding._asdict() for finding in findings]))
    else:
        for finding in findings:
            write_out(f"{finding.level}: {finding.what} {finding.remedy}".rstrip())
        write_out(
            "The model can be run." if not has_errors(findings) else "The model cannot be run."
        )
    if has_errors(findings):
        raise typer.Exit(1)


def _size_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` one option for each field of ``TinySize``, so that none is forgotten."""
    from .tiny_size import CHOICES, TinySize

    own = dict(signatures.signature(command, eval_str=True).parameters)
    del own["overrides"]
    for item in dataclasses.fields(TinySize):
        kind = {"int": int, "float": float, "bool": bool}.get(str(item.type), str)
        wanted = "|".join(CHOICES.get(item.name, ())) or ("3,7,8" if kind is str else None)
        option = typer.Option(metavar=wanted) if wanted else typer.Option()
        own[item.name] = signatures.Parameter(
            item.name,
            signatures.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )
    show_parameters(command, list(own.values()))
    return command


def make_tiny_command(
    out: Annotated[Path, typer.Argument(help="Folder to write; made if absent.")],
    size: Annotated[
        str, typer.Option(help="A size by name; the options below change it.")
    ] = "nano",
    seed: int = 0,
    full: Annotated[bool, typer.Option("--full", help="The released configuration.")] = False,
    sparse: Annotated[bool, typer.Option("--sparse", help="Large tensors as holes.")] = False,
    **overrides: Any,
) -> None:
    """Write a seeded synthetic checkpoint in the released layout into OUT."""
    from .make_tiny import make_tiny, make_tiny_full

    given = {name: value for name, value in overrides.items() if value is not None}
    if "mla_layers" in given:
        given["mla_layers"] = _layers(given["mla_layers"])
    if full != sparse:
        raise UsageError("--full and --sparse go together.", "Give both or neither.")
    if full and (given or size != "nano"):
        raise UsageError("--full takes no sizes.", "It is the released configuration.")
    with Progress() as progress:

        def show(name: str, done: int, total: int) -> None:
            progress.show(f"{name}: {show_size(done)} of {show_size(total)}")

        if full:
            made = make_tiny_full(out, seed, show)
        else:
            made = make_tiny(out, size, seed, progress=show, **given)
    write_out(json.dumps({k: v for k, v in made.items() if k != "sha256"}))


def _layers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise UsageError(f"--mla-layers {text!r} is no list of layers.", "Write it like 3,7,8.")
    return tuple(map(int, text.split(",")))
