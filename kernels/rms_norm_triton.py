"""rms_norm as a Triton kernel: a program for each row, so that no row sees another.

The interpreter needs a millisecond for a program, so there one takes ``TOGETHER`` rows; sums run
along a row either way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_round import narrow, rounded
from .triton_run import FUSION, Compiled, Sizes, upcast

TOGETHER = 32


@triton.jit
def inverse_root_mean(x, eps, N: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each row [R, 1]; every step correctly rounded, unlike the
    hardware's rsqrt."""
    mean = tl.div_rn(tl.sum(x * x, 1)[:, None], tl.full([], N, tl.float32))
    return tl.div_rn(tl.full([], 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, weight, out, eps, rows,
    ROWS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    real = (row < rows) & (at < N)
    TYPE: tl.constexpr = out.dtype.element_ty
    wide = tl.load(x + row * N + at, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(weight + at, mask=at < N, other=0.0).to(tl.float32)
    factor = rounded(factor, TYPE, UPCAST)
    normed = rounded(wide * inverse_root_mean(wide, eps, N), TYPE, UPCAST)
    tl.store(out + row * N + at, narrow(normed * factor, TYPE, UPCAST), mask=real)


def warps_of(width: int) -> int:
    """Warps for a row of ``width`` numbers: a thread holds at most 32 of them."""
    return min(16, max(1, int(triton.next_power_of_2(width)) // 512))


def together() -> int:
    """Rows of one program."""
    return TOGETHER if upcast() else 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` [R, N] -> [R, N] in ``x``'s dtype.  The cast comes before the multiplication by
    ``weight`` [N], as in the released model."""
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        some = together()
        _rms_norm[(triton.cdiv(rows, some),)](
            x.contiguous(), weight.contiguous(), out, eps, rows, some, n, triton.next_power_of_2(n),
            upcast(), num_warps=warps_of(n), **FUSION,
        )  # fmt: skip
    return out


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches of this file at ``sizes``: each width that is normed."""
    signature = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32", "rows": "i32"}
    signature |= dict.fromkeys(("ROWS", "N", "BLOCK", "UPCAST"), "constexpr")
    launches = []
    for n in sorted({sizes.hidden, sizes.latent, sizes.q_lora, sizes.kv_lora}):
        given = {"ROWS": 1, "N": n, "BLOCK": triton.next_power_of_2(n), "UPCAST": False}
        name, warps = f"rms_norm_{n}", warps_of(n)
        launches.append(Compiled(name, _rms_norm, signature, given, warps=warps, decode=True))
    return launches
