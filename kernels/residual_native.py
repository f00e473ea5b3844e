"""residual, output_gate by the native library (native/seq_rows.h); sums have torch's bits."""

from __future__ import annotations

import torch

from .c_function import CFunction, dense, dtype_of, threads_of
from .workers import Workers

_CALL = CFunction("k3_add", "piqqppppp")
_GATE = CFunction("k3_output_gate", "piqqppp")


def residual(
    base: torch.Tensor | None,
    y: torch.Tensor,
    more: torch.Tensor | None,
    out: torch.Tensor,
    peaks: bool,
    workers: Workers,
) -> torch.Tensor | None:
    """As ``residual.residual``."""
    given = [None if x is None else dense(x) for x in (base, y, more)]
    assert out.is_contiguous()
    assert all(x is None or (x.shape == out.shape and x.dtype == out.dtype) for x in given)
    found = torch.empty(out.shape[0]) if peaks else None
    _CALL(threads_of(workers), dtype_of(out), *out.shape, *given, out, found)
    return found


def output_gate(x: torch.Tensor, gate: torch.Tensor, workers: Workers) -> torch.Tensor:
    """As ``residual.output_gate``."""
    x, gate = dense(x), dense(gate)
    assert x.shape == gate.shape and x.dtype == torch.float32, (x.shape, gate.shape, x.dtype)
    out = torch.empty_like(gate)
    _GATE(threads_of(workers), dtype_of(gate), *gate.shape, x, gate, out)
    return out
