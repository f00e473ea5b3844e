"""mla_prefill as Triton kernels: expand some blocks, attend to them, and on to the next blocks.

Keys and values of all heads at once would be 42 times their latents, so ``EXPANDED`` blocks at a
time go through one scratch; the running softmax of each tile of queries (Milakov & Gimelshein,
arXiv 1805.02867) waits in float32 in between.  64 keys at a time at absolute positions, whatever
the scratch: a row's bits follow from its position and the latents up to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..config import EXPANDED, LATENT_BLOCK, ROW_TILE
from .linear_reference import Weight
from .mla_decode_triton import KINDS, SHARE_PIECES, multiply, multiply_shares, padded
from .mla_prefill_reference import Query
from .pieces import Pieces, walk
from .transfer import sent, tables
from .triton_round import narrow
from .triton_run import FUSION, Compiled, Sizes, upcast
from .triton_weights import aligned, numbers
from .tuning import tuned
from .workers import Workers

KEYS = 64  #: keys at a time
TILE, STEP = 128, 32  #: of the product that expands: rows and columns, latent columns at a time


@triton.jit(do_not_specialize=["first", "length"])
def _expand(
    table, up, kv, first, length, N, C: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` .. of the latents times ``up`` [N, K] -> ``kv`` [rows, N]; rows that hold no
    token give zeros.  A tile lies in one block."""
    tile = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    at, begin = tl.arange(0, STEP), first + tl.program_id(0) * TILE
    block = tl.multiple_of(tl.load(table + begin // SIZE).to(tl.pointer_type(TYPE)), 16)
    row = begin % SIZE + tl.arange(0, TILE)
    known = first + tile < length
    total = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, K, STEP):
        c = block + row[:, None] * C + k + at[None, :]
        c = tl.load(c, mask=known[:, None] & (k + at[None, :] < K), other=0.0)
        w = up + column[None, :] * K + k + at[:, None]
        w = tl.load(w, mask=(column[None, :] < N) & (k + at[:, None] < K), other=0.0)
        total = multiply(c, w, total, WIDE)
    where = kv + tile.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(where, narrow(total, kv.dtype.element_ty, UPCAST), mask=column[None, :] < N)


@triton.jit
def _block_scores(
    wide, extra, kv, block, row, known, NOPE: tl.constexpr, ROPE: tl.constexpr, K: tl.constexpr,
    NP: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """[rows, keys]: queries (``wide`` and ``extra``) times keys, of which ``kv`` points at the
    expanded parts and ``block`` at the latents."""
    n, r = tl.arange(0, NP), tl.arange(0, RP)
    k = tl.load(kv[None, :] + n[:, None], mask=n[:, None] < NOPE, other=0.0)
    scores = multiply(wide, k, tl.zeros([ROWS, KEYS], tl.float32), WIDE)
    e = block + row[None, :] * (K + ROPE) + K + r[:, None]
    e = tl.load(e, mask=known[None, :] & (r[:, None] < ROPE), other=0.0)
    return multiply(extra, e, scores, WIDE)


@triton.jit(do_not_specialize=["first", "end", "length"])
def _attend(
    queries, table, kv, tops, totals, sums, out, heads, first, end, length, scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, K: tl.constexpr, NP: tl.constexpr,
    RP: tl.constexpr, VP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PIECES: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one head over the keys ``first:end``.  ``queries`` [tiles, 4]:
    address, position of the first row, rows, where they go in ``out``."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = tl.load(queries + tile * 4 + 1).to(tl.int32)
    rows = tl.load(queries + tile * 4 + 2).to(tl.int32)
    last = start + rows
    if first >= last:
        return
    lane, n = tl.arange(0, ROWS), tl.arange(0, NP)
    r, v, key = tl.arange(0, RP), tl.arange(0, VP), tl.arange(0, KEYS)
    q = tl.multiple_of(tl.load(queries + tile * 4).to(tl.pointer_type(KIND)), 16)
    q += (lane[:, None] * heads + head) * (NOPE + ROPE)
    real = lane[:, None] < rows
    wide = tl.load(q + n[None, :], mask=real & (n[None, :] < NOPE), other=0.0)
    extra = tl.load(q + NOPE + r[None, :], mask=real & (r[None, :] < ROPE), other=0.0)
    state = (tile * heads + head) * ROWS + lane
    place = sums + state[:, None] * V + v[None, :]
    earlier = lane < tl.where(first > 0, ROWS, 0)
    top = tl.load(tops + state, mask=earlier, other=float("-inf"))
    total = tl.load(totals + state, mask=earlier, other=0.0)
    result = tl.load(place, mask=earlier[:, None] & (v[None, :] < V), other=0.0)
    width = heads * (NOPE + V)
    for begin in range(first, tl.minimum(end, last), KEYS):
        block = tl.multiple_of(tl.load(table + begin // SIZE).to(tl.pointer_type(TYPE)), 16)
        own = kv + (begin - first + key).to(tl.int64) * width + head * (NOPE + V)
        known = begin + key < length
        scores = scale * _block_scores(
            wide, extra, own, block, begin % SIZE + key, known, NOPE, ROPE, K, NP, RP, ROWS, KEYS,
            WIDE,
        )  # fmt: skip
        seen = begin + key[None, :] <= start + lane[:, None]
        scores = tl.where(seen & real, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # rows of padding see no key
        keep, share = tl.exp(top - base), tl.exp(scores - base[:, None])
        total = total * keep + tl.sum(share, 1)
        values = tl.load(own[:, None] + NOPE + v[None, :], mask=v[None, :] < V, other=0.0)
        result = result * keep[:, None]
        result = multiply_shares(share, values, result, PIECES, KIND, WIDE, UPCAST)
        top = higher
    if end < last:
        tl.store(tops + state, top)
        tl.store(totals + state, total)
        tl.store(place, result, mask=v[None, :] < V)
    else:
        to = out + ((tl.load(queries + tile * 4 + 3) + lane[:, None]) * heads + head) * V
        # + 0: keys that a row may not see must not decide the sign of its zeros
        done = tl.div_rn(result, tl.where(total == 0.0, 1.0, total)[:, None]) + 0.0
        tl.store(to + v[None, :], done, mask=real & (v[None, :] < V))


def mla_prefill(
    queries: Sequence[Query],
    pieces: Pieces,
    length: int,
    up: Weight,
    nope: int,
    v: int,
    scale: float,
    workers: Workers,
) -> list[torch.Tensor]:
    """``queries`` of one sequence over its ``length`` latents in ``pieces`` of blocks
    [256, kv_lora + rope]; ``up`` is [h * (nope + v), kv_lora].  Returns [n, h, v] float32 for each
    query.

    A row sees the latents up to its own position.  Rows from ``length`` on may hold anything.
    """
    (heads, width), k = queries[0].q.shape[1:], up.shape[1]
    dtype, device, rope = queries[0].q.dtype, queries[0].q.device, width - nope
    assert up.shape[0] == heads * (nope + v), (up.shape, heads, nope, v)
    weight = numbers(up, dtype)
    own = tuned(device)
    tiles, counts = [aligned(query.q) for query in queries], [len(q.q) for q in queries]
    last = max(query.start + len(query.q) for query in queries)
    assert last <= length and max(counts) <= ROW_TILE, (last, length, counts)
    place, total = _places(queries, tiles, device), sum(counts)
    out = torch.empty(total, heads, v, device=device)
    used = min(EXPANDED, triton.cdiv(last, LATENT_BLOCK))
    kv = torch.empty(used * LATENT_BLOCK, weight.shape[0], dtype=dtype, device=device)
    held: list[torch.Tensor] = []  # of earlier pieces the addresses alone stay in the table
    for blocks, first, end, _ in walk(pieces, length):
        if first >= last:
            break
        end = min(end, last)
        assert blocks[0].shape == (LATENT_BLOCK, k + rope), blocks[0].shape
        kind, step = blocks[0].dtype, used * LATENT_BLOCK
        held += map(aligned, blocks)
        table = tables(held, device)
        wide = upcast() or not dtype == kind == weight.dtype == torch.bfloat16
        if first == 0:
            state = len(tiles) * heads * ROW_TILE if last > min(step, end) else 1
            tops, totals, sums = (torch.empty(state * n, device=device) for n in (1, 1, v))
        for begin in range(first, end, step):
            stop = min(begin + step, end)
            grid = (triton.cdiv(stop - begin, TILE), triton.cdiv(weight.shape[0], TILE))
            _expand[grid](
                table, weight, kv, begin, length, weight.shape[0], k + rope, k, LATENT_BLOCK, TILE,
                STEP, KINDS[kind], wide, upcast(), num_warps=8, num_stages=own.expand_stages,
                **FUSION,
            )  # fmt: skip
            _attend[(len(tiles), heads)](
                place, table, kv, tops, totals, sums, out, heads, begin, stop, length, scale,
                nope, rope, v, k, padded(nope), padded(rope), padded(v), LATENT_BLOCK, ROW_TILE,
                KEYS, SHARE_PIECES if dtype == torch.bfloat16 else 1, KINDS[kind], KINDS[dtype],
                wide, upcast(), num_warps=8, num_stages=1 if wide else own.attend_stages, **FUSION,
            )  # fmt: skip
    return list(torch.split(out, counts))


def _places(
    queries: Sequence[Query], tiles: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """[tiles, 4] int64: address, position of the first row, rows, rows of the tiles before."""
    rows, before = [], 0
    for query, tile in zip(queries, tiles, strict=True):
        rows.append((tile.data_ptr(), query.start, len(tile), before))
        before += len(tile)
    return sent(torch.tensor(rows, dtype=torch.int64), device)


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches of this file at ``sizes``."""
    n, r, v, k = sizes.nope, sizes.rope, sizes.v, sizes.kv_lora
    expand = {"table": "*i64", "up": "*bf16", "kv": "*bf16"}
    expand |= dict.fromkeys(("first", "length", "N"), "i32")
    expands = {
        "C": k + r, "K": k, "SIZE": LATENT_BLOCK, "TILE": TILE, "STEP": STEP,
        "TYPE": tl.bfloat16, "WIDE": False, "UPCAST": False,
    }  # fmt: skip
    attend = {"queries": "*i64", "table": "*i64", "kv": "*bf16"}
    attend |= dict.fromkeys(("tops", "totals", "sums", "out"), "*fp32")
    attend |= dict.fromkeys(("heads", "first", "end", "length"), "i32") | {"scale": "fp32"}
    attends = {
        "NOPE": n, "ROPE": r, "V": v, "K": k, "NP": padded(n), "RP": padded(r), "VP": padded(v),
        "SIZE": LATENT_BLOCK, "ROWS": ROW_TILE, "KEYS": KEYS, "PIECES": SHARE_PIECES,
        "TYPE": tl.bfloat16, "KIND": tl.bfloat16, "WIDE": False, "UPCAST": False,
    }  # fmt: skip
    expand |= dict.fromkeys(expands, "constexpr")
    attend |= dict.fromkeys(attends, "constexpr")
    own = tuned(torch.device("cpu"))
    return [
        Compiled("mla_prefill_expand", _expand, expand, expands, 8, own.expand_stages),
        Compiled("mla_prefill_attend", _attend, attend, attends, 8, own.attend_stages),
    ]
