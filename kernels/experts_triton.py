"""experts: y = down(act(gate x, up x)) for a list of jobs, by Triton: two launches for all of them.

Rows of all jobs are cut into tiles of one job each.  A program of the first launch takes a tile and
some rows of gate and up, and ends with the activation; the second takes the tile and some rows of
down.  Weights lie where they are: a table holds their addresses, so pages never move.  The table,
the tiles and the numbers of the rows go to the device in one copy.

Families, kinds of weights and what makes a row's bits its own: see `linear_triton`.  A decode tile
is one row of an expert (few rows share one) or four rows of a dense MLP; a tile of prompts 32 or
64.  Gate, up and the activation are rounded to x's dtype, as in the released model.
"""

# Tuples grow while a kernel is unrolled.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl

from . import triton_run
from .experts_reference import Job
from .glu_reference import Activation
from .linear_triton import (
    DECODE_ROWS,
    MANY,
    accumulate,
    decode_blocks,
    factor_of,
    member,
    nothing,
    rows_of,
    scales_of,
    tile_blocks,
    tile_of,
    words_of,
)
from .triton_round import narrow, rounded
from .triton_run import Compiled, Sizes
from .triton_weights import (
    BF16,
    COLUMNS,
    INT8,
    MXFP4,
    TYPES,
    Parts,
    aligned,
    scale_type,
    table_of,
    x_in_words,
    x_kind,
)
from .tuning import tuned
from .workers import Workers

POINTEES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, "i8": tl.int8,
            "u8": tl.uint8}  # fmt: skip


@triton.jit
def tanh(x):
    """tanh of float32: near 0 by its series, since 1 - 2/(e**2x + 1) cancels there."""
    s = x * x
    series = tl.fma(s, 62.0 / 2835.0, -17.0 / 315.0)
    series = tl.fma(s, series, 2.0 / 15.0)
    series = tl.fma(s, series, -1.0 / 3.0)
    series = tl.fma(s * x, series, x)
    return tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def activated(a, b, beta, linear_beta, SITU: tl.constexpr, CAP: tl.constexpr):
    """The gated activation of float32 ``a`` (gate) and ``b`` (up), by `glu_reference`."""
    s = 1.0 / (1.0 + tl.exp(-a))
    if CAP:
        b = linear_beta * tanh(b / linear_beta)
    return beta * tanh(a / beta) * s * b if SITU else a * s * b


@triton.jit
def address(table, job, i: tl.constexpr, TYPE: tl.constexpr):
    """Where part ``i`` of a job's weights lies."""
    place = tl.load(table + job * 6 + i)
    return tl.multiple_of(place.to(tl.pointer_type(TYPE)), 16)


@triton.jit(do_not_specialize=["tiles", "rows"])
def _up(
    x, table, out, tiles, rows, n, words, x_words, beta, linear_beta,
    KIND: tl.constexpr, X_KIND: tl.constexpr, SCALE: tl.constexpr, SITU: tl.constexpr,
    CAP: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = table + tiles + tl.program_id(0) * 3
    job, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    gate, gate_scale = address(table, job, 0, tl.int64), address(table, job, 1, SCALE)
    up, up_scale = address(table, job, 2, tl.int64), address(table, job, 3, SCALE)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, W)
    LOOPS: tl.constexpr = 1 if UPCAST else ROWS
    acc = ()
    row = ()
    for r in tl.static_range(LOOPS):
        place = member(begin, r, ROWS, UPCAST)
        number = tl.load(table + rows + place, mask=place < end, other=0)
        row = row + (x + number * x_words,)
        acc = acc + (nothing(ROWS, BN, W, UPCAST), nothing(ROWS, BN, W, UPCAST))
    a_scales = scales_of(gate_scale, col, n, lane, words, KIND)
    b_scales = scales_of(up_scale, col, n, lane, words, KIND)
    for k in tl.range(0, words, W, num_stages=STAGES):
        at = k + lane
        a_later = scales_of(gate_scale, col, n, at + W, words, KIND)
        b_later = scales_of(up_scale, col, n, at + W, words, KIND)
        word = (words_of(gate, col, n, at, words), words_of(up, col, n, at, words))
        factor = (factor_of(a_scales, KIND), factor_of(b_scales, KIND))
        ok = ()
        for r in tl.static_range(LOOPS):
            ok = ok + ((at < words) & (lane * 0 + member(begin, r, ROWS, UPCAST) < end),)
        acc = accumulate(acc, word, factor, row, ok, at, KIND, X_KIND, UPCAST)
        a_scales, b_scales = a_later, b_later
    DTYPE: tl.constexpr = out.dtype.element_ty
    for r in tl.static_range(LOOPS):
        a = rounded(tl.sum(acc[r], 2 if UPCAST else 1), DTYPE, UPCAST)
        b = rounded(tl.sum(acc[LOOPS + r], 2 if UPCAST else 1), DTYPE, UPCAST)
        y = narrow(activated(a, b, beta, linear_beta, SITU, CAP), DTYPE, UPCAST)
        place = member(begin, r, ROWS, UPCAST)
        mask = (col < n) & (col * 0 + place < end)
        tl.store(out + place * n + col, y, mask=mask)


@triton.jit(do_not_specialize=["tiles"])
def _down(
    x, table, out, tiles, n, words, x_words,
    KIND: tl.constexpr, X_KIND: tl.constexpr, SCALE: tl.constexpr, BN: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = table + tiles + tl.program_id(0) * 3
    job, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    down, scale = address(table, job, 4, tl.int64), address(table, job, 5, SCALE)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, W)
    LOOPS: tl.constexpr = 1 if UPCAST else ROWS
    acc = ()
    row = ()
    for r in tl.static_range(LOOPS):
        row = row + (x + member(begin, r, ROWS, UPCAST) * x_words,)
        acc = acc + (nothing(ROWS, BN, W, UPCAST),)
    scales = scales_of(scale, col, n, lane, words, KIND)
    for k in tl.range(0, words, W, num_stages=STAGES):
        at = k + lane
        later = scales_of(scale, col, n, at + W, words, KIND)
        word, factor = words_of(down, col, n, at, words), factor_of(scales, KIND)
        ok = ()
        for r in tl.static_range(LOOPS):
            ok = ok + ((at < words) & (lane * 0 + member(begin, r, ROWS, UPCAST) < end),)
        acc = accumulate(acc, (word,), (factor,), row, ok, at, KIND, X_KIND, UPCAST)
        scales = later
    for r in tl.static_range(LOOPS):
        y = narrow(tl.sum(acc[r], 2 if UPCAST else 1), out.dtype.element_ty, UPCAST)
        place = member(begin, r, ROWS, UPCAST)
        mask = (col < n) & (col * 0 + place < end)
        tl.store(out + place * n + col, y, mask=mask)


@triton.jit(do_not_specialize=["tiles", "rows"])
def _up_tiles(
    x, table, out, tiles, rows, n, k, beta, linear_beta,
    KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr, SITU: tl.constexpr,
    CAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    tile = table + tiles + tl.program_id(0) * 3
    job, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    gate, gate_scale = address(table, job, 0, DATA), address(table, job, 1, SCALE)
    up, up_scale = address(table, job, 2, DATA), address(table, job, 3, SCALE)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    place = begin + tl.arange(0, BM)
    row = tl.load(table + rows + place, mask=place < end, other=0)
    # Weights are the left operand: its 64 rows are what Hopper's matrix unit wants.
    a = tl.zeros((BN, BM), dtype=tl.float32)
    b = tl.zeros((BN, BM), dtype=tl.float32)
    for k0 in range(0, k, BK):
        v = tl.trans(rows_of(x, row, place < end, k0, k, BK, UPCAST))
        w = tile_of(gate, gate_scale, col, n, k0, k, KIND, BK, UPCAST)
        a = tl.dot(w, v, a, input_precision="ieee")
        w = tile_of(up, up_scale, col, n, k0, k, KIND, BK, UPCAST)
        b = tl.dot(w, v, b, input_precision="ieee")
    a, b = rounded(a, tl.bfloat16, UPCAST), rounded(b, tl.bfloat16, UPCAST)
    y = narrow(activated(a, b, beta, linear_beta, SITU, CAP), tl.bfloat16, UPCAST)
    mask = (col < n)[:, None] & (place < end)[None, :]
    tl.store(out + (place * n)[None, :] + col[:, None], y, mask=mask)


@triton.jit(do_not_specialize=["tiles"])
def _down_tiles(
    x, table, out, tiles, n, k,
    KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = table + tiles + tl.program_id(0) * 3
    job, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    down, scale = address(table, job, 4, DATA), address(table, job, 5, SCALE)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    place = begin + tl.arange(0, BM)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for k0 in range(0, k, BK):
        v = tl.trans(rows_of(x, place, place < end, k0, k, BK, UPCAST))
        w = tile_of(down, scale, col, n, k0, k, KIND, BK, UPCAST)
        acc = tl.dot(w, v, acc, input_precision="ieee")
    mask = (col < n)[:, None] & (place < end)[None, :]
    y = narrow(acc, tl.bfloat16, UPCAST)
    tl.store(out + (place * n)[None, :] + col[:, None], y, mask=mask)


def experts(
    x: torch.Tensor,
    jobs: Sequence[Job],
    act: Activation,
    workers: Workers,
    decode: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each job's rows of ``x`` [R, K], one job's after another's -> [rows of all jobs, K'], in
    ``x``'s dtype, written to ``out`` if it is given."""
    assert x.dtype in (torch.float32, torch.bfloat16), x.dtype
    width = jobs[0].down.shape[0]
    taken = [range(len(x)) if job.rows is None else job.rows for job in jobs]
    count = sum(map(len, taken))
    if out is None:
        out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    assert out.shape == (count, width) and out.dtype == x.dtype and out.is_contiguous()
    assert all(0 <= min(own) <= max(own) < len(x) for own in taken if own), len(x)
    weights = [(Parts(job.gate), Parts(job.up), Parts(job.down)) for job in jobs]
    begin = 0
    for _, group in groupby(range(len(jobs)), lambda i: [(p.kind, p.n, p.k) for p in weights[i]]):
        own = list(group)
        end = begin + sum(len(taken[i]) for i in own)
        if end > begin:
            run = _decode if decode or x.dtype == torch.float32 else _prompt
            run(x, [weights[i] for i in own], [taken[i] for i in own], act, out[begin:end])
        begin = end
    return out


def _checked(x: torch.Tensor, gate: Parts, up: Parts, down: Parts, out: torch.Tensor) -> None:
    if gate.kind != up.kind:
        raise TypeError("the Triton kernels need gate and up in one format")
    assert (gate.n, gate.k) == (up.n, up.k) == (down.k, x.shape[1]) and down.n == out.shape[1]


def _act(act: Activation) -> dict[str, Any]:
    return {
        "beta": float(act.beta),
        "linear_beta": float(act.linear_beta or 1.0),
        "SITU": act.name == "situ",
        "CAP": act.name == "situ" and act.linear_beta is not None,
    }


def _decode(
    x: torch.Tensor,
    jobs: Sequence[tuple[Parts, Parts, Parts]],
    taken: Sequence[Sequence[int]],
    act: Activation,
    out: torch.Tensor,
) -> None:
    """Jobs of one shape and format, decode rows or float32 ones."""
    gate, up, down = jobs[0]
    _checked(x, gate, up, down, out)
    upcast = triton_run.upcast()
    tile = MANY if upcast else decode_rows(gate.kind)
    table, kept = table_of(jobs, taken, True, tile, x.device)
    inner = torch.empty(len(out), gate.n, dtype=x.dtype, device=x.device)
    fixed = {
        "ROWS": tile, "STAGES": tuned(x.device).decode_stages, "UPCAST": upcast, "num_warps": 4,
        **triton_run.FUSION,
    }  # fmt: skip
    words, xs = kept[0].shape[1], x_in_words(x, gate.kind)
    blocks = up_blocks(gate.n, words)
    _up[(table.tile_count, -(-gate.n // blocks["BN"]))](
        xs, table.data, inner, table.tiles, table.rows, gate.n, words, xs.shape[1],
        KIND=gate.kind, X_KIND=x_kind(x.dtype, gate.kind), SCALE=_scale(gate.kind),
        **_act(act), **blocks, **fixed,
    )  # fmt: skip
    words, xs = kept[4].shape[1], x_in_words(inner, down.kind)
    blocks = decode_blocks(down.n, words)
    _down[(table.tile_count, -(-down.n // blocks["BN"]))](
        xs, table.data, out, table.tiles, down.n, words, xs.shape[1],
        KIND=down.kind, X_KIND=x_kind(x.dtype, down.kind), SCALE=_scale(down.kind),
        **blocks, **fixed,
    )  # fmt: skip


def _prompt(
    x: torch.Tensor,
    jobs: Sequence[tuple[Parts, Parts, Parts]],
    taken: Sequence[Sequence[int]],
    act: Activation,
    out: torch.Tensor,
) -> None:
    """Jobs of one shape and format, rows of prompts in bfloat16."""
    gate, up, down = jobs[0]
    _checked(x, gate, up, down, out)
    upcast = triton_run.upcast()
    table, _kept = table_of(jobs, taken, False, prompt_tile(gate.kind)["BM"], x.device)
    inner = torch.empty(len(out), gate.n, dtype=x.dtype, device=x.device)
    fixed = {
        "UPCAST": upcast, "num_warps": 4, "num_stages": tuned(x.device).tile_stages,
        **triton_run.FUSION,
    }  # fmt: skip
    blocks = tile_blocks(prompt_tile(gate.kind), gate.n, gate.k)
    _up_tiles[(table.tile_count, -(-gate.n // blocks["BN"]))](
        aligned(x), table.data, inner, table.tiles, table.rows, gate.n, gate.k, KIND=gate.kind,
        DATA=POINTEES[TYPES[gate.kind]], SCALE=_scale(gate.kind), **_act(act), **blocks, **fixed,
    )  # fmt: skip
    blocks = {**tile_blocks(prompt_tile(down.kind), down.n, down.k), "BM": blocks["BM"]}
    _down_tiles[(table.tile_count, -(-down.n // blocks["BN"]))](
        inner, table.data, out, table.tiles, down.n, down.k, KIND=down.kind,
        DATA=POINTEES[TYPES[down.kind]], SCALE=_scale(down.kind), **blocks, **fixed,
    )  # fmt: skip


def decode_rows(kind: int) -> int:
    """Rows of a decode tile: a routed expert seldom has two, a dense MLP has all there are."""
    return 1 if kind == MXFP4 else DECODE_ROWS


def up_blocks(n: int, words: int) -> dict[str, int]:
    """As ``decode_blocks``, for two weights at a time."""
    blocks = decode_blocks(n, words)
    return blocks if triton_run.upcast() else {**blocks, "BN": blocks["BN"] // 2}


def prompt_tile(kind: int) -> dict[str, int]:
    """A routed expert has about ten rows of 512, a dense MLP all of them."""
    return {"BM": 32 if kind == MXFP4 else 64, "BN": 64, "BK": 64}


def _scale(kind: int) -> tl.dtype:
    pointee: tl.dtype = POINTEES[scale_type(kind)]
    return pointee


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches of a model of ``sizes``, bfloat16 activations: routed experts in MXFP4, shared
    and dense ones in each format that a pack may have."""
    return [launch for kind in (MXFP4, BF16, INT8) for launch in _launches(kind, sizes)]


def _launches(kind: int, sizes: Sizes) -> Iterator[Compiled]:
    """Both launches of both families for weights of ``kind``."""
    act = {"SITU": True, "CAP": True}
    scale = {"SCALE": _scale(kind), "KIND": kind, "UPCAST": False}
    decode = {**scale, "X_KIND": BF16, "ROWS": decode_rows(kind)}
    decode["STAGES"] = tuned(torch.device("cpu")).decode_stages
    tiles = {**scale, "DATA": POINTEES[TYPES[kind]], **prompt_tile(kind)}
    per = COLUMNS[kind]
    up, down = up_blocks(sizes.inner, sizes.latent // per), decode_blocks(sizes.latent, 1)
    words, beta = ("words", "x_words"), ("beta", "linear_beta")
    yield _launch("up", _up, kind, "*i64", ("tiles", "rows", "n", *words), beta,
                  {**decode, **act, **up}, True)  # fmt: skip
    yield _launch("down", _down, kind, "*i64", ("tiles", "n", *words), (), {**decode, **down}, True)
    yield _launch("up-tiles", _up_tiles, kind, "*bf16", ("tiles", "rows", "n", "k"), beta,
                  {**tiles, **act}, False)  # fmt: skip
    yield _launch("down-tiles", _down_tiles, kind, "*bf16", ("tiles", "n", "k"), (), tiles, False)


def _launch(
    name: str, kernel: Any, kind: int, x: str, numbers: Sequence[str], floats: Sequence[str],
    constants: dict[str, Any], decode: bool,
) -> Compiled:  # fmt: skip
    signature = {"x": x, "table": "*i64", "out": "*bf16", **dict.fromkeys(numbers, "i32")}
    signature |= dict.fromkeys(floats, "fp32") | dict.fromkeys(constants, "constexpr")
    sizes = tuple(n for n in numbers if n not in ("tiles", "rows"))
    stages = 1 if decode else tuned(torch.device("cpu")).tile_stages
    return Compiled(
        f"experts-{name}-{TYPES[kind]}", kernel, signature, constants, 4,
        stages, decode, ("x", "table", "out", *sizes),
    )  # fmt: skip
