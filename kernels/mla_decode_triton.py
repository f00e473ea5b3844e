"""mla_decode as Triton kernels: lift the query, attend over ranges of blocks, merge the ranges.

* `_lift` brings each head's query into the latent space, in float32.
* `_attend` runs an online softmax (Milakov & Gimelshein, arXiv 1805.02867) over a range of whole
  blocks for 16 heads, which share a reading of the latents.  How many blocks a range has follows
  from the length alone, so a token's bits follow from its own sequence alone.
* `_merge` sums the ranges in their order and applies each head's value up-projection.

Tensor cores multiply bfloat16.  The latents are that already; float32 queries and shares are taken
apart into a sum of bfloat16 numbers first (24 and 16 bits), and every product is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..config import LATENT_BLOCK, RANGES
from .linear_reference import Weight
from .pieces import Pieces, walk
from .transfer import tables
from .triton_round import narrow
from .triton_run import FUSION, Compiled, Sizes, upcast
from .triton_weights import aligned, numbers
from .tuning import tuned
from .workers import Workers

SHARING = 16  #: heads that share a reading of the latents: what a tensor core takes
KEYS = 32  #: latents at a time
COLUMNS, VALUES = 64, 32  #: of the latent space, of a head's result, that one program computes
QUERY_PIECES, SHARE_PIECES = 3, 2  #: bfloat16 numbers that stand for a float32 one
KINDS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def multiply(a, b, total, WIDE: tl.constexpr):
    """``total`` + ``a`` ``b``: exact products of bfloat16 summed in float32, or float32 all the
    way where numbers are ``WIDE``."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def multiply_shares(
    p, v, total, PIECES: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr
):
    """``total`` + ``p`` ``v`` where ``p`` is float32 and ``v`` is of ``TYPE``."""
    for _ in tl.static_range(PIECES):
        part = narrow(p, TYPE, UPCAST)
        total = multiply(part, v, total, WIDE)
        p = p - part.to(tl.float32)
    return total


@triton.jit
def _lift(
    q, up, lifted, heads, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    NP: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """q' = W_k^T q of one head, for some columns, as ``PIECES`` numbers that sum up to it."""
    head = tl.program_id(0).to(tl.int64)
    n, column = tl.arange(0, NP), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.load(q + head * (N + R) + n, mask=n < N, other=0.0).to(tl.float32)
    where = up + (head * (N + V) + n[:, None]) * K + column[None, :]
    weight = tl.load(where, mask=(n[:, None] < N) & (column[None, :] < K), other=0.0)
    rest = tl.sum(weight.to(tl.float32) * own[:, None], 0)
    TYPE: tl.constexpr = lifted.dtype.element_ty
    for piece in tl.static_range(PIECES):
        part = narrow(rest, TYPE, UPCAST)
        tl.store(lifted + (piece * heads + head) * K + column, part, mask=column < K)
        rest = rest - part.to(tl.float32)


@triton.jit
def _scores(
    q, lifted, row, known, head, real, heads, N: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    RP: tl.constexpr, KEYS: tl.constexpr, SHARING: tl.constexpr, COLUMNS: tl.constexpr,
    PIECES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """[heads, keys] q'.c + q_e.e of the latents at ``row``; zero where ``known`` is false."""
    r = tl.arange(0, RP)
    own = q + head[:, None] * (N + R) + N + r[None, :]
    own = tl.load(own, mask=real[:, None] & (r[None, :] < R), other=0.0)
    extra = tl.load(
        row[None, :] + K + r[:, None], mask=known[None, :] & (r[:, None] < R), other=0.0
    )
    scores = multiply(own, extra, tl.zeros([SHARING, KEYS], tl.float32), WIDE)
    for begin in range(0, K, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        c = row[None, :] + column[:, None]
        c = tl.load(c, mask=known[None, :] & (column[:, None] < K), other=0.0)
        for piece in tl.static_range(PIECES):
            part = lifted + (piece * heads + head[:, None]) * K + column[None, :]
            part = tl.load(part, mask=real[:, None] & (column[None, :] < K), other=0.0)
            scores = multiply(part, c, scores, WIDE)
    return scores


@triton.jit(do_not_specialize=["first", "end", "each"])
def _attend(
    q, lifted, table, sums, tops, totals, heads, first, end, each, scale,
    N: tl.constexpr, R: tl.constexpr, K: tl.constexpr, RP: tl.constexpr, KP: tl.constexpr,
    SIZE: tl.constexpr, SHARING: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    PIECES: tl.constexpr, SHARE_PIECES: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Partial softmax of some heads over a range of ``each`` blocks, as far as the tokens ``first``
    to ``end`` lie in it; what came before them there is taken up again."""
    at = (first // (each * SIZE) + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * SHARING + tl.arange(0, SHARING)
    real, column = head < heads, tl.arange(0, KP)
    own = at.to(tl.int32) * each * SIZE
    top = tl.full([SHARING], float("-inf"), tl.float32)
    total = tl.zeros([SHARING], tl.float32)
    result = tl.zeros([SHARING, KP], tl.float32)
    if first > own:
        before = at * heads + head
        top = tl.load(tops + before, mask=real, other=float("-inf"))
        total = tl.load(totals + before, mask=real, other=0.0)
        earlier = sums + before[:, None] * K + column[None, :]
        result = tl.load(earlier, mask=real[:, None] & (column[None, :] < K), other=0.0)
    stop = tl.minimum(own + each * SIZE, end)
    for begin in range(tl.maximum(own, first), stop, KEYS):
        key = begin % SIZE + tl.arange(0, KEYS)
        known = begin + tl.arange(0, KEYS) < stop
        block = tl.multiple_of(tl.load(table + begin // SIZE).to(tl.pointer_type(TYPE)), 16)
        row = block + key.to(tl.int64) * (K + R)
        scores = scale * _scores(
            q, lifted, row, known, head, real, heads, N, R, K, RP, KEYS, SHARING, COLUMNS, PIECES,
            WIDE,
        )  # fmt: skip
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        keep, share = tl.exp(top - higher), tl.exp(scores - higher[:, None])
        total = total * keep + tl.sum(share, 1)
        c = tl.load(
            row[:, None] + column[None, :], mask=known[:, None] & (column[None, :] < K), other=0.0
        )
        result = result * keep[:, None]
        result = multiply_shares(share, c, result, SHARE_PIECES, TYPE, WIDE, UPCAST)
        top = higher
    place = at * heads + head
    tl.store(tops + place, top, mask=real)
    tl.store(totals + place, total, mask=real)
    where = sums + place[:, None] * K + column[None, :]
    tl.store(where, result, mask=real[:, None] & (column[None, :] < K))


@triton.jit(do_not_specialize=["ranges"])
def _merge(
    sums, tops, totals, up, out, lse, heads, ranges,
    N: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """W_v times the shares' sum of the latents, for some of a head's values."""
    head, column = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    highest = tl.full([], float("-inf"), tl.float32)
    for r in range(ranges):
        highest = tl.maximum(highest, tl.load(tops + r * heads + head))
    total = tl.full([], 0.0, tl.float32)
    context = tl.zeros([KP], tl.float32)
    for r in range(ranges):
        place = r * heads + head
        keep = tl.exp(tl.load(tops + place) - highest)
        total = total + tl.load(totals + place) * keep
        context = context + tl.load(sums + place * K + column, mask=column < K, other=0.0) * keep
    context = tl.div_rn(context, total)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    where = up + (head * (N + V) + N + value[:, None]) * K + column[None, :]
    weight = tl.load(where, mask=(value[:, None] < V) & (column[None, :] < K), other=0.0)
    result = tl.sum(weight.to(tl.float32) * context[None, :], 1)
    tl.store(out + head * V + value, result, mask=value < V)
    if tl.program_id(1) == 0:
        tl.store(lse + head, highest + tl.log(total))


def padded(n: int) -> int:
    """``n`` numbers as a side of a tile of a product."""
    return max(16, int(triton.next_power_of_2(n)))


def blocks_each(blocks: int) -> int:
    """Blocks of one range: a power of two, so that the ranges of any length are at most 64."""
    return int(triton.next_power_of_2(triton.cdiv(blocks, RANGES)))


def mla_decode(
    q: torch.Tensor,
    pieces: Pieces,
    length: int,
    up: Weight,
    nope: int,
    v: int,
    scale: float,
    workers: Workers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [h, nope + rope] over ``length`` latents in ``pieces`` of blocks [256, kv_lora + rope].

    ``up`` is [h * (nope + v), kv_lora].  Returns (o [h, v], log-sum-exp of the scores [h]), both
    float32.  Rows of the last block from ``length`` on are never read.
    """
    heads, k, rope, device = q.shape[0], up.shape[1], q.shape[1] - nope, q.device
    assert up.shape[0] == heads * (nope + v), (up.shape, heads, nope, v)
    q, weight = q.contiguous(), numbers(up, q.dtype)
    each = blocks_each(triton.cdiv(length, LATENT_BLOCK))
    span = each * LATENT_BLOCK
    ranges = triton.cdiv(length, span)
    sums = torch.empty(ranges, heads, k, device=device)
    tops, totals = torch.empty(2, ranges, heads, device=device).unbind()
    out, lse = torch.empty(heads, v, device=device), torch.empty(heads, device=device)
    rp, kp = padded(rope), padded(k)
    held: list[torch.Tensor] = []  # of earlier pieces the addresses alone stay in the table
    for blocks, first, end, _ in walk(pieces, length):
        assert blocks[0].shape == (LATENT_BLOCK, k + rope), blocks[0].shape
        dtype = blocks[0].dtype
        apart = q.dtype == dtype == torch.bfloat16
        query_pieces = QUERY_PIECES if apart else 1
        if first == 0:
            kind = dtype if apart else torch.float32
            lifted = torch.empty(query_pieces, heads, k, dtype=kind, device=device)
            _lift[(heads, triton.cdiv(k, COLUMNS))](
                q, weight, lifted, heads, nope, rope, v, k, padded(nope), COLUMNS, query_pieces,
                upcast(), num_warps=4, **FUSION,
            )  # fmt: skip
        held += map(aligned, blocks)
        _attend[(triton.cdiv(end, span) - first // span, triton.cdiv(heads, SHARING))](
            q, lifted, tables(held, device), sums, tops, totals, heads, first, end, each, scale,
            nope, rope, k, rp, kp, LATENT_BLOCK, SHARING, KEYS, COLUMNS, query_pieces,
            SHARE_PIECES if dtype == torch.bfloat16 else 1, KINDS[dtype], upcast() or not apart,
            upcast(), num_warps=4, num_stages=tuned(device).attend_stages, **FUSION,
        )  # fmt: skip
    _merge[(heads, triton.cdiv(v, VALUES))](
        sums, tops, totals, weight, out, lse, heads, ranges, nope, v, k, kp, VALUES,
        num_warps=8, **FUSION,
    )  # fmt: skip
    return out, lse


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches of this file at ``sizes``."""
    n, r, v, k = sizes.nope, sizes.rope, sizes.v, sizes.kv_lora
    lift = {"q": "*bf16", "up": "*bf16", "lifted": "*bf16", "heads": "i32"}
    lifts = {
        "N": n, "R": r, "V": v, "K": k, "NP": padded(n), "COLUMNS": COLUMNS,
        "PIECES": QUERY_PIECES, "UPCAST": False,
    }  # fmt: skip
    attend = {"q": "*bf16", "lifted": "*bf16", "table": "*i64"}
    attend |= dict.fromkeys(("sums", "tops", "totals"), "*fp32")
    attend |= dict.fromkeys(("heads", "first", "end", "each"), "i32") | {"scale": "fp32"}
    attends = {
        "N": n, "R": r, "K": k, "RP": padded(r), "KP": padded(k), "SIZE": LATENT_BLOCK,
        "SHARING": SHARING, "KEYS": KEYS, "COLUMNS": COLUMNS, "PIECES": QUERY_PIECES,
        "SHARE_PIECES": SHARE_PIECES,
        "TYPE": tl.bfloat16, "WIDE": False, "UPCAST": False,
    }  # fmt: skip
    merge = dict.fromkeys(("sums", "tops", "totals"), "*fp32") | {"up": "*bf16"}
    merge |= {"out": "*fp32", "lse": "*fp32", "heads": "i32", "ranges": "i32"}
    merges = {"N": n, "V": v, "K": k, "KP": padded(k), "VALUES": VALUES}
    ahead = tuned(torch.device("cpu")).attend_stages
    return [
        _launch("mla_decode_lift", _lift, lift, lifts, 4, 1),
        _launch("mla_decode_attend", _attend, attend, attends, 4, ahead),
        _launch("mla_decode_merge", _merge, merge, merges, 8, 1),
    ]


def _launch(name, kernel, signature, constants, warps, stages):
    signature = signature | dict.fromkeys(constants, "constexpr")
    return Compiled(name, kernel, signature, constants, warps, stages, decode=True)
