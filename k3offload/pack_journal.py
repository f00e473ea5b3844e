"""The folder in which a pack grows, and the journal that says which of its shards are complete.

The journal's first line says what is being packed and how; each further line is one shard that has
reached the drive, with size and checksum.  A shard that is not in it, or whose checksum is another,
is written again.  The folder lies beside OUT and becomes OUT by one rename, so that OUT is never
seen half-written.  This file knows names and lines; it computes no bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from .durable import UNFINISHED, sync
from .errors import CheckpointError, UsageError
from .pack_layout import Shard
from .pack_source import CONFIG, JOURNAL
from .pack_write import checksum
from .paths import show_path
from .shards import INDEX_NAME

PARTIAL: Final = ".k3pack-partial"  #: what the folder is called, behind the name of OUT
_SHARD: Final = re.compile(r"model-\d{5,}-of-\d{6,}\.safetensors")
_SAYS: Final = {
    "version": "made by another version of k3offload",
    "source": "of another model",
    "stamps": "of a model whose files have changed since",
    "trunk": "with another --trunk",
    "shard_size": "with another --shard-size",
}


def partial_folder(out: Path) -> Path:
    """Where a pack grows that will be ``out``."""
    return out.with_name(out.name + PARTIAL)


class Growing:
    """The folder while it is written to; one process at a time, by a lock on the journal.

    ``about`` is what must be the same for an earlier run to be continued; ``others`` are the names
    the folder may hold beside shards.  Raises ``UsageError`` for a folder that is in use, holds
    anything else, or was begun from something else.
    """

    def __init__(self, folder: Path, about: dict[str, Any], others: Collection[str]) -> None:
        self.folder = folder
        self._done: dict[str, tuple[int, int]] = {}
        if folder.is_symlink():  # it might lead into a model
            raise UsageError(f"{show_path(folder)} is a link.", "Remove it, or name another OUT.")
        folder.mkdir(exist_ok=True)
        self._refuse_strangers({JOURNAL, CONFIG, INDEX_NAME, *others})
        self._file = open(folder / JOURNAL, "a+b")  # noqa: SIM115
        try:
            self._lock()
            self._read(about)
        except BaseException:
            self._file.close()
            raise
        for path in folder.iterdir():
            if path.name.endswith(UNFINISHED):
                path.unlink()

    def __enter__(self) -> Growing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def keeps(self, shard: Shard, read: Callable[[int], None]) -> bool:
        """Whether ``shard`` is complete from an earlier run; all of it is read to know."""
        known, path = self._done.get(shard.name), self.folder / shard.name
        if known is None or not path.is_file() or path.stat().st_size != known[0]:
            return False
        return known[0] == shard.size and checksum(path, read) == known[1]

    def note(self, shard: Shard, checksum: int) -> None:
        """Write down that ``shard`` is complete."""
        self._write({"shard": shard.name, "size": shard.size, "crc32": checksum})

    def publish(self, out: Path) -> None:
        """Make the folder ``out``, at once and whole; the journal goes when it has been done."""
        sync(self.folder)
        os.rename(self.folder, out)
        sync(out.parent)
        drop_journal(out)

    def _refuse_strangers(self, ours: set[str]) -> None:
        for path in sorted(self.folder.iterdir()):
            name = path.name.removesuffix(UNFINISHED)
            if not (path.is_file() and not path.is_symlink()) or not (
                name in ours or _SHARD.fullmatch(name)
            ):
                raise UsageError(
                    f"{show_path(path)} is not of a pack; the folder should hold nothing else.",
                    "Move it away, or name another OUT.",
                )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another run is writing {show_path(self.folder)}.", "Wait for it, or end it."
            ) from None

    def _read(self, about: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        torn = lines.pop()  # what stands behind the last line's end
        if torn:
            self._file.truncate(self._file.seek(0, os.SEEK_END) - len(torn))
        if not lines:
            self._write(about)
            sync(self.folder)
            return
        begun = _line(self.folder, lines[0])
        for name, text in _SAYS.items():
            if begun.get(name) != about[name]:
                raise UsageError(
                    f"{show_path(self.folder)} holds an unfinished pack {text}.",
                    "Repeat the command that began it, or remove that folder to start anew.",
                )
        for line in lines[1:]:
            entry = _line(self.folder, line)
            self._done[str(entry.get("shard"))] = entry.get("size", -1), entry.get("crc32", -1)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _line(folder: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{show_path(folder / JOURNAL)} is damaged.", "Remove that folder to start anew."
        )
    return value


def drop_journal(out: Path) -> None:
    """Remove the journal from a published pack; one that was killed at that point has it still."""
    (out / JOURNAL).unlink(missing_ok=True)
    sync(out)
