"""kda_gate, l2_norm, gated_norm on a GPU, and the pointwise steps that a KDA layer's kernels share.

Definition: ``kda_gate_reference``.  One program for one head of some rows; every sum runs over one
head's channels of one row, so that a row's bits know nothing of other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .triton_round import narrow
from .triton_run import FUSION, Compiled, Sizes

ROWS = 16  #: of a program; whole rows, so it changes no bit
OPTIONS = {"num_warps": 4, **FUSION}


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(z, rate, lower, BOUNDED: tl.constexpr):
    """lower * sigmoid(rate z), or without a bound -rate * softplus(z)."""
    if BOUNDED:
        return lower * sigmoid(rate * z)
    # log(1 + u) of a small u: what 1 + u lost of u is put back by the factor u / (w - 1)
    u = tl.exp(tl.where(z > 20.0, 20.0, z))
    w = 1.0 + u
    soft = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return -rate * tl.where(z > 20.0, z, soft)


@triton.jit
def unit(x, eps, AXIS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=AXIS, keep_dims=True) + eps)


@triton.jit
def gated(x, gate, weight, eps, DIM: tl.constexpr, AXIS: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, axis=AXIS, keep_dims=True) / DIM + eps)
    return x * scale * weight * sigmoid(gate)


@triton.jit
def tile_of(rows, heads, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """A program's head, channels [1, D], places of ROWS rows of it [ROWS, D], and which exist."""
    head, i = tl.program_id(1).to(tl.int64), tl.arange(0, D)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return head, i, (row * heads + head) * DIM + i, (row < rows) & (i < DIM)


@triton.jit
def kda_gate_kernel(
    raw, a_log, dt_bias, out, lower, rows, heads, BOUNDED: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, i, at, mask = tile_of(rows, heads, DIM, D, ROWS)
    bias = tl.load(dt_bias + head * DIM + i, mask=i < DIM, other=0.0)
    z = tl.load(raw + at, mask=mask, other=0.0).to(tl.float32) + bias
    rate = tl.exp(tl.load(a_log + head))
    tl.store(out + at, log_decay(z, rate, lower, BOUNDED), mask=mask)


@triton.jit
def l2_norm_kernel(
    x, out, eps, rows, heads, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    _, _, at, mask = tile_of(rows, heads, DIM, D, ROWS)
    tl.store(out + at, unit(tl.load(x + at, mask=mask, other=0.0), eps, 1), mask=mask)


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out, eps, rows, heads, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    _, i, at, mask = tile_of(rows, heads, DIM, D, ROWS)
    row = tl.load(x + at, mask=mask, other=0.0)
    factor = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + i, mask=i < DIM, other=0.0)
    kept: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, narrow(gated(row, factor, scale, eps, DIM, 1), kept, True), mask=mask)


def _grid(rows: int, heads: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS), heads


def kda_gate(
    raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower: float | None
) -> torch.Tensor:
    """Log decay of each key channel, <= 0: ``raw`` [R, h*d], ``a_log`` [h], ``dt_bias`` [h*d] ->
    [R, h, d] float32 (arXiv 2510.26692; bounded by ``lower`` in K3)."""
    heads = a_log.shape[0]
    dim = raw.shape[1] // heads
    out = torch.empty(raw.shape[0], heads, dim, device=raw.device)
    kda_gate_kernel[_grid(raw.shape[0], heads)](
        raw.contiguous(), a_log.float().contiguous(), dt_bias.float().contiguous(), out,
        lower or 0.0, raw.shape[0], heads, lower is not None, dim, triton.next_power_of_2(dim),
        ROWS, **OPTIONS,
    )  # fmt: skip
    return out


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x`` [R, h, d] float32 / sqrt(sum(x^2) + eps) for each head of each row."""
    rows, heads, dim = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    l2_norm_kernel[_grid(rows, heads)](
        x.contiguous(), out, eps, rows, heads, dim, triton.next_power_of_2(dim), ROWS, **OPTIONS
    )
    return out


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm of each head of ``x`` [R, h, d] float32, times ``weight`` [d] and
    sigmoid(``gate`` [R, h*d]) -> [R, h*d] in ``gate``'s dtype."""
    rows, heads, dim = x.shape
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gated_norm_kernel[_grid(rows, heads)](
        x.contiguous(), gate.contiguous(), weight.float().contiguous(), out, eps, rows, heads,
        dim, triton.next_power_of_2(dim), ROWS, **OPTIONS,
    )  # fmt: skip
    return out


def compiled(sizes: Sizes) -> list[Compiled]:
    """Every launch at a model's sizes; all of these run for each token and in prompts."""
    dim = {"DIM": sizes.kda_dim, "D": triton.next_power_of_2(sizes.kda_dim), "ROWS": ROWS}

    def launch(name: str, kernel: Any, types: str, **constants: Any) -> Compiled:
        arguments = [name for name in kernel.arg_names if not name.isupper()]
        signature = dict(zip(arguments, types.split(), strict=True))
        return Compiled(name, kernel, signature, {**constants, **dim}, 4, 1, True)

    return [
        launch("kda_gate", kda_gate_kernel, "*bf16 *fp32 *fp32 *fp32 fp32 i32 i32", BOUNDED=True),
        launch("l2_norm", l2_norm_kernel, "*fp32 *fp32 fp32 i32 i32"),
        launch("gated_norm", gated_norm_kernel, "*fp32 *bf16 *fp32 *bf16 fp32 i32 i32"),
    ]
