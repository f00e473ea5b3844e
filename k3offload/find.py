"""From what a person types to places: MODEL to a folder, an output to a file that may be written.

Hub ids are looked up in the local hub cache only (``HF_HUB_CACHE``, ``HF_HOME``); nothing is
downloaded and no name is looked up on a network.  A model's folder is never written into.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import UsageError
from .paths import show_path

EMBEDDED = "nano"


def find_model(name: str | os.PathLike[str]) -> Path:
    """The folder of ``name``.  Raises ``UsageError`` if there is none.

    A folder wins over a name, except that ``nano`` is the embedded model unless a folder of that
    name holds a model.
    """
    folder, text = Path(name), os.fspath(name)
    if text == EMBEDDED and not (folder / "config.json").is_file():
        return Path(__file__).parent / EMBEDDED
    if folder.is_dir():
        return folder
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not folder.exists():
        return _in_hub_cache(text)
    raise UsageError(
        f"{show_path(folder)} is not a folder.",
        f"Give the folder that holds config.json, or {EMBEDDED!r} for the embedded model.",
    )


def hub_cache() -> Path:
    """Where the hub's tools keep downloaded models on this machine."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"


def _in_hub_cache(model: str) -> Path:
    place = hub_cache() / f"models--{model.replace('/', '--')}"
    main = place / "refs" / "main"
    if main.is_file():
        snapshot = place / "snapshots" / main.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    raise UsageError(
        f"{model} is neither a folder nor a model in the hub cache {show_path(hub_cache())}.",
        f"Download it first (huggingface-cli download {model}), or give its folder.",
    )


def find_output(path: str | os.PathLike[str], model: Path) -> Path:
    """The real path (links followed) of a file to write.

    Raises ``UsageError`` for a place that cannot be written, and for one inside the folder
    ``model`` or that one of its links leads to.
    """
    real, shown = Path(os.path.realpath(path)), show_path(path)
    if real.is_dir():
        raise UsageError(f"{shown} is a folder.", "Name a file.")
    if not real.parent.is_dir():
        raise UsageError(f"{shown}: {show_path(real.parent)} is not a folder.", "Make it first.")
    if real.exists() and not real.is_file():
        raise UsageError(f"{shown} is no regular file.", "Name a file to write.")
    home = Path(os.path.realpath(model))
    held = real.exists() and any(real.samefile(entry) for entry in _files(home))
    if held or home in real.parents:
        raise UsageError(
            f"{shown} would be written into the model {show_path(home)}, which is left as it is.",
            "Choose a place outside of it.",
        )
    try:
        probe = partial_path(real)
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"{shown} cannot be written: {error.strerror}.", "Choose another place."
        ) from error
    return real


def find_outputs(
    model: str | os.PathLike[str], tokens: Path, out: Path, routing: Path | None
) -> tuple[Path, Path | None]:
    """``find_output`` of ``out`` and ``routing``, which must differ from each other and ``tokens``.

    Raises ``UsageError``.
    """
    folder = find_model(model)
    place = find_output(out, folder)
    routing_place = None if routing is None else find_output(routing, folder)
    real = Path(os.path.realpath(tokens))
    if place in (real, routing_place) or real == routing_place:
        raise UsageError("--tokens, --out and --routing name one file twice.", "Name another.")
    return place, routing_place


def _files(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_file()]


def partial_path(path: Path) -> Path:
    """A name beside ``path`` that nothing has yet, for what is not complete."""
    return path.with_name(f".k3offload-{secrets.token_hex(8)}.partial")


@contextmanager
def published(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears as ``path`` when it is complete, and else leaves nothing.

    An ``OSError`` of writing it names ``path``.
    """
    partial = partial_path(path)
    with named(path, partial):
        try:
            with partial.open("xb") as file:
                yield file
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def named(name: str | os.PathLike[str], partial: Path | None = None) -> Iterator[None]:
    """Let an ``OSError`` that names no file (or ``partial``) name ``name``."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(partial), partial):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(name)) from error
