"""combine by the native library (native/seq_rows.h); the bits are those of the reference."""

from __future__ import annotations

import torch

from . import native
from .c_function import CFunction, dense, dtype_of
from .workers import Workers

_CALL = CFunction("k3_combine", "piqqqpppp")


def combine(
    x: torch.Tensor, at: torch.Tensor, weights: torch.Tensor, workers: Workers
) -> torch.Tensor:
    """``x`` [M, N]: results of experts; row r takes its rows ``at`` [R, k] int64, times
    ``weights`` [R, k] float32 -> [R, N] in ``x``'s dtype.  Products and sums in float32."""
    rows, count = at.shape
    assert at.dtype == torch.int64 and weights.dtype == torch.float32, (at.dtype, weights.dtype)
    assert weights.shape == at.shape, (weights.shape, at.shape)
    x, at, weights = dense(x), dense(at), dense(weights)
    out = x.new_empty(rows, x.shape[1])
    _CALL(
        native.pool(workers), dtype_of(x), rows, count, x.shape[1], x, at, weights, out,
    )  # fmt: skip
    return out
