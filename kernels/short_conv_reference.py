"""short_conv: the causal depthwise convolution and SiLU in front of q, k and v of a KDA layer."""

from __future__ import annotations

import torch


def short_conv(
    x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [n, C] after ``tail`` [taps-1, C] (the inputs before it) with ``weight`` [C, taps].

    Returns (y [n, C] float32 of ``x``'s precision, tail after the first ``valid`` rows).  The
    last tap multiplies the current token; float32 inside, rows beyond ``valid`` are padding.
    """
    taps = weight.shape[1]
    window = torch.cat((tail, x), 0)
    wide = window.float()
    n = x.shape[0]
    y = weight[:, 0] * wide[0:n]
    for j in range(1, taps):
        y = y + weight[:, j] * wide[j : j + n]
    y = (y * torch.sigmoid(y)).to(x.dtype).float()
    return y, window[valid : valid + taps - 1].clone()
