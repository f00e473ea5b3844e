"""linear: y = x W^T by Triton: decode rows by streaming the weight, prompt rows on tensor cores.

Two families, chosen by the kind of a row alone (decode rows and float32 activations; rows of a
prompt in bfloat16).  In both a value is one fixed chain of operations on its row of x and its row
of the weight: sums are never split between programs, and tiles depend on the weight's shape alone.

* Decode: weights are decoded in registers and summed in float32.  A weight is read as 64-bit words
  of consecutive columns, ``W`` words of ``BN`` weight rows at a time, two words to a lane; lanes
  are added once, at the end.  ``ROWS`` rows of x share one reading; absent ones are masked.
* Prompts: tiles of 64 rows; weights are rounded to bfloat16, as in the reference.

`experts_triton` is built from the same pieces.
"""

# Tuples grow while a kernel is unrolled.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import triton_run
from .linear_reference import Weight
from .triton_round import narrow
from .triton_run import Compiled, Sizes
from .triton_weights import (
    BF16,
    COLUMNS,
    INT8,
    MXFP4,
    TYPES,
    Parts,
    aligned,
    in_words,
    scale_type,
    x_in_words,
    x_kind,
)
from .tuning import tuned
from .workers import Workers

DECODE_ROWS = 4  #: decode rows that share one reading of a weight
TILE = {"BM": 64, "BN": 128, "BK": 64}  #: of prompts
MANY = 64  #: decode rows of a program where it is interpreted


@triton.jit
def e2m1(bits, low: tl.constexpr):
    """The E2M1 numbers at bit ``low`` of int32, as float32."""
    # The three bits of a magnitude, put where a float has the last two of its exponent and the
    # first of its mantissa, are the value times 2**-126; 1/2 is subnormal there as it is in E2M1.
    sign = (bits << (28 - low)) & -2147483648
    size = bits << (22 - low) if low < 22 else bits >> (low - 22)
    moved = sign | (size & 0x01C00000)
    return moved.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def column(word, factor, j: tl.constexpr, KIND: tl.constexpr):
    """Column ``j`` of 64-bit words of weights times their scales, exactly, as float32."""
    if KIND == 4:
        w = e2m1((word >> (32 * (j // 8))).to(tl.int32), 4 * (j % 8)) * factor
    elif KIND == 3:
        # 2**23 + 128 + q as the bits of a float: a conversion takes four times as long.
        magic = ((word >> (8 * j)).to(tl.int32) & 0xFF) ^ 0x4B000080
        w = (magic.to(tl.float32, bitcast=True) - 8388736.0) * factor
    elif KIND == 2:
        short = (word >> (16 * j)).to(tl.int16)
        w = short.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == 1:
        w = ((word >> (16 * j)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        w = (word >> (32 * j)).to(tl.int32).to(tl.float32, bitcast=True)
    return w


@triton.jit
def power(scale):
    """2**(s - 127) of E8M0 bytes, as float32; 0 is a subnormal number and 255 NaN."""
    s = scale.to(tl.int32)
    bits = (s << 23) | tl.where((s == 0) | (s == 255), 0x00400000, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(v):
    """bfloat16 as float32, by bits: the interpreter's conversion is slow."""
    return (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def words_of(weight, col, n, at, words):
    """Words ``at`` [W] of rows ``col`` [BN] of a weight of ``n`` rows of ``words`` words: [BN, W];
    0 outside."""
    mask = (col < n)[:, None] & (at < words)[None, :]
    place = (col.to(tl.int64) * words)[:, None] + at[None, :]
    return tl.load(weight + place, mask=mask, other=0)


@triton.jit
def scales_of(scale, col, n, at, words, KIND: tl.constexpr):
    """The scales of the words of ``words_of`` as they are stored, [BN, W]; floats have none.

    Loads of single bytes are not pipelined, so loops ask for a step's scales one step ahead."""
    if KIND < 3:
        found = col
    else:
        PER: tl.constexpr = 8 if KIND == 3 else 2  # words that share a scale
        mask = (col < n)[:, None] & (at < words)[None, :]
        place = (col.to(tl.int64) * (words // PER))[:, None] + (at // PER)[None, :]
        found = tl.load(scale + place, mask=mask, other=0)
    return found


@triton.jit
def factor_of(scales, KIND: tl.constexpr):
    """What ``scales_of`` found, as float32."""
    if KIND == 3:
        scales = widen(scales)
    elif KIND == 4:
        scales = power(scales)
    return scales


@triton.jit
def member(first, r: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr):
    """Number of row ``r`` of a program.  Interpreted, rows are not unrolled but a dimension of
    their own, since every operation has its price there: all ``ROWS`` of them, [ROWS, 1]."""
    return first + tl.arange(0, ROWS)[:, None] if UPCAST else first + r


@triton.jit
def accumulate(acc, word, factor, x, ok, at, KIND: tl.constexpr, X_KIND: tl.constexpr,
               UPCAST: tl.constexpr):  # fmt: skip
    """One step of the chain: every weight of ``word`` times every row of ``x``, added to ``acc``.

    ``word``, ``factor``: tuples of [BN, W], by weight; ``x``: tuple of addresses of rows as 64-bit
    words; ``ok``: tuple of [W], which words ``at`` of the row are there; ``acc``: tuple of [BN, W],
    by weight and row.  (Interpreted: see ``member``.)"""
    COLS: tl.constexpr = 2 if KIND == 0 else (8 if KIND == 3 else (16 if KIND == 4 else 4))
    PER: tl.constexpr = 2 if X_KIND == 0 else 4  # columns that a word of x holds
    BITS: tl.constexpr = 64 // PER
    for part in tl.static_range(COLS // PER):
        xs = ()
        for r in tl.static_range(len(x)):
            xs = xs + (tl.load(x[r] + at * (COLS // PER) + part, mask=ok[r], other=0),)
        for i in tl.static_range(PER):
            sums = ()
            for m in tl.static_range(len(word)):
                w = column(word[m], factor[m], part * PER + i, KIND)
                for r in tl.static_range(len(x)):
                    # A float of either kind is the upper part of a float32.
                    v = (xs[r] >> (BITS * i)).to(tl.int32) << (32 - BITS)
                    v = v.to(tl.float32, bitcast=True)
                    if UPCAST:  # its fma is ten times slower
                        sums = sums + (w[None, :, :] * v[:, None, :] + acc[m * len(x) + r],)
                    else:
                        v = tl.broadcast_to(v[None, :], w.shape)
                        sums = sums + (tl.fma(w, v, acc[m * len(x) + r]),)
            acc = sums
    return acc


@triton.jit
def nothing(ROWS: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, UPCAST: tl.constexpr):
    """What ``accumulate`` adds to, of one row."""
    if UPCAST:
        acc = tl.zeros((ROWS, BN, W), dtype=tl.float32)
    else:
        acc = tl.zeros((BN, W), dtype=tl.float32)
    return acc


@triton.jit
def tile_of(weight, scale, col, n, k0, k, KIND: tl.constexpr, BK: tl.constexpr,
            UPCAST: tl.constexpr):  # fmt: skip
    """Columns ``k0`` to ``k0 + BK`` of rows ``col`` [BN] of a weight [n, k]: [BN, BK] bfloat16, or
    that widened where ``UPCAST``.  What lies outside is 0."""
    BN: tl.constexpr = col.shape[0]
    start = col.to(tl.int64)
    inside = (col < n)[:, None]
    if KIND == 4:
        at = k0 // 2 + tl.arange(0, BK // 2)
        mask = inside & (at < k // 2)[None, :]
        byte = tl.load(weight + (start * (k // 2))[:, None] + at[None, :], mask=mask, other=0)
        group = k0 // 32 + tl.arange(0, BK // 32)
        own = inside & (group < k // 32)[None, :]
        s = tl.load(scale + (start * (k // 32))[:, None] + group[None, :], mask=own, other=0)
        factor = tl.broadcast_to(power(s)[:, :, None], (BN, BK // 32, 16))
        factor = tl.reshape(factor, (BN, BK // 2))
        bits = byte.to(tl.int32)
        low = narrow(e2m1(bits, 0) * factor, tl.bfloat16, UPCAST)
        high = narrow(e2m1(bits, 4) * factor, tl.bfloat16, UPCAST)
        w = tl.reshape(tl.join(low, high), (BN, BK))
    else:
        at = k0 + tl.arange(0, BK)
        mask = inside & (at < k)[None, :]
        w = tl.load(weight + (start * k)[:, None] + at[None, :], mask=mask, other=0)
        if KIND == 3:
            group = k0 // 64 + tl.arange(0, BK // 64)
            own = inside & (group < k // 64)[None, :]
            s = tl.load(scale + (start * (k // 64))[:, None] + group[None, :], mask=own, other=0)
            factor = tl.broadcast_to(widen(s)[:, :, None], (BN, BK // 64, 64))
            w = narrow(w.to(tl.float32) * tl.reshape(factor, (BN, BK)), tl.bfloat16, UPCAST)
        elif KIND != 1:
            w = narrow(w.to(tl.float32), tl.bfloat16, UPCAST)
    if UPCAST:
        w = widen(w)
    return w


@triton.jit
def rows_of(x, row, ok, k0, k, BK: tl.constexpr, UPCAST: tl.constexpr):
    """Columns ``k0`` to ``k0 + BK`` of rows ``row`` [BM] of ``x`` [., k] where ``ok``: [BM, BK]."""
    at = k0 + tl.arange(0, BK)
    mask = ok[:, None] & (at < k)[None, :]
    v = tl.load(x + (row.to(tl.int64) * k)[:, None] + at[None, :], mask=mask, other=0.0)
    if UPCAST:
        v = widen(v)
    return v


@triton.jit(do_not_specialize=["rows"])
def _decode(
    x, weight, scale, out, rows, n, words, x_words,
    KIND: tl.constexpr, X_KIND: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, W)
    LOOPS: tl.constexpr = 1 if UPCAST else ROWS
    acc = ()
    row = ()
    for r in tl.static_range(LOOPS):
        acc = acc + (nothing(ROWS, BN, W, UPCAST),)
        row = row + (x + member(first, r, ROWS, UPCAST).to(tl.int64) * x_words,)
    scales = scales_of(scale, col, n, lane, words, KIND)
    for k in tl.range(0, words, W, num_stages=STAGES):
        at = k + lane
        later = scales_of(scale, col, n, at + W, words, KIND)
        word, factor = words_of(weight, col, n, at, words), factor_of(scales, KIND)
        ok = ()
        for r in tl.static_range(LOOPS):
            ok = ok + ((at < words) & (lane * 0 + member(first, r, ROWS, UPCAST) < rows),)
        acc = accumulate(acc, (word,), (factor,), row, ok, at, KIND, X_KIND, UPCAST)
        scales = later
    for r in tl.static_range(LOOPS):
        y = narrow(tl.sum(acc[r], 2 if UPCAST else 1), out.dtype.element_ty, UPCAST)
        number = member(first, r, ROWS, UPCAST)
        mask = (col < n) & (col * 0 + number < rows)
        tl.store(out + number.to(tl.int64) * n + col, y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    x, weight, scale, out, rows, n, k,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, k, BK):
        v = rows_of(x, row, row < rows, k0, k, BK, UPCAST)
        w = tile_of(weight, scale, col, n, k0, k, KIND, BK, UPCAST)
        acc = tl.dot(v, tl.trans(w), acc, input_precision="ieee")
    y = narrow(acc, out.dtype.element_ty, UPCAST)
    mask = (row < rows)[:, None] & (col < n)[None, :]
    tl.store(out + (row.to(tl.int64) * n)[:, None] + col[None, :], y, mask=mask)


def decode_blocks(n: int, words: int) -> dict[str, int]:
    """``BN`` and ``W`` of the decode family, for weights of ``n`` rows of ``words`` words: 8 KB a
    step.  Few rows make few programs, each of which then reads longer stretches.  The interpreter
    pays by the operation."""
    if triton_run.upcast():
        width = min(512, triton.next_power_of_2(words))
        return {"BN": min(triton.next_power_of_2(n), (1 << 14) // width), "W": width}
    return {"BN": 32, "W": 32} if n >= 2048 else {"BN": 8, "W": 128}


def tile_blocks(blocks: dict[str, int], n: int, k: int) -> dict[str, int]:
    """``blocks`` of the prompt family for weights [n, k]; the interpreter takes larger ones."""
    if not triton_run.upcast():
        return blocks
    large = {"BN": triton.next_power_of_2(n), "BK": max(64, triton.next_power_of_2(k))}
    return {**blocks, **{name: min(512, size) for name, size in large.items()}}


def linear(x: torch.Tensor, weight: Weight, workers: Workers, decode: bool = False) -> torch.Tensor:
    """``x`` [R, K] times ``weight`` [N, K] -> [R, N] in ``x``'s dtype, summed in float32."""
    w = Parts(weight)
    rows, n, k = len(x), w.n, w.k
    assert x.shape[1] == k and x.dtype in (torch.float32, torch.bfloat16), (x.shape, x.dtype)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    upcast = triton_run.upcast()
    if not decode and x.dtype == torch.bfloat16:
        blocks = tile_blocks(TILE, n, k)
        _tiles[(-(-rows // blocks["BM"]), -(-n // blocks["BN"]))](
            aligned(x), w.data, w.scale, out, rows, n, k, KIND=w.kind, UPCAST=upcast,
            num_warps=tile_warps(w.kind), num_stages=tuned(x.device).tile_stages,
            **blocks, **triton_run.FUSION,
        )  # fmt: skip
        return out
    x, data = x_in_words(x, w.kind), in_words(w)
    words = data.shape[1]
    blocks = decode_blocks(n, words)
    count = MANY if upcast else DECODE_ROWS
    _decode[(-(-rows // count), -(-n // blocks["BN"]))](
        x, data, w.scale, out, rows, n, words, x.shape[1], KIND=w.kind,
        X_KIND=x_kind(out.dtype, w.kind), ROWS=count, STAGES=tuned(x.device).decode_stages,
        UPCAST=upcast,
        num_warps=4, **blocks, **triton_run.FUSION,
    )  # fmt: skip
    return out


def tile_warps(kind: int) -> int:
    """Weights that are decoded on the way take twice the registers."""
    return 4 if kind == BF16 else 8


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches of a model of ``sizes``: both families, each kind of weight that a pack may
    have; the decode family for many rows and for few.  bfloat16 activations."""
    found, own = [], tuned(torch.device("cpu"))
    for kind, n in ((k, n) for k in (BF16, INT8, MXFP4) for n in (sizes.hidden, sizes.kda_dim)):
        words = sizes.hidden // COLUMNS[kind]
        constants: dict[str, Any] = {
            "KIND": kind, "X_KIND": BF16, "ROWS": DECODE_ROWS, "STAGES": own.decode_stages,
            "UPCAST": False, **decode_blocks(n, words),
        }  # fmt: skip
        signature = {
            "x": "*i64", "weight": "*i64", "scale": f"*{scale_type(kind)}", "out": "*bf16",
            "rows": "i32", "n": "i32", "words": "i32", "x_words": "i32",
            **dict.fromkeys(constants, "constexpr"),
        }  # fmt: skip
        aligned = ("x", "weight", "scale", "out", "n", "words", "x_words")
        name = f"linear-{TYPES[kind]}-{n}"
        found.append(
            Compiled(name, _decode, signature, constants, 4, 1, decode=True, aligned=aligned)
        )
    for kind in (BF16, INT8, MXFP4):
        constants = {"KIND": kind, "UPCAST": False, **TILE}
        signature = {
            "x": "*bf16", "weight": f"*{TYPES[kind]}", "scale": f"*{scale_type(kind)}",
            "out": "*bf16", "rows": "i32", "n": "i32", "k": "i32",
            **dict.fromkeys(constants, "constexpr"),
        }  # fmt: skip
        even = ("x", "weight", "scale", "out", "n", "k")
        name, warps = f"linear-tiles-{TYPES[kind]}", tile_warps(kind)
        found.append(
            Compiled(name, _tiles, signature, constants, warps, own.tile_stages, aligned=even)
        )
    return found
