"""Memory limits as the system states them: control groups of both versions, from made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3offload.machine import Machine, cgroup_room, default_threads, peak_rss, read_machine, rss

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


def tree(folder: Path, own: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """A control group file system and a ``/proc/self/cgroup``."""
    root = folder / "cgroup"
    root.mkdir()
    for name, text in limits.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    proc = folder / "self_cgroup"
    proc.write_text(own)
    return root, proc


V2 = "memory.max"
V1 = "memory.limit_in_bytes"

CASES: dict[str, tuple[str, dict[str, str], int | None]] = {
    "v2 own group": ("0::/a/b\n", {f"a/b/{V2}": str(3 * GIB)}, 3 * GIB),
    "v2 a parent is tighter": (
        "0::/a/b\n",
        {f"a/b/{V2}": str(3 * GIB), f"a/{V2}": str(2 * GIB)},
        2 * GIB,
    ),
    "v2 only a parent has one": ("0::/a/b/c\n", {f"a/{V2}": str(GIB), f"a/b/{V2}": "max"}, GIB),
    "v2 no limit": ("0::/a\n", {f"a/{V2}": "max"}, None),
    "v2 group namespace": ("0::/\n", {V2: str(GIB)}, GIB),
    "v2 nothing mounted": ("0::/a/b\n", {}, None),
    "v1 own group": ("4:memory:/a\n", {f"memory/a/{V1}": str(GIB)}, GIB),
    "v1 among others": (
        "9:name=systemd:/x\n4:memory:/a\n1:cpu:/\n",
        {f"memory/a/{V1}": str(GIB)},
        GIB,
    ),
    "v1 controllers together": ("4:cpuacct,memory:/a\n", {f"memory/a/{V1}": str(GIB)}, GIB),
    "v1 no limit": (
        "4:memory:/a\n",
        {f"memory/a/{V1}": str(NO_LIMIT_V1), f"memory/{V1}": str(NO_LIMIT_V1)},
        None,
    ),
    "v1 a parent is tighter": (
        "4:memory:/a/b\n",
        {f"memory/a/b/{V1}": str(NO_LIMIT_V1), f"memory/a/{V1}": str(GIB)},
        GIB,
    ),
    "v1 path of the host": ("4:memory:/docker/abc\n", {f"memory/{V1}": str(GIB)}, GIB),
    "both": (
        "4:memory:/a\n0::/b\n",
        {f"memory/a/{V1}": str(2 * GIB), f"b/{V2}": str(3 * GIB)},
        2 * GIB,
    ),
    "memory of another controller": ("4:memory2,cpu:/a\n", {f"memory/a/{V1}": str(GIB)}, None),
    "a colon in the name": ("0::/a:b\n", {f"a:b/{V2}": str(GIB)}, GIB),
    "empty": ("", {V2: str(GIB)}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_cgroup_limit(case: str, tmp_path: Path) -> None:
    own, limits, expected = CASES[case]
    root, proc = tree(tmp_path, own, limits)
    assert cgroup_room(root, proc, held=0) == expected


def test_cgroup_limit_without_control_groups(tmp_path: Path) -> None:
    assert cgroup_room(tmp_path, tmp_path / "missing") is None


def use(folder: str, limit: str, used: int, stat: dict[str, int], version: int) -> dict[str, str]:
    """The files of one control group."""
    names = (V2, "memory.current") if version == 2 else (V1, "memory.usage_in_bytes")
    lines = "\n".join(f"{name} {size}" for name, size in stat.items())
    return {
        f"{folder}/{names[0]}": limit,
        f"{folder}/{names[1]}": str(used),
        f"{folder}/memory.stat": lines,
    }


def stat(version: int, inactive: int, active: int) -> dict[str, int]:
    """``memory.stat``: version 1 has fields of the group alone beside those of its whole tree."""
    if version == 2:
        return {"anon": 77, "file": 88, "inactive_file": inactive, "active_file": active}
    alone = {"cache": 88, "inactive_file": 1, "active_file": 1}
    return {**alone, "total_inactive_file": inactive, "total_active_file": active}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("used", "inactive", "active", "held", "room"),
    [
        (1000, 0, 0, 1000, 8000),  # alone
        (3000, 0, 0, 1000, 6000),  # others hold 2000
        (3000, 500, 300, 1000, 6800),  # 800 of it is file cache
        (3000, 2500, 0, 1000, 8000),  # less than nothing is nothing
        (9000, 0, 0, 500, 0),  # others hold more than the limit
    ],
)
def test_what_others_hold_is_taken_off(
    version: int, used: int, inactive: int, active: int, held: int, room: int, tmp_path: Path
) -> None:
    prefix, own = ("memory/", "4:memory:/a\n") if version == 1 else ("", "0::/a\n")
    files = use(f"{prefix}a", "8000", used, stat(version, inactive, active), version)
    root, proc = tree(tmp_path, own, files)
    assert cgroup_room(root, proc, held) == room


def test_a_parent_that_others_fill_is_tighter(tmp_path: Path) -> None:
    files = use("a/b", "5000", 1000, stat(2, 0, 0), 2) | use("a", "9000", 7000, stat(2, 100, 0), 2)
    root, proc = tree(tmp_path, "0::/a/b\n", files)
    assert cgroup_room(root, proc, held=1000) == 9000 - (7000 - 1000 - 100)


def test_own_memory_does_not_count_as_that_of_others(tmp_path: Path) -> None:
    """What this process holds itself: at least a block just filled, and no file pages."""
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    used = 10 * GIB
    root, proc = tree(tmp_path, "0::/a\n", use("a", str(16 * GIB), used, {}, 2))
    room = cgroup_room(root, proc)
    assert room is not None
    assert (64 << 20) <= room - (16 * GIB - used) <= rss()


def test_ceiling_is_the_smallest() -> None:
    assert Machine(100, 40, None, 10).ceiling == 50, "free for this process, with what it holds"
    assert Machine(100, 99, None, 10).ceiling == 100
    assert Machine(100, 40, 30, 10).ceiling == 30
    assert Machine(100, 40, 70, 10).ceiling == 50


def test_this_machine() -> None:
    machine = read_machine()
    assert 0 < machine.rss < machine.ceiling <= machine.physical
    assert default_threads() >= 1


def test_peak_follows_what_is_held() -> None:
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    now = rss()
    assert now >= 64 << 20
    assert peak_rss() >= now - (1 << 20)
