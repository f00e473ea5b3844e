"""kda_step, kda_chunk on a GPU: the gated delta rule of KDA (arXiv 2510.26692).

Definition: ``kda_reference``.  A program keeps the state [dk, dv] of its head, in a chunk some
columns of it, in registers: it is read once and written once however many tokens there are.

A chunk is walked in sub-blocks of 16 tokens, each of which moves the state on.  Inside one, with
G the running sum of g from the sub-block's first token and b the strengths,
    u_s = v_s - S^T(e^{G_s} k_s) - sum_{r<s} <k_s e^{G_s-G_r} k_r> b_r u_r
    o_s = S^T(e^{G_s} q_s) + sum_{r<=s} <q_s e^{G_s-G_r} k_r> b_r u_r
    S <- e^{G_last} S + sum_r e^{G_last-G_r} k_r b_r u_r^T
Pairs of tokens and the inverse of the unit triangular system are built from halves: of one token,
two, four, eight.  The first half decays until the middle, the second since then: every exponent is
a sum of the g between, so that none is positive and none is the difference of long sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..config import SUB_BLOCK
from .triton_run import FUSION, Compiled, Sizes, upcast
from .workers import Workers

STEP_OPTIONS = {"num_warps": 8, **FUSION}
CHUNK_OPTIONS = {"num_warps": 4, "num_stages": 1, **FUSION}
LEAST = 16  #: channels of a tile at least: what a product of tiles takes
COLUMNS = 32  #: of a state in a program that walks a chunk; never meet, so it changes no bit


def precision() -> str:
    """How products of float32 tiles are taken: three passes of the matrix unit keep 21 bits of
    each factor; the interpreter multiplies float32 itself."""
    return "ieee" if upcast() else "tf32x3"


def padded(size: int) -> int:
    """``size`` rounded up to a power of two, as tiles must be."""
    return max(LEAST, 1 << (size - 1).bit_length())


@triton.jit
def cells_of(state, head, i, j, DK: tl.constexpr, DV: tl.constexpr):
    """Addresses of rows ``i`` and columns ``j`` of a head's state, which starts at 16 bytes."""
    cells = state + head * (DK * DV) + i[:, None] * DV + j[None, :]
    if DV % 4 == 0:  # every row does too: four numbers a load, a quarter of the addresses
        cells = tl.multiple_of(cells, (16, 16))
    return cells


@triton.jit
def delta(S, q, k, v, g, strength):
    """One token for the state ``S`` [D, V] -> S, o [V]."""
    S = S * tl.exp(g)[:, None]
    error = v - tl.sum(S * k[:, None], axis=0)
    S = S + (strength * k)[:, None] * error[None, :]
    return S, tl.sum(S * q[:, None], axis=0)


@triton.jit
def kda_step_kernel(
    q, k, v, g, beta, state, out, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    head, i, j = tl.program_id(0).to(tl.int64), tl.arange(0, D), tl.arange(0, V)
    keys, values = i < DK, j < DV
    cells = cells_of(state, head, i, j, DK, DV)
    S = tl.load(cells, mask=keys[:, None] & values[None, :], other=0.0)
    own = head * DK + i
    S, o = delta(
        S,
        tl.load(q + own, mask=keys, other=0.0),
        tl.load(k + own, mask=keys, other=0.0),
        tl.load(v + head * DV + j, mask=values, other=0.0),
        tl.load(g + own, mask=keys, other=0.0),
        tl.load(beta + head),
    )
    tl.store(cells, S, mask=keys[:, None] & values[None, :])
    tl.store(out + head * DV + j, o, mask=values)


@triton.jit
def sums(some, g, PRECISION: tl.constexpr):
    """e to the sums of the decays ``g`` [SUB, D] of ``some`` tokens [SUB, SUB], row by row."""
    return tl.exp(tl.dot(tl.where(some, 1.0, 0.0), g, input_precision=PRECISION))


@triton.jit
def pairs(q, k, g, strengths, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """What tokens of a sub-block do to one another.

    Returns the inverse of the system and <q_s e^{G_s-G_r} k_r> for r <= s, each [SUB, SUB].
    """
    s, r = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
    inverse = tl.where(s == r, 1.0, 0.0)
    queried = tl.where(s == r, tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
    size = 1  # of the halves; each round joins two that are done
    while size < SUB:
        middle = s // (2 * size) * (2 * size) + size  # the second half's first token
        later = s >= middle
        # the second half decays since the middle began, the first half until it begins
        between = tl.where(later, (r >= middle) & (r <= s), (r > s) & (r < middle))
        decay = sums(between, g, PRECISION)
        keys = tl.trans(k * decay)
        cross = later & (r >= middle - size) & (r < middle)
        by_key = tl.dot(k * decay, keys, input_precision=PRECISION) * strengths[None, :]
        by_query = tl.dot(q * decay, keys, input_precision=PRECISION)
        queried = tl.where(cross, by_query, queried)
        joined = tl.dot(tl.where(cross, by_key, 0.0), inverse, input_precision=PRECISION)
        inverse = inverse - tl.dot(inverse, joined, input_precision=PRECISION)
        size *= 2
    return inverse, queried


@triton.jit
def sub_block(S, q, k, v, g, strengths, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """SUB tokens for the state ``S`` [D, V] -> S, o [SUB, V].

    ``q, k, g`` [SUB, D], ``v`` [SUB, V], ``strengths`` [SUB]: zero for tokens that are not there.
    """
    inverse, queried = pairs(q, k, g, strengths, SUB, PRECISION)
    s, r = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
    since = sums(r <= s, g, PRECISION)
    error = v - tl.dot(k * since, S, input_precision=PRECISION)
    u = tl.dot(inverse, error, input_precision=PRECISION) * strengths[:, None]
    o = tl.dot(q * since, S, input_precision=PRECISION)
    o = o + tl.dot(queried, u, input_precision=PRECISION)
    carried = tl.trans(k * sums(r > s, g, PRECISION))
    S = S * tl.exp(tl.sum(g, axis=0))[:, None]
    return S + tl.dot(carried, u, input_precision=PRECISION), o


@triton.jit(do_not_specialize=["rows"])
def kda_chunk_kernel(
    q, k, v, g, beta, state, out, rows, heads, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, i = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    j = tl.program_id(1) * V + tl.arange(0, V)
    row, values = tl.arange(0, SUB), j < DV
    cells = cells_of(state, head, i, j, DK, DV)
    kept = (i < DK)[:, None] & values[None, :]
    S = tl.load(cells, mask=kept, other=0.0)
    for first in range(0, rows, SUB):
        token = first + row
        alive = (token < rows)[:, None]
        line = token[:, None] * heads + head
        key, place = line * DK + i[None, :], line * DV + j[None, :]
        S, o = sub_block(
            S,
            tl.load(q + key, mask=alive & (i < DK)[None, :], other=0.0),
            tl.load(k + key, mask=alive & (i < DK)[None, :], other=0.0),
            tl.load(v + place, mask=alive & values[None, :], other=0.0),
            tl.load(g + key, mask=alive & (i < DK)[None, :], other=0.0),
            tl.load(beta + token * heads + head, mask=token < rows, other=0.0),
            SUB,
            PRECISION,
        )
        tl.store(out + place, o, mask=alive & values[None, :])
    tl.store(cells, S, mask=kept)


def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    workers: Workers,
) -> torch.Tensor:
    """One token: ``q, k, g`` [h, dk], ``v`` [h, dv], ``beta`` [h], all float32.

    Changes ``state`` [h, dk, dv] in place; returns o [h, dv].
    """
    heads, dk, dv = state.shape
    assert state.is_contiguous() and (dv % 4 or state.data_ptr() % 16 == 0)
    out = torch.empty(heads, dv, device=v.device)
    kda_step_kernel[(heads,)](
        q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous(), state,
        out, dk, dv, padded(dk), padded(dv), **STEP_OPTIONS,
    )  # fmt: skip
    return out


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    workers: Workers,
) -> torch.Tensor:
    """One chunk of n <= 64 tokens: ``q, k, g`` [n, h, dk], ``v`` [n, h, dv], ``beta`` [n, h], all
    float32.  Changes ``state`` [h, dk, dv] in place; returns o [n, h, dv]."""
    heads, dk, dv = state.shape
    assert state.is_contiguous() and (dv % 4 or state.data_ptr() % 16 == 0)
    out = torch.empty(q.shape[0], heads, dv, device=v.device)
    columns = min(COLUMNS, padded(dv))
    kda_chunk_kernel[(heads, triton.cdiv(dv, columns))](
        q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous(), state,
        out, q.shape[0], heads, dk, dv, padded(dk), columns, SUB_BLOCK, precision(),
        **CHUNK_OPTIONS,
    )  # fmt: skip
    return out


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches at a model's sizes."""
    d = sizes.kda_dim
    dims = {"DK": d, "DV": d, "D": padded(d), "V": padded(d)}
    step = dict.fromkeys(("q", "k", "v", "g", "beta", "state", "out"), "*fp32")
    chunk = {**step, "rows": "i32", "heads": "i32"}
    tiles = {**dims, "V": min(COLUMNS, padded(d)), "SUB": SUB_BLOCK, "PRECISION": "tf32x3"}
    return [
        Compiled("kda_step", kda_step_kernel, step, dims, 8, 1, True),
        Compiled("kda_chunk", kda_chunk_kernel, chunk, tiles, 4, 1),
    ]
