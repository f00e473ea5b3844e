"""Memory limits as the system states them: control groups of both versions, from made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3offload.machine import Machine, cgroup_limit, default_threads, peak_rss, read_machine, rss

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
    assert cgroup_limit(root, proc) == expected


def test_cgroup_limit_without_control_groups(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path, tmp_path / "missing") is None


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
