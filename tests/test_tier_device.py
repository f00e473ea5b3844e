"""The device tier over a store in RAM, on a device that delays, reorders, fails, poisons (R61)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from k3offload.errors import ReadError
from k3offload.scheduler.policy_lru import Policy
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import Buffer, PageId, Priority, Ticket
from k3offload.tiers.device import DeviceError, Mark
from k3offload.tiers.device_fake import POISON, FakeDevice
from k3offload.tiers.tier_device import DeviceTier

SIZE = 64


def content(page: PageId) -> Buffer:
    return np.random.default_rng([page.layer, page.expert]).integers(0, 255, SIZE, np.uint8)


class Files:
    """A tier whose pages arrive after a moment, on a thread."""

    name = "files"

    def __init__(self, seed: int, broken: frozenset[PageId] = frozenset()) -> None:
        self._random, self._broken = random.Random(seed), broken
        self.threads: list[threading.Thread] = []

    def order(self, page: PageId) -> PageId:
        return page

    def size(self, page: PageId) -> int:
        return SIZE

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket, wait = Ticket(1), self._random.random() * 3e-4
        into[:] = 0xA5

        def run() -> None:
            threading.Event().wait(wait)
            if page in self._broken:
                ticket.finish(ReadError("made to fail"))
            else:
                into[:] = content(page)
                ticket.finish(None, SIZE)

        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()
        return ticket


@contextmanager
def stack(
    seed: int, ram: int, slots: int, failing: frozenset[int] = frozenset(),
    broken: frozenset[PageId] = frozenset(),
) -> Iterator[tuple[ExpertStore, ExpertStore, FakeDevice]]:  # fmt: skip
    """Files under RAM under the device."""
    files, device = Files(seed, broken), FakeDevice(slots * SIZE, seed, 4e-4, failing)
    host = ExpertStore(files, list(np.zeros((ram, SIZE), np.uint8)), Policy(ram))
    tier = DeviceTier(host, files, device)
    memory = device.allocate(slots * SIZE).view(slots, SIZE)
    try:
        yield ExpertStore(tier, list(memory), Policy(slots)), host, device
    finally:
        tier.close()
        device.close()
        for thread in files.threads:
            thread.join()


def used(slot: torch.Tensor, page: PageId) -> None:
    assert np.array_equal(slot.numpy(), content(page)), page


def test_pages_reach_the_device_and_are_counted() -> None:
    with stack(1, ram=20, slots=6) as (store, host, _):
        pages = [PageId(0, expert) for expert in range(6)]
        for _ in range(2):
            with store.lease(pages) as arrivals:
                for batch in arrivals:
                    for page, slot in batch:
                        used(slot, page)
        assert (store.counts.hits, store.counts.misses) == (6, 6)
        assert (host.counts.hits, host.counts.misses) == (0, 6)
        assert store.counts.bytes == 6 * SIZE


def test_what_is_read_too_early_is_poison() -> None:
    device = FakeDevice(2 * SIZE, delay=0.05)
    memory, landed = device.allocate(SIZE), threading.Event()
    device.copy(content(PageId(0, 1)), memory, None, lambda error: landed.set())
    assert (memory == POISON).all()
    landed.wait()
    used(memory, PageId(0, 1))
    device.close()


def test_memory_in_use_is_not_overwritten() -> None:
    device = FakeDevice(2 * SIZE)
    memory, early = device.allocate(SIZE), device.mark()
    device.handed_out(memory)
    for mark in (None, early):
        with pytest.raises(AssertionError, match="still read it"):
            device.copy(content(PageId(0, 1)), memory, mark, lambda error: None)
        device.handed_out(memory)
    device.copy(content(PageId(0, 1)), memory, device.mark(), lambda error: None)
    device.close()


def test_a_source_given_up_too_early_arrives_as_something_else() -> None:
    device = FakeDevice(2 * SIZE, delay=0.05)
    memory, landed, source = device.allocate(SIZE), threading.Event(), content(PageId(0, 1))
    device.copy(source, memory, None, lambda error: landed.set())
    source[:] = 1
    landed.wait()
    assert (memory == 1).all()
    device.close()


def test_memory_ends() -> None:
    device = FakeDevice(100)
    device.allocate(60)
    assert device.free_bytes() == 40
    with pytest.raises(DeviceError, match=r"asked for 41 B and has 40 B left.*--vram"):
        device.allocate(41)
    device.close()


def test_a_failed_copy_fails_the_lease_and_a_later_one_reads_again() -> None:
    with stack(3, ram=4, slots=2, failing=frozenset([0])) as (store, _, _):
        page = PageId(1, 1)
        with pytest.raises(DeviceError), store.lease([page]) as arrivals:
            next(arrivals)
        with store.lease([page]) as arrivals:
            for batch in arrivals:
                used(batch[0][1], page)


def test_a_tier_without_marks_is_caught() -> None:
    """The check above would not fail if the tier forgot when its slots were last used."""
    with stack(5, ram=4, slots=1) as (store, _, _):
        tier = store._tier
        assert isinstance(tier, DeviceTier)
        tier._last_use = _Forgetful()
        with store.lease([PageId(0, 0)]) as arrivals:
            assert len(next(arrivals)) == 1
        with store.lease([PageId(0, 1)]) as arrivals:
            with pytest.raises(AssertionError, match="still read it"):
                next(arrivals)


class _Forgetful(dict[int, Mark]):
    def update(self, *args: Any, **rest: Any) -> None:
        return None
