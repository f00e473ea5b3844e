"""MXFP4: how the bytes of a routed expert become numbers.

A weight row of K numbers is K/2 packed bytes and K/32 scale bytes.
* Byte j holds column 2j in its low nibble and column 2j+1 in its high nibble.
* A nibble is E2M1: bit 3 is the sign, the low three bits are 0, 0.5, 1, 1.5, 2, 3, 4, 6.
* Scale byte s belongs to 32 consecutive columns and multiplies them by 2**(s - 127) (E8M0); 255
  is NaN in that format and is refused.
Every product is exact in bfloat16: one mantissa bit times a power of two.

Decoding goes through a table of all 65,536 byte pairs: one look-up gives four weights, which was
measured seven times faster than bit arithmetic (see LOG.md).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .workers import Workers

GROUP = 32  #: columns that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_NAN = 255


@lru_cache(maxsize=1)
def _pair_table() -> torch.Tensor:
    """[65536] int64: the four bfloat16 numbers of each little-endian pair of packed bytes."""
    codes = torch.arange(16)
    value = torch.tensor(E2M1)[codes & 7]
    value = torch.where(codes >= 8, -value, value).bfloat16()
    pair = torch.arange(65536)
    nibbles = torch.stack([(pair >> shift) & 15 for shift in (0, 4, 8, 12)], -1)
    return value[nibbles].contiguous().view(torch.int64).view(-1)


@lru_cache(maxsize=1)
def _scale_table() -> torch.Tensor:
    """[256] bfloat16: 2**(s - 127); entry 255 is NaN."""
    table = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
    table[0] = 2.0**-127  # ldexp would go through a flushed subnormal on some builds
    table[SCALE_NAN] = float("nan")
    return table.bfloat16()


def decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The definition: ``packed`` [N, K/2] uint8, ``scale`` [N, K/32] uint8 -> [N, K] bfloat16."""
    low, high = packed & 15, packed >> 4
    code = torch.stack((low, high), -1).reshape(packed.shape[0], -1).long()
    value = torch.tensor(E2M1)[code & 7]
    value = torch.where(code >= 8, -value, value)
    exponent = scale.long().repeat_interleave(GROUP, dim=1) - 127
    return torch.ldexp(value.double(), exponent).bfloat16()


class Mxfp4Weight:
    """A packed weight [N, K] that decodes rows on demand; its bytes may lie at any address."""

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor) -> None:
        self.packed, self.scale = packed, scale
        self.shape = (packed.shape[0], packed.shape[1] * 2)

    def rows(self, begin: int, end: int, dtype: torch.dtype, workers: Workers) -> torch.Tensor:
        """Rows ``begin:end`` as [n, K] of ``dtype``, in this thread's scratch (valid until the
        next call)."""
        n, k = end - begin, self.shape[1]
        raw = workers.scratch("mxfp4_raw", (n, k // 2), torch.uint8)
        raw.copy_(self.packed[begin:end])
        index = workers.scratch("mxfp4_index", (n * k // 4,), torch.int32)
        index.copy_(raw.view(-1).view(torch.uint16))
        quad = workers.scratch("mxfp4_quad", (n * k // 4,), torch.int64)
        torch.index_select(_pair_table(), 0, index, out=quad)
        weight = quad.view(torch.bfloat16).view(n, k // GROUP, GROUP)
        factor = torch.index_select(_scale_table(), 0, self.scale[begin:end].reshape(-1).int())
        weight.mul_(factor.view(n, k // GROUP, 1))
        weight = weight.view(n, k)
        if dtype == torch.bfloat16:
            return weight
        wide = workers.scratch("weight_tile", (n, k), dtype)
        return wide.copy_(weight)
