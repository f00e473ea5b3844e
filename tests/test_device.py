"""The engine with a device that delays, reorders and poisons: the bits are those of the CPU alone,
whatever the budget and whatever is computed where (R61)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from k3offload.checkpoint import Checkpoint
from k3offload.config import parse_size
from k3offload.device_trunk import DeviceFetch
from k3offload.errors import DoesNotFit, SessionError, UsageError
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.loading import load
from k3offload.options import Watch
from k3offload.tiers.base import PageId, Priority
from k3offload.tiers.device import DeviceError
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import BRIEF, checkpoint, least_vram

PROMPT, STEPS = [(7 * i) % 300 for i in range(150)], 3


Logits = npt.NDArray[np.float32]


def logits(**options: Any) -> Logits:
    """After a prompt and after each of a few sampled tokens, [1 + STEPS, vocab]."""
    with load("nano", context=512, sweep=64, threads=2, **options) as engine:
        with engine.session() as session:
            session.append(PROMPT)
            rows = [session.logits()]
            for step in range(STEPS):
                session.append_sampled(11 * step + 3)
                rows.append(session.logits())
        device = engine.accelerator
        assert (device is None) == (options["device"] == "cpu")
    return np.stack(rows)


@pytest.fixture(scope="module")
def alone() -> Logits:
    return logits(device="cpu")


@pytest.mark.parametrize("vram", [None, "5M", "7M", "9M", "12M", "60M"])
def test_bits_do_not_depend_on_the_budget(alone: Logits, vram: str | None) -> None:
    """From the least there can be to everything."""
    if vram is None:
        vram = str(least_vram("nano", context=512, sweep=64))
    device = FakeDevice(parse_size(vram), seed=len(vram))  # so that the plan has to keep its word
    assert np.array_equal(logits(device=device, vram=vram), alone)


@pytest.mark.parametrize(
    ("trunk_on", "experts_on"),
    [("gpu", "cpu"), ("cpu", "gpu"), ("split:3", "gpu"), ("split:5", "cpu")],
)
def test_bits_do_not_depend_on_the_place(
    alone: Logits,
    trunk_on: str,
    experts_on: str,
) -> None:
    device = FakeDevice(400 << 20, seed=3)
    got = logits(device=device, vram="6M", trunk_on=trunk_on, experts_on=experts_on)
    assert np.array_equal(got, alone)


def test_little_ram_and_little_vram(alone: Logits) -> None:
    device = FakeDevice(400 << 20, seed=5)
    assert np.array_equal(logits(device=device, vram="7M", cache="1M"), alone)


def test_pages_lie_on_the_device_where_kernels_like_them() -> None:
    """At 16 bytes, which is what their loads take, whatever their place in a file."""
    folder = checkpoint(**BRIEF)
    with load(folder, context=64, device=FakeDevice(400 << 20), vram="60M") as engine:
        store = engine.accelerator.store if engine.accelerator else None
        assert store is not None
        page = PageId(engine.spec.moe_layers[0], 7)
        assert Checkpoint.open(folder).expert(*page).extents[0].offset % 16 == 8
        with store.lease([page]) as arrivals:
            for batch in arrivals:
                for weight in engine.weights.expert(page, batch[0][1]):
                    assert isinstance(weight, Mxfp4Weight)
                    assert weight.packed.data_ptr() % 16 == weight.scale.data_ptr() % 16 == 0


@pytest.mark.parametrize("trunk", ["int8", "mxfp4"])
def test_a_smaller_trunk(trunk: str) -> None:
    want = logits(device="cpu", trunk=trunk)
    got = logits(device=FakeDevice(400 << 20, seed=6), vram="5M", trunk=trunk)
    assert np.array_equal(got, want)


def test_an_adaptive_backend_computes_experts_on_both(alone: Logits) -> None:
    """Few slots on the device and all of RAM: the CPU takes a part of what would be copied."""
    device = FakeDevice(400 << 20, seed=9)
    with load(
        "nano", context=512, sweep=64, threads=2, device=device, vram="5M", adaptive=True
    ) as engine:
        assert engine.accelerator is not None
        choice = engine.accelerator.adaptive
        assert choice is not None
        with engine.session() as session:
            session.append(PROMPT)
            rows = [session.logits()]
            choice.copy_seconds = choice.cpu_seconds  # so that each has half
            for step in range(STEPS):
                session.append_sampled(11 * step + 3)
                rows.append(session.logits())
        asked = engine.counts()["experts on the device"].requests
    assert choice.on_cpu > 0 and asked > 0
    error = np.linalg.norm(np.stack(rows) - alone, axis=1) / np.linalg.norm(alone, axis=1)
    assert error.max() < 2e-2  # experts of prompts by the matrix unit, or by the other family


def test_an_adaptive_backend_needs_experts_on_the_device() -> None:
    with pytest.raises(UsageError, match="--adaptive-backend chooses for experts"):
        logits(device=FakeDevice(400 << 20), experts_on="cpu", adaptive=True)


def test_a_head_that_the_device_holds_is_not_kept_in_ram_too() -> None:
    with load("nano", context=64, device=FakeDevice(400 << 20), vram="60M") as engine:
        assert engine.accelerator is not None and engine.accelerator.plan.head_resident
        assert not engine.plan.head_resident
    with load(  # the head stays with the CPU
        "nano", context=64, device=FakeDevice(400 << 20), vram="60M", trunk_on="split:7"
    ) as engine:
        assert engine.plan.head_resident


def test_r33_memory_that_cannot_be_locked(alone: Logits) -> None:
    """One warning that names the limit; nothing else changes."""
    told: list[str] = []
    device = FakeDevice(400 << 20, seed=8, pinnable=1 << 20)
    got = logits(device=device, vram="5M", watch=Watch(warn=told.append))
    assert np.array_equal(got, alone)
    assert len(told) == 1 and "refuses to lock" in told[0] and "ulimit -l" in told[0]


def test_too_little_device_memory_is_refused_before_anything_is_read() -> None:
    with pytest.raises(DoesNotFit, match=r"for the device needs.*--vram \d+M or more"):
        logits(device=FakeDevice(400 << 20), vram="2M")
    with pytest.raises(DoesNotFit, match=r"more than the 10,000,000 bytes .* free on fake"):
        logits(device=FakeDevice(10_000_000), vram="20M")


def test_a_copy_that_fails_fails_the_sweep_and_the_next_goes_on() -> None:
    device = FakeDevice(400 << 20, failing=frozenset(range(12, 200)))
    with load("nano", context=512, sessions=2, device=device, vram="7M") as engine:
        with engine.session() as session:
            session.append(PROMPT[:20])
            with pytest.raises(DeviceError):
                session.logits()
            device.heal()
            session.reset()
            session.append(PROMPT[:20])
            assert np.isfinite(session.logits()).all()


OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.79 GiB"
)
RAISED: list[tuple[Exception, str]] = [
    (OUT_OF_MEMORY, r"fake ran out of memory: 20.00 MiB was asked .* --vram or a smaller --sweep"),
    (RuntimeError("CUDA error: an illegal memory access"), "fake failed .*illegal.*start again"),
    (type("OutOfResources", (Exception,), {"__module__": "triton.errors"})("shared memory"),
     r"cannot be made for fake \(OutOfResources: shared memory\)"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said"), RAISED)
def test_what_torch_and_triton_raise_in_a_sweep_names_the_device(
    error: Exception, said: str
) -> None:
    """The sweep fails as any other does: its states are lost, the engine goes on."""

    def fail(layer: int) -> None:
        if layer == 3:
            raise error

    with load("nano", context=128, device=FakeDevice(400 << 20), vram="60M") as engine:
        with engine.session() as session:
            session.append(PROMPT[:20])
            engine.hooks.before_layer = fail
            with pytest.raises(DeviceError, match=said):
                session.logits()
            engine.hooks.before_layer = lambda layer: None
            with pytest.raises(SessionError, match=r"state was lost: .*DeviceError: .*fake"):
                session.logits()
            session.reset()
            session.append(PROMPT[:20])
            assert np.isfinite(session.logits()).all()


def test_memory_of_a_device_that_ends_outside_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a session is opened, copied, or given room; other errors stay what they are."""

    def fail(*given: object) -> None:
        raise error

    error: Exception = OUT_OF_MEMORY
    with load("nano", context=512, device=FakeDevice(400 << 20), vram="60M") as engine:
        with engine.session() as session:
            session.append(PROMPT[:20])
            monkeypatch.setattr("k3offload.state.SequenceState.__init__", fail)
            for act in (engine.session, session.fork, session.snapshot):
                with pytest.raises(DeviceError, match="fake ran out of memory"):
                    act()
            monkeypatch.setattr("k3offload.latents._Block", fail)
            with pytest.raises(DeviceError, match="fake ran out of memory"):
                session.logits()
            error = RuntimeError("something else")
            with pytest.raises(RuntimeError, match=r"^something else$"):
                session.logits()
            monkeypatch.undo()
            assert np.isfinite(session.logits()).all()  # nothing had been computed


@pytest.mark.parametrize(
    ("option", "value"),
    [("trunk_on", "split:0"), ("trunk_on", "half"), ("experts_on", "disk"), ("device", "tpu")],
)
def test_what_is_not_known_is_refused(option: str, value: str) -> None:
    given: dict[str, Any] = {"device": FakeDevice(400 << 20), option: value}
    with pytest.raises(UsageError, match=f"{value!r} is not known"):
        logits(**given)


def test_options_of_a_device_mean_something_or_are_refused() -> None:
    """Asked for a CPU, an option of a GPU is an error; where none was found, a warning says so."""
    for option in ({"vram": "1G"}, {"trunk_on": "cpu"}, {"experts_on": "gpu"}, {"adaptive": True}):
        with pytest.raises(UsageError, match="is about a GPU"):
            load("nano", device="cpu", **option)
    told: list[str] = []
    with load("nano", context=64, vram="1G", watch=Watch(warn=told.append)) as engine:
        if engine.accelerator is None:
            assert len(told) == 1 and "--vram has no effect: device: cpu" in told[0]


def test_r76_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found and not asked for by name: the CPU goes on alone and says so."""
    found = (FakeDevice(1 << 20), "device: fake")
    monkeypatch.setattr("k3offload.engine.open_device", lambda wanted: found)
    told: list[str] = []
    with load("nano", context=64, watch=Watch(warn=told.append)) as engine:
        assert engine.accelerator is None and engine.device_line.startswith("device: cpu (")
    assert len(told) == 1 and "fake is not used: The smallest plan for the device" in told[0]
    found = (FakeDevice(1 << 20), "device: fake")
    with pytest.raises(DoesNotFit, match="--vram"):
        load("nano", context=64, device="cuda")


def test_a_closed_engine_keeps_nothing_of_the_device() -> None:
    engine = load("nano", context=64, device=FakeDevice(400 << 20), vram="5M")
    trunk, store = weakref.ref(engine._model._weights), weakref.ref(engine._model._store)
    engine.close()
    gc.collect()
    assert trunk() is None and store() is None


def test_the_mark_of_a_ring_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a layer would be copied over one that kernels still read."""

    def forgetful(self: DeviceFetch, *given: Any) -> None:
        made(self, *given)
        self._after = None

    made = DeviceFetch.__init__
    monkeypatch.setattr(DeviceFetch, "__init__", forgetful)
    with pytest.raises(AssertionError, match="still read it"):
        logits(device=FakeDevice(400 << 20, seed=2), vram="5M")


def test_guesses_reach_the_disk_as_guesses() -> None:
    """A page that is read ahead for the device does not go before one that is waited for."""
    with load(
        "nano", context=256, device=FakeDevice(400 << 20), vram="9M", cache="1M", predict="router"
    ) as engine:
        seen: list[Priority] = []
        read = engine.disk.read

        def watched(page: PageId, into: Any, priority: Priority = Priority.DEMAND) -> Any:
            seen.append(priority)
            return read(page, into, priority)

        engine.disk.read = watched  # type: ignore[method-assign]
        with engine.session() as session:
            session.append(PROMPT[:20])
            session.logits()
            for step in range(12):
                session.append_sampled(11 * step + 3)
                session.logits()
        assert engine.counts()["experts on the device"].prefetches > 0
        assert Priority.PREFETCH in seen and Priority.DEMAND in seen


def test_r76_a_gpu_that_is_not_there() -> None:
    """Asked for by name it is an error; ``auto`` goes on and says why."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="--device cuda cannot be used: "):
        load("nano", device="cuda")
    with load("nano") as engine:
        assert engine.accelerator is None
        assert engine.device_line.startswith("device: cpu (")
