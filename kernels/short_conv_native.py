"""short_conv by the native library (native/seq_rows.h): 16 channels at a time, all rows."""

from __future__ import annotations

import torch

from .c_function import CFunction, dense, dtype_of, threads_of, wide
from .workers import Workers

_CALL = CFunction("k3_short_conv", "piqqqppppp")


def short_conv(
    x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor, workers: Workers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [n, C] after ``tail`` [taps-1, C] (the inputs before it) with ``weight`` [C, taps].

    Returns (y [n, C] float32 of ``x``'s precision, tail after the last row).  The last tap
    multiplies the current token; float32 inside.
    """
    x, tail, weight = dense(x), dense(tail), wide(weight)
    rows, (channels, taps) = x.shape[0], weight.shape
    assert x.shape[1] == channels, (x.shape, weight.shape)
    assert tail.shape == (taps - 1, channels), (tail.shape, weight.shape)
    assert tail.dtype == x.dtype, (tail.dtype, x.dtype)
    out, moved = torch.empty(x.shape), torch.empty_like(tail)
    _CALL(
        threads_of(workers), dtype_of(x), rows, channels, taps, x, tail,
        weight, out, moved,
    )  # fmt: skip
    return out, moved
