"""linear and experts by Triton: formats to their last bit, edges of tiles, memory around them.

The contract (tests/contract) has values and companions; here is what is Triton's own.
"""

from __future__ import annotations

import pytest
import torch

from k3offload.kernels import mxfp4 as mxfp4_format
from k3offload.kernels import quantize, triton_run
from k3offload.kernels.experts_reference import Job
from k3offload.kernels.glu_reference import Activation
from k3offload.kernels.int8 import Int8Weight
from k3offload.kernels.linear_reference import DenseWeight, Weight
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import backends, dense, randn

pytestmark = pytest.mark.skipif(not triton_run.interpreted(), reason="needs Triton's interpreter")

SOLO = Workers(1)
ACT = Activation("situ", 4.0, 25.0)
FORMATS = ["float32", "bfloat16", "float16", "int8", "mxfp4"]
DTYPES = [torch.bfloat16, torch.float32]


def linear(x: torch.Tensor, weight: Weight, decode: bool) -> torch.Tensor:
    with poisoned():
        y: torch.Tensor = backends("linear")["triton"].linear(x, weight, SOLO, decode)
    return y


def experts(x: torch.Tensor, jobs: list[Job], decode: bool) -> torch.Tensor:
    with poisoned():
        y: torch.Tensor = backends("experts")["triton"].experts(x, jobs, ACT, SOLO, decode)
    return y


def weight(kind: str, n: int, k: int, seed: int = 0) -> Weight:
    w = randn(generator(seed), n, k) / 8
    if kind == "int8":
        return Int8Weight(*quantize.int8(w))
    if kind == "mxfp4":
        return Mxfp4Weight(*quantize.mxfp4(w))
    return DenseWeight(w.to(getattr(torch, kind)))


def mlp(kind: str, inner: int, rows: list[int], seed: int) -> Job:
    gate, up = weight(kind, inner, 64, seed), weight(kind, inner, 64, seed + 1)
    return Job(gate, up, weight(kind, 64, inner, seed + 2), rows)


def numbers(w: Weight) -> torch.Tensor:
    """[N, K] float32, each exact."""
    return w.rows(0, w.shape[0], torch.float32, SOLO).clone()


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_and_ragged_shapes(kind: str, dtype: torch.dtype, decode: bool) -> None:
    """Rows, columns and outputs around the edges of tiles; for floats, K of any number."""
    shapes = [(1, 1, 64), (3, 33, 192), (65, 130, 576)]
    shapes += [(2, 5, 7), (5, 7, 74)] if kind in FORMATS[:3] else []
    for rows, n, k in shapes:
        x, w = randn(generator(rows), rows, k, dtype=dtype), weight(kind, n, k)
        a, b = x.double(), numbers(w).double().T
        got = linear(x, w, decode)
        assert got.dtype == dtype
        allowed = (2.0**-7 if dtype == torch.bfloat16 else 1e-6) * (a.abs() @ b.abs())
        assert ((got.double() - a @ b).abs() <= allowed).all(), (rows, n, k)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mxfp4_number(dtype: torch.dtype, decode: bool) -> None:
    """All 16 codes under all scales but NaN's, each seen through a row of x with a single 1: the
    numbers of `mxfp4.decode`, from 2**-128 to infinity."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)  # a group has every code twice
    packed = (codes[0::2] | codes[1::2] << 4).expand(255, 16).contiguous()
    scale = torch.arange(255, dtype=torch.uint8)[:, None]
    want = mxfp4_format.decode(packed, scale)
    seen = [0, 1, 2, 3, 126, 127, 128, 252, 253, 254]
    finite = torch.isfinite(want).all(1)  # an infinity makes NaN of the zeros of x
    got = linear(torch.eye(32, dtype=dtype)[:16], Mxfp4Weight(packed, scale), decode)
    assert torch.equal(got.T[finite], want[finite, :16].to(dtype))
    assert finite.sum() == 253
    for s in seen:
        for c in range(1, 8):  # one code in all columns: no zero meets infinity
            same = torch.full((1, 16), c | c << 4, dtype=torch.uint8)
            w = Mxfp4Weight(same, torch.tensor([[s]], dtype=torch.uint8))
            value = mxfp4_format.decode(w.packed, w.scale)[0, 0]
            y = linear(torch.full((1, 32), 2.0**-5, dtype=dtype), w, decode)
            assert y.item() == value.item(), (s, c)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_int8_number(dtype: torch.dtype) -> None:
    q = torch.arange(-127, 129, dtype=torch.int16).clamp(max=127).to(torch.int8).view(4, 64)
    scale = torch.tensor([[1.0], [0.5], [3.0], [2.0**-126]], dtype=torch.bfloat16)
    w = Int8Weight(q, scale)
    want = q.float() * scale.float()
    assert torch.equal(linear(torch.eye(64), w, True).T, want)
    got = linear(torch.eye(64, dtype=dtype), w, False).T
    assert torch.equal(got, want.to(dtype))


def test_results_are_rounded_to_nearest_even() -> None:
    values = torch.tensor([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8])
    x = torch.ones(1, 4).bfloat16()
    w = torch.zeros(len(values), 4)
    w[:, 0] = values
    assert torch.equal(linear(x, DenseWeight(w), True)[0], values.bfloat16())


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_lies_around_is_never_read(kind: str, decode: bool) -> None:
    """Weights and rows inside memory of NaN give the bits of the same ones elsewhere."""
    x, w = randn(generator(1), 5, 192, dtype=torch.bfloat16), weight(kind, 37, 192)
    want = linear(x, w, decode)
    for name in ("tensor", "q", "packed", "scale"):
        inner = vars(w).get(name)
        if inner is None:
            continue
        memory = torch.empty(inner.numel() + 512, dtype=inner.dtype)
        memory.view(torch.uint8).fill_(255)
        own = memory[256:-256].view(inner.shape).copy_(inner)
        setattr(w, name, own)
    rows = torch.full((9, 192), float("nan")).bfloat16()
    rows[2:7] = x
    assert same_bits(linear(rows[2:7], w, decode), want)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "mxfp4"])
def test_jobs_of_any_number_of_rows(kind: str, decode: bool) -> None:
    """No rows, one, the edges of tiles: the bits of each job are those it has alone."""
    x = randn(generator(2), 70, 64, dtype=torch.bfloat16)
    x[69] = float("nan")  # chosen by nobody
    taken = [[], [3], list(range(31)), list(range(33)), [], [68] * 2]
    jobs = [mlp(kind, 128, rows, 3 * i) for i, rows in enumerate(taken)]
    got = torch.split(experts(x, jobs, decode), [len(rows) for rows in taken])
    reference = backends("experts")["reference"].experts
    for job, y in zip(jobs, got, strict=True):
        if job.rows:
            want = reference(x, [job], ACT, SOLO, decode).float()
            assert (y.float() - want).abs().max() <= 2.0**-6 * want.abs().max()
            assert same_bits(experts(x, [job._replace(rows=job.rows[-1:])], decode)[0], y[-1])
    assert len(experts(x, jobs[:1], decode)) == 0


def test_jobs_of_several_formats_and_widths_in_one_call() -> None:
    x = randn(generator(2), 6, 64, dtype=torch.bfloat16)
    jobs = []
    for kind, inner in (("mxfp4", 128), ("bfloat16", 128), ("bfloat16", 64), ("mxfp4", 128)):
        jobs.append(mlp(kind, inner, [1, 4], 0))
    got = experts(x, jobs, True)
    assert same_bits(got, torch.cat([experts(x, [job], True) for job in jobs]))


def test_gate_and_up_in_two_formats_are_refused() -> None:
    g = generator(0)
    job = Job(weight("mxfp4", 64, 64), dense(g, torch.bfloat16, 64, 64), weight("mxfp4", 64, 64))
    with pytest.raises(TypeError, match="one format"):
        experts(randn(g, 1, 64, dtype=torch.bfloat16), [job], True)
