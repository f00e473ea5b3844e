"""The command ``pack``: parse, call, print."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from .config import parse_size, show_size
from .find import find_model
from .progress import Progress, show_seconds, write_out


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("pack")(pack_command)


def pack_command(
    model: Annotated[str, typer.Argument(help="Folder, hub id in the local cache, or 'nano'.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; absent or empty.")],
    trunk: Annotated[
        str | None,
        typer.Option(metavar="bfloat16|int8|mxfp4", help="Precision of the trunk; as it is."),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(help="Most bytes of a shard, like 16G or 16GiB.")
    ] = "16GiB",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Lay a model's pages anew, aligned and in order, into OUT.

    The trunk may be quantised on the way.  A run that was interrupted is continued by the same
    command.
    """
    from .pack import pack

    size = parse_size(shard_size)
    begin = time.monotonic()
    with Progress() as progress:

        def show(what: str, done: int, total: int) -> None:
            seconds = time.monotonic() - begin
            left = show_seconds(seconds * (total - done) / done) if done else "?"
            progress.show(f"{what}: {show_size(done)} of {show_size(total)}, {left} left")

        packed = pack(
            find_model(model),
            out,
            trunk,
            size,
            progress=show,
            warn=lambda text: progress.say(f"warning: {text}"),
        )
        for note in packed.notes:
            progress.say(f"note: {note}")
    if as_json:
        write_out(json.dumps(packed.to_dict()))
        return
    if packed.already:
        write_out(f"{packed.out} is this pack already; nothing was done.")
        return
    kept = f" ({packed.kept} of them from before)" if packed.kept else ""
    write_out(
        f"{packed.out}: {packed.tensors:,} tensors, {show_size(packed.file_bytes)} in "
        f"{packed.shards} shards{kept}, trunk {packed.trunk}, {show_seconds(packed.seconds)}"
    )
