"""What the system allows this process: memory, limits, NUMA, settings.  Verdicts with remedies.

This file reads ``/proc`` and ``/sys`` below a root that tests may make up.  It measures nothing,
knows no model and changes nothing: no page is bound to a node, no memory is locked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .config import show_size
from .machine import cgroup_room
from .tiers.tier_disk import MAX_OPEN

Verdict = Literal["good", "slow", "problem"]
ROOT: Final = Path("/")
SPARE_FILES: Final = 64  #: open files beside the model's: libraries, pipes, results
LEAST_MEMORY: Final = 600_000_000  #: interpreter, libraries and the smallest plan


@dataclass(frozen=True)
class Fact:
    """One thing the doctor found.  ``data`` holds the numbers that ``text`` tells."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def memory(root: Path = ROOT, held: int | None = None) -> Fact:
    """Physical memory, what is free of it, and what control groups leave; ``held``: bytes of this
    process, measured if None."""
    fields = _meminfo(root / "proc/meminfo")
    total, free = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    room = cgroup_room(root / "sys/fs/cgroup", root / "proc/self/cgroup", held)
    data = {"physical": total, "available": free, "cgroup": room}
    least = free if room is None else min(free, room)
    text = f"{show_size(total)}, {show_size(free)} free"
    text += ", no control group limits it" if room is None else (
        f", the control group leaves {show_size(room)}"
    )  # fmt: skip
    if least < LEAST_MEMORY:
        remedy = (
            "End other programs" if least == free else "Raise the memory limit of the container"
        )
        return Fact(
            "memory", "problem", text, f"{remedy}: {show_size(LEAST_MEMORY)} at least.", data
        )
    if least < total / 2:
        by_group = room is not None and room < free
        remedy = (
            "The control group allows less than half of the memory: raise its limit "
            "(docker run --memory, systemd MemoryMax)."
            if by_group
            else "More than half of the memory is in use: end other programs before loading."
        )
        return Fact("memory", "slow", text, remedy, data)
    return Fact("memory", "good", text, "", data)


def limits(root: Path = ROOT) -> list[Fact]:
    """Locked memory and open files, from ``/proc/self/limits``."""
    lines = _lines(root / "proc/self/limits")
    locked, files = _limit(lines, "Max locked memory"), _limit(lines, "Max open files")
    shown = "unlimited" if locked is None else show_size(locked)
    facts = [
        Fact(
            "locked memory",
            "good",
            f"{shown}; this version locks none, so nothing depends on it",
            "",
            {"bytes": locked},
        )
    ]
    needed = MAX_OPEN + SPARE_FILES
    text = f"{'unlimited' if files is None else format(files, ',')} ({needed} are needed at most)"
    if files is not None and files < needed:
        remedy = f"Raise it before starting: ulimit -n {4 * needed}."
        facts.append(Fact("open files", "problem", text, remedy, {"limit": files}))
    else:
        facts.append(Fact("open files", "good", text, "", {"limit": files}))
    return facts


def numa(root: Path = ROOT) -> Fact:
    """Nodes, their memory and processors, and the policy of this process."""
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        sizes = _meminfo(folder / "meminfo")
        cpus = "".join(_lines(folder / "cpulist"))
        nodes[int(folder.name[4:])] = {"bytes": sizes.get("MemTotal", 0), "cpus": cpus.strip()}
    policy = _policy(root)
    data = {"nodes": nodes, "policy": policy, "bound": False}
    with_memory = [n for n, node in nodes.items() if node["bytes"]]
    if len(with_memory) < 2:
        empty = len(nodes) - len(with_memory)
        beside = f" and {empty} without" if empty and nodes else ""
        return Fact("numa", "good", f"one node with memory{beside}; nothing is bound", "", data)
    text = f"{len(with_memory)} nodes with memory, policy {policy}; nothing is bound"
    if policy.startswith("interleave"):
        return Fact("numa", "good", text, "", data)
    remedy = (
        "Weights fall to the node that reads them first. Try numactl --interleave=all k3offload "
        "..., and compare a whole run: binding to one node often looks better than it is."
    )
    return Fact("numa", "slow", text, remedy, data)


def gpu(root: Path = ROOT, why_not: str = "this torch is not built for CUDA") -> Fact:
    """Which device computes; ``why_not`` a GPU, empty if one does."""
    there = (root / "dev/nvidia0").exists() or (root / "proc/driver/nvidia/version").exists()
    data = {"device": "cpu" if why_not else "cuda", "gpu_present": there, "why_not": why_not}
    if not why_not:
        return Fact("device", "good", "device: a GPU computes, see --vram", "", data)
    if not there:
        return Fact("device", "good", "device: cpu; there is no GPU", "", data)
    text = f"device: cpu, although there is a GPU: {why_not}"
    remedy = "Install a torch with CUDA (pip install torch) and a driver that fits it."
    return Fact("device", "slow", text, remedy, data)


def settings(origins: Mapping[str, tuple[Any, str]]) -> Fact:
    """Where each setting comes from: ``origins`` name -> (value, flag | variable | default)."""
    parts = [f"{name} {value} ({origin})" for name, (value, origin) in origins.items()]
    data = {name: {"value": v, "origin": origin} for name, (v, origin) in origins.items()}
    return Fact("settings", "good", ", ".join(parts), "", data)


def _policy(root: Path) -> str:
    """The memory policy of this process; ``unknown`` where a container does not tell."""
    lines = _lines(root / "proc/self/numa_maps")
    words = lines[0].split() if lines else []
    return words[1] if len(words) > 1 else "unknown"


def _limit(lines: list[str], name: str) -> int | None:
    """The soft limit ``name``; None if there is none or the system does not tell."""
    for line in lines:
        if line.startswith(name):
            soft = line[len(name) :].split()[0]
            return None if soft == "unlimited" else int(soft)
    return None


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes of each field of a ``meminfo`` file, of the machine or of a node."""
    found = {}
    for line in _lines(path):
        if match := re.search(r"(\w+):\s+(\d+) kB", line):
            found[match[1]] = int(match[2]) * 1024
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
