"""Writing one shard of a pack: past the page cache, checksummed, complete or not there at all.

A shard grows under a temporary name and is renamed when its bytes have reached the drive.  This
file knows files and blocks; what they hold and what a folder of them means is decided elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from .config import READ_ALIGN
from .durable import UNFINISHED, sync
from .pack_layout import Entry, Shard, header
from .pack_stream import BLOCK, Block, Quantise, stream
from .tiers.base import Buffer
from .tiers.tier_disk import DiskTier
from .tiers.tier_ram import Slab

BLOCKS: Final = 4  #: in memory: one being filled, one being written, the others being read
FLUSH: Final = 64 << 20  #: bytes a buffered file may hold in the page cache


class _File:
    """A file written from front to end, with direct writes where the file system takes them."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path, self._at, self._flushed = path, 0, 0
        self._direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            self._fd = os.open(path, flags, 0o644)

    def write(self, data: Buffer) -> None:
        done = 0
        while done < data.size:
            if self._direct and (data.size - done) % READ_ALIGN:
                self._give_up_direct()  # the end of the file, or after a short write
            try:
                done += os.pwrite(self._fd, data[done:].data, self._at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise OSError(error.errno, error.strerror, os.fspath(self._path)) from error
                self._give_up_direct()
        self._at += done
        if not self._direct and self._at - self._flushed >= FLUSH:
            self._flush()

    def _give_up_direct(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def _flush(self) -> None:
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._flushed = self._at

    def finish(self) -> None:
        """Bring everything to the drive."""
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)


class _Writer:
    """Takes filled blocks in order, and sums each up while it is written."""

    def __init__(self, file: _File, wrote: Callable[[int], None]) -> None:
        self._file, self._wrote = file, wrote
        slab = Slab(BLOCKS * BLOCK, claim=False)
        self._free: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
        for begin in range(0, slab.size, BLOCK):
            self._free.put(Block(slab.bytes[begin : begin + BLOCK]))
        self._error: BaseException | None = None
        self.checksum = 0
        self._drive = ThreadPoolExecutor(1, "k3-pack-drive")
        self._thread = threading.Thread(target=self._work, name="k3-pack-write", daemon=True)
        self._thread.start()

    def take(self) -> Block:
        """A block to fill; raises what writing an earlier one raised."""
        block = self._free.get()
        if self._error is not None:
            raise self._error
        return block

    def give(self, block: Block) -> None:
        self._full.put(block)

    def join(self) -> None:
        """Wait until every block has ended; ``check`` says how."""
        self._full.put(None)
        self._thread.join()
        self._drive.shutdown()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (block := self._full.get()) is not None:
            try:
                assert block.ticket is not None
                block.ticket.wait()  # also after an error: its memory is in use until then
                if self._error is None:
                    data = block.buffer[: block.used]
                    writing = self._drive.submit(self._file.write, data)
                    self.checksum = zlib.crc32(data.data, self.checksum)
                    writing.result()
                    self._wrote(block.used)
            except BaseException as error:
                self._error = self._error or error
            self._free.put(Block(block.buffer))


def write_shard(
    folder: Path,
    shard: Shard,
    entries: Callable[[], Iterable[Entry]],
    disk: DiskTier,
    quantise: Quantise,
    wrote: Callable[[int], None],
) -> int:
    """Write ``shard`` into ``folder`` and return its CRC-32; ``wrote`` is told bytes as they go.

    Raises ``OSError`` (naming the file) and what reading raises; the unfinished file is removed.
    """
    path, partial = folder / shard.name, folder / (shard.name + UNFINISHED)
    file = _File(partial)
    try:
        writer = _Writer(file, wrote)
        try:
            stream(header(entries()), entries(), disk, writer.take, writer.give, quantise)
        finally:
            writer.join()
        writer.check()
        file.finish()
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        file.close()
    assert partial.stat().st_size == shard.size, shard
    os.rename(partial, path)
    sync(folder)
    return writer.checksum


def checksum(path: Path, wrote: Callable[[int], None]) -> int:
    """CRC-32 of a file, read past the page cache as far as that goes."""
    total, buffer = 0, np.empty(BLOCK, np.uint8)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer.data):
            total = zlib.crc32(buffer[:count].data, total)
            wrote(count)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total
