"""Quantisers: weights [N, K] to int8 or MXFP4 codes and scales (formats: int8.py, mxfp4.py).

Every group of columns is rounded by itself, in steps that are exact or rounded once, so the codes
of a row depend on nothing but that row: any split into blocks, any number of threads gives the
same bytes.

* int8: the scale of 64 columns is their largest magnitude / 127, rounded UP to bfloat16 (so that
  no code leaves -127..127), and at least 2**-126; a code is w / scale, to nearest even.
* MXFP4: the exponent of 32 columns is the smallest e for which no magnitude exceeds 7 * 2**e, and
  at least -124; a code is w / 2**e, to the nearest of E2M1, ties to even.  Up to 7 the nearest is
  6; beyond it 8 would be nearer, so the group takes the next exponent.  (The OCP rule,
  floor(log2(largest)) - 2, lets up to 8 saturate to 6.  On the embedded model it does 11 % more
  damage than this one; the better of both exponents by squared error does 1 % less, at twice the
  work.  See LOG.md.)
A group of zeros becomes codes of 0, which decode to 0.
"""

from __future__ import annotations

import torch

from ..config import QUANTISE_CHUNK as CHUNK
from . import int8 as int8_format
from . import mxfp4 as mxfp4_format
from .workers import Workers

_SMALLEST = 2.0**-126
_LOWEST = 5  #: biased by 127; two exponents lower, a zero's bits would look like a number near 1/2
_ROUND_UP = 0xFFFF  #: added to float32 bits, carries into the upper half unless that is exact


def int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``w`` [N, K] of a floating dtype, K a multiple of 64 -> codes [N, K] int8, scales [N, K/64]
    bfloat16.  Raises ``ValueError`` where a number is NaN or infinite."""
    w, bits, mantissa = _bits(w)
    _, largest = _magnitudes(bits, int8_format.GROUP, mantissa)
    scale = scale_of(largest.int().bitwise_left_shift_(23 - mantissa).view(torch.float32), 127)
    x = torch.empty(w.shape).copy_(w)
    x.view(*scale.shape, -1).div_(scale[:, :, None]).round_()
    return x.to(torch.int8), scale.bfloat16()


def mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``w`` [N, K] of a floating dtype, K a multiple of 32 -> packed codes [N, K/2] uint8, scales
    [N, K/32] uint8.  Raises ``ValueError`` where a number is NaN or infinite."""
    w, bits, mantissa = _bits(w)
    x, largest = _magnitudes(bits, mxfp4_format.GROUP, mantissa)
    # Beyond 1.75 * 2**n, that is 7 * 2**(n - 2), the sum carries into the exponent.
    top = largest.add_((1 << mantissa - 2) - 1).bitwise_right_shift_(mantissa)
    exponent = top.clamp_(min=_LOWEST).sub_(2)
    x.sub_((exponent << mantissa)[:, :, None])  # 0 is the number 2**e
    code = _e2m1(x.view(w.shape), mantissa)
    code |= (bits >> mantissa + 5).bitwise_and_(8)
    pair = code.to(torch.int8).view(torch.int16)  # the byte of the even column is the low one
    return pair.bitwise_or(pair >> 4).to(torch.uint8), exponent.to(torch.uint8)


def scale_of(largest: torch.Tensor, top: float) -> torch.Tensor:
    """``largest``, magnitudes in float32 that are not needed any more, over ``top``: rounded up to
    what bfloat16 can hold, at least 2**-126; NaN and infinity stay."""
    scale = largest.div_(top)
    scale.view(torch.int32).add_(_ROUND_UP).bitwise_and_(~_ROUND_UP)
    return scale.clamp_(min=_SMALLEST)


def _bits(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """``w`` in bfloat16 or float32, its bits as integers, and the bits of a mantissa."""
    if w.dtype == torch.bfloat16:
        return w, w.view(torch.int16), 7
    w = w.float()
    return w, w.view(torch.int32), 23


def _magnitudes(bits: torch.Tensor, group: int, mantissa: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits without their sign, which are ordered as the magnitudes are: all of them as [N, K/group,
    group], and the largest of each group."""
    n, k = bits.shape
    assert k % group == 0, (k, group)
    x = bits.bitwise_and((1 << mantissa + 8) - 1).view(n, k // group, group)
    largest = x.amax(2)
    if largest.numel() and int(largest.max()) >> mantissa == 255:
        raise ValueError("a number is NaN or infinite")
    return x, largest


def _e2m1(x: torch.Tensor, mantissa: int) -> torch.Tensor:
    """Codes of magnitudes of at most 7, given as the bits of a float less those of 1.

    From 1 on E2M1 is a float with one bit of mantissa, so the bits are rounded there and that is
    the code; 1/2 and 0 have none, and are told by their limits: beyond 1/4 and from 3/4 on."""
    kept = mantissa - 1  # bits to be rounded away
    code = (x >> kept).bitwise_and_(1).add_(x).add_((1 << kept - 1) - 1)
    code.bitwise_right_shift_(kept).add_(2)
    small = (x + (2 << mantissa)).clamp_(0, 1)
    small += x.add_((1 << kept) + 1).clamp_(0, 1)
    return torch.maximum(code, small, out=code).clamp_(max=7)


_QUANTISERS = {"int8": int8, "mxfp4": mxfp4}


def quantize_into(
    w: torch.Tensor,
    precision: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    workers: Workers | None = None,
) -> None:
    """Quantise ``w`` [N, K] to ``codes`` and ``scale``, some rows at a time, on ``workers`` if
    there are any.  Raises ``ValueError`` where a number is NaN or infinite."""
    rows = max(1, CHUNK // w.shape[1])

    def task(i: int) -> None:
        some = slice(i * rows, (i + 1) * rows)
        made, factor = _QUANTISERS[precision](w[some])
        codes[some] = made
        scale[some] = factor

    count = -(-w.shape[0] // rows)
    if workers is not None:
        workers.map(task, count)
        return
    for i in range(count):
        task(i)
