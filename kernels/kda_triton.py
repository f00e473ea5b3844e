"""kda_step, kda_chunk on a GPU: the gated delta rule of KDA (arXiv 2510.26692).

Definition: ``kda_reference``.  A program keeps the state [dk, dv] of its head, in a chunk some
columns of it, in registers: it is read once and written once however many tokens there are.

A chunk is walked in sub-blocks of 16 tokens, each of which moves the state on.  What their tokens
are to one another does not ask for the state, so a first launch computes it for all of them at a
time, and the second only walks: both at once need more registers than a thread has.  Inside a
sub-block, with G the running sum of g from the sub-block's first token and b the strengths,
    u_s = v_s - S^T(e^{G_s} k_s) - sum_{r<s} <k_s e^{G_s-G_r} k_r> b_r u_r
    o_s = S^T(e^{G_s} q_s) + sum_{r<=s} <q_s e^{G_s-G_r} k_r> b_r u_r
    S <- e^{G_last} S + sum_r e^{G_last-G_r} k_r b_r u_r^T
Pairs of tokens and the inverse of the unit triangular system are built from halves: of one token,
two, four, eight.  The first half decays until the middle, the second since then: every exponent is
a sum of the g between, so that none is positive and none is the difference of long sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..config import SUB_BLOCK
from .triton_run import FUSION, Compiled, Sizes, upcast
from .workers import Workers

STEP_OPTIONS = {"num_warps": 8, **FUSION}
PREPARE_OPTIONS = {"num_warps": 2, "num_stages": 1, **FUSION}
WALK_OPTIONS = {"num_warps": 8, "num_stages": 1, **FUSION}
LEAST = 16  #: channels of a tile at least: what a product of tiles takes
PART = 32  #: channels whose products are summed before those of the next ones
COLUMNS = 64  #: of a state in a program that walks a chunk; never meet, so it changes no bit


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
def halves(s, r, size):
    """Round by round, two halves of ``size`` tokens become one: the first token of the second half
    of ``s``'s pair, and where ``s`` is of the second and ``r`` of the first half."""
    middle = s // (2 * size) * (2 * size) + size
    return middle, (s >= middle) & (r >= middle - size) & (r < middle)


@triton.jit
def pairs(q, k, g, by_key, by_query, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """Adds what some channels ``q, k, g`` [SUB, PART] of a sub-block's tokens are to one another:
    <k_s e^{G_s-G_r} k_r> for r < s, <q_s e^{G_s-G_r} k_r> for r <= s, [SUB, SUB]."""
    s, r = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
    own = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    by_query += tl.where(s == r, own, 0.0)
    size = 1
    while size < SUB:
        middle, cross = halves(s, r, size)
        # the second half decays since the middle began, the first half until it begins
        later = (r >= middle) & (r <= s)
        decay = sums(tl.where(s >= middle, later, (r > s) & (r < middle)), g, PRECISION)
        key, query = k * decay, q * decay
        keys = tl.trans(key)
        by_key += tl.where(cross, tl.dot(key, keys, input_precision=PRECISION), 0.0)
        by_query += tl.where(cross, tl.dot(query, keys, input_precision=PRECISION), 0.0)
        size *= 2
    return by_key, by_query


@triton.jit
def inverted(system, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of 1 + ``system``, of which the numbers below the diagonal count."""
    s, r = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
    inverse = tl.where(s == r, 1.0, 0.0)
    size = 1
    while size < SUB:
        _, cross = halves(s, r, size)
        joined = tl.dot(tl.where(cross, system, 0.0), inverse, input_precision=PRECISION)
        inverse = inverse - tl.dot(inverse, joined, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit
def tiles_of(q, k, g, first, line, alive, DK: tl.constexpr, PART: tl.constexpr):
    """PART channels of some tokens from ``first`` on, where they lie, and which exist."""
    i = first + tl.arange(0, PART)
    at, mask = line * DK + i[None, :], alive & (i < DK)[None, :]
    keys, queries = tl.load(k + at, mask=mask, other=0.0), tl.load(q + at, mask=mask, other=0.0)
    return queries, keys, tl.load(g + at, mask=mask, other=0.0), at, mask


@triton.jit(do_not_specialize=["rows", "channels"])
def kda_prepare_kernel(
    q, k, g, beta, decayed, systems, ends, rows, heads, channels, DK: tl.constexpr,
    PART: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the tokens of one sub-block and one head are to one another, and how they decay.

    ``channels`` is DK, as a number that the compiler does not know: it would unroll the loops and
    run out of registers.  One loop for both purposes would, too.
    """
    block, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, SUB)
    token = block * SUB + row
    alive, line = (token < rows)[:, None], token[:, None] * heads + head
    by_key, by_query = tl.zeros([SUB, SUB], tl.float32), tl.zeros([SUB, SUB], tl.float32)
    for first in range(0, channels, PART):
        queries, keys, decay, _, _ = tiles_of(q, k, g, first, line, alive, DK, PART)
        by_key, by_query = pairs(queries, keys, decay, by_key, by_query, SUB, PRECISION)
    s, r = row[:, None], row[None, :]
    every = rows.to(tl.int64) * heads * DK
    for first in range(0, channels, PART):
        queries, keys, decay, at, mask = tiles_of(q, k, g, first, line, alive, DK, PART)
        since, until = sums(r <= s, decay, PRECISION), sums(r > s, decay, PRECISION)
        tl.store(decayed + at, keys * since, mask=mask)
        tl.store(decayed + every + at, queries * since, mask=mask)
        tl.store(decayed + 2 * every + at, keys * until, mask=mask)
        i = first + tl.arange(0, PART)
        end = ends + (block * heads + head) * DK + i
        tl.store(end, tl.exp(tl.sum(decay, axis=0)), mask=i < DK)
    strengths = tl.load(beta + token * heads + head, mask=token < rows, other=0.0)
    inverse = inverted(by_key * strengths[None, :], SUB, PRECISION)
    cell = systems + (block * heads + head) * (2 * SUB * SUB) + s * SUB + r
    tl.store(cell, inverse * strengths[:, None])
    tl.store(cell + SUB * SUB, by_query)


@triton.jit(do_not_specialize=["rows"])
def kda_walk_kernel(
    v, decayed, systems, ends, state, out, rows, heads, DK: tl.constexpr, DV: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, V: tl.constexpr, SUB: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """V columns of a head's state, held as PARTS tiles of PART channels each, so that a product
    takes few registers at a time, through all sub-blocks of a chunk."""
    head, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * V + tl.arange(0, V)
    row, part, values = tl.arange(0, SUB), tl.arange(0, PART), (j < DV)[None, :]
    s, r, S = row[:, None], row[None, :], ()
    for p in tl.static_range(PARTS):
        i = p * PART + part
        cells = cells_of(state, head, i, j, DK, DV)
        tile = tl.load(cells, mask=(i < DK)[:, None] & values, other=0.0)
        S = S + (tile,)  # type: ignore[assignment]  # a tuple that grows while compiling
    every = rows.to(tl.int64) * heads * DK
    for first in range(0, rows, SUB):
        token, block = first + row, (first // SUB) * heads + head
        alive, line = (token < rows)[:, None], token[:, None] * heads + head
        place, cell = line * DV + j[None, :], systems + block * (2 * SUB * SUB) + s * SUB + r
        error = tl.load(v + place, mask=alive & values, other=0.0)
        o = tl.zeros([SUB, V], tl.float32)
        for p in tl.static_range(PARTS):
            i = p * PART + part
            at, mask = decayed + line * DK + i[None, :], alive & (i < DK)[None, :]
            keys = tl.load(at, mask=mask, other=0.0)
            error -= tl.dot(keys, S[p], input_precision=PRECISION)
            queries = tl.load(at + every, mask=mask, other=0.0)
            o += tl.dot(queries, S[p], input_precision=PRECISION)
        u = tl.dot(tl.load(cell), error, input_precision=PRECISION)
        o += tl.dot(tl.load(cell + SUB * SUB), u, input_precision=PRECISION)
        tl.store(out + place, o, mask=alive & values)
        moved = ()
        for p in tl.static_range(PARTS):
            i = p * PART + part
            at = decayed + 2 * every + line * DK + i[None, :]
            keys = tl.load(at, mask=alive & (i < DK)[None, :], other=0.0)
            end = tl.load(ends + block * DK + i, mask=i < DK, other=0.0)
            tile = S[p] * end[:, None] + tl.dot(tl.trans(keys), u, input_precision=PRECISION)
            moved = moved + (tile,)  # type: ignore[assignment]
        S = moved
    for p in tl.static_range(PARTS):
        i = p * PART + part
        tl.store(cells_of(state, head, i, j, DK, DV), S[p], mask=(i < DK)[:, None] & values)


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
    rows, blocks, part = q.shape[0], triton.cdiv(q.shape[0], SUB_BLOCK), min(PART, padded(dk))
    assert state.is_contiguous() and (dv % 4 or state.data_ptr() % 16 == 0)
    out = torch.empty(rows, heads, dv, device=v.device)
    decayed = torch.empty(3, rows, heads, dk, device=v.device)
    systems = torch.empty(blocks, heads, 2, SUB_BLOCK, SUB_BLOCK, device=v.device)
    ends = torch.empty(blocks, heads, dk, device=v.device)
    kda_prepare_kernel[(blocks, heads)](
        q.contiguous(), k.contiguous(), g.contiguous(), beta.contiguous(), decayed, systems, ends,
        rows, heads, dk, dk, part, SUB_BLOCK, precision(), **PREPARE_OPTIONS,
    )  # fmt: skip
    columns = min(COLUMNS, padded(dv))
    kda_walk_kernel[(heads, triton.cdiv(dv, columns))](
        v.contiguous(), decayed, systems, ends, state, out, rows, heads, dk, dv,
        padded(dk) // part, part, columns, SUB_BLOCK, precision(), **WALK_OPTIONS,
    )  # fmt: skip
    return out


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches at a model's sizes."""
    d, part = sizes.kda_dim, min(PART, padded(sizes.kda_dim))
    step = dict.fromkeys(("q", "k", "v", "g", "beta", "state", "out"), "*fp32")
    dims = {"DK": d, "DV": d, "D": padded(d), "V": padded(d)}
    columns = min(COLUMNS, padded(d))
    tiles = {"DK": d, "PART": part, "SUB": SUB_BLOCK, "PRECISION": "tf32x3"}
    walk = {**tiles, "DV": d, "PARTS": padded(d) // part, "V": columns}

    def launch(name: str, kernel: Any, constants: dict[str, Any], warps: int) -> Compiled:
        names = [n for n in kernel.arg_names if not n.isupper()]
        numbers = ("rows", "heads", "channels")
        signature = {n: "i32" if n in numbers else "*fp32" for n in names}
        aligned = tuple(n for n in names if n not in numbers)
        return Compiled(name, kernel, signature, constants, warps, 1, aligned=aligned)

    return [
        Compiled("kda_step", kda_step_kernel, step, dims, 8, 1, True),
        launch("kda_prepare", kda_prepare_kernel, tiles, 2),
        launch("kda_walk", kda_walk_kernel, walk, 8),
    ]
