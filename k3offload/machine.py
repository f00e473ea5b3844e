"""What memory this machine and its limits really allow, read from the system."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Machine:
    """Bytes.  ``cgroup`` is the tightest limit of the process's control groups, None if none."""

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
    return Machine(memory.total, memory.available, cgroup_limit(), rss())


def rss() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """The largest resident size this process has had, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return rss()


def cgroup_limit(root: Path = Path("/sys/fs/cgroup"), own: Path | None = None) -> int | None:
    """The smallest memory limit on the way from this process's control group to the root.

    Reads version 2 (``memory.max``) and version 1 (``memory.limit_in_bytes``).
    """
    limits = []
    try:
        lines = (own or Path("/proc/self/cgroup")).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            try:
                text = (place / name).read_text().strip()
            except OSError:
                text = "max"
            if text.isdigit():
                limits.append(int(text))
            if place == base:
                break
    real = [limit for limit in limits if limit < 1 << 60]  # version 1 writes "no limit" so
    return min(real) if real else None


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
