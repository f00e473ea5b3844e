"""A memory control group of its own for a process: made, limited, read, and taken away.

Versions 1 and 2.  ``None`` where none can be made: then nothing is to be compared.  Knows files of
the kernel, nothing of what runs in a group.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    limit: str
    peak: str
    swap: str  #: the limit of memory and swap (version 1), or of swap alone


_V1 = _Names("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.memsw.limit_in_bytes")
_V2 = _Names("memory.max", "memory.peak", "memory.swap.max")


@dataclass(frozen=True)
class Group:
    """``folder`` of a group whose members together hold ``limit`` bytes at most, the page cache
    that they filled included."""

    folder: Path
    version: int
    limit: int

    @property
    def joining(self) -> list[str]:
        """What a command line begins with to run in this group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    def peak(self) -> int | None:
        """Most bytes it held so far; None where the kernel does not say (version 2 before 5.19)."""
        name = (_V1 if self.version == 1 else _V2).peak
        try:
            return int((self.folder / name).read_text())
        except (OSError, ValueError):
            return None

    def killed(self) -> bool:
        """Whether the kernel ended a member because the limit was reached."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        try:
            words = (self.folder / name).read_text().split()
        except OSError:
            return False
        fields = dict(zip(words[::2], words[1::2], strict=False))
        return int(fields.get("oom_kill", 0)) > 0

    def remove(self) -> None:
        """The group goes away; its members must have ended.  The kernel takes a moment."""
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)


def make_group(
    name: str, limit: int, root: Path = ROOT, own: Path = Path("/proc/self/cgroup")
) -> Group | None:
    """A new group ``name`` of ``limit`` bytes beside or below this process's; None where the
    system has no such groups or allows none."""
    for version, parent in _parents(root, own):
        names = _V1 if version == 1 else _V2
        folder = parent / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / names.limit).write_text(str(limit))
            # a kernel without swap has no such file
            with suppress(OSError):
                if (folder / names.swap).exists():
                    (folder / names.swap).write_text(str(limit if version == 1 else 0))
            return Group(folder, version, limit)
        except OSError:  # version 2 hands memory on only where the group above says so
            with suppress(OSError):
                folder.rmdir()
    return None


def _parents(root: Path, own: Path) -> list[tuple[int, Path]]:
    """Version and folder of the groups that one of ours can be made in, the nearest first.

    Version 1 allows it below the own group.  In version 2 a group with members cannot have groups
    with limits below it, but the one above may."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder = root / "memory" / path.lstrip("/")
            found += [(1, folder), (1, root / "memory")]
        elif not controllers and (root / "cgroup.controllers").exists():
            folder = root / path.lstrip("/")
            found += [
                (2, place) for place in dict.fromkeys((folder.parent, root)) if place != root.parent
            ]
    return [(version, folder) for version, folder in found if folder.is_dir() and _open(folder)]


def _open(folder: Path) -> bool:
    return os.access(folder, os.W_OK)
