"""short_conv on a GPU: the causal depthwise convolution and SiLU of a KDA layer.

Definition: ``short_conv_reference``.  A number depends on its channel's last inputs alone, and the
taps are added in their order, so that neither the other rows nor the width change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kda_gate_triton import sigmoid
from .triton_round import rounded
from .triton_run import FUSION, Compiled, Sizes

ROWS, CHANNELS = 16, 64  #: of a program; numbers never meet, so they change no bit
OPTIONS = {"num_warps": 4, **FUSION}


@triton.jit
def input_at(x, tail, t, channel, mask, wide, TAPS: tl.constexpr):
    """Inputs of token ``t`` as float32; those before token 0 are the ``tail``."""
    past = tl.load(tail + (t + (TAPS - 1)) * wide + channel, mask=mask & (t < 0), other=0.0)
    now = tl.load(x + t * wide + channel, mask=mask & (t >= 0), other=0.0)
    return tl.where(t < 0, past, now).to(tl.float32)


@triton.jit
def convolved(x, tail, weight, t, channel, mask, wide, TAPS: tl.constexpr):
    """SiLU of the convolution at token ``t``, rounded to ``x``'s dtype, as float32.

    ``t`` (int64) and ``channel`` broadcast to the shape of ``mask``.
    """
    y = tl.load(weight + channel * TAPS, mask=mask, other=0.0) * input_at(
        x, tail, t - (TAPS - 1), channel, mask, wide, TAPS
    )
    for j in tl.static_range(1, TAPS):
        w = tl.load(weight + channel * TAPS + j, mask=mask, other=0.0)
        y = y + w * input_at(x, tail, t - (TAPS - 1) + j, channel, mask, wide, TAPS)
    return rounded(y * sigmoid(y), x.dtype.element_ty, True)


@triton.jit
def short_conv_kernel(
    x, tail, weight, out, moved, rows, wide, TAPS: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A program for ROWS rows of C channels; TAPS-1 "rows" behind the last write the new tail."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)[None, :]
    inside = channel < wide
    mask = inside & (t < rows)
    y = convolved(x, tail, weight, t, channel, mask, wide, TAPS)
    tl.store(out + t * wide + channel, y, mask=mask)
    mask = inside & (t >= rows) & (t < rows + (TAPS - 1))
    kept = input_at(x, tail, t - (TAPS - 1), channel, mask, wide, TAPS)
    kept = kept.to(moved.dtype.element_ty)  # exact: it came from there
    tl.store(moved + (t - rows) * wide + channel, kept, mask=mask)


def short_conv(
    x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [n, C] after ``tail`` [taps-1, C] with ``weight`` [C, taps] float32 -> y [n, C] float32
    of ``x``'s precision, and the tail after the last row."""
    (n, wide), taps = x.shape, weight.shape[1]
    out = torch.empty(n, wide, device=x.device)
    moved = torch.empty_like(tail, memory_format=torch.contiguous_format)
    short_conv_kernel[(triton.cdiv(n + taps - 1, ROWS), triton.cdiv(wide, CHANNELS))](
        x.contiguous(), tail.contiguous(), weight.contiguous(), out, moved, n, wide, taps,
        CHANNELS, ROWS, **OPTIONS,
    )  # fmt: skip
    return out, moved


def compiled(sizes: Sizes) -> list[Compiled]:
    """The one launch, at a model's sizes; it runs for each token and in prompts."""
    signature = {"x": "*bf16", "tail": "*bf16", "weight": "*fp32", "out": "*fp32", "moved": "*bf16"}
    signature |= {"rows": "i32", "wide": "i32"}
    constants = {"TAPS": sizes.taps, "C": CHANNELS, "ROWS": ROWS}
    return [Compiled("short_conv", short_conv_kernel, signature, constants, 4, 1, True)]
