"""router as Triton kernels: float32 logits, then one program for each row that chooses.

Products of bfloat16 numbers are exact in float32 and summed there, without tensor cores: those
cut bits off while they sum, and near-ties decide which experts run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .linear_reference import Weight
from .rms_norm_triton import together
from .triton_run import FUSION, Compiled, Sizes, upcast
from .triton_weights import numbers
from .workers import Workers

FEW, LONG = 4, 1024  #: a decode program: experts of one row, columns at a time
TILE, SOME, STEP = 64, 32, 32  #: a prompt program: rows, experts, columns at a time
LOWEST = -(2**63)


@triton.jit(do_not_specialize=["rows"])
def _logits_row(
    x, gate, logits, rows, E,
    ROWS: tl.constexpr, K: tl.constexpr, FEW: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """A few experts' logits of decode rows, one row a program on a GPU."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(0) * FEW + tl.arange(0, FEW)
    at = tl.arange(0, LONG)[None, None, :]
    total = tl.zeros([ROWS, FEW, LONG], tl.float32)
    mine, known = row[:, None, None] * K, row[:, None, None] < rows
    others, there = expert.to(tl.int64)[None, :, None] * K, expert[None, :, None] < E
    for k in range(0, K, LONG):
        column = k + at
        own = tl.load(x + mine + column, mask=known & (column < K), other=0.0)
        other = tl.load(gate + others + column, mask=there & (column < K), other=0.0)
        total = total + other.to(tl.float32) * own.to(tl.float32)
    where = logits + row[:, None] * E + expert[None, :]
    tl.store(where, tl.sum(total, 2), mask=(row[:, None] < rows) & (expert[None, :] < E))


@triton.jit(do_not_specialize=["rows"])
def _logits_tile(
    x, gate, logits, rows, E,
    K: tl.constexpr, TILE: tl.constexpr, SOME: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of prompt rows for some experts, by float32 multiply-adds."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    expert = tl.program_id(1) * SOME + tl.arange(0, SOME)
    at = tl.arange(0, STEP)
    total = tl.zeros([TILE, SOME], tl.float32)
    for k in range(0, K, STEP):
        column = k + at
        own = x + row[:, None] * K + column[None, :]
        own = tl.load(own, mask=(row[:, None] < rows) & (column[None, :] < K), other=0.0)
        other = gate + expert.to(tl.int64)[None, :] * K + column[:, None]
        other = tl.load(other, mask=(expert[None, :] < E) & (column[:, None] < K), other=0.0)
        total = tl.dot(own.to(tl.float32), other.to(tl.float32), total, input_precision="ieee")
    where = logits + row[:, None] * E + expert[None, :]
    tl.store(where, total, mask=(row[:, None] < rows) & (expert[None, :] < E))


@triton.jit
def _in_order(x):
    """int32 that is ordered as the float32 ``x`` is, NaN above every number.  (``x`` is the sum
    of a sigmoid and a bias: never -0.)"""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFF)


@triton.jit(do_not_specialize=["rows"])
def _choose(
    scores, bias, experts, weights, scale, rows, ROWS: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Turns the logits in ``scores`` into biased sigmoids and writes the best experts, rising."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, BLOCK)[None, :]
    real = (row < rows) & (expert < E)
    logit = tl.load(scores + row * E + expert, mask=real, other=0.0)
    one = tl.full([ROWS, BLOCK], 1.0, tl.float32)
    score = tl.div_rn(one, one + tl.exp(-logit))
    biased = score + tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)
    tl.store(scores + row * E + expert, biased, mask=real)
    # Score above, number below: one maximum finds the best, and the lower number among equals.
    key = (_in_order(biased).to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    key = tl.where(expert < E, key, LOWEST)
    chosen = tl.zeros([ROWS, BLOCK], tl.int32)
    for _ in range(TOP_K):
        best = key == tl.max(key, 1)[:, None]
        chosen = tl.where(best, 1, chosen)
        key = tl.where(best, LOWEST, key)
    weight = score
    if RENORMALIZE:
        total = tl.sum(tl.where(chosen > 0, score, 0.0), 1)[:, None]
        weight = tl.div_rn(score, total + 1e-20)
    place = row * TOP_K + tl.cumsum(chosen, 1) - 1
    kept = (chosen > 0) & real
    tl.store(experts + place, tl.zeros([ROWS, BLOCK], tl.int64) + expert, mask=kept)
    tl.store(weights + place, weight * scale, mask=kept)


def router(
    x: torch.Tensor,
    gate: Weight,
    bias: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scale: float,
    workers: Workers,
    decode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x`` [R, H] -> (experts [R, k] int64 in rising order, weights [R, k] float32, scores [R, E]
    float32, by which they were chosen: sigmoids plus ``bias`` [E]).

    The logits are float32.  The bias takes part in the choice only; the weights are the plain
    sigmoids, divided by their sum if ``renormalize``, times ``scale``.  Equal biased
    scores: the lower expert number wins; NaN comes before every number.
    """
    (rows, k), count = x.shape, gate.shape[0]
    assert 0 < top_k <= count and gate.shape[1] == k, (top_k, gate.shape, k)
    x = x.contiguous()
    weight = numbers(gate, torch.float32)
    scores = torch.empty(rows, count, device=x.device)
    experts = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, top_k, device=x.device)
    if not rows:
        return experts, weights, scores
    some = together()
    if decode:
        few = 64 if upcast() else FEW
        _logits_row[(triton.cdiv(count, few), triton.cdiv(rows, some))](
            x, weight, scores, rows, count, some, k, few, min(LONG, triton.next_power_of_2(k)),
            num_warps=4, **FUSION,
        )  # fmt: skip
    else:
        _logits_tile[(triton.cdiv(rows, TILE), triton.cdiv(count, SOME))](
            x, weight, scores, rows, count, k, TILE, SOME, STEP, num_warps=4, **FUSION
        )
    _choose[(triton.cdiv(rows, some),)](
        scores, bias.contiguous(), experts, weights, scale, rows, some, count,
        triton.next_power_of_2(count), top_k, renormalize, LOWEST, num_warps=2, **FUSION,
    )  # fmt: skip
    return experts, weights, scores


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches of this file at ``sizes``."""
    e, h, names = sizes.experts, sizes.hidden, ("x", "gate", "logits")
    given = dict(zip(names, ("*bf16", "*bf16", "*fp32"), strict=True))
    row = {**given, "rows": "i32", "E": "i32"}
    tile = dict(row)
    row |= dict.fromkeys(("ROWS", "K", "FEW", "LONG"), "constexpr")
    tile |= dict.fromkeys(("K", "TILE", "SOME", "STEP"), "constexpr")
    choose = {
        "scores": "*fp32", "bias": "*fp32", "experts": "*i64", "weights": "*fp32", "scale": "fp32",
        "rows": "i32",
    }  # fmt: skip
    constants = {
        "ROWS": 1, "E": e, "BLOCK": triton.next_power_of_2(e), "TOP_K": sizes.top_k,
        "RENORMALIZE": True, "LOWEST": LOWEST,
    }  # fmt: skip
    choose |= dict.fromkeys(constants, "constexpr")
    few, tiles = {"ROWS": 1, "FEW": FEW, "LONG": LONG}, {"TILE": TILE, "SOME": SOME, "STEP": STEP}
    return [
        Compiled("router_logits_row", _logits_row, row, {"K": h, **few}, decode=True),
        Compiled("router_logits_tile", _logits_tile, tile, {"K": h, **tiles}),
        Compiled("router_choose", _choose, choose, constants, warps=2, decode=True),
    ]
