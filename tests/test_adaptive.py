"""Results of the CPU on their way to a device: late and in any order, they are there in time."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from k3offload.adaptive import Adaptive, Outbox
from k3offload.errors import K3Error
from k3offload.loading import load
from k3offload.tiers.base import Buffer
from k3offload.tiers.device import DeviceError, Landed, Mark
from k3offload.tiers.device_fake import FakeDevice
from tests.test_device import PROMPT, Logits

WIDTH, STEPS = 6, 4


def rows(count: int, first: float) -> torch.Tensor:
    return torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH) + first


def outbox(device: FakeDevice, room: int) -> Outbox:
    return Outbox(device, np.full(4 * room * WIDTH, 0xFF, np.uint8), torch.float32, WIDTH)


def send(box: Outbox, values: torch.Tensor, to: torch.Tensor) -> None:
    box.rows(len(values)).copy_(values)
    box.send(to)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("room", [3, 4, 7, 12])
def test_rows_arrive_whatever_the_order(room: int, seed: int) -> None:
    """Room for one call, two, or all of them: memory is written again only behind its copy."""
    device = FakeDevice(1 << 20, seed, delay=0.004)
    box, counts = outbox(device, room), (3, 1, 2, 3, 3)
    for again in range(2):
        wanted, to = [], torch.zeros(sum(counts), WIDTH)
        with box.emptied():
            box.aim(to)
            done = 0
            for i, count in enumerate(counts):
                wanted.append(rows(count, 100.0 * i + again))
                send(box, wanted[-1], to[done : done + count])
                done += count
        assert torch.equal(to, torch.cat(wanted))
    device.close()


def test_copies_begin_behind_the_kernels_that_read_what_was_there() -> None:
    device = FakeDevice(1 << 20)
    box, to = outbox(device, 4), torch.zeros(4, WIDTH)
    with box.emptied():
        box.aim(to)
        box._after = None
        with pytest.raises(AssertionError, match="still read it"):
            send(box, rows(4, 0.0), to)
    device.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_copy_that_fails_is_heard_of(at_once: bool) -> None:
    device = FakeDevice(1 << 20, delay=0.002)
    box, to = outbox(device, 4), torch.zeros(4, WIDTH)

    def three() -> None:
        with box.emptied():
            box.aim(to)
            send(box, rows(1, 1.0), to[:1])
            device.fail_next(at_once)
            send(box, rows(1, 2.0), to[1:2])
            send(box, rows(2, 3.0), to[2:])

    with pytest.raises(DeviceError, match="A copy to or from the device failed"):
        three()
    device.heal()
    with box.emptied():  # and the next goes on
        box.aim(to)
        send(box, rows(4, 4.0), to)
    assert torch.equal(to, rows(4, 4.0))
    device.close()


def test_nothing_is_under_way_behind_an_error() -> None:
    """What was aimed at is given up then, and so is its memory."""
    device = FakeDevice(1 << 20, delay=0.02)
    box, to = outbox(device, 4), torch.zeros(4, WIDTH)

    def stopped() -> None:
        with box.emptied():
            box.aim(to)
            send(box, rows(4, 5.0), to)
            raise KeyError("something else")

    with pytest.raises(KeyError):
        stopped()
    assert torch.equal(to, rows(4, 5.0))
    device.close()


# ---- the engine ----


class LateRows(FakeDevice):
    """Results of the CPU, which come from what is locked last, land later than all else."""

    def copy(
        self,
        source: Buffer,
        to: torch.Tensor,
        after: Mark | None,
        landed: Landed,
        urgent: bool = True,
    ) -> None:
        with self._change:
            super().copy(source, to, after, landed, urgent)
            begin, end = self._pinned[-1]
            if begin <= source.ctypes.data < end:
                self._waiting[-1].not_before += 0.01


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what could be copied goes to the CPU, whatever the times were."""

    def fixed(self: Adaptive, pages: Any) -> Any:
        self.copy_seconds = self.cpu_seconds = 1.0
        return chosen(self, pages)

    chosen = Adaptive.for_cpu
    monkeypatch.setattr(Adaptive, "for_cpu", fixed)


def logits(device: FakeDevice, dtype: str = "float32") -> tuple[Logits, int]:
    """After a prompt and a few tokens with half of the experts on the CPU, and how many those
    were.  All results of the CPU come from locked memory."""
    with load(
        "nano", context=512, sweep=64, threads=2, device=device, vram="5M", adaptive=True,
        predict="none", dtype=dtype,
    ) as engine:  # fmt: skip
        assert engine.accelerator is not None and engine.accelerator.adaptive is not None
        before = device.unpinned
        with engine.session() as session:
            session.append(PROMPT)
            found = [session.logits()]
            for step in range(STEPS):
                session.append_sampled(11 * step + 3)
                found.append(session.logits())
        assert device.unpinned == before
        return np.stack(found), engine.accelerator.adaptive.on_cpu


@pytest.fixture
def at_once(halves: None) -> npt.NDArray[np.float32]:
    """With copies that take no time."""
    found, on_cpu = logits(FakeDevice(400 << 20, delay=0.0))
    assert on_cpu > 100
    return found


@pytest.mark.parametrize("seed", range(3))
def test_late_copies_change_no_bit(at_once: Logits, seed: int) -> None:
    got, on_cpu = logits(LateRows(400 << 20, seed, delay=0.002))
    assert on_cpu > 100 and np.array_equal(got, at_once)


def test_close_to_the_cpu_alone(at_once: Logits) -> None:
    with load("nano", context=512, sweep=64, threads=2, dtype="float32", device="cpu") as engine:
        with engine.session() as session:
            session.append(PROMPT)
            want = session.logits()
    assert np.linalg.norm(at_once[0] - want) <= 2e-4 * np.linalg.norm(want)


def no_waiting(self: Outbox) -> None:
    self._free = 0


def no_mark(self: Outbox, to: torch.Tensor) -> None:
    aimed(self, to)
    self._after = None


aimed = Outbox.aim


@pytest.mark.parametrize(("name", "wrong"), [("_wait", no_waiting), ("aim", no_mark)])
def test_planted_mistakes_are_seen(
    halves: None, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any
) -> None:
    """Kernels that read rows before they have landed; copies over what kernels still read."""
    want, _ = logits(FakeDevice(400 << 20, delay=0.0))
    monkeypatch.setattr(Outbox, name, wrong)
    got = None
    with suppress(K3Error, AssertionError):  # NaN in a layer, or a copy that is refused
        got, _ = logits(LateRows(400 << 20, 1))
    assert got is None or not np.array_equal(got, want)
