"""Makers of tiers for the contract: for each tier, a few pages whose bytes the test knows.

Adding ``tiers/tier_NAME.py`` means adding its maker to ``MAKERS``; a test says so when it lacks.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3offload.config import READ_ALIGN
from k3offload.scheduler.policy_lru import Policy
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import Buffer, Location, PageId, Priority, Ticket, Tier
from k3offload.tiers.device_fake import FakeDevice
from k3offload.tiers.tier_device import DeviceTier
from k3offload.tiers.tier_disk import DiskTier, windows
from k3offload.tiers.tier_made import MadeTier

CANARY = 0xA5


@dataclass
class TierCase:
    """A tier and what its pages must look like in a slot: (first byte in the slot, bytes).

    ``spread``: bytes of the slot that the page may touch.  ``hold`` stops all reads of the tier
    until ``go``; ``break_page`` makes every read of a page fail with ``error``.
    """

    tier: Tier
    pages: dict[PageId, list[tuple[int, bytes]]]
    spread: Callable[[PageId], int]
    hold: Callable[[], None]
    go: Callable[[], None]
    break_page: Callable[[PageId], type[BaseException]]
    close: Callable[[], None] = field(default=lambda: None)


def aligned(size: int, fill: int = CANARY) -> Buffer:
    """``size`` bytes at a page boundary, all ``fill``."""
    memory = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]
    memory[:] = fill
    return memory


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def write_files(folder: Path, sizes: list[int], seed: int = 0) -> list[Path]:
    """Files of these sizes with random bytes."""
    paths = []
    for i, size in enumerate(sizes):
        path = folder / f"part{i}"
        path.write_bytes(random_bytes(size, seed + i))
        paths.append(path)
    return paths


class Disk:
    """A disk tier over files in ``folder``, with its warnings."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files, self.warnings = list(files), list[str]()
        self.data = [f.read_bytes() for f in files]
        self.location = Location(0, 0, 1)
        self.tier = DiskTier(files, lambda page: [self.location], self.warnings.append)

    def want(self, place: Location) -> bytes:
        return self.data[place.file][place.offset : place.offset + place.length]

    def fetch(self, place: Location) -> bytes:
        """``place`` read as a page, checked against its guards."""
        self.location = place
        (start,), size = windows([place])
        slot = aligned(size + READ_ALIGN)
        self.tier.read(PageId(0, 0), slot[:size]).wait()
        assert (slot[size:] == CANARY).all()
        return slot[start : start + place.length].tobytes()

    def scatter(self, places: Sequence[Location]) -> list[bytes]:
        """``places`` read into buffers at odd addresses, checked against their guards."""
        memory = np.full(sum(p.length + 3 for p in places) + 1, CANARY, np.uint8)
        pieces, at = list[tuple[Location, Buffer]](), 1
        for place in places:
            pieces.append((place, memory[at : at + place.length]))
            at += place.length + 3
        self.tier.read_scatter(pieces).wait()
        at = 1
        for place in places:
            assert (memory[at + place.length : at + place.length + 3] == CANARY).all()
            at += place.length + 3
        assert memory[0] == CANARY
        return [target.tobytes() for _, target in pieces]


class Gate:
    """Wraps ``os.preadv``: reads wait while it is shut, and fail for the ranges in ``broken``."""

    def __init__(self, preadv: Callable[..., int]) -> None:
        self._preadv = preadv
        self.open = threading.Event()
        self.open.set()
        self.broken: list[tuple[int, int]] = []
        self.asked: list[tuple[int, int]] = []  # offset and bytes of each read that has begun

    def __call__(self, fd: int, views: list[Any], offset: int) -> int:
        self.asked.append((offset, len(views[0])))
        assert self.open.wait(30)
        if any(begin <= offset < end for begin, end in self.broken):
            raise OSError(5, "Input/output error")
        return self._preadv(fd, views, offset)


def make_disk(folder: Path, monkeypatch: Any) -> TierCase:
    """Pages of one and of several extents at odd places, in two files, up to the last byte."""
    size = 200_003
    files = write_files(folder, [size, size])
    data = [f.read_bytes() for f in files]
    extents = {
        PageId(0, 0): [Location(0, 0, 4096)],
        PageId(0, 1): [Location(0, 4095, 2)],
        PageId(0, 2): [Location(0, 12_345, 67_891)],
        PageId(1, 0): [Location(1, 50_001, 8191), Location(0, 90_112, 4097)],
        PageId(1, 1): [Location(1, 4096, 1), Location(1, 4098, 1), Location(1, 77_777, 9999)],
        PageId(2, 0): [Location(1, size - 5001, 5001)],
        PageId(2, 1): [Location(0, size - 1, 1)],
    }
    gate = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", gate)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    tier = DiskTier(files, extents.__getitem__)

    def expected(page: PageId) -> list[tuple[int, bytes]]:
        starts, _ = windows(extents[page])
        return [
            (start, data[e.file][e.offset : e.offset + e.length])
            for start, e in zip(starts, extents[page], strict=True)
        ]

    def break_page(page: PageId) -> type[BaseException]:
        from k3offload.errors import ReadError

        gate.broken = [(e.offset - 4096, e.offset + e.length) for e in extents[page]]
        return ReadError

    return TierCase(
        tier=tier,
        pages={page: expected(page) for page in extents},
        spread=lambda page: windows(extents[page])[1],
        hold=gate.open.clear,
        go=gate.open.set,
        break_page=break_page,
        close=tier.close,
    )


class _HeldMade(MadeTier):
    """A made tier whose threads wait at a gate."""

    def __init__(self, sizes: dict[PageId, int]) -> None:
        super().__init__(sizes.__getitem__, seed=3, movers=2)
        self.open = threading.Event()
        self.open.set()

    def _end(self, *piece: Any) -> PageId:
        assert self.open.wait(30)
        return super()._end(*piece)


def make_made(folder: Path, monkeypatch: Any) -> TierCase:
    """Pages of odd sizes whose order of arrival is drawn from a seed."""
    sizes = {PageId(i // 3, i): size for i, size in enumerate([1, 31, 4096, 5000, 100_001])}
    tier = _HeldMade(sizes)

    def break_page(page: PageId) -> type[BaseException]:
        tier.fail(page, OSError(5, "made to fail"), times=10**9, landed=sizes[page] // 2)
        return OSError

    return TierCase(
        tier=tier,
        pages={page: [(0, tier.content(page).tobytes())] for page in sizes},
        spread=sizes.__getitem__,
        hold=tier.open.clear,
        go=tier.open.set,
        break_page=break_page,
        close=tier.close,
    )


class _AsTensors:
    """The device tier, given the bytes of a device that lies in RAM."""

    name = "device"

    def __init__(self, tier: DeviceTier) -> None:
        self._tier, self.order, self.size = tier, tier.order, tier.size

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        return self._tier.read(page, torch.from_numpy(into), priority)


def make_device(folder: Path, monkeypatch: Any) -> TierCase:
    """The pages of ``make_disk`` over a store in RAM, on a device that delays and reorders."""
    below, device = make_disk(folder, monkeypatch), FakeDevice(1 << 24, seed=2)
    size = max(map(below.spread, below.pages))
    slots = [aligned(-(-size // READ_ALIGN) * READ_ALIGN) for _ in below.pages]
    host = ExpertStore(below.tier, slots, Policy(len(slots)))

    def pieces(page: PageId, memory: Buffer) -> list[tuple[Buffer, int]]:
        return [(memory[at : at + len(data)], at) for at, data in below.pages[page]]

    tier = DeviceTier(host, below.tier, device, pieces)

    def close() -> None:
        tier.close()
        device.close()
        below.close()

    return replace(below, tier=_AsTensors(tier), close=close)


MAKERS: dict[str, Callable[[Path, Any], TierCase]] = {
    "device": make_device,
    "disk": make_disk,
    "made": make_made,
}
