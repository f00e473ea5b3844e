"""The disk tier's queue on real files: cuts, cancels, drives, reads in place (R58, R62)."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.config import READ_ALIGN
from k3offload.errors import ReadError
from k3offload.scheduler.policy_lru import Policy
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import Buffer, Cancelled, Location, PageId, Priority
from k3offload.tiers.tier_disk import (
    DIRECT_PART,
    IN_FLIGHT,
    PIECE,
    READERS,
    RETRIES,
    DiskTier,
    _cut,
    windows,
)
from k3offload.tiers.tier_ram import HUGE, Slab
from tests.helpers_tiers import CANARY, Disk, Gate, aligned, write_files

DEMAND, TRUNK, PREFETCH = Priority
PATIENCE = 20.0


def test_default_bounds_fit_together() -> None:
    assert READERS * PIECE <= IN_FLIGHT, "no reader is idle for want of bytes"
    assert PIECE % READ_ALIGN == 0


def test_pages_are_cut_into_equal_aligned_pieces() -> None:
    rng = random.Random(2)
    for _ in range(500):
        most = READ_ALIGN * rng.randrange(1, 5)
        extent = Location(3, rng.randrange(40_000), rng.randrange(1, 60_000))
        parts = list(_cut(extent, most))
        assert sum(part.length for part in parts) == extent.length
        at, sizes = extent.offset, []
        for part in parts:
            assert part.offset == at and part.file == 3
            assert at == extent.offset or at % READ_ALIGN == 0
            at += part.length
            sizes.append(windows([part])[1])
        assert sum(sizes) == windows([extent])[1], "nothing is read twice"
        assert max(sizes) <= most and len(parts) <= -(-sum(sizes) // most) + 1
        assert max(sizes) - sizes[0] <= READ_ALIGN
    k3 = list(_cut(Location(0, 0, 17_547_264), PIECE))
    assert [part.length for part in k3] == [17_547_264 // 2] * 2


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DiskTier, Gate]]:
    """A tier with 2 readers over a file of 4 MB; pages of 8 pieces of 16 KiB, at a gate."""
    gate = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", gate)
    size = 8 * 16384
    tier = DiskTier(
        write_files(tmp_path, [32 * size]),
        lambda page: [Location(0, page.expert * size, size)],
        readers=2,
        piece=16384,
    )
    yield tier, gate
    gate.open.set()
    tier.close()


def test_a_demand_waits_for_the_pieces_already_running_only(
    gated: tuple[DiskTier, Gate],
) -> None:
    """Behind megabytes of trunk and guesses."""
    tier, gate = gated
    gate.open.clear()
    begun = _wait_for_begun(gate)
    trunk = np.zeros(20 * 131072 + 1, np.uint8)
    tickets = [tier.read_scatter([(Location(0, 131072, trunk.size - 1), trunk[1:])], TRUNK)]
    tickets += [tier.read(PageId(0, e), aligned(131072), PREFETCH) for e in range(22, 32)]
    begun(2)
    tickets.append(tier.read(PageId(0, 0), aligned(131072), DEMAND))
    gate.open.set()
    for ticket in tickets:
        ticket.wait()
    asked = [offset for offset, _ in gate.asked]
    assert sorted(asked[2:10]) == [16384 * i for i in range(8)]
    trunk_reads = [i for i, offset in enumerate(asked) if 131072 <= offset < 22 * 131072]
    guesses = [i for i, offset in enumerate(asked) if offset >= 22 * 131072]
    assert max(trunk_reads) < min(guesses) + 2, "trunk before guesses"


def _wait_for_begun(gate: Gate) -> Callable[[int], None]:
    def wait(count: int) -> None:
        end = time.monotonic() + PATIENCE
        while len(gate.asked) < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    return wait


def test_a_cancelled_page_is_not_read_on(gated: tuple[DiskTier, Gate]) -> None:
    tier, gate = gated
    gate.open.clear()
    slot = aligned(131072)
    ticket = tier.read(PageId(0, 5), slot, PREFETCH)
    _wait_for_begun(gate)(2)
    assert ticket.cancel() and not ticket.done()
    gate.open.set()
    with pytest.raises(Cancelled):
        ticket.wait()
    assert len(gate.asked) == 2 and ticket.landed == 2 * 16384
    assert (slot[2 * 16384 :] == CANARY).all()
    assert tier.counts.bytes == 2 * 16384


def test_r58_a_broken_page_is_given_up_at_its_first_broken_piece(
    gated: tuple[DiskTier, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, gate = gated
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    gate.broken = [(3 * 131072 + 16384, 3 * 131072 + 5 * 16384)]
    with pytest.raises(ReadError, match=r"16,384 bytes at offset 4[\d,]+ of .*part0 failed"):
        tier.read(PageId(0, 3), aligned(131072)).wait()
    assert len({offset for offset, _ in gate.asked}) <= 4
    tier.read(PageId(0, 4), aligned(131072)).wait()


def test_files_of_another_drive_have_readers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = Gate(os.preadv), os.stat
    files = write_files(tmp_path, [100_000, 100_000])
    drives = {str(files[0]): 11, str(files[1]): 12}
    tier = DiskTier(files, lambda page: [Location(page.layer, 0, 50_000)], readers=1)

    class Stat:
        def __init__(self, path: str) -> None:
            self.st_dev = drives[path]

    monkeypatch.setattr(os, "stat", lambda p, **k: Stat(str(p)) if "part" in str(p) else real(p))
    tier.read(PageId(0, 0), aligned(53_248)).wait()
    slow = threading.Event()

    def preadv(fd: int, views: list[Any], offset: int) -> int:
        if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == "part0":
            assert slow.wait(PATIENCE)
        return gate(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    hangs = tier.read(PageId(0, 0), aligned(53_248), DEMAND)
    tier.read(PageId(1, 0), aligned(53_248), PREFETCH).wait()
    assert not hangs.done()
    slow.set()
    hangs.wait()
    tier.close()


def test_scattered_reads_of_like_alignment_need_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their whole blocks are read in place; what stands around them is not touched."""
    size = 900_000
    file = write_files(tmp_path, [size])[0]
    data, staged = file.read_bytes(), 0
    tier = DiskTier([file], lambda page: [], piece=131072)
    copy = DiskTier._read_staged

    def counted(tier: DiskTier, extent: Location, targets: Any) -> None:
        nonlocal staged
        staged += sum(target.size for _, target in targets)
        copy(tier, extent, targets)

    monkeypatch.setattr(DiskTier, "_read_staged", counted)
    rng = random.Random(3)
    for length in (1, 4095, DIRECT_PART - 1, DIRECT_PART + 8192, 300_001, 800_000):
        for alike in (True, False):
            offset = rng.randrange(size - length)
            memory = aligned(size + 2 * READ_ALIGN)
            begin = READ_ALIGN + offset % READ_ALIGN + (0 if alike else 64)
            target = memory[begin : begin + length]
            staged = 0
            tier.read_scatter([(Location(0, offset, length), target)], TRUNK).wait()
            assert target.tobytes() == data[offset : offset + length]
            assert (memory[:begin] == CANARY).all() and (memory[begin + length :] == CANARY).all()
            direct = alike and length >= DIRECT_PART + READ_ALIGN
            assert staged < 2 * READ_ALIGN if direct else staged == length
    tier.close()


# ---- the memory ----


@pytest.mark.parametrize("size", [0, 1, READ_ALIGN, HUGE - 1, HUGE, 3 * HUGE + 12_345])
@pytest.mark.parametrize("claim", [True, False])
def test_slabs(size: int, claim: bool) -> None:
    slab = Slab(size, claim)
    assert slab.bytes.size == size and not slab.bytes.any()
    if size:
        assert slab.bytes.ctypes.data % (HUGE if size >= HUGE else READ_ALIGN) == 0
        slab.bytes[:] = 7
    assert len(slab.slots(READ_ALIGN)) == size // READ_ALIGN


# ---- under the expert store ----


def test_r58_a_broken_page_fails_its_lease_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With file and offset, within 10 s of real retries, wherever the page lay in the lease."""
    gate, size = Gate(os.preadv), 65536
    monkeypatch.setattr(os, "preadv", gate)
    files = write_files(tmp_path, [12 * size])
    data, said = files[0].read_bytes(), list[str]()
    tier = DiskTier(
        files, lambda page: [Location(0, page.expert * size, size)], said.append, readers=2
    )
    store = ExpertStore(tier, Slab(6 * size).slots(size), Policy(6))
    gate.broken = [(7 * size, 8 * size)]
    begin = time.monotonic()
    with (
        pytest.raises(ReadError, match=r"65,536 bytes at offset 458,752 of .*part0 failed"),
        store.lease([PageId(0, e) for e in range(12)]) as walk,
    ):
        list(walk)
    assert time.monotonic() - begin < 10 and len(said) == RETRIES
    for page in (PageId(0, 6), PageId(0, 8), PageId(0, 11)):
        with store.lease([page]) as walk:
            ((found, buffer),) = next(walk)
            at = page.expert * size
            assert found == page and buffer.tobytes() == data[at : at + size]
    gate.broken = []
    with store.lease([PageId(0, 7)]) as walk:
        assert next(walk)[0][1].tobytes() == data[7 * size : 8 * size]
    tier.close()


def test_a_page_is_looked_at_before_anybody_hears_of_it(tmp_path: Path) -> None:
    """By the thread that read its end, when all of its pieces are there; not if one failed."""
    size, disk = 40_001, Disk(write_files(tmp_path, [40_001, 40_001]))
    place, seen = Location(0, 100, size - 200), list[tuple[PageId, bool, bool]]()
    disk.location, ((start,), room) = place, windows([place])
    slot = aligned(room)
    disk.tier = DiskTier(disk.files, lambda page: [disk.location], piece=2 * READ_ALIGN)

    def look(page: PageId, into: Buffer) -> None:
        whole = into[start : start + place.length].tobytes() == disk.want(place)
        here = threading.current_thread() is threading.main_thread()
        seen.append((page, whole, here))
        if page.expert == 7:
            raise ReadError("damaged", "fetch it again")

    disk.tier.look = look
    disk.tier.read(PageId(0, 3), slot).wait()
    assert seen == [(PageId(0, 3), True, False)]
    ticket = disk.tier.read(PageId(0, 7), slot)
    with pytest.raises(ReadError, match="damaged"):
        ticket.wait()
    assert ticket.landed == place.length
    disk.location = Location(1, size - 10, 100)
    with pytest.raises(ReadError, match="shortened"):
        disk.tier.read(PageId(0, 4), slot).wait()
    assert len(seen) == 2
    disk.tier.close()
