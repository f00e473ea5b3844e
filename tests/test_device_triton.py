"""The engine on a device with every operator by Triton, in the interpreter: the float32 rule, and
bits that do not depend on the budget."""

from __future__ import annotations

import numpy as np
import pytest

from k3offload.config import parse_size
from k3offload.kernels.choose import OPS, TRITON
from k3offload.kernels.triton_run import interpreted
from k3offload.loading import load
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import BRIEF, Logits, checkpoint, expected
from tests.judge import judge

pytestmark = pytest.mark.skipif(not interpreted(), reason="Triton is not installed")
TOKENS, DECODED = [3, 1, 4, 1, 5, 9, 2, 6, 5], 2


def logits(vram: str) -> Logits:
    """After each of the last tokens, of which the very last are fed one by one."""
    device = FakeDevice(parse_size(vram), seed=4)
    folder, kernels = checkpoint(**BRIEF), dict.fromkeys(OPS, TRITON)
    with load(folder, dtype="float32", context=64, device=device, kernels=kernels) as engine:
        assert engine.accelerator is not None
        assert set(engine.accelerator.kernels.chosen.values()) == {TRITON}
        with engine.session() as session:
            session.append(TOKENS[:-DECODED])
            rows = [session.logits()]
            for token in TOKENS[-DECODED:]:
                session.append_sampled(token)
                rows.append(session.logits())
    return np.stack(rows)


def test_all_operators_by_triton() -> None:
    want = expected(checkpoint(**BRIEF), TOKENS)
    everything = logits("60M")
    report = judge(want.logits[-DECODED - 1 :], everything)
    assert report and report.judged == DECODED + 1
    assert np.array_equal(logits("4M"), everything)
