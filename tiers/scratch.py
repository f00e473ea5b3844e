"""The scratch folder: files of one engine that mean nothing once it is gone.

Each engine has a folder of its own inside ``--scratch``, locked as long as its process lives, so
that whoever comes next can tell leftovers of a crash from a neighbour's files.  Nothing is deleted
that does not carry our mark.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from ..config import show_size
from ..errors import ScratchError, UsageError

PREFIX, MARK = "engine-", "k3offload-scratch"  #: of a folder's name; the file that is its lock
IN_RAM = ("tmpfs", "ramfs")  #: file systems that are memory under another name
SPARE: int = 256 << 20  #: bytes of the file system that are left to others


def usual_place(environ: Mapping[str, str] = os.environ) -> Path:
    """``k3offload/scratch`` in the user's cache folder: of all the places for temporary files it
    is the one that hardly ever lies in memory."""
    cache = environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "k3offload" / "scratch"


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` (or where it would be made) lies on."""
    there = Path(os.path.realpath(path))
    mounts = [(Path(p.mountpoint), p.fstype) for p in psutil.disk_partitions(all=True)]
    inside = [(m, kind) for m, kind in mounts if m == there or m in there.parents]
    return max(inside, key=lambda one: len(one[0].parts))[1] if inside else ""


class Scratch:
    """A fresh folder in ``place`` (``usual_place()`` if None), deleted by ``close``.

    Deletes what crashed processes left in ``place``.  Raises ``UsageError`` if ``place`` cannot be
    used: not writable, or in memory.
    """

    def __init__(
        self, place: Path | None = None, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.place = usual_place() if place is None else place
        if (kind := file_system(self.place)) in IN_RAM:
            raise UsageError(
                f"The scratch folder {self.place} lies in memory ({kind}): what is moved there "
                "would free nothing.",
                "Name a folder on a disk with --scratch.",
            )
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            clean(self.place, warn)
            # Under a name that nobody cleans until it is locked: others may start just now.
            made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=self.place))
            self._lock = os.open(made / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.folder = made.rename(self.place / made.name.removeprefix("."))
        except OSError as error:
            raise UsageError(
                f"The scratch folder {self.place} cannot be used: {error}.",
                "Name another one with --scratch.",
            ) from error

    def free(self) -> int:
        """Bytes that may still be written."""
        found = os.statvfs(self.folder)
        return max(0, found.f_bavail * found.f_frsize - SPARE)

    def check(self, size: int, what: str) -> None:
        """Raises ``ScratchError`` if ``size`` more bytes have no room."""
        free = self.free()
        if size > free:
            raise ScratchError(
                f"{what} needs {show_size(size)} in {self.place}, and {show_size(free)} are free "
                f"there ({show_size(SPARE)} are left to others).",
                "Free space there, name another folder with --scratch, or close sessions.",
            )

    def close(self) -> None:
        """Delete the folder.  Closing twice is fine."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def clean(place: Path, warn: Callable[[str], None] = lambda text: None) -> None:
    """Delete the folders in ``place`` whose process is gone."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / MARK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # not ours, or not made to the end
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            warn(f"{folder} was left by a process that ended early; it is deleted")
        except OSError:  # in use
            pass
        finally:
            os.close(lock)
