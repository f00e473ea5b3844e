"""int8: how the bytes of a quantised trunk weight become numbers.

A weight row of K numbers is K signed bytes and K/64 scales in bfloat16.  Scale s belongs to 64
consecutive columns, and a weight is ``q * s``.  Codes lie in -127..127; -128 is not used.  A code
has 7 bits and a scale 8, so every product is exact in float32; ``rows`` rounds it once, to nearest
even, where a narrower dtype is wanted.
"""

from __future__ import annotations

import torch

from .workers import Workers

GROUP = 64  #: columns that share a scale


def decode(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The definition: ``q`` [N, K], ``scale`` [N, K/64, rounded up] -> [N, K] float32."""
    return q.float() * scale.float().repeat_interleave(GROUP, dim=1)[:, : q.shape[1]]


class Int8Weight:
    """A weight [N, K] of int8 codes that decodes rows on demand; its bytes may lie at any
    address."""

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.q, self.scale = q, scale
        self.shape = tuple(q.shape)

    def rows(self, begin: int, end: int, dtype: torch.dtype, workers: Workers) -> torch.Tensor:
        """Rows ``begin:end`` as [n, K] of ``dtype``, in this thread's scratch (valid until the
        next call)."""
        n, k = end - begin, self.shape[1]
        tile = workers.scratch("weight_tile", (n, k), dtype)
        tile.copy_(self.q[begin:end])
        tile.view(n, k // GROUP, GROUP).mul_(self.scale[begin:end].to(dtype)[:, :, None])
        return tile
