"""residual, output_gate: what a sublayer gives is gated and joins the running sum.  By the native
library: ``residual_native``."""

from __future__ import annotations

import torch

from .rows import by_lanes
from .workers import Workers


def residual(
    base: torch.Tensor | None,
    y: torch.Tensor,
    more: torch.Tensor | None,
    out: torch.Tensor,
    peaks: bool,
    workers: Workers,
) -> torch.Tensor | None:
    """``out`` = ``base`` + (``y`` + ``more``), each sum rounded to their dtype; all [R, N].
    ``out`` may be ``base``; ``y`` is used up.

    With ``peaks`` the largest magnitude of each row of ``out``, [R] float32: finite only if all of
    the row is."""
    if more is not None:
        y = y.add_(more)
    if base is None:
        out.copy_(y)
    else:
        torch.add(base, y, out=out)
    return torch.maximum(out.amax(1), -out.amin(1)).float() if peaks else None


def output_gate(x: torch.Tensor, gate: torch.Tensor, workers: Workers) -> torch.Tensor:
    """``x`` times sigmoid(``gate``), in float32 -> [R, N] in ``gate``'s dtype: ``x`` float32, used
    up, ``gate``, both [R, N]."""
    return x.mul_(by_lanes(torch.sigmoid, gate.float())).to(gate.dtype)
