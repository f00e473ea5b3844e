"""rms_norm by the native library (native/seq_rows.h): float32 inside, 64 partial sums a row."""

from __future__ import annotations

import torch

from .c_function import CFunction, dense, dtype_of, narrow, threads_of
from .workers import Workers

_CALL = CFunction("k3_rms_norm", "piiqqfppp")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, workers: Workers | None = None
) -> torch.Tensor:
    """``x`` [R, N] -> [R, N] in ``x``'s dtype.  The cast comes before the multiplication by
    ``weight`` [N], as in the released model."""
    x, weight = dense(x), narrow(weight)
    rows, width = x.shape
    out = torch.empty_like(x)
    _CALL(
        threads_of(workers), dtype_of(x), dtype_of(weight), rows, width, eps, x,
        weight, out,
    )  # fmt: skip
    return out
