"""The disk tier against real files, and a disk that misbehaves (R06, R56, R57, R58, R65)."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3offload.config import READ_ALIGN
from k3offload.errors import ReadError
from k3offload.tiers.base import Location
from k3offload.tiers.tier_disk import MAX_OPEN, RETRIES, STAGING, windows
from tests.helpers_tiers import Disk, aligned, write_files

SIZE = 40_001


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(write_files(tmp_path, [SIZE, SIZE]))
    yield made
    made.tier.close()


Preadv = Callable[[int, list[Any], int], int]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Preadv], Preadv]], None]:
    """Replaces ``os.preadv`` by a wrapper of it; pauses between tries take no time."""
    real = os.preadv
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return lambda wrap: monkeypatch.setattr(os, "preadv", wrap(real))


# ---- places (R57) ----


def test_windows_are_aligned_and_follow_one_another() -> None:
    rng = random.Random(0)
    for _ in range(300):
        extents = [
            Location(0, rng.randrange(20_000), rng.randrange(1, 20_000))
            for _ in range(rng.randrange(1, 6))
        ]
        starts, size = windows(extents)
        end = 0
        for start, extent in zip(starts, extents, strict=True):
            assert start % READ_ALIGN == extent.offset % READ_ALIGN
            assert end <= start - extent.offset % READ_ALIGN
            end = start + extent.length
        assert end <= size < end + READ_ALIGN
        assert size % READ_ALIGN == 0


def test_r57_every_residue_and_odd_sizes(disk: Disk) -> None:
    for residue in range(0, READ_ALIGN):
        length = 1 + residue * 7919 % 9001
        place = Location(0, READ_ALIGN + residue, length)
        assert disk.fetch(place) == disk.want(place), place


def test_r57_last_bytes_of_the_file(disk: Disk) -> None:
    for length in (1, 2, 511, 4095, 4096, 4097, SIZE % READ_ALIGN, SIZE):
        place = Location(1, SIZE - length, length)
        assert disk.fetch(place) == disk.want(place)
        assert disk.scatter([place]) == [disk.want(place)]


def test_overhead_is_counted_apart(disk: Disk) -> None:
    disk.fetch(Location(0, 4095, 2))
    counts = disk.tier.counts
    assert (counts.reads, counts.bytes, counts.overhead) == (1, 2, 2 * READ_ALIGN - 2)


def test_r57_stricter_alignment_is_read_buffered(disk: Disk, patch: Any) -> None:
    """A disk that wants 16 KiB blocks refuses our reads; the bytes are right all the same."""

    def strict(real: Preadv) -> Preadv:
        def preadv(fd: int, views: list[Any], offset: int) -> int:
            direct = _is_direct(fd)
            if direct and (offset % 16384 or len(views[0]) % 16384):
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, views, offset)

        return preadv

    patch(strict)
    places = [Location(0, 0, 16384), Location(0, 5000, 9000), Location(1, 1, 7)]
    assert [disk.fetch(p) for p in places] == [disk.want(p) for p in places]
    assert len(disk.warnings) == 1


# ---- scattered reads ----


def test_scatter_random_pieces(disk: Disk) -> None:
    """Overlapping, adjacent, equal, tiny and large pieces, out of order, over two files."""
    rng = random.Random(1)
    for _ in range(60):
        places = []
        for _ in range(rng.randrange(1, 20)):
            offset = rng.choice([0, 4095, 4096, rng.randrange(SIZE)])
            longest = SIZE - offset
            length = rng.choice([1, min(4096, longest), rng.randrange(1, longest + 1)])
            places.append(Location(rng.randrange(2), offset, length))
        places.append(Location(places[0].file, places[0].offset, places[0].length))
        assert disk.scatter(places) == [disk.want(p) for p in places]


def test_scatter_larger_than_staging(tmp_path: Path) -> None:
    size = 2 * STAGING + 12_345
    disk = Disk(write_files(tmp_path, [size]))
    places = [
        Location(0, 4095, size - 4095),
        Location(0, 0, STAGING),
        Location(0, STAGING - 1, STAGING + 1),
        Location(0, STAGING, 1),
    ]
    assert disk.scatter(places) == [disk.want(p) for p in places]
    disk.tier.close()


def test_scatter_joins_neighbours_and_reads_overlaps_once(disk: Disk) -> None:
    disk.scatter([Location(0, 100 + 50 * i, 50) for i in range(100)])
    assert disk.tier.counts.reads == 1
    disk.scatter([Location(1, 0, 9000), Location(1, 4000, 5000), Location(1, 8999, 1)])
    assert (disk.tier.counts.reads, disk.tier.counts.bytes) == (2, 5000 + 9000)


def test_scatter_nothing(disk: Disk) -> None:
    assert disk.scatter([]) == []
    assert disk.scatter([Location(0, 17, 0)]) == [b""]


# ---- files that change or go (R06, R58) ----


@pytest.mark.parametrize("keep", [0, 20_000, SIZE - 6])
def test_r06_file_shortened_while_in_use(disk: Disk, keep: int) -> None:
    disk.fetch(Location(0, 0, SIZE))
    os.truncate(disk.files[0], keep)
    with pytest.raises(ReadError, match=r"part0.*shortened while in use"):
        disk.fetch(Location(0, 5, SIZE - 10))
    with pytest.raises(ReadError, match=r"part0.*shortened while in use"):
        disk.scatter([Location(0, 5, SIZE - 10)])
    assert disk.fetch(Location(1, 5, 100)) == disk.want(Location(1, 5, 100))


def test_r58_missing_file(disk: Disk) -> None:
    disk.files[1].unlink()
    with pytest.raises(ReadError, match=r"offset 77 of .*part1 failed: .*No such file"):
        disk.fetch(Location(1, 77, 100))
    assert disk.fetch(Location(0, 77, 100)) == disk.want(Location(0, 77, 100))


# ---- a disk that misbehaves (R58) ----


def _fails(number: int, times: int) -> Callable[[Preadv], Preadv]:
    """The first ``times`` reads fail with this error number."""
    left = [times]

    def wrap(real: Preadv) -> Preadv:
        def preadv(fd: int, views: list[Any], offset: int) -> int:
            if left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number))
            return real(fd, views, offset)

        return preadv

    return wrap


@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN])
@pytest.mark.parametrize("times", [1, RETRIES])
def test_r58_error_that_passes(disk: Disk, patch: Any, number: int, times: int) -> None:
    patch(_fails(number, times))
    place = Location(0, 5, 1000)
    assert disk.fetch(place) == disk.want(place)
    assert len(disk.warnings) == times == disk.tier.counts.retries
    assert all("part0" in warning for warning in disk.warnings)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENODEV])
def test_r58_error_for_ever(disk: Disk, patch: Any, number: int) -> None:
    patch(_fails(number, 10**9))
    words = rf"1,000 bytes at offset 5 of .*part0 failed: .*{os.strerror(number)}"
    with pytest.raises(ReadError, match=words):
        disk.fetch(Location(0, 5, 1000))
    with pytest.raises(ReadError, match=words):
        disk.scatter([Location(0, 5, 1000)])


def test_r58_gives_up_within_seconds(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", _fails(errno.EIO, 10**9)(os.preadv))
    begin = time.monotonic()
    with pytest.raises(ReadError):
        disk.fetch(Location(0, 5, 1000))
    assert time.monotonic() - begin < 10


def _short(rule: Callable[[int], int], times: int) -> Callable[[Preadv], Preadv]:
    """The first ``times`` reads deliver only ``rule(n)`` of the n bytes they could."""
    left = [times]

    def wrap(real: Preadv) -> Preadv:
        def preadv(fd: int, views: list[Any], offset: int) -> int:
            scratch = aligned(len(views[0]))
            got = real(fd, [scratch.data], offset)
            if left[0] and got:
                left[0] -= 1
                got = rule(got)
            views[0][:got] = scratch.data[:got]
            return got

        return preadv

    return wrap


@pytest.mark.parametrize("times", [1, 3, 10**9])
@pytest.mark.parametrize(
    "rule",
    [lambda n: n - 1 or n, lambda n: -(-n // 2), lambda n: min(n, 512), lambda n: min(n, 4096)],
    ids=["one_less", "half", "512", "4096"],
)
def test_r58_short_reads(disk: Disk, patch: Any, rule: Callable[[int], int], times: int) -> None:
    disk.fetch(Location(0, 0, 1))
    before = list(disk.warnings)
    patch(_short(rule, times))
    for place in (Location(0, 5, 13_000), Location(1, SIZE - 5000, 5000)):
        assert disk.fetch(place) == disk.want(place)
        assert disk.scatter([place]) == [disk.want(place)]
    if times <= RETRIES:
        assert disk.warnings == before, (
            "a read that ends short is no reason to give up direct reads"
        )


def test_r58_reads_that_return_nothing_end(disk: Disk, patch: Any) -> None:
    patch(_short(lambda n: 0, 10**9))
    with pytest.raises(ReadError, match=r"part0 failed: .*no bytes"):
        disk.fetch(Location(0, 5, 13_000))


# ---- no direct reads (R56) ----


def _is_direct(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _refuse_open(monkeypatch: pytest.MonkeyPatch, refused: Callable[[str], bool]) -> None:
    real = os.open

    def opened(path: str, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT and refused(path):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", opened)


def _refuse_read(real: Preadv) -> Preadv:
    def preadv(fd: int, views: list[Any], offset: int) -> int:
        if _is_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, offset)

    return preadv


@pytest.mark.parametrize("when", ["open", "read"])
def test_r56_refused_direct_reads_are_buffered(
    disk: Disk, patch: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "open":
        _refuse_open(monkeypatch, lambda path: True)
    else:
        patch(_refuse_read)
    for _ in range(2):
        for place in (Location(0, 5, 9000), Location(1, 4095, 2), Location(1, SIZE - 1, 1)):
            assert disk.fetch(place) == disk.want(place)
            assert disk.scatter([place]) == [disk.want(place)]
    assert len(disk.warnings) == 1, "once per file system"
    assert "refuses direct reads" in disk.warnings[0]
    assert set(disk.tier.counts.modes.values()) == {"buffered"}


def test_r56_refused_while_many_read(disk: Disk, patch: Any) -> None:
    """Files that are open already meet the refusal, and all readers at the same moment."""
    for file in range(2):
        disk.fetch(Location(file, 0, 1))
    disk.warnings.clear()
    patch(_refuse_read)
    places = [Location(i % 2, 1000 * i, 999) for i in range(39)]
    assert disk.scatter(places) == [disk.want(p) for p in places]
    assert len(disk.warnings) == 1


def test_r56_one_file_system_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the files of the one that refuses are buffered."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    files = [write_files(folder, [SIZE], i)[0] for i, folder in enumerate(folders)]
    _refuse_open(monkeypatch, lambda path: os.path.dirname(path) == str(folders[1]))
    real = os.stat

    class Stat:
        def __init__(self, path: str) -> None:
            self.st_dev = f"device of {os.path.dirname(path)}"

    monkeypatch.setattr(
        os, "stat", lambda p, **k: Stat(str(p)) if "part" in str(p) else real(p, **k)
    )
    disk = Disk(files)
    for place in (Location(0, 5, 9000), Location(1, 5, 9000)):
        assert disk.fetch(place) == disk.want(place)
    assert disk.tier.counts.modes == {str(folders[0]): "direct", str(folders[1]): "buffered"}
    assert len(disk.warnings) == 1
    assert str(folders[1]) in disk.warnings[0]
    disk.tier.close()


def test_direct_reads_are_direct(disk: Disk, patch: Any) -> None:
    """Where the file system allows it, every read goes past the page cache."""
    seen: list[bool] = []

    def watch(real: Preadv) -> Preadv:
        def preadv(fd: int, views: list[Any], offset: int) -> int:
            seen.append(_is_direct(fd))
            return real(fd, views, offset)

        return preadv

    patch(watch)
    disk.fetch(Location(0, 5, 9000))
    if disk.warnings:
        pytest.skip("the file system of the temporary folder has no direct reads")
    assert seen == [True]


# ---- handles (R65) ----


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_r65_handles_are_bounded(tmp_path: Path) -> None:
    before = _open_files()
    disk = Disk(write_files(tmp_path, [5000] * 300))
    most = 0
    for _ in range(2):
        for i in range(300):
            place = Location(i, i, 100)
            assert disk.fetch(place) == disk.want(place)
            most = max(most, _open_files())
    disk.scatter([Location(i, 0, 10) for i in range(300)])
    assert _open_files() <= before + MAX_OPEN + 4
    assert before + 1 < most <= before + MAX_OPEN + 4
    disk.tier.close()
    assert _open_files() <= before


def test_r65_load_and_unload(tmp_path: Path) -> None:
    files = write_files(tmp_path, [5000] * 10)
    counts = []
    for _ in range(50):
        disk = Disk(files)
        disk.scatter([Location(i, 3, 10) for i in range(10)])
        disk.tier.close()
        counts.append(_open_files())
    assert len(set(counts)) == 1
