"""Files that are on the drive when a call returns, and locks that say whose a file is.

A file system that cannot sync a folder (some of networks and of user space) answers EINVAL; it has
no promise to give there, and that is no reason to fail.  This file knows the file system only.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

UNFINISHED: Final = ".part"  #: behind the name of a file that is not complete
_NO_SYNC: Final = (errno.EINVAL, errno.ENOTSUP)
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the drive.  Raises ``OSError``."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC or not path.is_dir():
            raise
    finally:
        os.close(number)


def write_file(path: Path, chunks: Iterable[bytes]) -> None:
    """A small file, on the drive when this returns, complete or as it was before.

    Its name may still be in memory: ``sync`` the folder.  Raises ``OSError``, leaving nothing.
    """
    partial = path.with_name(path.name + UNFINISHED)
    try:
        with open(partial, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


class LockFile:
    """A file in a folder of its own that one process holds; both go when it is released.

    ``who`` names the process that holds it instead, '' if this one does.  ``works`` is False where
    the file system has no locks: then nothing is held and nobody is told.  Raises ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.who, self.works = path, "", True
        while True:
            path.parent.mkdir(exist_ok=True)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._number = os.open(path, flags, 0o644)
            except FileNotFoundError:
                continue  # whoever held it has just removed the folder
            if self._take():
                return

    def _take(self) -> bool:
        """Whether it is known who holds the lock; False if it is of a file that is gone."""
        try:
            fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = os.pread(self._number, 200, 0).decode("utf-8", "replace").strip()
            self.who = told or "a process that has just begun"
            os.close(self._number)
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(self._number)
                raise
            self.works = False
        try:
            if not os.path.samestat(os.fstat(self._number), os.stat(self._path)):
                raise FileNotFoundError
        except FileNotFoundError:
            os.close(self._number)
            return False
        with suppress(OSError):  # a full disk: it is only for the message
            os.truncate(self._number, 0)
            os.pwrite(self._number, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        return True

    def release(self) -> None:
        """Let the next one have it; the folder stays if anything else is in it."""
        with suppress(OSError):
            self._path.unlink()  # while it is held: nobody's new file is removed
        with suppress(OSError):
            self._path.parent.rmdir()
        os.close(self._number)
