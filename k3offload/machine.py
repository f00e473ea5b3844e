"""What memory this machine and its limits really allow, read from the system."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil


@dataclass(frozen=True)
class Machine:
    """Bytes.  ``cgroup``: what the tightest of the process's control groups leaves to this process
    beside their other members, None where none has a limit."""

    physical: int
    available: int
    cgroup: int | None
    rss: int  # of this process now

    @property
    def ceiling(self) -> int:
        """What this process may hold in all: never more than is physically free for it."""
        free = min(self.physical, self.available + self.rss)
        return free if self.cgroup is None else min(free, self.cgroup)


def read_machine() -> Machine:
    """The machine as it is now."""
    memory = psutil.virtual_memory()
    return Machine(memory.total, memory.available, cgroup_room(), rss())


def facts() -> dict[str, str]:
    """Processor, commit (of a checkout) and date, for lines of results."""
    commit, root = "", Path(__file__).parent.parent
    if (root / ".git").exists():
        with suppress(OSError):
            ask = ["git", "rev-parse", "--short", "HEAD"]
            done = subprocess.run(ask, cwd=root, capture_output=True, text=True)
            commit = done.stdout.strip()
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": cpu, "commit": commit, "date": datetime.date.today().isoformat()}


def rss() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """The largest resident size this process has had, in bytes."""
    return _status("VmHWM") or rss()


def _status(field: str) -> int:
    """Bytes of a field of ``/proc/self/status``; 0 where there is none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0


class _Names(NamedTuple):
    """The files of a control group, and the fields of its ``memory.stat`` with file pages."""

    limit: str
    used: str
    file_pages: tuple[str, str]


_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def cgroup_room(
    root: Path = Path("/sys/fs/cgroup"), own: Path | None = None, held: int | None = None
) -> int | None:
    """What the memory limits from this process's control group up to the root leave to it.

    For each group with a limit: the limit less what other members hold, which is what the group
    holds less ``held`` (this process's own memory, file pages apart) and less file pages, which
    the system takes back before it refuses.  Versions 1 and 2.  None if there is no limit.
    """
    try:
        lines = (own or Path("/proc/self/cgroup")).read_text().splitlines()
    except OSError:
        return None
    if held is None:
        held = _status("RssAnon") + _status("RssShmem")
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, _V2
        elif "memory" in controllers.split(","):
            base, names = root / "memory", _V1
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            limit = _number(place / names.limit)
            if limit is not None and limit < 1 << 60:  # version 1 writes "no limit" so
                others = (_number(place / names.used) or 0) - held - _file_pages(place, names)
                rooms.append(max(0, limit - max(0, others)))
            if place == base:
                break
    return min(rooms) if rooms else None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_pages(group: Path, names: _Names) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.partition(" ")[::2] for line in lines)
    return sum(int(fields.get(name, 0)) for name in names.file_pages)


def steady_allocator() -> None:
    """Keep the C allocator's habits fixed, so that memory in use stays close to memory planned.

    Buffers of a tile are reused from the heap instead of being mapped anew each time, and threads
    share two arenas instead of keeping one each.  Only where the C library is glibc.
    """
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(m_arena_max, 2)
    mallopt(m_mmap_threshold, 1 << 20)
    mallopt(m_trim_threshold, 4 << 20)


def trim_allocator() -> None:
    """Give unused heap back to the system, if the C library can."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def default_threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))
