"""How often a sweep waits for the device: each time, all that was launched before has to end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from k3offload.engine import Engine
from k3offload.kernels.transfer import tables
from k3offload.loading import load
from k3offload.tiers.device_fake import FakeDevice

ROOT = Path(__file__).resolve().parent.parent
#: What a tensor of a GPU would be waited for by, without being counted.
UNCOUNTED = re.compile(r"\.(cpu|item|numpy)\(\)")


class Scalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts numbers that Python takes out of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def waits(engine: Engine, tokens: list[int], sampled: bool) -> int:
    """Of a sweep over ``tokens`` in a session of their own."""
    assert engine.accelerator is not None
    kernels = engine.accelerator.kernels
    with engine.session() as session:
        session.append([1, 2, 3])
        session.logits()
        (session.append_sampled(tokens[0]) if sampled else session.append(tokens))
        before = kernels.waits
        scalars = Scalars()  # type: ignore[no-untyped-call]
        with scalars:
            session.logits()
        assert not scalars.count
        return kernels.waits - before


@pytest.mark.parametrize("latents", [None, "int8"])
def test_a_sweep_waits_for_its_routers_and_twice_more(latents: str | None) -> None:
    """A wait for each router, since it decides what is read; one for whether all numbers are
    finite, and one for the logits."""
    how: dict[str, Any] = {"vram": "60M", "latent_dtype": latents}
    with load("nano", context=256, device=FakeDevice(400 << 20), **how) as engine:
        routers = len(engine.spec.moe_layers)
        assert waits(engine, [7], True) == routers + 2
        assert waits(engine, [(7 * i) % 300 for i in range(150)], False) == routers + 2


@pytest.mark.parametrize("predict", ["router", "combined"])
def test_looking_ahead_waits_once_more_a_layer(predict: str) -> None:
    """Scores and latents come together."""
    with load(
        "nano", context=256, device=FakeDevice(400 << 20), vram="9M", cache="1M", predict=predict
    ) as engine:
        routers = len(engine.spec.moe_layers)
        assert waits(engine, [7], True) in range(routers + 3, 2 * routers + 3)


def test_nothing_else_waits() -> None:
    """What is not counted above: conversions that stop for a GPU, in files that see its tensors."""
    files = [*ROOT.glob("kernels/*_triton.py"), *ROOT.glob("kernels/triton_*.py")]
    names = (
        "model",
        "layer_kda",
        "layer_mla",
        "layer_moe",
        "stream",
        "adaptive",
        "state",
        "latents",
        "device_latents",
    )
    files += [p for n in names if (p := ROOT / f"k3offload/{n}.py").exists()]
    assert len(files) > 15
    found = {f"{p.name}: {m[0]}" for p in files for m in UNCOUNTED.finditer(p.read_text())}
    # what was fetched, what the schedule and trace are told, and blocks for scratch files: in RAM
    assert found == {f"{name}.py: .numpy()" for name in ("model", "latents", "stream")}


def test_tables_are_sent_once() -> None:
    pieces = [torch.zeros(4), torch.zeros(4)]
    first = tables(pieces, torch.device("cpu"))
    assert np.array_equal(first.numpy(), [p.data_ptr() for p in pieces])
    assert tables(pieces, torch.device("cpu")) is first
    assert tables(pieces[::-1], torch.device("cpu")).tolist() == first.tolist()[::-1]
