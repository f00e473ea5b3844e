"""What is run so that Triton compiles it before the first token: all that a sweep will call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3offload.device_warmup import Made
from k3offload.engine import Engine
from k3offload.kernels.choose import Kernels
from k3offload.loading import load
from k3offload.options import Watch
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import BRIEF, checkpoint


def traits(value: Any) -> Any:
    """What a kernel is compiled for: kinds and sizes, but for the number of rows."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), *value.shape[1:])
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # jobs, rows, fixed weights
        return tuple(traits(part) for part in value if not isinstance(part, range | list | int))
    if isinstance(value, list | tuple):
        return traits(value[0]) if value else None
    if hasattr(value, "shape"):
        return (type(value).__name__, *value.shape)
    return value if isinstance(value, bool) else type(value).__name__


def watched(kernels: Kernels) -> set[Any]:
    """The calls of ``kernels`` from now on."""
    seen = set()

    def watch(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            seen.add((name, *map(traits, args)))
            return f(*args, **named)

        return call

    kernels.wrap(watch)
    return seen


def of_sweeps(engine: Engine) -> set[Any]:
    assert engine.accelerator is not None
    seen = watched(engine.accelerator.kernels)
    with engine.session() as session:
        session.append([(7 * i) % 300 for i in range(70)])
        session.logits()
        session.append_sampled(3)
        session.logits()
    return set(seen)


def of_made_up(engine: Engine, dtype: str) -> set[Any]:
    there = engine.accelerator
    assert there is not None
    seen, steps = watched(there.kernels), list[tuple[int, int]]()
    packed = engine.options.latent_dtype
    made = Made(engine.weights, there.plan, there.placed, there.sides(), dtype, packed)
    made.sweeps(lambda *step: steps.append(step))
    assert steps == [(i, len(steps)) for i in range(len(steps))]
    return set(seen)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("bfloat16", {}),
        ("float32", {}),
        ("bfloat16", {"trunk": "int8", "vram": "5M"}),
        ("bfloat16", {"latent_dtype": "fp8"}),
        ("bfloat16", {"experts_on": "cpu"}),
        ("bfloat16", {"trunk_on": "cpu"}),
        ("bfloat16", {"trunk_on": "split:3"}),
    ],
)
def test_all_that_sweeps_call_is_called_before(dtype: str, given: dict[str, Any]) -> None:
    device = FakeDevice(400 << 20)
    with load(checkpoint(**BRIEF), context=256, dtype=dtype, device=device, **given) as engine:
        before = engine.counts()
        made_up, free = of_made_up(engine, dtype), device.free_bytes()
        assert engine.counts() == before and device.free_bytes() == free
        called = of_sweeps(engine)
        assert called and not called - made_up


def test_nothing_is_compiled_where_nothing_can_be() -> None:
    told: list[object] = []
    watch = Watch(compiling=lambda *step: told.append(step))
    with load("nano", context=64, device=FakeDevice(400 << 20), watch=watch) as engine:
        assert engine.accelerator is not None and engine.accelerator.compile_seconds == 0.0
    assert not told
