"""Whether others used the machine while something was measured, and what limits this process has.

``Background`` counts from its making on: processor time that was not this process's or its
children's, on the processors that it may use; time that a hypervisor took; times that the control
group held it back.  Where the kernel tells how long tasks waited for a processor or for memory
(PSI), that is noted; it is no reason by itself, since a process also waits for its own threads.
``Alone`` looks at the idle machine before and after as well: whoever slows a measurement down may
get so little of a busy machine meanwhile that it is hardly seen.
"""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from .machine import facts

OTHERS = 0.05  #: part of the processors that others may use in a clean run
STOLEN = 0.01  #: part of their time that a hypervisor may take
LOOK = 0.3  #: seconds of a look at the machine while this process is idle
ROOT = Path("/sys/fs/cgroup")
PRESSURE = Path("/proc/pressure")


class Background:
    """What went on beside this process since it was made."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._processors = sorted(os.sched_getaffinity(0))
        self._begin, self._before = time.perf_counter(), self._now()

    def _now(self) -> dict[str, float]:
        """Seconds so far: of all processors, of this process, waited; times held back."""
        every = psutil.cpu_times(percpu=True)
        # a container may number its processors anew
        mine = [every[i] for i in self._processors if i < len(every)] or every
        busy = sum(t.user + t.nice + t.system + getattr(t, "irq", 0.0) + getattr(t, "softirq", 0.0)
                   for t in mine)  # fmt: skip
        found = {
            "busy": busy,
            "stolen": sum(getattr(t, "steal", 0.0) for t in mine),
            "own": _own_seconds(),
            "held_back": float(_throttled(self._root)),
        }
        for what in ("cpu", "memory"):
            waited = _pressure(PRESSURE / what)
            if waited is not None:
                found[f"waited_{what}"] = waited
        return found

    def read(self) -> dict[str, Any]:
        """``clean``, and ``background``: the figures it follows from, with the reasons if not."""
        now, seconds = self._now(), max(time.perf_counter() - self._begin, 1e-9)
        gone = {name: now[name] - self._before.get(name, 0.0) for name in now}
        there = seconds * len(self._processors)
        others = max(0.0, gone["busy"] - gone["own"]) / there
        stolen = gone["stolen"] / there
        reasons = []
        if others > OTHERS:
            reasons.append(f"other processes used {others:.0%} of the processors")
        if stolen > STOLEN:
            reasons.append(f"the hypervisor took {stolen:.0%} of the processors' time")
        if gone["held_back"]:
            reasons.append(f"the control group held it back {gone['held_back']:.0f} times")
        background = {
            "seconds": seconds,
            "others": others,
            "stolen": stolen,
            "held_back": int(gone["held_back"]),
            **{n: gone[n] / seconds for n in gone if n.startswith("waited_")},
            "reasons": reasons,
        }
        return {"clean": not reasons, "background": background}


class Alone:
    """Whether something that is measured has the machine to itself: make one before it begins.

    Looks at the machine for ``LOOK`` seconds, again and again for ``wait`` seconds until nobody
    else uses it.
    """

    def __init__(self, wait: float = 0.0, root: Path = ROOT) -> None:
        self._root, end = root, time.monotonic() + wait
        self._before = self._look()
        while not self._before["clean"] and time.monotonic() < end:
            self._before = self._look()
        self._during = Background(root)

    def _look(self) -> dict[str, Any]:
        background = Background(self._root)
        time.sleep(LOOK)
        return background.read()

    def read(self) -> dict[str, Any]:
        """``clean``: before, during and after.  ``background``: the figures of the time between,
        with the reasons of all three."""
        during = self._during.read()
        looks = {"before": self._before, "during": during, "after": self._look()}
        reasons = [f"{when} {reason}" for when, found in looks.items()
                   for reason in found["background"]["reasons"]]  # fmt: skip
        others = {f"others_{when}": looks[when]["background"]["others"]
                  for when in ("before", "after")}  # fmt: skip
        background = {**during["background"], **others, "reasons": reasons}
        return {"clean": not reasons, "background": background}


def machine() -> dict[str, Any]:
    """What a line of results says of the machine: ``facts``, its memory in bytes, kernel and torch,
    and the limits of this process."""
    return {
        **facts(), "memory": psutil.virtual_memory().total, "system": platform.platform(),
        "torch": version("torch"), **limits(),
    }  # fmt: skip


def limits(root: Path = ROOT) -> dict[str, Any]:
    """Processors that this process may use, and the limits of its control groups; None for none."""
    cpus, memories = [], []
    for folder in _groups(root):
        quota = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]):
            cpus.append(int(quota[0]) / int(quota[1]))
        for name in ("memory.max", "memory.limit_in_bytes"):
            # version 1 writes "no limit" as a large number
            words = [int(w) for w in _words(folder / name) if w.isdigit() and int(w) < 1 << 60]
            memories += words
    return {
        "processors": len(os.sched_getaffinity(0)),
        "cgroup_processors": min(cpus, default=None),
        "cgroup_memory": min(memories, default=None),
    }


def _own_seconds() -> float:
    """Of this process, of children that have ended, and of those that run."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            own = child.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += own.user + own.system
    return total


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control groups and of those above them, versions 1 and 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for base in [root] if not controllers else [root / c for c in controllers.split(",")]:
            folder = base / path.lstrip("/")
            for place in (folder, *folder.parents):
                found.append(place)
                if place == base:
                    break
    return found


def _throttled(root: Path) -> int:
    counts = [0]
    for folder in _groups(root):
        words = _words(folder / "cpu.stat")
        if "nr_throttled" in words:
            counts.append(int(words[words.index("nr_throttled") + 1]))
    return max(counts)


def _pressure(file: Path) -> float | None:
    """Seconds in which some task waited; None where the kernel does not say."""
    words = _words(file)
    total = next((word for word in words if word.startswith("total=")), None)
    return None if total is None else int(total.removeprefix("total=")) / 1e6


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
