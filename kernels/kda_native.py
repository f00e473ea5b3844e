"""kda_step, kda_chunk by the native library (native/seq_kda.h); the formulas are in
kda_reference.py.

The chunk multiplies decays of single tokens, as the recurrence does, instead of taking exponents
of differences of running sums: pairs inside a sub-block of 16 tokens that way, pairs across
sub-blocks by the decays since the sub-block began and of whole sub-blocks.  No factor exceeds 1.
Numbers below 1e-38 count as zero.
"""

from __future__ import annotations

import torch

from . import native
from .c_function import CFunction, dense
from .workers import Workers

CHUNK = 64  #: tokens of a chunk at most; MOST of native/seq_kda.h
_STEP = CFunction("k3_kda_step", "pqqqppppppp")
_CHUNK = CFunction("k3_kda_chunk", "pqqqqppppppp")


def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    workers: Workers,
) -> torch.Tensor:
    """One token: ``q, k, g`` [h, dk], ``v`` [h, dv], ``beta`` [h], all float32.

    Changes ``state`` [h, dk, dv] in place; returns o [h, dv].
    """
    q, k, v, g, beta = _checked((q, k, v, g, beta), state, ())
    out = torch.empty_like(v)
    _STEP(
        native.pool(workers), *state.shape, q, k, v, g,
        beta, state, out,
    )  # fmt: skip
    return out


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    workers: Workers,
) -> torch.Tensor:
    """One chunk of n <= 64 tokens: ``q, k, g`` [n, h, dk], ``v`` [n, h, dv], ``beta`` [n, h], all
    float32.  Changes ``state`` [h, dk, dv] in place; returns o [n, h, dv]."""
    rows = q.shape[0]
    assert rows <= CHUNK, rows
    q, k, v, g, beta = _checked((q, k, v, g, beta), state, (rows,))
    out = torch.empty_like(v)
    _CHUNK(
        native.pool(workers), rows, *state.shape, q, k, v,
        g, beta, state, out,
    )  # fmt: skip
    return out


def _checked(
    args: tuple[torch.Tensor, ...], state: torch.Tensor, lead: tuple[int, ...]
) -> list[torch.Tensor]:
    """q, k, v, g, beta as they can be handed over."""
    heads, dk, dv = state.shape
    widths = ((heads, dk), (heads, dk), (heads, dv), (heads, dk), (heads,))
    for x, width in zip(args, widths, strict=True):
        assert x.dtype == torch.float32, x.dtype
        assert x.shape == (*lead, *width), (x.shape, state.shape)
    assert state.dtype == torch.float32, state.dtype
    assert state.is_contiguous()
    return [dense(x) for x in args]
