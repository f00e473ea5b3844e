"""``k3offload pack``: a model's pages laid anew, aligned and in order, in a folder of its own.

The result is a model folder as released, with ``k3offload_pack`` in its config.json; its trunk may
be held in a smaller precision.  This file is the order of the steps.  Where things lie says
``pack_layout.py``, how a shard is written ``pack_write.py``, what survives a kill
``pack_journal.py``.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from .checkpoint import Checkpoint
from .config import show_size
from .config_fields import read_json
from .config_read import PACK_KEY, PACK_VERSION
from .durable import write_file
from .errors import CheckpointError, DoesNotFit, UsageError
from .findings import count_of, listing
from .machine import default_threads
from .pack_journal import Growing, drop_journal, partial_folder
from .pack_layout import Layout
from .pack_source import CONFIG, JOURNAL, check_outside, identity, read_sources, side_files, stamps
from .pack_stream import Quantise
from .pack_write import write_shard
from .paths import show_path
from .precision import PRECISIONS
from .shards import INDEX_NAME
from .spec import Precision
from .tiers.tier_disk import DiskTier

SHARD_SIZE: Final = 1 << 34  #: bytes; a layer of K3 is a little smaller
ROOM: Final = 1 << 20  #: bytes kept free for the journal and folders
INDEX_LINE: Final = 60  #: bytes of a line of the index beside the tensor's name, at most
Progress = Callable[[str, int, int], None]  #: what is being done, bytes so far, bytes in all


@dataclass(frozen=True)
class Packed:
    """What was written; sizes in bytes.  ``kept`` counts shards that an interrupted run had
    completed; ``already`` says that this very pack was there and nothing was done."""

    out: str
    trunk: str
    tensors: int
    tensor_bytes: int
    shards: int
    file_bytes: int
    kept: int
    already: bool
    seconds: float
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The form ``pack --json`` prints."""
        return asdict(self)


def pack(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    trunk: str | None = None,
    shard_size: int = SHARD_SIZE,
    *,
    threads: int | None = None,
    extra_folders: Sequence[str | os.PathLike[str]] = (),
    progress: Progress = lambda what, done, total: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Packed:
    """Pack the model folder ``model`` into the folder ``out``, which must be absent or empty.

    ``trunk`` None keeps the precision of the source; ``threads`` are those that quantise.  An
    interrupted run is continued by the same call.  Raises ``UsageError`` (a place or an option that
    will not do), ``DoesNotFit`` (the disk), ``CheckpointError``, ``ConfigError``, ``ReadError`` or
    ``OSError``.
    """
    begin, place = time.perf_counter(), Path(os.path.realpath(out))
    checkpoint = Checkpoint.open(model, extra_folders=extra_folders)
    check_outside(place, checkpoint)
    job = _Job(checkpoint, place, _precision(checkpoint, trunk), shard_size)
    already = job.is_done()
    kept = 0 if already else job.run(threads or default_threads(), progress, warn)
    shards = job.layout.shards
    return Packed(
        out=show_path(place),
        trunk=job.trunk,
        tensors=sum(shard.tensors for shard in shards),
        tensor_bytes=job.layout.payload,
        shards=len(shards),
        file_bytes=job.file_bytes,
        kept=kept,
        already=already,
        seconds=time.perf_counter() - begin,
        notes=job.notes(),
    )


def _precision(checkpoint: Checkpoint, wanted: str | None) -> Precision:
    """The trunk's precision in the pack."""
    has = checkpoint.spec.trunk_precision
    if wanted is None:
        return has
    if wanted not in PRECISIONS:
        raise UsageError(f"--trunk {wanted} is not known.", f"Give {' or '.join(PRECISIONS)}.")
    if has not in ("bfloat16", wanted):
        raise UsageError(
            f"--trunk {wanted}: the trunk of {show_path(checkpoint.folder)} is {has} already.",
            "Pack the model that it was made from.",
        )
    return cast(Precision, wanted)


class _Tally:
    """Turns bytes moved for one shard into progress over all; ``done`` counts those before it."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self.done = progress, total, 0

    def of(self, what: str) -> Callable[[int], None]:
        moved = 0

        def show(count: int) -> None:
            nonlocal moved
            moved += count
            self._progress(what, self.done + moved, self._total)

        return show


class _Job:
    """One pack: a checkpoint, a place and options; nothing is written before ``run``."""

    def __init__(
        self, checkpoint: Checkpoint, out: Path, trunk: Precision, shard_size: int
    ) -> None:
        self._checkpoint, self._out, self.trunk = checkpoint, out, trunk
        self._sources = read_sources(checkpoint)
        # what the source holds quantised is copied
        todo: Precision = trunk if checkpoint.spec.trunk_precision == "bfloat16" else "bfloat16"
        self._quantises = todo != "bfloat16"
        self.layout = Layout(checkpoint, self._sources, todo, shard_size)
        self.file_bytes = sum(shard.size for shard in self.layout.shards)
        self._sides, self._left = side_files(checkpoint.folder)
        self._source, self._stamps = identity(checkpoint), stamps(checkpoint)
        own = {"version": PACK_VERSION, "trunk": trunk, "source": self._source}
        self._about = {**own, "stamps": self._stamps, "shard_size": shard_size}
        config = {**read_json(checkpoint.folder / CONFIG), PACK_KEY: own}
        self._config = json.dumps(config, indent=2).encode() + b"\n"

    def is_done(self) -> bool:
        """Whether ``out`` is this very pack; raises unless it may be written."""
        out = self._out
        if not out.exists():
            if not out.parent.is_dir():
                raise UsageError(f"{show_path(out.parent)} is not a folder.", "Make it first.")
            return False
        if not out.is_dir():
            raise UsageError(f"{show_path(out)} is a file.", "Name a folder.")
        if os.path.ismount(out):
            raise UsageError(
                f"{show_path(out)} is where a disk is mounted, so nothing can be renamed to it.",
                "Name a folder inside of it.",
            )
        there = sorted(path.name for path in out.iterdir())
        if there and not self._is_ours():
            raise UsageError(
                f"{show_path(out)} is not empty (it holds {show_path(there[0])}).",
                "Name a folder that is new or empty.",
            )
        if JOURNAL in there:  # a kill came between the last two steps
            drop_journal(out)
        return bool(there)

    def _is_ours(self) -> bool:
        files = {shard.name: shard.size for shard in self.layout.shards}
        try:
            same = all((self._out / name).stat().st_size == n for name, n in files.items())
            return same and (self._out / CONFIG).read_bytes() == self._config
        except OSError:
            return False

    def run(self, threads: int, progress: Progress, warn: Callable[[str], None]) -> int:
        """Write, check and publish the pack; returns how many shards an earlier run had done."""
        folder = partial_folder(self._out)
        self._check_room(folder)
        try:
            with Growing(folder, self._about, self._sides) as growing:
                with ExitStack() as stack:
                    disk = DiskTier(self._checkpoint.files, lambda page: (), warn)
                    stack.callback(disk.close)
                    kept = self._write(
                        growing, disk, self._quantiser(disk, threads, stack), progress
                    )
                for name, path in self._sides.items():
                    write_file(folder / name, [path.read_bytes()])
                write_file(folder / INDEX_NAME, self._index())
                write_file(folder / CONFIG, [self._config])  # last: it makes the folder a model
                self._check(folder)
                growing.publish(self._out)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DoesNotFit(
                f"The disk of {show_path(folder)} is full; the pack is not finished.",
                "Make room and give the same command again, which keeps what is complete; or "
                "remove that folder.",
            ) from error
        return kept

    def _quantiser(self, disk: DiskTier, threads: int, stack: ExitStack) -> Quantise:
        """Loaded only where it is needed: a pack that keeps the trunk as it is needs no torch."""
        if not self._quantises:
            return lambda entry: iter(())
        from .pack_quantise import Quantiser

        quantiser = Quantiser(disk, threads)
        stack.callback(quantiser.close)
        return quantiser

    def _write(
        self, growing: Growing, disk: DiskTier, quantise: Quantise, progress: Progress
    ) -> int:
        kept, tally = 0, _Tally(progress, self.file_bytes)
        for shard in self.layout.shards:
            if growing.keeps(shard, tally.of("checking what is there")):
                kept += 1
            else:
                entries, moved = partial(self.layout.entries, shard), tally.of(shard.name)
                crc = write_shard(growing.folder, shard, entries, disk, quantise, moved)
                growing.note(shard, crc)
            tally.done += shard.size
        return kept

    def _index(self) -> Iterator[bytes]:
        """``model.safetensors.index.json``, in pieces: K3 has half a million lines."""
        yield f'{{\n  "metadata": {{"total_size": {self.layout.payload}}},\n'.encode()
        before = '  "weight_map": {\n'
        for shard in self.layout.shards:
            for entry in self.layout.entries(shard):
                for stored in entry.stored:
                    yield f'{before}    {json.dumps(stored.name)}: "{shard.name}"'.encode()
                    before = ",\n"
        yield b"\n  }\n}\n"

    def _check(self, folder: Path) -> None:
        """Open what was written as a model, and see that the source is still what it was."""
        assert Checkpoint.open(folder).spec.trunk_precision == self.trunk
        now = identity(self._checkpoint), stamps(self._checkpoint)
        if now != (self._source, self._stamps):
            raise CheckpointError(
                f"{show_path(self._checkpoint.folder)} was changed while it was packed.",
                f"Remove {show_path(folder)} and pack it again.",
            )

    def _check_room(self, folder: Path) -> None:
        """Raise before anything is written when the disk cannot hold the pack."""
        shards = self.layout.shards
        index = sum(shard.text + INDEX_LINE * shard.entries for shard in shards)
        sides = sum(path.stat().st_size for path in self._sides.values())
        needed = self.file_bytes + index + sides + len(self._config) + ROOM
        there = folder.iterdir() if folder.is_dir() else ()
        needed -= sum(path.lstat().st_blocks * 512 for path in there)  # kept, or written over
        free = shutil.disk_usage(self._out.parent).free
        if needed > free:
            raise DoesNotFit(
                f"The pack needs {needed:,} bytes ({show_size(needed)}) but the disk of "
                f"{show_path(self._out.parent)} has {free:,} bytes ({show_size(free)}) free.",
                f"Free {show_size(needed - free)}, choose another disk, or a smaller --trunk.",
                missing=needed - free,
            )

    def notes(self) -> tuple[str, ...]:
        """What a person should know of the result."""
        notes = []
        if self._left:
            names = listing(map(show_path, self._left), 5)
            notes.append(f"Not copied, since they are no side files of a model: {names}.")
        if self._sources.dropped:
            what = count_of(self._sources.dropped, "tensor")
            notes.append(f"Left out: {what} of experts that no reader needs.")
        return tuple(notes)
