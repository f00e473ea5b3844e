"""situ, silu: the gated activations, float32 inside.

SiTU(a, b) = b1 tanh(a / b1) sigmoid(a) * b2 tanh(b / b2); without b2 the up branch has no cap.
"""

from __future__ import annotations

import torch


def situ(
    gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None
) -> torch.Tensor:
    """``gate``, ``up`` [R, N] -> [R, N] in their dtype.  The sigmoid sees the raw gate."""
    a, b = gate.float(), up.float()
    capped = b if linear_beta is None else linear_beta * torch.tanh(b / linear_beta)
    return (beta * torch.tanh(a / beta) * torch.sigmoid(a) * capped).to(gate.dtype)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(``gate``) * ``up``, [R, N] -> [R, N] in their dtype (the Kimi Linear activation)."""
    a = gate.float()
    return (a * torch.sigmoid(a) * up.float()).to(gate.dtype)
