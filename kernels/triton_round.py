"""Rounding to a narrower type inside Triton kernels, the same in the interpreter and on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bfloat16_bits(x):
    """The 16 bits of float32 ``x`` rounded to bfloat16, to nearest, ties to even; NaN stays NaN.

    In integers, since the interpreter's own cast cuts the low bits off and makes zeros of numbers
    below 2**-126.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, bits, 0x7FC0)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """float32 ``x`` as ``DTYPE``, to nearest, ties to even; ``UPCAST``: by ``bfloat16_bits``."""
    if UPCAST and tl.bfloat16 == DTYPE:
        y = bfloat16_bits(x).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def rounded(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """``narrow``, widened to float32 again."""
    if UPCAST and tl.bfloat16 == DTYPE:
        y = (bfloat16_bits(x) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(DTYPE).to(tl.float32)
    return y
