"""linear: y = x W^T in fixed tiles, so that a row's bits never depend on its companions.

torch's matrix products give a row the same bits only for one shape and alignment.  Here every
product has the shape [64, K] x [K, n] where n depends on the weight alone; rows come in tiles of
64, padded with zeros by the caller.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from .workers import Workers

ROW_TILE = 64
K_BLOCK = 32  #: matrix units of CPUs read bfloat16 rows in blocks of this many numbers
TILE_ELEMENTS = 1 << 20  #: weights of one tile: 2 MB in bfloat16, about one core's second cache


class Weight(Protocol):
    """A weight [N, K] that hands out rows in a wanted dtype, 64-byte aligned."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, begin: int, end: int, dtype: torch.dtype, workers: Workers) -> torch.Tensor: ...


class DenseWeight:
    """A weight stored as numbers [N, K] (bfloat16, float16 or float32).

    ``aligned`` says that the tensor lies at a 64-byte boundary; otherwise tiles are copied, since
    alignment may change the bits of a product.
    """

    def __init__(self, tensor: torch.Tensor, aligned: bool = True) -> None:
        self.tensor, self.aligned = tensor, aligned
        self.shape = tuple(tensor.shape)

    def rows(self, begin: int, end: int, dtype: torch.dtype, workers: Workers) -> torch.Tensor:
        part = self.tensor[begin:end]
        if part.dtype == dtype and self.aligned:
            return part
        return workers.scratch("weight_tile", (end - begin, self.shape[1]), dtype).copy_(part)


def tile_rows(n: int, k: int) -> int:
    """Weight rows of a tile: a multiple of 32, about ``TILE_ELEMENTS`` numbers."""
    return min(n, max(32, TILE_ELEMENTS // k // 32 * 32))


def linear(x: torch.Tensor, weight: Weight, workers: Workers) -> torch.Tensor:
    """``x`` [R, K] (R a multiple of 64) times ``weight`` [N, K] -> [R, N], in ``x``'s dtype with
    float32 accumulation."""
    n, k = weight.shape
    rows = x.shape[0]
    assert rows % ROW_TILE == 0, x.shape
    assert x.shape[1] == k, (x.shape, weight.shape)
    assert x.is_contiguous()
    step = tile_rows(n, k)
    # Where a row ends inside a block, the block goes on into the next row, times zero weights:
    # an infinity there would make this row NaN.  (No size of K3 is affected.)
    spare = 0 if x.dtype == torch.float32 else -k % K_BLOCK
    if spare:
        x = F.pad(x, (0, spare))
    out = torch.empty(rows, n, dtype=x.dtype)

    def task(i: int) -> None:
        begin, end = i * step, min((i + 1) * step, n)
        tile = weight.rows(begin, end, x.dtype, workers)
        if spare:
            tile = F.pad(tile, (0, spare))
        for r in range(0, rows, ROW_TILE):
            out[r : r + ROW_TILE, begin:end] = F.linear(x[r : r + ROW_TILE], tile)

    workers.map(task, -(-n // step))
    return out
