"""The disk tier: aligned direct reads of whole pages, several in flight, straight into slots.

A page is one or more file extents.  A direct read needs offset, length and address aligned, and
extents start anywhere, so each extent is read as the aligned window around it, and lands in the
slot at the same distance from an aligned address (``windows``).  Tensors that must lie at a place
of their own go through small staging buffers (``read_scatter``), but for the part of them whose
place happens to be aligned like the file.  Reads are cut into pieces, so that an urgent one waits
for the pieces already running at most.  Where a file system refuses direct reads the file is read
buffered instead, and that is said once per file system.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..config import READ_ALIGN, align_up
from ..errors import ReadError
from .base import Buffer, Location, PageId, Priority, Ticket
from .read_queue import Piece, ReadQueue, Watch
from .tier_ram import HUGE, Slab

STAGING = HUGE - READ_ALIGN  #: bytes read through a staging buffer, one huge page, at once
PIECE = 9 << 20  #: most bytes of a page that are read at once
READERS = 8  #: reads in flight on each drive (files of one ``st_dev``)
IN_FLIGHT = READERS * PIECE  #: most bytes in flight on each drive; fewer were slower (see LOG.md)
BESIDE_GUESSES = 3 * PIECE  #: most bytes in flight with guesses among them; a drive is busy with it
DIRECT_PART = 64 << 10  #: a shorter part of a scattered read is not worth a read of its own
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
        end += _window(extent)
    return starts, end


def _window(extent: Location) -> int:
    """Bytes of the aligned window around ``extent``."""
    return align_up(extent.offset % READ_ALIGN + extent.length, READ_ALIGN)


@dataclass
class DiskCounts:
    """What the disk was asked for.  ``overhead`` is what alignment added to the useful bytes."""

    reads: int = 0
    bytes: int = 0
    overhead: int = 0
    retries: int = 0
    modes: dict[str, str] = field(default_factory=dict)


class DiskTier:
    """Reads of model files.  ``locate(page)`` gives a page's extents.

    Each drive has ``readers`` threads of its own, with ``in_flight`` bytes under way at most (at
    least one piece), ``beside_guesses`` if guesses are among them.  Pages are cut into equal pieces
    of ``piece`` bytes or less.
    """

    name = "disk"

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        locate: Callable[[PageId], Sequence[Location]],
        warn: Callable[[str], None] = lambda text: None,
        readers: int = READERS,
        in_flight: int = IN_FLIGHT,
        piece: int = PIECE,
        beside_guesses: int = BESIDE_GUESSES,
    ) -> None:
        assert piece % READ_ALIGN == 0
        self._files = {number: os.fspath(f) for number, f in enumerate(files)}
        self._next_file = len(files)
        self._locate = locate
        self._warn = warn
        self._piece = piece
        self._queue = ReadQueue(readers, in_flight, beside_guesses)
        self._drives: dict[int, int] = {}  # file -> its drive
        self._local = threading.local()
        self._handles: OrderedDict[int, list[int]] = OrderedDict()  # file -> [fd, users, direct]
        self._lock = threading.Lock()
        self._buffered: set[int] = set()  # devices that refuse direct reads
        #: called with a page and its slot when all of it is there, on the thread that read its end;
        #: what it raises is the read's error
        self.look: Callable[[PageId, Buffer], object] | None = None
        self.counts = DiskCounts()

    # ---- what callers use ----

    def watch(self, heard: Watch | None) -> None:
        """Let ``heard`` be told of every piece that is read from now on; None: nobody."""
        self._queue.watch = heard

    def order(self, page: PageId) -> Any:
        return self._locate(page)[0]

    def size(self, page: PageId) -> int:
        return sum(extent.length for extent in self._locate(page))

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        """Start reading ``page`` into the slot ``into`` (aligned; laid out by ``windows``)."""
        extents = self._locate(page)
        starts, size = windows(extents)
        assert into.size >= size
        assert into.ctypes.data % READ_ALIGN == 0
        pieces = []
        for extent, start in zip(extents, starts, strict=True):
            pieces += self._direct(extent, into[start - extent.offset % READ_ALIGN :])
        look = None if self.look is None else partial(self.look, page, into)
        return self._queue.submit(pieces, priority, look)

    def read_scatter(
        self, pieces: Sequence[tuple[Location, Buffer]], priority: Priority = Priority.DEMAND
    ) -> Ticket:
        """Start reading each location into its own buffer, wherever that lies in memory.

        The whole blocks of a buffer whose address is as far from an aligned one as its offset in
        the file land there directly; all else is copied from a staging buffer.
        """
        staged: list[tuple[Location, Buffer]] = []
        tasks: list[tuple[Location, list[Piece]]] = []
        for location, target in pieces:
            assert target.size == location.length
            begin, end = _whole_blocks(location, target)
            blocks = Location(location.file, location.offset + begin, end - begin)
            if blocks.length:
                tasks.append((blocks, self._direct(blocks, target[begin:end])))
            for i, j in ((0, begin), (end, location.length)):
                part = Location(location.file, location.offset + i, j - i)
                staged.append((part, target[i:j]))
        for extent, targets in _group(staged):
            window = _window(extent)
            tasks.append((extent, [self._planned(extent, window, self._read_staged, targets)]))
        tasks.sort(key=lambda task: task[0])
        return self._queue.submit([piece for _, several in tasks for piece in several], priority)

    def probe(self, page: PageId) -> None:
        """Read the beginning of the file of ``page``, at once and ahead of what waits.  Raises
        ``ReadError`` where that fails too: then it is not this page alone that cannot be read."""
        window = Slab(READ_ALIGN).bytes
        self._read_window(Location(self._locate(page)[0].file, 0, 1), window)

    def add(self, path: str) -> int:
        """The number of one more file that may be read from now on."""
        with self._lock:
            number, self._next_file = self._next_file, self._next_file + 1
            self._files[number] = path
        return number

    def forget(self, file: int) -> None:
        """Close ``file``, which was added and which nobody reads any more."""
        with self._lock:
            self._drives.pop(file, None)
            del self._files[file]
            handle = self._handles.pop(file, None)
        if handle is not None:
            os.close(handle[0])

    def close(self) -> None:
        """Give up the reads that have not begun, wait for the others, close the files."""
        self._queue.close()
        self.look = None  # it may hold what should be freed now
        with self._lock:
            for fd, _, _ in self._handles.values():
                os.close(fd)
            self._handles.clear()

    # ---- one read ----

    def _direct(self, extent: Location, into: Buffer) -> list[Piece]:
        """Reads of ``extent`` whose windows fill ``into`` from its (aligned) begin."""
        pieces, at = [], 0
        for part in _cut(extent, self._piece):
            window = into[at : at + _window(part)]
            pieces.append(self._planned(part, window.size, self._read_window, window))
            at += window.size
        return pieces

    def _planned(
        self, extent: Location, size: int, read: Callable[[Location, Any], None], into: Any
    ) -> Piece:
        drive = self._drives.get(extent.file)
        if drive is None:
            try:
                drive = os.stat(self._files[extent.file]).st_dev
            except OSError:  # the read itself will say what is wrong with the file
                return Piece(None, size, extent.length, partial(read, extent, into))
            self._drives[extent.file] = drive
        return Piece(drive, size, extent.length, partial(read, extent, into))

    def _read_staged(self, extent: Location, targets: list[tuple[int, Buffer]]) -> None:
        staging = getattr(self._local, "staging", None)
        if staging is None:
            staging = self._local.staging = Slab(HUGE).bytes
        skew = extent.offset % READ_ALIGN
        self._read_window(extent, staging[: _window(extent)])
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


def _cut(extent: Location, most: int) -> Iterator[Location]:
    """``extent`` in parts about as long as one another, whose aligned windows follow one another
    and have ``most`` bytes or less."""
    size = _window(extent)
    step = align_up(-(-size // max(1, -(-size // most))), READ_ALIGN)
    at, end = extent.offset, extent.offset + extent.length
    while at < end:
        stop = min(end, at - at % READ_ALIGN + step)
        yield Location(extent.file, at, stop - at)
        at = stop


def _whole_blocks(location: Location, target: Buffer) -> tuple[int, int]:
    """The part of ``location`` that can be read straight into ``target``; empty at its begin if
    the two are not aligned alike or it is too short."""
    begin = -location.offset % READ_ALIGN
    end = location.length - (location.offset + location.length) % READ_ALIGN
    alike = (target.ctypes.data - location.offset) % READ_ALIGN == 0
    return (begin, end) if alike and end - begin >= DIRECT_PART else (0, 0)
