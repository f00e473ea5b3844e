"""The files of spilled arrays: one folder an array, a zarr array that any reader opens.

Uncompressed chunks of whole blocks, so that a block is a run of bytes of a file.  Writes are direct
where the file system and the size of a block allow it.  A file goes with the last of its blocks, a
folder with the last of its files.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..config import LATENT_BLOCK, READ_ALIGN
from ..errors import ScratchError, UsageError
from .base import Buffer
from .scratch import Scratch
from .tier_disk import RETRIES, DiskTier

CHUNK = 16  #: blocks of a file at most
FILE = 16 << 20  #: bytes of a file at most, but for one of a single block


def zarr() -> Any:
    """The library, which most engines never need; ``UsageError`` where there is none."""
    try:
        return import_module("zarr")
    except ImportError as error:
        raise UsageError(
            f"Scratch files are written with the package zarr, and it cannot be had: {error}.",
            "Install zarr 3 (Python 3.11 or later), or give enough RAM to do without.",
        ) from error


@dataclass
class SpillCounts:
    """What went to scratch files and came back."""

    written_bytes: int = 0
    read_bytes: int = 0
    reads: int = 0  # pieces that had something to read
    wait_seconds: float = 0.0  # of readers for pieces
    full_seconds: float = 0.0  # of writers for a free slot


class Layout(NamedTuple):
    """What an array holds: ``width`` numbers of ``item`` bytes a token, of the type ``dtype``."""

    width: int
    item: int
    dtype: str

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return LATENT_BLOCK * self.width * self.item

    @property
    def chunk(self) -> int:
        """Blocks of a file."""
        return max(1, min(CHUNK, FILE // self.block))


class File:
    """Some blocks of an array.  ``live``: how many of them anybody still has."""

    def __init__(self, folder: Folder, index: int) -> None:
        self.folder, self.index = folder, index
        self.live = 0
        self.number: int | None = None  # of the reader, once there is a file
        self.path = str(folder.path / f"{index}.0")

    @property
    def full(self) -> bool:
        """Whether it has been given all of its blocks."""
        return self.folder.blocks >= (self.index + 1) * self.folder.layout.chunk


class Folder:
    """One array on disk.  ``first``: the token that its first row belongs to (a copy of a sequence
    shares what came before)."""

    def __init__(self, path: Path, layout: Layout, first: int, scratch: Scratch) -> None:
        self.path, self.layout, self.first, self._scratch = path, layout, first, scratch
        self.blocks = 0  # that were ever added
        self.files: dict[int, File] = {}
        self.ended = False  # nothing will be added any more
        self.error: ScratchError | None = None
        self._array: Any = None
        self._written = 0  # blocks, all those before them included
        self._direct = layout.block % READ_ALIGN == 0

    def place(self) -> tuple[File, int]:
        """The file of the next block, and its number there."""
        index, at = divmod(self.blocks, self.layout.chunk)
        if index not in self.files:
            self.files[index] = File(self, index)
        file = self.files[index]
        file.live += 1
        self.blocks += 1
        return file, at

    def write(self, file: File, at: int, data: Buffer, disk: DiskTier) -> None:
        """Write block number ``at`` of ``file``; retries what may pass.  Raises ``OSError`` or
        ``ScratchError``."""
        for attempt in range(RETRIES + 1):
            try:
                if file.number is None:
                    self._make(file)
                    file.number = disk.add(file.path)
                self._write(file.path, at * self.layout.block, data)
                break
            except OSError as error:
                if attempt == RETRIES or error.errno not in (errno.EIO, errno.EAGAIN):
                    raise
                time.sleep(0.05 * 4**attempt)
        self._written = file.index * self.layout.chunk + at + 1
        if at + 1 == self.layout.chunk:
            self.describe()

    def _make(self, file: File) -> None:
        if self._array is None:
            self._array = zarr().create_array(
                store=str(self.path),
                shape=(0, self.layout.width),
                chunks=(self.layout.chunk * LATENT_BLOCK, self.layout.width),
                dtype=f"uint{8 * self.layout.item}",
                compressors=None,
                filters=None,
                fill_value=0,
                chunk_key_encoding={"name": "v2", "separator": "."},
                attributes={"dtype": self.layout.dtype, "first_token": self.first},
            )
        size = self.layout.chunk * self.layout.block
        self._scratch.check(size, "A scratch file")
        fd = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.posix_fallocate(fd, 0, size)  # a full disk says so now; a chunk is never short
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                os.ftruncate(fd, size)  # a file system that reserves nothing
        except OSError:
            os.unlink(file.path)
            raise
        finally:
            os.close(fd)

    def _write(self, path: str, at: int, data: Buffer) -> None:
        fd = self._open(path)
        try:
            done = 0
            while done < data.size:
                done += os.pwrite(fd, data[done:].data, at + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = False
            self._write(path, at, data)
        finally:
            os.close(fd)

    def _open(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CLOEXEC  # never made anew: a file that is gone is an error
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False
        return os.open(path, flags)

    def describe(self) -> None:
        """Let the array's shape say how many tokens are there."""
        if self._array is not None:
            self._array.resize((self._written * LATENT_BLOCK, self.layout.width))

    def tidy(self, disk: DiskTier) -> None:
        """Delete the files that nobody needs, and the folder after the last of them."""
        for file in [f for f in self.files.values() if not f.live and (f.full or self.ended)]:
            del self.files[file.index]
            if file.number is not None:
                disk.forget(file.number)
                try:
                    os.unlink(file.path)
                except OSError:  # somebody else did it; the folder is ours to delete as a whole
                    continue
        if self.ended and not self.files:
            shutil.rmtree(self.path, ignore_errors=True)
