"""combine: the weighted sum of what a row's experts gave, in rising order of their numbers."""

from __future__ import annotations

import torch

from ..config import ROW_TILE
from .workers import Workers


def combine(
    x: torch.Tensor, at: torch.Tensor, weights: torch.Tensor, workers: Workers
) -> torch.Tensor:
    """``x`` [M, N]: results of experts; row r takes its rows ``at`` [R, k] int64, times
    ``weights`` [R, k] float32 -> [R, N] in ``x``'s dtype.  Products and sums in float32."""
    y = x.new_empty(at.shape[0], x.shape[1])
    for begin in range(0, at.shape[0], ROW_TILE):  # bounds the float32 copies
        rows = slice(begin, begin + ROW_TILE)
        total = torch.zeros(at[rows].shape[0], x.shape[1])
        for j in range(at.shape[1]):
            total += x[at[rows, j]].float() * weights[rows, j, None]
        y[rows] = total
    return y
