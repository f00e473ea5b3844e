"""What the GPU suite says about bus, disk and overlap, on a device that is made up."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu_budgets import Timed, bus_rate, decode, disk_rate, shares
from benchmarks.gpu_cases import Case
from k3offload.kernels.choose import Kernels
from k3offload.tiers.base import Ticket
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import checkpoint


def test_shares_of_line_rates() -> None:
    got = shares(10.0, 40, 5.0, 1.0, 60, bus=8.0, disk=12.0)
    assert got == {
        "bus_share": 0.5, "bus_share_while_copying": 1.0, "disk_share": 0.5, "overlap": 0.8,
    }  # fmt: skip
    assert shares(10.0, 40, 5.0, 9.0, 60, 8.0, 12.0)["overlap"] == 0.0  # waited for the disk too
    nothing = shares(10.0, 0, 0.0, 0.0, 0, 8.0, 12.0)
    assert (nothing["bus_share"], nothing["overlap"]) == (0.0, None)


@pytest.mark.parametrize("vram", ["5M", "60M"])
def test_a_budget_is_measured(vram: str) -> None:
    folder = checkpoint()
    rates = bus_rate(FakeDevice(1 << 20), 1 << 16), disk_rate(folder, 0.05)
    assert min(rates) > 0
    got = decode(folder, FakeDevice(400 << 20), rates, 64, 3, vram=vram)
    assert got["tokens_a_second"] > 0 and got["host_waits_a_step"] >= 2
    on_device = sum(n for kind, n in got["bytes"].items() if kind.endswith("on the device"))
    if vram == "60M":  # all is there
        assert got["bus_bytes"] == on_device == 0 and got["overlap"] is None
    else:
        assert got["bus_bytes"] > 0 and got["bus_share"] > 0
        assert 0.0 <= got["overlap"] < 1.0


def test_seconds_with_copies_under_way_are_counted_once() -> None:

    device = Timed(FakeDevice(1 << 20, delay=0.02))
    memory, landed = device.allocate(4096), Ticket(4)
    begin = time.perf_counter()
    for i in range(4):
        to = memory[1024 * i : 1024 * (i + 1)]
        device.copy(np.ones(1024, np.uint8), to, None, landed.finish)
    landed.wait()
    copied, busy = device.so_far()
    device.close()
    assert copied == 4096 and 0 < busy <= time.perf_counter() - begin


def test_a_kernel_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kernels: Kernels, inputs: Any) -> list[torch.Tensor]:
        raise RuntimeError("CUDA error: out of resources")

    def ones(kernels: Kernels, inputs: Any) -> list[torch.Tensor]:
        return [torch.ones(1)]

    made = [Case("first", {}, fail, 1, 1), Case("second", {}, ones, 1, 1)]
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu_suite, "limits", lambda device: (1e9, 1e9))
    monkeypatch.setattr(gpu_suite, "cases", lambda *given, **named: iter(made))
    monkeypatch.setattr(gpu_suite, "tell", lambda line, device: told.append(line))
    device = FakeDevice(1 << 20)
    assert not gpu_suite.run_kernels(device, lambda: 1.0)
    assert "out of resources" in told[1]["failed"] and not told[1]["right"]
    assert told[2]["right"] and told[2]["case"] == "second"
    device.close()


def test_what_is_left_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu_suite, "tell", lambda line, device: told.append(line))
    gpu_suite.run_budgets(lambda vram: FakeDevice(1 << 20), lambda: 20.0)
    assert [line["model"] for line in told] == ["wide", "io-real"]
    assert all(line["skipped"].startswith("20 seconds left") for line in told)
