"""The command ``damage``: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_open import read_text
from .cli_options import AsJson, Cache, Dtype, Model, Ram, Threads, at_least_one
from .config import show_size
from .progress import Progress, loading_libraries, write_out

if TYPE_CHECKING:
    from .damage import Damage


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(damage)


def damage(
    model: Model,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text; the embedded model's held-out text if unset.")
    ] = None,
    trunk: Annotated[
        list[str] | None,
        typer.Option(help="A precision of the trunk to measure; repeatable; all if none is named."),
    ] = None,
    latent_dtype: Annotated[list[str] | None, typer.Option(help="The same of latents.")] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of the text.")] = 4096,
    ram: Ram = None,
    cache: Cache = None,
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a smaller precision of trunk or latents does to the answers of MODEL."""
    at_least_one(("--tokens", tokens))
    with Progress() as progress:
        words = None if text is None else read_text(text, progress)
        with loading_libraries(progress):
            from .damage import LOSSY, LOSSY_LATENTS
            from .damage import damage as measure
            from .options import Watch
        watch = Watch(warn=lambda line: progress.say(f"warning: {line}"))
        every = not trunk and not latent_dtype
        found = measure(
            model,
            LOSSY if every else trunk or (),
            LOSSY_LATENTS if every else latent_dtype or (),
            text=words,
            tokens=tokens,
            show=progress.show,
            ram=ram,
            cache=cache,
            dtype=dtype,
            threads=threads,
            watch=watch,
        )
    write_out(json.dumps([one.to_dict() for one in found]) if as_json else render(found))


def render(found: list[Damage]) -> str:
    """A table, and what its columns are."""
    lines = [
        f"{found[0].tokens:,} tokens, each precision against the model as shipped",
        f"{'trunk':10}{'bytes':>10}  {'latents':10}{'a token':>9}{'KL mean':>10}{'KL 99 %':>10}"
        f"{'same best':>11}{'nats':>9}",
    ]
    lines += [
        f"{one.precision:10}{show_size(one.trunk_bytes):>10}  {one.latents:10}"
        f"{show_size(one.latent_bytes):>9}{one.kl_mean:10.5f}{one.kl_p99:10.4f}{one.top1:11.2%}"
        f"{one.nats:9.4f}"
        for one in found
    ]
    lines.append("KL in nats of the next token; same best: share of tokens with the same likeliest")
    lines.append("next token; nats: a token of the text (its loss)")
    return "\n".join(lines)
