"""mixer on a GPU: all of a KDA layer between its projections.  One launch for a token; for rows of
a prompt one before ``kda_chunk`` and one behind it.

The same steps in the same order as short_conv, l2_norm, kda_gate, kda and gated_norm alone.  A
program owns its head's channels of the three tails and its state, so both move on in place.  All
threads must have read what is overwritten before any of them writes: hence the barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..config import KDA_CHUNK
from .kda_gate_triton import (
    OPTIONS,
    ROWS,
    gated,
    log_decay,
    sigmoid,
    tile_of,
    unit,
)
from .kda_triton import STEP_OPTIONS, cells_of, delta, kda_chunk, padded
from .mixer import UNIT_EPS, MixerRows, MixerWeights
from .short_conv_triton import convolved, input_at
from .triton_round import narrow, rounded
from .triton_run import Compiled, Sizes
from .workers import Workers


@triton.jit
def tail_after(
    x, tail, rows, channel, mask, wide, TAPS: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """The last TAPS-1 inputs [R, D] up to token ``rows``; rows from TAPS-1 on are no part of it."""
    j = tl.arange(0, R).to(tl.int64)[:, None]
    inside = mask[None, :] & (j < TAPS - 1)
    return input_at(x, tail, rows - (TAPS - 1) + j, channel[None, :], inside, wide, TAPS)


@triton.jit
def move_tails(
    xq, xk, xv, tail_q, tail_k, tail_v, rows, channel, mask, wide, TAPS: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    q = tail_after(xq, tail_q, rows, channel, mask, wide, TAPS, R)
    k = tail_after(xk, tail_k, rows, channel, mask, wide, TAPS, R)
    v = tail_after(xv, tail_v, rows, channel, mask, wide, TAPS, R)
    tl.debug_barrier()
    j = tl.arange(0, R).to(tl.int64)[:, None]
    at, inside = j * wide + channel[None, :], mask[None, :] & (j < TAPS - 1)
    tl.store(tail_q + at, q.to(tail_q.dtype.element_ty), mask=inside)  # exact: came from there
    tl.store(tail_k + at, k.to(tail_k.dtype.element_ty), mask=inside)
    tl.store(tail_v + at, v.to(tail_v.dtype.element_ty), mask=inside)


@triton.jit
def decode_kernel(
    xq, xk, xv, tail_q, tail_k, tail_v, conv_q, conv_k, conv_v, raw, beta, gate, a_log, dt_bias,
    norm, state, out, wide, lower, scale, unit_eps, eps, TAPS: tl.constexpr, R: tl.constexpr,
    BOUNDED: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One token."""
    head, i = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    inside, channel = i < DIM, head * DIM + i
    cells = cells_of(state, head, i, i, DIM, DIM)
    S = tl.load(cells, mask=inside[:, None] & inside[None, :], other=0.0)  # while the rest goes on
    now = tl.zeros_like(channel)
    q = convolved(xq, tail_q, conv_q, now, channel, inside, wide, TAPS)
    k = convolved(xk, tail_k, conv_k, now, channel, inside, wide, TAPS)
    v = convolved(xv, tail_v, conv_v, now, channel, inside, wide, TAPS)
    z = tl.load(raw + channel, mask=inside, other=0.0).to(tl.float32)
    z = z + tl.load(dt_bias + channel, mask=inside, other=0.0)
    g = log_decay(z, tl.exp(tl.load(a_log + head)), lower, BOUNDED)
    strength = sigmoid(tl.load(beta + head).to(tl.float32))
    factor = tl.load(gate + channel, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm + i, mask=inside, other=0.0)
    move_tails(xq, xk, xv, tail_q, tail_k, tail_v, 1, channel, inside, wide, TAPS, R)
    S, o = delta(S, unit(q, unit_eps, 0) * scale, unit(k, unit_eps, 0), v, g, strength)
    tl.store(cells, S, mask=inside[:, None] & inside[None, :])
    kept: tl.constexpr = out.dtype.element_ty
    y = rounded(gated(o, factor, weight, eps, DIM, 0), kept, True)
    tl.store(out + channel, y.to(kept), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def inputs_kernel(
    xq, xk, xv, tail_q, tail_k, tail_v, conv_q, conv_k, conv_v, raw, beta, a_log, dt_bias, mixed,
    strengths, rows, heads, wide, lower, scale, unit_eps, TAPS: tl.constexpr,
    BOUNDED: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What ``kda_chunk`` is given for some rows of a head: q, k, v and g, one after the other in
    ``mixed``, and ``strengths``."""
    head, i, at, mask = tile_of(rows, heads, DIM, D, ROWS)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel, every = head * DIM + i, rows.to(tl.int64) * wide
    q = convolved(xq, tail_q, conv_q, t[:, None], channel, mask, wide, TAPS)
    tl.store(mixed + at, unit(q, unit_eps, 1) * scale, mask=mask)
    k = convolved(xk, tail_k, conv_k, t[:, None], channel, mask, wide, TAPS)
    tl.store(mixed + every + at, unit(k, unit_eps, 1), mask=mask)
    v = convolved(xv, tail_v, conv_v, t[:, None], channel, mask, wide, TAPS)
    tl.store(mixed + 2 * every + at, v, mask=mask)
    bias = tl.load(dt_bias + channel, mask=i < DIM, other=0.0)
    z = tl.load(raw + at, mask=mask, other=0.0).to(tl.float32) + bias
    g = log_decay(z, tl.exp(tl.load(a_log + head)), lower, BOUNDED)
    tl.store(mixed + 3 * every + at, g, mask=mask)
    logits = tl.load(beta + t * heads + head, mask=t < rows, other=0.0)
    tl.store(strengths + t * heads + head, sigmoid(logits.to(tl.float32)), mask=t < rows)


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(
    xq, xk, xv, tail_q, tail_k, tail_v, gate, norm, attended, out, rows, heads, wide, eps,
    TAPS: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The norm of each head, which needs all its columns; and the tails, which every program before
    this launch has read."""
    head, i, at, mask = tile_of(rows, heads, DIM, D, ROWS)
    x = tl.load(attended + at, mask=mask, other=0.0)
    factor = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm + i, mask=i < DIM, other=0.0)
    kept: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, narrow(gated(x, factor, weight, eps, DIM, 1), kept, True), mask=mask)
    if tl.program_id(0) == 0:
        j = tl.arange(0, D)
        channel = head * DIM + j
        move_tails(xq, xk, xv, tail_q, tail_k, tail_v, rows, channel, j < DIM, wide, TAPS, R)


def mixer(
    rows: MixerRows,
    tails: Sequence[torch.Tensor],
    state: torch.Tensor,
    w: MixerWeights,
    decode: bool,
    workers: Workers,
) -> torch.Tensor:
    """As ``mixer.composed`` with Triton's operators: ``rows`` of n <= 64 tokens, one with
    ``decode`` -> [n, h*d] in their dtype; moves on ``tails`` and ``state``."""
    heads, dim = state.shape[:2]
    wide = (rows.raw.shape[0], heads * dim)
    n, taps = wide[0], w.convs[0].shape[1]
    assert n <= (1 if decode else KDA_CHUNK), (n, decode)
    for x, tail, conv in zip(rows.qkv, tails, w.convs, strict=True):
        assert x.shape == wide and conv.shape == (wide[1], taps), (x.shape, conv.shape)
        assert tail.shape == (taps - 1, wide[1]) and tail.dtype == x.dtype, (tail.shape, tail.dtype)
    assert rows.raw.shape == rows.gate.shape == wide and rows.beta.shape == (n, heads)
    moved = (*rows.qkv, *tails)
    small = (*w.convs, rows.raw, rows.beta)
    floats = (*w.convs, w.a_log, w.dt_bias, w.norm, state)
    assert all(x.dtype == torch.float32 for x in floats)
    assert dim % 4 or state.data_ptr() % 16 == 0
    assert all(x.is_contiguous() for x in (*moved, *small, rows.gate, *floats))
    out = torch.empty_like(rows.gate)
    taps2, d, bounded, scale = (
        triton.next_power_of_2(taps),
        padded(dim),
        w.lower is not None,
        dim**-0.5,
    )
    lower = w.lower or 0.0
    if decode:
        decode_kernel[(heads,)](
            *moved, *small, rows.gate, w.a_log, w.dt_bias, w.norm, state, out, wide[1], lower,
            scale, UNIT_EPS, w.eps, taps, taps2, bounded, dim, d, **STEP_OPTIONS,
        )  # fmt: skip
        return out
    mixed = torch.empty(4, n, heads, dim, device=out.device)
    strengths = torch.empty(n, heads, device=out.device)
    grid, tile = (triton.cdiv(n, ROWS), heads), (dim, triton.next_power_of_2(dim), ROWS)
    inputs_kernel[grid](
        *moved, *small, w.a_log, w.dt_bias, mixed, strengths, n, heads, wide[1], lower, scale,
        UNIT_EPS, taps, bounded, *tile, **OPTIONS,
    )  # fmt: skip
    q, k, v, g = mixed
    attended = kda_chunk(q, k, v, g, strengths, state, workers)
    finish_kernel[grid](
        *moved, rows.gate, w.norm, attended, out, n, heads, wide[1], w.eps, taps, taps2, *tile,
        **OPTIONS,
    )  # fmt: skip
    return out


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches at a model's sizes."""
    d, taps = sizes.kda_dim, sizes.taps
    bf16 = ("xq", "xk", "xv", "tail_q", "tail_k", "tail_v", "raw", "beta", "gate", "out")
    types: dict[str, str] = {
        **dict.fromkeys(("lower", "scale", "unit_eps", "eps"), "fp32"),
        **dict.fromkeys(("rows", "heads", "wide"), "i32"),
        **dict.fromkeys(bf16, "*bf16"),
    }
    constants: dict[str, Any] = {
        "TAPS": taps, "R": triton.next_power_of_2(taps), "BOUNDED": True, "DIM": d, "D": padded(d),
        "ROWS": ROWS,
    }  # fmt: skip

    def launch(name: str, kernel: Any, warps: int, decode: bool = False) -> Compiled:
        names = kernel.arg_names
        signature = {n: types.get(n, "*fp32") for n in names if not n.isupper()}
        own = {n: constants[n] for n in names if n.isupper()}
        return Compiled(name, kernel, signature, own, warps, 1, decode)

    return [
        launch("mixer_decode", decode_kernel, 8, True),
        launch("mixer_inputs", inputs_kernel, 4),
        launch("mixer_finish", finish_kernel, 4),
    ]
