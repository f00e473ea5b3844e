"""What Triton's operators allocate beside their results, against what the device's plan says."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from k3offload import spec as spec_module
from k3offload.budget_kernels import attention_scratch, device_scratch, mixer_scratch
from k3offload.config import EXPANDED, LATENT_BLOCK, RANGES
from k3offload.kernels.choose import TRITON, Kernels
from k3offload.kernels.experts_reference import Job
from k3offload.kernels.glu_reference import Activation
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.mixer import MixerRows, MixerWeights
from k3offload.kernels.mla_prefill_reference import Query
from k3offload.kernels.triton_run import interpreted
from k3offload.kernels.workers import Workers
from k3offload.spec import ModelSpec
from tests.helpers_engine import BRIEF, checkpoint

SOLO, RELEASED = Workers(1), Path(spec_module.__file__).parent / "released"
needs_triton = pytest.mark.skipif(not interpreted(), reason="Triton is not installed")


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tensors that are made inside and not yet gone; the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in self._tensors(args):
            self.known.add(tensor.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for tensor in self._tensors(out if isinstance(out, tuple | list) else [out]):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    @staticmethod
    def _tensors(values: Any) -> list[torch.Tensor]:
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def beside(act: Callable[[], list[torch.Tensor]]) -> int:
    """Bytes that ``act`` takes at most beside its results."""
    held = Held()
    with held:
        results = act()
    return held.most - sum(r.untyped_storage().nbytes() for r in results[:1])


def nano() -> ModelSpec:
    return ModelSpec.load(checkpoint(**BRIEF))


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    ops = ("mla_prefill", "mla_decode", "experts", "short_conv", "kda_gate", "kda")
    return Kernels(SOLO, dict.fromkeys(ops, TRITON))


@needs_triton
@pytest.mark.parametrize("length", [200, (EXPANDED + 1) * LATENT_BLOCK])
def test_attention(kernels: Kernels, length: int) -> None:
    spec, rows = nano(), 192
    m = spec.mla
    up = DenseWeight(torch.ones(m.heads * (m.nope + m.v), m.kv_lora).bfloat16())
    blocks = [torch.ones(LATENT_BLOCK, m.latent).bfloat16() for _ in range(-(-length // 256))]
    q = torch.ones(64, m.heads, m.nope + m.rope).bfloat16()
    begins = [length - 64 * (i + 1) for i in range(min(3, length // 64))]
    queries = [Query(q, begin) for begin in begins]
    got = max(
        beside(lambda: kernels.mla_prefill(queries, [blocks], length, up, m.nope, m.v, 1.0)),
        beside(lambda: [kernels.mla_decode(q[0], [blocks], length, up, m.nope, m.v, 1.0)]),
    )
    planned = attention_scratch(spec, "bfloat16", rows, length)
    assert 0.5 * planned <= got <= planned + 4096, (got, planned)  # and small tables


@needs_triton
def test_experts_and_mixer(kernels: Kernels) -> None:
    spec = nano()
    assert spec.moe is not None
    h, d, width = spec.hidden, spec.kda.head_dim, spec.kda.width
    wide = DenseWeight(torch.ones(spec.dense_width, h).bfloat16())
    job = Job(wide, wide, DenseWeight(torch.ones(h, spec.dense_width).bfloat16()))
    x = torch.ones(64, h).bfloat16()
    dense = beside(lambda: [kernels.experts(x, [job], Activation("silu"), False)])
    ones = torch.ones(64, width).bfloat16()
    rows = MixerRows([ones] * 3, ones, torch.ones(64, spec.kda.heads).bfloat16(), ones)
    conv = torch.ones(width, spec.kda.conv)
    fixed = MixerWeights((conv,) * 3, torch.ones(spec.kda.heads), torch.ones(width),
                         torch.ones(d), -5.0, 1e-5)  # fmt: skip
    tails = [torch.ones(spec.kda.conv - 1, width).bfloat16() for _ in range(3)]
    state = torch.zeros(spec.kda.heads, d, d)
    mixed = beside(lambda: [kernels.mixer(rows, tails, state, fixed, False)])
    assert dense and 0.5 * mixer_scratch(spec) <= mixed <= mixer_scratch(spec) + 4096
    assert max(dense, mixed) <= device_scratch(spec, "bfloat16", 64, 64) + 4096


def test_k3_takes_75_megabytes_for_attention_to_prompts() -> None:
    spec = ModelSpec.load(RELEASED)
    got = attention_scratch(spec, "bfloat16", 512, 4096)
    assert math.isclose(got, 50.3e6 + 28.7e6, rel_tol=0.01)
    assert attention_scratch(spec, "bfloat16", 64, 1 << 20) >= RANGES * 96 * 512 * 4
