"""kda_gate, l2_norm, gated_norm by the native library (native/seq_rows.h), float32 inside."""

from __future__ import annotations

import torch

from .c_function import CFunction, dense, dtype_of, threads_of, wide
from .workers import Workers

_GATE = CFunction("k3_kda_gate", "piqqqfpppp")
_UNIT = CFunction("k3_l2_norm", "pqqfpp")
_NORM = CFunction("k3_gated_norm", "piqqqfpppp")


def kda_gate(
    raw: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower: float | None,
    workers: Workers | None = None,
) -> torch.Tensor:
    """Log decay of each key channel, <= 0: ``raw`` [R, h*d] -> [R, h, d] float32.

    ``a_log`` [h], ``dt_bias`` [h*d].  With ``lower`` the bounded gate of K3,
    lower * sigmoid(exp(A) z); without it Kimi Linear's -exp(A) softplus(z); z = raw + dt_bias.
    """
    raw, a_log, dt_bias = dense(raw), wide(a_log), wide(dt_bias)
    assert lower is None or lower < 0, lower
    rows, heads = raw.shape[0], a_log.shape[0]
    dim = raw.shape[1] // heads
    assert dt_bias.numel() == raw.shape[1] == heads * dim, (raw.shape, dt_bias.shape)
    out = torch.empty(rows, heads, dim)
    _GATE(
        threads_of(workers), dtype_of(raw), rows, heads, dim, lower or 0.0, raw,
        a_log, dt_bias, out,
    )  # fmt: skip
    return out


def l2_norm(x: torch.Tensor, eps: float = 1e-6, workers: Workers | None = None) -> torch.Tensor:
    """``x`` [R, h, d] float32 / sqrt(sum(x^2) + eps): eps joins the sum, inside the root."""
    assert x.dtype == torch.float32, x.dtype
    x = dense(x)
    out, dim = torch.empty_like(x), x.shape[-1]
    _UNIT(threads_of(workers), x.numel() // dim, dim, eps, x, out)
    return out


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    workers: Workers | None = None,
) -> torch.Tensor:
    """RMS norm of each head, times ``weight`` [d] and sigmoid(``gate``): ``x`` [R, h, d] float32,
    ``gate`` [R, h*d] -> [R, h*d] in ``gate``'s dtype."""
    assert x.dtype == torch.float32, x.dtype
    x, gate, weight = dense(x), dense(gate), wide(weight)
    rows, heads, dim = x.shape
    assert gate.shape == (rows, heads * dim), (x.shape, gate.shape)
    assert weight.numel() == dim, (weight.shape, dim)
    out = torch.empty_like(gate)
    _NORM(
        threads_of(workers), dtype_of(gate), rows, heads, dim, eps, x,
        gate, weight, out,
    )  # fmt: skip
    return out
