"""combine as a Triton kernel: a program sums one piece of one row, expert after expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rms_norm_triton import together
from .triton_round import narrow
from .triton_run import FUSION, Compiled, Sizes, upcast
from .workers import Workers

PIECE, WARPS = 256, 1


@triton.jit(do_not_specialize=["rows"])
def _combine(
    x, at, weights, out, rows,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)[None, :]
    real = (row < rows) & (column < N)
    total = tl.zeros([ROWS, PIECE], tl.float32)
    for j in tl.static_range(K):
        source = tl.load(at + row * K + j, mask=row < rows, other=0)
        part = tl.load(x + source * N + column, mask=real, other=0.0).to(tl.float32)
        total = total + part * tl.load(weights + row * K + j, mask=row < rows, other=0.0)
    tl.store(out + row * N + column, narrow(total, out.dtype.element_ty, UPCAST), mask=real)


def combine(
    x: torch.Tensor, at: torch.Tensor, weights: torch.Tensor, workers: Workers
) -> torch.Tensor:
    """``x`` [M, N]: results of experts; row r takes its rows ``at`` [R, k] int64, times
    ``weights`` [R, k] float32 -> [R, N] in ``x``'s dtype.  Products and sums in float32."""
    (rows, k), n = at.shape, x.shape[1]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        some = together()
        _combine[(triton.cdiv(rows, some), triton.cdiv(n, PIECE))](
            x.contiguous(), at.contiguous(), weights.contiguous(), out, rows, some, n, k, PIECE,
            upcast(), num_warps=WARPS, **FUSION,
        )  # fmt: skip
    return out


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launch of this file at ``sizes``."""
    signature = {"x": "*bf16", "at": "*i64", "weights": "*fp32", "out": "*bf16", "rows": "i32"}
    constants = {"ROWS": 1, "N": sizes.latent, "K": sizes.top_k, "PIECE": PIECE, "UPCAST": False}
    signature |= dict.fromkeys(constants, "constexpr")
    return [Compiled("combine", _combine, signature, constants, warps=WARPS, decode=True)]
