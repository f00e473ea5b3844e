"""attnres as a Triton kernel: a program for each row reads each entry once.

The softmax over the entries runs along with the reading (Milakov & Gimelshein, arXiv 1805.02867):
one entry is in registers while the next is on its way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .rms_norm_triton import inverse_root_mean, together
from .transfer import tables
from .triton_round import narrow
from .triton_run import FUSION, Compiled, Sizes, upcast
from .triton_weights import aligned

WARPS = 16  #: one row is one program: in decode the only one


@triton.jit
def _entry(table, j, at, real, TYPE: tl.constexpr):
    start = tl.multiple_of(tl.load(table + j).to(tl.pointer_type(TYPE)), 16)
    return tl.load(start + at, mask=real, other=0.0)


@triton.jit(do_not_specialize=["rows", "count"])
def _attnres(
    table, norm, query, out, eps, rows, count,
    ROWS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    real, at = (row < rows) & (column < H), row * H + column
    TYPE: tl.constexpr = out.dtype.element_ty
    following = _entry(table, 0, at, real, TYPE)
    learned = tl.load(norm + column, mask=column < H, other=0.0).to(tl.float32)
    learned *= tl.load(query + column, mask=column < H, other=0.0).to(tl.float32)
    top = tl.full([ROWS, 1], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in range(count):  # not unrolled: nine entries at once do not fit in registers
        wide = following.to(tl.float32)
        more = real & (row < tl.where(j + 1 < count, rows, 0))
        following = _entry(table, tl.minimum(j + 1, count - 1), at, more, TYPE)
        score = tl.sum((wide * inverse_root_mean(wide, eps, H)) * learned, 1)[:, None]
        higher = tl.maximum(top, score, propagate_nan=tl.PropagateNan.ALL)
        keep, share = tl.exp(top - higher), tl.exp(score - higher)
        mixed = mixed * keep + wide * share
        total = total * keep + share
        top = higher
    tl.store(out + at, narrow(tl.div_rn(mixed, total), TYPE, UPCAST), mask=real)


def attnres(
    entries: Sequence[torch.Tensor], norm: torch.Tensor, query: torch.Tensor, eps: float
) -> torch.Tensor:
    """Mix ``entries`` (each [R, H]; the running sum is last) -> [R, H] in their dtype.

    score_j = sum(entry_j * rsqrt(mean(entry_j^2) + eps) * (norm * query)); the values are the
    raw entries.  All in float32, in the order of the entries.  One entry is returned as it is.
    """
    if len(entries) == 1:
        return entries[0]
    last = entries[-1]
    rows, h = last.shape
    pieces = [aligned(entry) for entry in entries]
    assert all(p.shape == last.shape and p.dtype == last.dtype for p in pieces)
    out = torch.empty(rows, h, dtype=last.dtype, device=last.device)
    if rows:
        some = together()
        _attnres[(triton.cdiv(rows, some),)](
            tables(pieces, out.device), norm.contiguous(), query.contiguous(), out, eps, rows,
            len(pieces), some, h, triton.next_power_of_2(h), upcast(), num_warps=WARPS, **FUSION,
        )  # fmt: skip
    return out


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launch of this file at ``sizes``."""
    signature = {
        "table": "*i64", "norm": "*bf16", "query": "*bf16", "out": "*bf16", "eps": "fp32",
        "rows": "i32", "count": "i32",
    }  # fmt: skip
    h = sizes.hidden
    constants = {"ROWS": 1, "H": h, "BLOCK": triton.next_power_of_2(h), "UPCAST": False}
    signature |= dict.fromkeys(constants, "constexpr")
    return [Compiled("attnres", _attnres, signature, constants, warps=WARPS, decode=True)]
