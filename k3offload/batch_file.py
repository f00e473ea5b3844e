"""The file that a batch grows: whole lines appended, or nothing; replaced in one step.

This file knows bytes and where they end; what lines mean is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from .batch_lines import Line, read_lines
from .durable import UNFINISHED, sync
from .errors import BatchError, UsageError
from .paths import show_path

_BLOCK: Final = 1 << 20  #: bytes copied at a time
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def beside(out: Path, ending: str) -> Path:
    """The file or folder that belongs to ``out``."""
    return out.with_name(out.name + ending)


def refuse(out: Path, allowed: bool) -> None:
    """Raise ``UsageError`` if ``out`` cannot be a file, or is there and is not ``allowed`` to."""
    shown = show_path(out)
    if not os.path.isdir(out.parent):
        raise UsageError(f"{shown}: {show_path(out.parent)} is not a folder.", "Make it first.")
    if os.path.lexists(out):
        if not os.path.isfile(out):
            raise UsageError(f"{shown} is no regular file.", "Name one that is new.")
        if not allowed:
            raise UsageError(
                f"{shown} is there already.",
                "Go on with it by --resume, replace it by --overwrite, or name another file.",
            )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an ``OSError`` become a ``BatchError`` that names ``path`` and says what is kept."""
    try:
        yield
    except OSError as error:
        other = error.filename not in (None, path, os.fspath(path))
        full = error.errno in _FULL
        raise BatchError(
            f"{show_path(path)} cannot be written: {error.strerror or error}"
            f"{f' ({show_path(error.filename)})' if other else ''}.",
            f"{'Make room' if full else 'Look at that drive and its permissions'}, then go on with "
            "--resume: what was recorded before is kept.",
        ) from error


class OutFile:
    """The file ``out``, open to be read and appended to; the caller holds its lock.

    With ``replace`` a file that is there stays until the first ``append``.  Raises ``OSError``, as
    all methods do.
    """

    def __init__(self, out: Path, replace: bool) -> None:
        self._out, self._part = out, beside(out, UNFINISHED)
        self.size = 0  #: bytes of whole lines; what is behind them was not written to its end
        self.there = os.path.exists(out)  #: before this
        self.hidden = self.there and replace  #: the old file is still there instead
        self._part.unlink(missing_ok=True)  # of a run that was killed
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        if self.there and not replace:
            flags &= ~os.O_CREAT
        else:
            flags |= os.O_EXCL
        self._number = os.open(self._part if self.hidden else out, flags, 0o644)
        if self.hidden:
            os.fchmod(self._number, stat.S_IMODE(out.stat().st_mode))

    def read(self, take: Callable[[Line], None], warn: Callable[[str], None]) -> bool:
        """Give all records to ``take``, and mend the end: half a line is cut off.

        Returns whether the last record had no newline; it has one now, behind its bytes.  Raises
        ``BatchError`` naming the line for other damage.
        """
        torn, end = 0, 0
        with open(os.dup(self._number), "rb") as file:
            for found in read_lines(file, self._out):
                if isinstance(found, int):
                    torn = found
                else:
                    end = found.begin + found.length
                    take(found)
            self.size = file.seek(0, os.SEEK_END) - torn
        if torn:
            warn(f"{show_path(self._out)} ended in half a record ({torn:,} bytes): it is cut off")
            os.ftruncate(self._number, self.size)
        bare = 0 < end == self.size and os.pread(self._number, 1, end - 1) != b"\n"
        if bare:
            os.pwrite(self._number, b"\n", self.size)
            self.size += 1
        os.fsync(self._number)  # a process that was killed may not have come to it
        return bare

    def append(self, data: bytes) -> None:
        """All of ``data`` behind the last whole line and on the drive, or nothing of it."""
        try:
            os.ftruncate(self._number, self.size)  # where the last one failed, and this did, too
            done = 0
            while done < len(data):
                done += os.pwrite(self._number, data[done:], self.size + done)
            os.fdatasync(self._number)
            self.publish()
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._number, self.size)
            raise
        self.size += len(data)

    def publish(self) -> None:
        """Let the file be there under its name."""
        if self.hidden:
            os.rename(self._part, self._out)
            self.hidden = False
            sync(self._out.parent)

    def rewrite(self, spans: Iterable[tuple[int, int]]) -> None:
        """Replace the file by these (begin, length) of its bytes, in one step.  Afterwards it can
        only be closed, or rewritten once more from what it was."""
        try:
            with open(self._part, "wb", buffering=_BLOCK) as file:
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._number).st_mode))
                for begin, length in spans:
                    self._copy(begin, length, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(self._part, self._out)
        except OSError:
            with suppress(OSError):
                self._part.unlink(missing_ok=True)
            raise
        sync(self._out.parent)

    def _copy(self, at: int, left: int, file: BinaryIO) -> None:
        while left:
            data = os.pread(self._number, min(left, _BLOCK), at)
            if not data:
                raise OSError(errno.EIO, "it is shorter than it was")
            file.write(data)
            at, left = at + len(data), left - len(data)

    def close(self, undo: bool = False) -> None:
        """Let it go; ``undo``: nothing was begun, so a file that this made is deleted."""
        os.close(self._number)
        made = self._part if self.hidden else self._out
        if self.hidden or (undo and not self.there):
            with suppress(OSError):
                made.unlink(missing_ok=True)
