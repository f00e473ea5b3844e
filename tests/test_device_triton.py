"""The engine on a device with every operator by Triton, in the interpreter: the float32 rule, and
bits that do not depend on the budget."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from k3offload.config import parse_size
from k3offload.engine import Engine
from k3offload.kernels.choose import OPS, TRITON
from k3offload.kernels.triton_run import interpreted
from k3offload.loading import load
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import BRIEF, Logits, checkpoint, expected, least_vram
from tests.judge import judge

pytestmark = pytest.mark.skipif(not interpreted(), reason="Triton is not installed")
TOKENS, DECODED = [3, 1, 4, 1, 5, 9, 2, 6, 5], 2
GIVEN: dict[str, Any] = {"dtype": "float32", "context": 64, "sweep": 64}


def run(vram: int, packed: str | None = None, **other: str) -> tuple[Logits, Engine]:
    """The logits after each of the last tokens, of which the very last are fed one by one; and the
    engine, closed.  ``other``: operators by something else than Triton."""
    device = FakeDevice(vram, seed=4)
    how = {**GIVEN, "kernels": dict.fromkeys(OPS, TRITON) | other, "latent_dtype": packed}
    with load(checkpoint(**BRIEF), device=device, vram=vram, **how) as engine:
        assert engine.accelerator is not None
        assert set(engine.accelerator.kernels.chosen.values()) == {TRITON, *other.values()}
        with engine.session() as session:
            session.append(TOKENS[:-DECODED])
            rows = [session.logits()]
            for token in TOKENS[-DECODED:]:
                session.append_sampled(token)
                rows.append(session.logits())
    return np.stack(rows), engine


@cache
def everything() -> Logits:
    got, engine = run(parse_size("60M"))
    plan = engine.plan.device
    assert plan is not None and plan.head_resident and plan.slots == plan.experts
    assert len(plan.resident_layers) == len(engine.spec.layers)
    return got


def test_all_operators_by_triton() -> None:
    want = expected(checkpoint(**BRIEF), TOKENS)
    report = judge(want.logits[-DECODED - 1 :], everything())
    assert report and report.judged == DECODED + 1


def test_the_least_memory_gives_the_same_bits() -> None:
    least = least_vram(checkpoint(**BRIEF), **GIVEN)
    got, engine = run(least)
    plan = engine.plan.device
    assert plan is not None and plan.slots == 1
    assert not plan.resident_layers
    assert np.array_equal(got, everything())


def test_a_part_of_the_memory_gives_the_same_bits() -> None:
    """A layer and some experts are there, the others come when they are needed."""
    got, engine = run(parse_size("2.8M"))
    plan = engine.plan.device
    assert plan is not None and 1 < plan.slots < plan.experts
    assert 0 < len(plan.resident_layers) < len(engine.spec.layers) and plan.ring_buffers == 2
    assert np.array_equal(got, everything())


def test_packed_latents() -> None:
    """Unpacked by Triton they are what the reference says, and answers move a little."""
    got, want = (run(parse_size("60M"), "int8", **how)[0] for how in ({}, {"latents": "reference"}))
    assert np.array_equal(got, want)
    assert 0 < np.abs(got - everything()).max() < 0.1 * np.abs(want).max()
