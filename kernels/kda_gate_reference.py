"""kda_gate, l2_norm, gated_norm: the pointwise parts of a KDA layer, float32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .rows import by_tiles


def kda_gate(
    raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower: float | None
) -> torch.Tensor:
    """Log decay of each key channel, <= 0: ``raw`` [R, h*d] -> [R, h, d] float32.

    ``a_log`` [h], ``dt_bias`` [h*d].  With ``lower`` the bounded gate of K3,
    lower * sigmoid(exp(A) z); without it Kimi Linear's -exp(A) softplus(z); z = raw + dt_bias.
    """
    heads = a_log.shape[0]
    rate = torch.exp(a_log.float())[None, :, None]

    def tile(raw: torch.Tensor) -> torch.Tensor:
        z = (raw.float() + dt_bias.float()).view(raw.shape[0], heads, -1)
        if lower is None:
            return -rate * F.softplus(z, threshold=20.0)
        return lower * torch.sigmoid(rate * z)

    return by_tiles(tile, raw)


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x`` [R, h, d] / sqrt(sum(x^2) + eps): eps joins the sum, inside the root."""
    return by_tiles(lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps), x)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm of each head, times ``weight`` [d] and sigmoid(``gate``): ``x`` [R, h, d] float32,
    ``gate`` [R, h*d] -> [R, h*d] in ``gate``'s dtype."""

    def tile(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
        normed = (x * scale * weight.float()).view(gate.shape)
        return (normed * torch.sigmoid(gate.float())).to(gate.dtype)

    return by_tiles(tile, x, gate)
