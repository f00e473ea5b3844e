"""situ, silu by the native library (native/seq_rows.h), float32 inside.

SiTU(a, b) = b1 tanh(a / b1) sigmoid(a) * b2 tanh(b / b2); without b2 the up branch has no cap.
"""

from __future__ import annotations

import torch

from .c_function import CFunction, dense, dtype_of, threads_of
from .workers import Workers

_SITU = CFunction("k3_situ", "piqqffppp")
_SILU = CFunction("k3_silu", "piqqppp")


def situ(
    gate: torch.Tensor,
    up: torch.Tensor,
    beta: float,
    linear_beta: float | None,
    workers: Workers | None = None,
) -> torch.Tensor:
    """``gate``, ``up`` [R, N] -> [R, N] in their dtype.  The sigmoid sees the raw gate."""
    gate, up = dense(gate), dense(up)
    assert gate.shape == up.shape, (gate.shape, up.shape)
    out = torch.empty_like(gate)
    _SITU(
        threads_of(workers), dtype_of(gate), *gate.shape, beta, linear_beta or 0.0,
        gate, up, out,
    )  # fmt: skip
    return out


def silu(gate: torch.Tensor, up: torch.Tensor, workers: Workers | None = None) -> torch.Tensor:
    """silu(``gate``) * ``up``, [R, N] -> [R, N] in their dtype (the Kimi Linear activation)."""
    gate, up = dense(gate), dense(up)
    assert gate.shape == up.shape, (gate.shape, up.shape)
    out = torch.empty_like(gate)
    _SILU(
        threads_of(workers), dtype_of(gate), *gate.shape,
        gate, up, out,
    )  # fmt: skip
    return out
