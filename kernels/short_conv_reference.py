"""short_conv: the causal depthwise convolution and SiLU in front of q, k and v of a KDA layer."""

from __future__ import annotations

import torch

from .rows import by_lanes


def short_conv(
    x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [n, C] after ``tail`` [taps-1, C] (the inputs before it) with ``weight`` [C, taps].

    Returns (y [n, C] float32 of ``x``'s precision, tail after the last row).  The last tap
    multiplies the current token; float32 inside.
    """
    n, taps = x.shape[0], weight.shape[1]
    window = torch.cat((tail, x), 0)
    wide = window.float()
    y = weight[:, 0] * wide[0:n]
    for j in range(1, taps):
        y = y + weight[:, j] * wide[j : j + n]
    y = (y * by_lanes(torch.sigmoid, y)).to(x.dtype).float()
    return y, window[n:].clone()
