"""situ, silu: the gated activations, float32 inside.

SiTU(a, b) = b1 tanh(a / b1) sigmoid(a) * b2 tanh(b / b2); without b2 the up branch has no cap.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .rows import by_tiles


class Activation(NamedTuple):
    """Which gated activation: ``name`` is ``situ`` or ``silu``; the betas are SiTU's."""

    name: str
    beta: float = 1.0
    linear_beta: float | None = None


def situ(
    gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None
) -> torch.Tensor:
    """``gate``, ``up`` [R, N] -> [R, N] in their dtype.  The sigmoid sees the raw gate."""

    def tile(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        a, b = gate.float(), up.float()
        capped = b if linear_beta is None else linear_beta * torch.tanh(b / linear_beta)
        return (beta * torch.tanh(a / beta) * torch.sigmoid(a) * capped).to(gate.dtype)

    return by_tiles(tile, gate, up)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(``gate``) * ``up``, [R, N] -> [R, N] in their dtype (the Kimi Linear activation)."""

    def tile(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        a = gate.float()
        return (a * torch.sigmoid(a) * up.float()).to(gate.dtype)

    return by_tiles(tile, gate, up)


def activate(gate: torch.Tensor, up: torch.Tensor, act: Activation) -> torch.Tensor:
    """The gated activation ``act`` of ``gate`` and ``up``, [R, N] -> [R, N]."""
    if act.name == "situ":
        return situ(gate, up, act.beta, act.linear_beta)
    return silu(gate, up)
