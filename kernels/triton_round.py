"""Rounding to a narrower type inside Triton kernels, the same in the interpreter and on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """float32 ``x`` as ``DTYPE``, to nearest, ties to even.

    ``UPCAST``: bfloat16 is rounded in integers, since the interpreter's own cast cuts the low bits
    off; NaN stays NaN.
    """
    if UPCAST and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, even, 0x7FC00000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """``narrow``, widened to float32 again."""
    return narrow(x, DTYPE, UPCAST).to(tl.float32)
