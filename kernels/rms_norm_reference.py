"""rms_norm: root-mean-square normalisation, float32 inside (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch

from .rows import by_tiles


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` [R, N] -> [R, N] in ``x``'s dtype.  The cast comes before the multiplication by
    ``weight`` [N], as in the released model."""

    def tile(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)
        return (wide * scale).to(x.dtype) * weight.to(x.dtype)

    return by_tiles(tile, x)
