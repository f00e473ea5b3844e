"""The disk tier: aligned direct reads of whole pages, several in flight, straight into slots.

A page is one or more file extents.  A direct read needs offset, length and address aligned, and
extents start anywhere, so each extent is read as the aligned window around it, and lands in the
slot at the same distance from an aligned address (``windows``).  Tensors that must lie at a place
of their own go through small staging buffers (``read_scatter``).  Where a file system refuses
direct reads the file is read buffered instead, and that is said once per file system.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import READ_ALIGN, align_up
from ..errors import ReadError
from .base import Buffer, Location, PageId, Ticket

STAGING = 1 << 20  #: bytes of a reader's staging buffer; larger ones were slower (see LOG.md)
READERS = 8  #: reads in flight
MAX_OPEN = 64  #: file handles kept open
RETRIES = 3


def windows(extents: Sequence[Location]) -> tuple[list[int], int]:
    """Where each extent begins in a slot, and the bytes of the slot.

    Each extent's aligned window follows the one before; the extent begins in its window where it
    begins in its aligned block of the file.
    """
    starts, end = [], 0
    for extent in extents:
        skew = extent.offset % READ_ALIGN
        starts.append(end + skew)
        end += align_up(skew + extent.length, READ_ALIGN)
    return starts, end


@dataclass
class DiskCounts:
    """What the disk was asked for.  ``overhead`` is what alignment added to the useful bytes."""

    reads: int = 0
    bytes: int = 0
    overhead: int = 0
    retries: int = 0
    modes: dict[str, str] = field(default_factory=dict)


class DiskTier:
    """Reads of model files.  ``locate(page)`` gives a page's extents."""

    name = "disk"

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        locate: Callable[[PageId], Sequence[Location]],
        warn: Callable[[str], None] = lambda text: None,
        readers: int = READERS,
    ) -> None:
        self._files = [os.fspath(f) for f in files]
        self._locate = locate
        self._warn = warn
        self._pool = ThreadPoolExecutor(readers, "k3-read")
        self._local = threading.local()
        self._handles: OrderedDict[int, list[int]] = OrderedDict()  # file -> [fd, users, direct]
        self._lock = threading.Lock()
        self._buffered: set[int] = set()  # devices that refuse direct reads
        self.counts = DiskCounts()

    # ---- what callers use ----

    def order(self, page: PageId) -> Any:
        return self._locate(page)[0]

    def size(self, page: PageId) -> int:
        return sum(extent.length for extent in self._locate(page))

    def read(self, page: PageId, into: Buffer) -> Ticket:
        """Start reading ``page`` into the slot ``into`` (aligned; laid out by ``windows``)."""
        extents = self._locate(page)
        starts, size = windows(extents)
        assert into.size >= size
        assert into.ctypes.data % READ_ALIGN == 0
        ticket = Ticket(len(extents))
        for extent, start in zip(extents, starts, strict=True):
            skew = extent.offset % READ_ALIGN
            window = into[start - skew : start - skew + align_up(skew + extent.length, READ_ALIGN)]
            self._submit(ticket, self._read_window, extent, window)
        return ticket

    def read_scatter(self, pieces: Sequence[tuple[Location, Buffer]]) -> Ticket:
        """Start reading each location into its own buffer, wherever that lies in memory."""
        tasks = _group(pieces)
        ticket = Ticket(len(tasks))
        for extent, targets in tasks:
            self._submit(ticket, self._read_staged, extent, targets)
        return ticket

    def close(self) -> None:
        self._pool.shutdown()
        with self._lock:
            for fd, _, _ in self._handles.values():
                os.close(fd)
            self._handles.clear()

    # ---- one read ----

    def _submit(self, ticket: Ticket, task: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                task(*args)
            except BaseException as error:
                ticket.finish(error)
            else:
                ticket.finish()

        self._pool.submit(run)

    def _read_staged(self, extent: Location, targets: list[tuple[int, Buffer]]) -> None:
        staging = getattr(self._local, "staging", None)
        if staging is None:
            memory = mmap.mmap(-1, STAGING + READ_ALIGN)
            staging = self._local.staging = np.frombuffer(memory, dtype=np.uint8)
        skew = extent.offset % READ_ALIGN
        self._read_window(extent, staging[: align_up(skew + extent.length, READ_ALIGN)])
        for delta, target in targets:
            target[:] = staging[skew + delta : skew + delta + target.size]

    def _read_window(self, extent: Location, window: Buffer) -> None:
        """Fill ``window``, the aligned window around ``extent``; retries what may pass."""
        begin = extent.offset // READ_ALIGN * READ_ALIGN
        needed = extent.offset + extent.length - begin
        for attempt in range(RETRIES + 1):
            try:
                self._fill(extent.file, begin, window, needed)
                break
            except OSError as error:
                if attempt == RETRIES or error.errno not in (errno.EIO, errno.EAGAIN):
                    raise self._read_error(extent, str(error)) from error
                with self._lock:
                    self.counts.retries += 1
                self._warn(f"{self._files[extent.file]}: {error}; reading again")
                time.sleep(0.05 * 4**attempt)
        with self._lock:
            self.counts.reads += 1
            self.counts.bytes += extent.length
            self.counts.overhead += window.size - extent.length

    def _fill(self, file: int, begin: int, window: Buffer, needed: int) -> None:
        view, done, stalled = window.data, 0, 0
        while done < needed:
            before = done
            with self._handle(file) as (fd, direct):
                try:
                    got = os.preadv(fd, [view[done:]], begin + done)
                except OSError as error:
                    if error.errno == errno.EINVAL and direct:
                        self._give_up_direct(file, fd)
                        continue
                    raise
                size = os.fstat(fd).st_size if done + got < needed else 0
            done += got
            if done < needed:
                if begin + needed > size:
                    raise ReadError(
                        f"{self._files[file]} ends at byte {size:,} while byte {begin + needed:,} "
                        "is needed: it was shortened while in use.",
                        "Copy or download this file again.",
                    )
                if direct:
                    done -= done % READ_ALIGN  # a short direct read may end anywhere
                stalled = stalled + 1 if done <= before else 0
                if stalled > RETRIES:
                    self._unstick(file, direct)
                    stalled = 0

    def _unstick(self, file: int, direct: bool) -> None:
        """Reads that end short without getting on: buffered ones need no whole blocks."""
        if not direct:
            raise OSError(errno.EIO, "reads return no bytes before the end of the file")
        with self._handle(file) as (fd, _):
            self._give_up_direct(file, fd)

    def _read_error(self, extent: Location, why: str) -> ReadError:
        return ReadError(
            f"Reading {extent.length:,} bytes at offset {extent.offset:,} of "
            f"{self._files[extent.file]} failed: {why}.",
            "Check the drive and the file (k3offload check MODEL --full reads all of it).",
        )

    # ---- file handles: opened at first use, a bounded number kept ----

    @contextmanager
    def _handle(self, file: int) -> Any:
        with self._lock:
            entry = self._handles.pop(file, None) or self._open(file)
            self._handles[file] = entry  # most recent last
            entry[1] += 1
            idle = [f for f, e in self._handles.items() if e[1] == 0]
            for old in idle[: max(0, len(self._handles) - MAX_OPEN)]:
                os.close(self._handles.pop(old)[0])
        try:
            yield entry[0], bool(entry[2])
        finally:
            with self._lock:
                entry[1] -= 1

    def _open(self, file: int) -> list[int]:
        path = self._files[file]
        direct = os.stat(path).st_dev not in self._buffered
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            direct = False
            self._note_buffered(path)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.counts.modes.setdefault(os.path.dirname(path), "direct" if direct else "buffered")
        return [fd, 0, int(direct)]

    def _give_up_direct(self, file: int, fd: int) -> None:
        import fcntl

        with self._lock:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            if file in self._handles:
                self._handles[file][2] = 0
            self._note_buffered(self._files[file])

    def _note_buffered(self, path: str) -> None:
        device = os.stat(path).st_dev
        self.counts.modes[os.path.dirname(path)] = "buffered"
        if device not in self._buffered:
            self._buffered.add(device)
            self._warn(
                f"The file system of {os.path.dirname(path)} refuses direct reads; "
                "its files are read through the page cache."
            )


def _group(
    pieces: Sequence[tuple[Location, Buffer]],
) -> list[tuple[Location, list[tuple[int, Buffer]]]]:
    """Cut and join ``pieces`` into reads of at most ``STAGING`` bytes, in file order."""
    cut: list[tuple[Location, Buffer]] = []
    for location, target in pieces:
        assert target.size == location.length
        for at in range(0, location.length, STAGING):
            n = min(STAGING, location.length - at)
            cut.append((Location(location.file, location.offset + at, n), target[at : at + n]))
    cut.sort(key=lambda piece: piece[0])
    tasks: list[tuple[Location, list[tuple[int, Buffer]]]] = []
    for location, target in cut:
        if tasks:
            last, targets = tasks[-1]
            end = location.offset + location.length
            joins = location.file == last.file and location.offset <= last.offset + last.length
            if joins and end - last.offset <= STAGING:
                length = max(last.length, end - last.offset)
                tasks[-1] = (Location(last.file, last.offset, length), targets)
                targets.append((location.offset - last.offset, target))
                continue
        tasks.append((location, [(0, target)]))
    return tasks
