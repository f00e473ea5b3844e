"""Packs taken apart by hand, and what a test compares them with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from tests.helpers_checkpoint import Raw, read_shard, shards

PADDING = "k3offload.padding."


class Place(NamedTuple):
    """Where a tensor's data lies: file name, first byte, end."""

    file: str
    begin: int
    end: int


def places(folder: Path) -> dict[str, Place]:
    """Every tensor of every shard of ``folder``, in the order of its data."""
    found: dict[str, Place] = {}
    for path in shards(folder):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(length))
        head.pop("__metadata__", None)
        for name, entry in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = Place(path.name, begin, end)
    return found


def tensors(folder: Path) -> dict[str, Raw]:
    """Every tensor of ``folder`` but padding."""
    every = {name: raw for path in shards(folder) for name, raw in read_shard(path).items()}
    return {name: raw for name, raw in every.items() if not name.startswith(PADDING)}


def digests(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of every file, folders and hidden files included."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stamp(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Content, time and mode of every file: what a command that only reads leaves as it was."""
    return {
        name: (digest, (folder / name).stat().st_mtime_ns, (folder / name).stat().st_mode)
        for name, digest in digests(folder).items()
    }
