"""linear: y = x W^T in fixed tiles, so that a row's bits never depend on its companions.

torch's matrix products give a row the same bits only for one shape and alignment.  Here every
product has the shape [64, K] x [K, n] where n depends on the weight alone; rows are cut into tiles
of 64, the last one filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from ..config import ROW_TILE, tile_rows
from .rows import fill_up
from .workers import Workers

K_BLOCK = 32  #: matrix units of CPUs read bfloat16 rows in blocks of this many numbers


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


class Bundle:
    """Weights [N_i, K] that are multiplied by the same rows, for `linears`."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)


def linear(x: torch.Tensor, weight: Weight, workers: Workers, decode: bool = False) -> torch.Tensor:
    """``x`` [R, K] times ``weight`` [N, K] -> [R, N], in ``x``'s dtype with float32 accumulation.

    ``decode`` says that the rows are decode tokens: an implementation may treat these another way
    than rows of a prompt.  This one does not.
    """
    n, k = weight.shape
    rows = x.shape[0]
    assert x.shape[1] == k, (x.shape, weight.shape)
    x = fill_up(x)
    step = tile_rows(n, k)
    # Where a row ends inside a block, the block goes on into the next row, times zero weights:
    # an infinity there would make this row NaN.  (No size of K3 is affected.)
    spare = 0 if x.dtype == torch.float32 else -k % K_BLOCK
    if spare:
        x = F.pad(x, (0, spare))
    out = torch.empty(x.shape[0], n, dtype=x.dtype)

    def task(i: int) -> None:
        begin, end = i * step, min((i + 1) * step, n)
        tile = weight.rows(begin, end, x.dtype, workers)
        if spare:
            tile = F.pad(tile, (0, spare))
        for r in range(0, x.shape[0], ROW_TILE):
            out[r : r + ROW_TILE, begin:end] = F.linear(x[r : r + ROW_TILE], tile)

    workers.map(task, -(-n // step))
    return out[:rows]
