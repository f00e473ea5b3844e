"""Spilled arrays: the bytes that went in come out, whatever the memory; files that any zarr reader
opens; full disks, lost files, crashes (R32, R58)."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.config import LATENT_BLOCK
from k3offload.errors import ScratchError, UsageError
from k3offload.tiers import scratch as scratch_module
from k3offload.tiers.base import Buffer
from k3offload.tiers.scratch import MARK, PREFIX, Scratch, file_system, usual_place
from k3offload.tiers.spill import Block, Spill, SpillArray
from k3offload.tiers.spill_files import CHUNK, Layout
from k3offload.tiers.spill_room import Room, room_for
from k3offload.tiers.tier_disk import DiskTier

zarr = pytest.importorskip("zarr")  # there is none of version 3 for Python 3.10
SMALL = Room(4, 2)
WIDE, ODD = Layout(40, 2, "bfloat16"), Layout(5, 4, "float32")  #: whole pages a block, or not


class Case:
    """A spill in a folder of its own, and what it was given."""

    def __init__(
        self,
        place: Path,
        layout: Layout = WIDE,
        room: Room = SMALL,
        view: Callable[[Buffer], Any] = lambda data: data,
    ) -> None:
        self.scratch, self.disk = Scratch(place), DiskTier([], lambda page: [])
        self.spill: Spill[Any] = Spill(self.scratch, self.disk, layout, room, view)
        self.random = np.random.default_rng(0)

    def data(self) -> Buffer:
        return self.random.integers(0, 256, self.spill.layout.block, np.uint8)

    def grow(self, array: SpillArray, count: int) -> tuple[list[Block], list[Buffer]]:
        given = [self.data() for _ in range(count)]
        return [array.append(data) for data in given], given

    def close(self) -> None:
        self.spill.close()
        self.disk.close()
        self.scratch.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Case]]:
    cases: list[Case] = []

    def case(layout: Layout = WIDE, room: Room = SMALL) -> Case:
        cases.append(Case(tmp_path / "scratch", layout, room))
        return cases[-1]

    yield case
    for made in cases:
        made.close()


def check(case: Case, blocks: Sequence[Block], given: Sequence[Buffer]) -> None:
    """Every block comes back, once and in order, also if its memory is spoilt after use."""
    got = []
    tail = case.data()
    for piece in case.spill.pieces(blocks, [tail]):
        got += [bytes(data) for data in piece]
        cold = case.spill._memory[case.spill.room.slots * case.spill._stride :]
        for data in piece:
            if np.may_share_memory(data, cold):
                data[:] = 0xEE
    assert got == [*map(bytes, given), bytes(tail)]


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def files(case: Case) -> list[Path]:
    every = os.walk(case.scratch.folder)  # folders may go meanwhile
    return sorted(Path(at, name) for at, _, names in every for name in names if name != MARK
                  and name != "zarr.json")  # fmt: skip


# ---- bytes ----


@pytest.mark.parametrize("layout", [WIDE, ODD])
@pytest.mark.parametrize("room", [Room(1, 1), Room(2, 1), Room(5, 3), Room(64, 4)])
def test_bytes_come_back(make: Callable[..., Case], layout: Layout, room: Room) -> None:
    case = make(layout, room)
    array = case.spill.array("a")
    blocks: list[Block] = []
    given: list[Buffer] = []
    for count in (0, 1, 3, 20, 17):
        some = case.grow(array, count)
        blocks, given = blocks + some[0], given + some[1]
        check(case, blocks, given)
    counts = case.spill.counts
    assert (counts.written_bytes > 0) == (counts.read_bytes > 0) == (room.slots < 41)
    if room.slots < 41:
        assert counts.written_bytes >= (41 - room.slots) * layout.block


def test_memory_that_suffices_is_never_written(make: Callable[..., Case]) -> None:
    case = make(room=Room(41, 1))
    check(case, *case.grow(case.spill.array("a"), 20))
    assert case.spill.counts.written_bytes == 0 and not files(case)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_growth_copies_and_ends(make: Callable[..., Case], seed: int) -> None:
    """Arrays grow in turns, share blocks with copies, and go; the bytes are those of a list."""
    rng = random.Random(seed)
    case = make(rng.choice([WIDE, ODD]), Room(rng.randint(1, 9), rng.randint(1, 5)))
    held: list[tuple[SpillArray, list[Block], list[Buffer]]] = []
    for _ in range(150):
        kind = rng.random()
        if kind < 0.1 or not held:
            held.append((case.spill.array("a"), [], []))
        elif kind < 0.2:
            _, blocks, given = rng.choice(held)
            held.append((case.spill.array("a", len(blocks) * LATENT_BLOCK), [*blocks], [*given]))
        elif kind < 0.3 and len(held) > 1:
            held.pop(rng.randrange(len(held)))
        elif kind < 0.8:
            array, blocks, given = rng.choice(held)
            more = case.grow(array, rng.randint(1, 4))
            blocks += more[0]
            given += more[1]
        else:
            check(case, *rng.choice(held)[1:])
    for _, blocks, given in held:
        check(case, blocks, given)
    del array, blocks, given, more
    held.clear()
    gc.collect()
    wait_until(lambda: not files(case))
    wait_until(lambda: [p.name for p in case.scratch.folder.iterdir()] == [MARK])
    assert sorted(case.spill._free) == list(range(case.spill.room.slots))


def test_the_next_piece_is_read_while_one_is_used(make: Callable[..., Case]) -> None:
    case = make(room=Room(1, 2))
    blocks, given = case.grow(case.spill.array("a"), 9)
    before, size = case.spill.counts.read_bytes, WIDE.block
    pieces = case.spill.pieces(blocks)
    assert [bytes(data) for data in next(pieces)] == [bytes(data) for data in given[:2]]
    assert case.spill.counts.read_bytes - before == 4 * size
    del pieces  # gives up in the middle; the buffers serve the next reader all the same
    check(case, blocks, given)


def test_blocks_are_copied_from_other_threads(make: Callable[..., Case]) -> None:
    """While the array grows and is read: each copy is right, wherever the block lies by then."""
    case = make(room=Room(3, 2))
    array = case.spill.array("a")
    blocks, given = case.grow(array, 12)
    wrong: list[int] = []
    stop = threading.Event()

    def copies() -> None:
        while not stop.is_set():
            for i, (block, data) in enumerate(zip(list(blocks), given, strict=False)):
                if bytes(case.spill.copy(block)) != bytes(data):
                    wrong.append(i)

    threads = [threading.Thread(target=copies) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        data = case.data()
        given.append(data)
        blocks.append(array.append(data))
        check(case, blocks, given)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_room_is_shared_out() -> None:
    assert room_for(4 * 20480, WIDE.block) is None
    for size in (4 * 21504, 10**6, 10**9):
        room = room_for(size, WIDE.block)
        assert room is not None and room.slots >= 2 and room.piece >= 1
        assert (room.slots + 2 * room.piece) * 21504 <= size


# ---- files ----


@pytest.mark.parametrize("layout", [WIDE, ODD])
def test_a_zarr_reader_opens_the_files(make: Callable[..., Case], layout: Layout) -> None:
    case = make(layout)
    array = case.spill.array("latents", first=512)
    blocks, given = case.grow(array, CHUNK + 3)
    case.spill.flush()
    (folder,) = (p for p in case.scratch.folder.iterdir() if p.is_dir())
    found = zarr.open_array(str(folder), mode="r")
    assert found.shape == ((CHUNK + 3) * LATENT_BLOCK, layout.width)
    assert found.chunks == (CHUNK * LATENT_BLOCK, layout.width)
    assert dict(found.attrs) == {"dtype": layout.dtype, "first_token": 512}
    assert np.asarray(found[:]).tobytes() == b"".join(map(bytes, given))
    assert {p.stat().st_size for p in files(case)} == {CHUNK * layout.block}
    check(case, blocks, given)


def test_files_go_with_their_last_owner(make: Callable[..., Case]) -> None:
    case = make(room=Room(2, 1))
    ours, given = case.grow(case.spill.array("a"), 2 * CHUNK + 4)
    theirs, part = ours[:CHUNK], given[:CHUNK]
    case.spill.flush()
    assert len(files(case)) == 3
    ours.clear()
    wait_until(lambda: len(files(case)) == 1)
    check(case, theirs, part)
    theirs.clear()
    wait_until(lambda: [p.name for p in case.scratch.folder.iterdir()] == [MARK])


# ---- failures ----


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Writes that would make a file longer fail, as the system sees to it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_fails_who_needs_it_and_nobody_else(make: Callable[..., Case]) -> None:
    case = make(room=Room(4, 2))
    before, given = case.grow(case.spill.array("a"), 8)
    case.spill.flush()
    hungry = case.spill.array("b")
    kept: list[Block] = []

    def grow() -> None:
        for _ in range(20):
            kept.extend(case.grow(hungry, 1)[0])

    with no_file_longer_than(0):
        with pytest.raises(ScratchError, match=r"0\.0 failed: .*--scratch"):
            grow()
        check(case, before, given)
        with pytest.raises(ScratchError):
            hungry.append(case.data())
    kept.clear()  # its session is gone, and its slots serve others
    after = case.spill.array("c")
    check(case, *case.grow(after, 9))
    check(case, before, given)


def test_space_is_left_to_others(
    make: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(room=Room(4, 2))
    case.spill.check(100)
    monkeypatch.setattr(scratch_module, "SPARE", 1 << 60)
    case.spill.check(4)
    for write in (lambda: case.spill.check(5), lambda: case.grow(case.spill.array("a"), 9)):
        with pytest.raises(ScratchError, match="are free there"):
            write()


@pytest.mark.parametrize("how", ["deleted", "truncated"])
def test_lost_files_fail_who_needs_them(make: Callable[..., Case], how: str) -> None:
    case = make(room=Room(2, 1))
    (lost, _), (kept, given) = (case.grow(case.spill.array(n), 2 * CHUNK) for n in "ab")
    case.spill.flush()
    path = next(p for p in files(case) if p.parent.name.startswith("a") and p.name == "1.0")
    if how == "deleted":
        path.unlink()
    else:
        os.truncate(path, WIDE.block)
    got: list[Buffer] = []

    def read() -> None:
        for piece in case.spill.pieces(lost):
            got.extend(piece)

    with pytest.raises(ScratchError, match=rf"{path}.*reset it"):
        read()
    assert len(got) >= CHUNK  # what is there comes first
    check(case, kept, given)
    lost.clear()
    got.clear()
    wait_until(lambda: len(files(case)) == 2)


# ---- the folder ----

HOLD = """
import sys, time
from pathlib import Path
from k3offload.tiers.scratch import Scratch
made = Scratch(Path(sys.argv[1]))
(made.folder / "data").write_bytes(b"x" * 1000)
print(made.folder, flush=True)
time.sleep(60)
"""


def test_leftovers_of_a_crash_are_deleted(tmp_path: Path) -> None:
    """Those of a killed process; not a neighbour's, nor a folder that is not ours."""
    stranger = tmp_path / f"{PREFIX}mine"
    stranger.mkdir()
    neighbour = Scratch(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    folder = Path(child.stdout.readline().decode().strip())
    alive = Scratch(tmp_path)
    assert (folder / "data").exists()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    said: list[str] = []
    Scratch(tmp_path, said.append).close()
    assert not folder.exists() and str(folder) in said[0]
    assert stranger.exists() and neighbour.folder.exists() and alive.folder.exists()
    for made in (neighbour, alive):
        made.close()
        made.close()
        assert not made.folder.exists()


def test_a_folder_that_is_being_made_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever starts just before the folder is locked leaves it alone."""
    lock, cleaned = fcntl.flock, list[int]()

    def late(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not cleaned:
            cleaned.append(fd)
            scratch_module.clean(tmp_path)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    made = Scratch(tmp_path)
    assert cleaned and (made.folder / MARK).exists() and made.folder.name.startswith(PREFIX)
    scratch_module.clean(tmp_path)
    assert made.folder.exists()
    made.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_memory_is_no_scratch_folder() -> None:
    assert file_system(Path("/dev/shm/not/there")) == "tmpfs"
    with pytest.raises(UsageError, match=r"lies in memory.*--scratch"):
        Scratch(Path("/dev/shm/k3"))
    assert not Path("/dev/shm/k3").exists()


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--scratch"):
        Scratch(tmp_path / "file")


def test_the_usual_place() -> None:
    assert usual_place({"XDG_CACHE_HOME": "/x"}) == Path("/x/k3offload/scratch")
    assert usual_place({}) == Path.home() / ".cache/k3offload/scratch"
