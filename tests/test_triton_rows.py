"""Triton kernels beyond the contract: ties, rounding, latents at any place, ranges and scratches.

They run in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from k3offload.kernels import triton_run
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.mla_prefill_reference import Query
from k3offload.kernels.workers import Workers
from tests import test_mla_decode as decode
from tests import test_mla_prefill as prefill
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import backends, randn

if not triton_run.interpreted():
    pytest.skip("there is no Triton", allow_module_level=True)

SOLO = Workers(1)
OPS = ("rms_norm", "attnres", "combine", "router", "mla_decode", "mla_prefill")
TRITON: dict[str, Any] = {op: backends(op)["triton"] for op in OPS}
REFERENCE: dict[str, Any] = {op: backends(op)["reference"] for op in OPS}


@pytest.mark.parametrize("op", OPS)
def test_every_launch_is_listed_with_all_its_arguments(op: str) -> None:
    for launch in TRITON[op].compiled(triton_run.Sizes()):
        assert list(launch.kernel.arg_names) == [
            name for name in launch.kernel.arg_names if name in launch.signature
        ], launch.name
        constants = {n for n, kind in launch.signature.items() if kind == "constexpr"}
        assert constants == set(launch.constants), launch.name
        assert set(launch.signature) == set(launch.kernel.arg_names), launch.name


# ---- rounding ----


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    """Through combine with one expert of ones: values beside and at the half-way points."""
    bits = torch.tensor([0x3F80, 0x3F81, 0x7F7F, 0x0080, 0x4049, 0xBF80, 0xC2F7]) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    wide = (bits[:, None] | low).flatten().to(torch.int32).view(torch.float32)
    values = torch.cat((wide, torch.tensor([0.0, float("inf"), -float("inf")])))
    one, at = torch.ones(1, 1).bfloat16(), torch.zeros(len(values), 1, dtype=torch.int64)
    got = TRITON["combine"].combine(one, at, values[:, None], SOLO)
    assert same_bits(got, values.bfloat16()[:, None])
    nan = torch.full((1, 1), float("nan"))
    assert TRITON["combine"].combine(one, at[:1], nan, SOLO).isnan().all()


# ---- router ----


def _route(
    op: Any, x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, k: int, decode: bool
) -> tuple[torch.Tensor, ...]:
    with poisoned():
        routed: tuple[torch.Tensor, ...] = op.router(
            x, DenseWeight(gate), bias, k, True, 1.0, SOLO, decode
        )
    return routed


@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("decode_rows", [False, True])
def test_equal_scores_go_to_the_lower_expert(rows: int, decode_rows: bool) -> None:
    g = generator(rows)
    x = randn(g, rows, 48, dtype=torch.bfloat16)
    gate = randn(g, 7, 48, dtype=torch.bfloat16).repeat(11, 1)[:70] / 8  # ten of each expert
    bias = torch.zeros(70)
    bias[::3] = -0.0  # the same scores
    for k in (1, 5, 16, 70):
        got, want = (
            _route(op["router"], x, gate, bias, k, decode_rows) for op in (TRITON, REFERENCE)
        )
        assert torch.equal(got[0], want[0])
        assert torch.allclose(got[1], want[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("decode_rows", [False, True])
def test_a_row_of_nan_names_real_experts(decode_rows: bool) -> None:
    g = generator(1)
    x, gate = randn(g, 4, 40), randn(g, 33, 40, dtype=torch.bfloat16)
    x[1], x[2] = float("nan"), float("inf")
    experts, weights, _ = _route(TRITON["router"], x, gate, torch.zeros(33), 8, decode_rows)
    assert ((experts >= 0) & (experts < 33)).all()
    assert (experts.diff(dim=1) > 0).all()
    assert torch.isfinite(weights[[0, 3]]).all()


# ---- row by row ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_and_views_of_rows(dtype: torch.dtype) -> None:
    g = generator(0)
    wide, weight = randn(g, 5, 70, dtype=dtype), randn(g, 33, dtype=dtype)
    norm = TRITON["rms_norm"].rms_norm
    assert same_bits(norm(wide[:, 7:40], weight, 1e-5), norm(wide[:, 7:40].clone(), weight, 1e-5))
    assert norm(wide[:0, :33], weight, 1e-5).shape == (0, 33)
    assert TRITON["combine"].combine(
        wide, torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3), SOLO
    ).shape == (0, 70)
    mix, entries = TRITON["attnres"].attnres, [wide[1:, 37:], wide[:4, :33], wide[1:, 1:34]]
    base = mix([e.clone() for e in entries], weight, weight[None], 1e-5)
    assert same_bits(base, mix(entries, weight, weight[None], 1e-5))
    assert mix([e[:0] for e in entries], weight, weight[None], 1e-5).shape == (0, 33)


def test_rows_that_nobody_asked_for_reach_nothing() -> None:
    g = generator(2)
    x, weights = randn(g, 20, 300, dtype=torch.bfloat16), torch.rand(3, 4, generator=g)
    at = torch.randint(0, 10, (3, 4), generator=g) * 2
    base = TRITON["combine"].combine(x, at, weights, SOLO)
    x[1::2] = float("nan")
    assert same_bits(base, TRITON["combine"].combine(x, at, weights, SOLO))
    assert same_bits(base[:1], TRITON["combine"].combine(x, at[:1], weights[:1], SOLO))


# ---- attention ----


def scattered(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of ``blocks`` in any order in one memory, NaN everywhere else."""
    size = blocks[0].numel()
    memory = torch.full(((2 * len(blocks) + 1) * size,), float("nan"), dtype=blocks[0].dtype)
    order = torch.randperm(len(blocks), generator=generator(len(blocks))).tolist()
    placed = []
    for block, slot in zip(blocks, order, strict=True):
        own = memory[(2 * slot + 1) * size : (2 * slot + 2) * size].view(block.shape)
        placed.append(own.copy_(block))
    return placed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_in_ranges_of_several_blocks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the long sequences are: 5 blocks in 3 ranges of 2, then one range for all."""
    module, length = TRITON["mla_decode"], 1025
    q, latents, up = decode.make(length, dtype)
    q, up = q[:2], up[: 2 * (decode.NOPE + decode.V)]
    blocks = decode.in_blocks(latents, float("nan"))
    k = q.double(), latents.double(), up.double()
    monkeypatch.setattr(decode, "H", 2)
    want = decode.exact(*k)
    for ranges, each in ((64, 1), (3, 2), (1, 8)):
        monkeypatch.setattr(module, "RANGES", ranges)
        assert module.blocks_each(len(blocks)) == each
        for placed in (blocks, scattered(blocks)):
            with poisoned():
                got = module.mla_decode(
                    q, [placed], length, DenseWeight(up), decode.NOPE, decode.V, decode.SCALE, SOLO
                )
            for a, b in zip(got, want, strict=True):
                assert (a.double() - b).abs().max() <= 1e-5 * b.abs().max()


def test_decode_ranges_cover_any_length() -> None:
    module = TRITON["mla_decode"]
    for blocks in (1, 2, 63, 64, 65, 128, 129, 4096):
        each = module.blocks_each(blocks)
        assert each * module.RANGES >= blocks and each.bit_count() == 1
        assert each == 1 or each // 2 * module.RANGES < blocks


def test_decode_blocks_at_any_place_have_the_same_bits() -> None:
    module, inputs = TRITON["mla_decode"], decode.make(600, torch.bfloat16)
    q, latents, up = inputs
    base = decode.run(module.mla_decode, inputs, float("nan"))
    placed = scattered(decode.in_blocks(latents, float("inf")))
    got = module.mla_decode(
        q, [placed], 600, DenseWeight(up), decode.NOPE, decode.V, decode.SCALE, SOLO
    )
    assert all(same_bits(a, b) for a, b in zip(base, got, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_bits_do_not_depend_on_the_scratch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block at a time, or several: the running softmax waits in memory without loss."""
    module, given = TRITON["mla_prefill"], prefill.make(520, dtype)
    queries = given.queries((0, 64), (200, 264), (511, 520))
    base = prefill.run(module.mla_prefill, given, queries)
    for expanded in (1, 2):
        monkeypatch.setattr(module, "EXPANDED", expanded)
        for a, b in zip(base, prefill.run(module.mla_prefill, given, queries), strict=True):
            assert same_bits(a.contiguous(), b.contiguous()), expanded


def test_prompt_blocks_and_queries_at_any_place_have_the_same_bits() -> None:
    module, given = TRITON["mla_prefill"], prefill.make(300, torch.bfloat16)
    queries = given.queries((250, 300))
    base = prefill.run(module.mla_prefill, given, queries)
    shifted = torch.empty(queries[0].q.numel() + 3, dtype=torch.bfloat16)[3:]
    moved = [Query(shifted.view(queries[0].q.shape).copy_(queries[0].q), 250)]
    blocks = scattered(decode.in_blocks(given.latents, float("nan")))
    with poisoned():
        got = module.mla_prefill(
            moved,
            [blocks],
            300,
            DenseWeight(given.up),
            prefill.NOPE,
            prefill.V,
            prefill.SCALE,
            SOLO,
        )
    assert same_bits(base[0].contiguous(), got[0].contiguous())
