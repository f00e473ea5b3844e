"""mixer: all of a KDA layer between its projections, for the rows of one sequence.

``composed`` puts it together from the operators short_conv, kda_gate (with l2_norm, gated_norm) and
kda.  Where all of these are native ones, ``mixer_native`` does the same in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .rows import by_lanes
from .workers import Workers

UNIT_EPS = 1e-6  #: of the norm of queries and keys


class MixerWeights(NamedTuple):
    """What a layer keeps: ``convs`` of q, k and v [h*d, taps], ``a_log`` [h], ``dt_bias`` [h*d],
    ``norm`` [d], all float32; ``lower`` bound of the log decay (None: unbounded); ``eps``."""

    convs: tuple[torch.Tensor, ...]
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    lower: float | None
    eps: float


class MixerRows(NamedTuple):
    """Rows of one sequence as the projections give them: ``qkv`` three of [n, h*d], ``raw`` decay
    [n, h*d], ``beta`` [n, h], output ``gate`` [n, h*d]."""

    qkv: Sequence[torch.Tensor]
    raw: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor


def composed(
    f: Mapping[str, Callable[..., Any]],
    rows: MixerRows,
    tails: Sequence[torch.Tensor],
    state: torch.Tensor,
    w: MixerWeights,
    decode: bool,
    workers: Workers,
) -> torch.Tensor:
    """``rows`` of n <= 64 tokens, one with ``decode`` -> [n, h*d] in their dtype.

    ``f``: the operators by name.  Moves on ``tails``, the last inputs of the three convolutions
    [taps-1, h*d], and ``state`` [h, d, d] float32.
    """
    heads, dim = state.shape[:2]
    mixed = []
    for x, tail, conv in zip(rows.qkv, tails, w.convs, strict=True):
        y, moved = f["short_conv"](x, tail, conv)
        tail.copy_(moved)
        mixed.append(y.view(-1, heads, dim))
    q = f["l2_norm"](mixed[0], UNIT_EPS) * dim**-0.5
    k, v = f["l2_norm"](mixed[1], UNIT_EPS), mixed[2]
    g = f["kda_gate"](rows.raw, w.a_log, w.dt_bias, w.lower)
    beta = by_lanes(torch.sigmoid, rows.beta.float())
    if decode:
        attended = f["kda_step"](q[0], k[0], v[0], g[0], beta[0], state, workers)[None]
    else:
        attended = f["kda_chunk"](q, k, v, g, beta, state, workers)
    out: torch.Tensor = f["gated_norm"](attended, rows.gate, w.norm, w.eps)
    return out
