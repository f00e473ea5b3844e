"""One KDA sublayer over one tile of rows: projections, convolutions, gated delta rule, output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .config import KDA_CHUNK
from .kernels.kda_gate_reference import gated_norm, kda_gate, l2_norm
from .kernels.kda_reference import kda_chunk, kda_step
from .kernels.linear_reference import linear
from .kernels.short_conv_reference import short_conv
from .kernels.workers import Workers
from .scheduler.sweep import Part, Tile
from .spec import ModelSpec
from .state import SequenceState
from .weights import LayerWeights

HEAD_GROUP = 8  #: heads computed together; fixed, so that shapes never depend on the threads


def kda(
    x: torch.Tensor,
    tile: Tile,
    states: Sequence[SequenceState],
    w: LayerWeights,
    spec: ModelSpec,
    workers: Workers,
) -> torch.Tensor:
    """``x`` [64, H] (normed) -> [64, H].  Advances the KDA state of each sequence in the tile."""
    heads, dim = spec.kda.heads, spec.kda.head_dim

    def project(name: str, source: torch.Tensor = x) -> torch.Tensor:
        return linear(source, w.matrix(f"self_attn.{name}.weight"), workers)

    streams = torch.stack([project("q_proj"), project("k_proj"), project("v_proj")])
    raw = project("f_b_proj", project("f_a_proj"))
    a_log = w.vector("self_attn.A_log")[:heads]  # stored wider; the tail was checked to be zero
    decay = kda_gate(raw, a_log, w.vector("self_attn.dt_bias"), spec.kda.gate_lower_bound)
    beta = torch.sigmoid(project("b_proj").float())
    taps = torch.stack([w.conv(f"self_attn.{c}_conv1d.weight") for c in "qkv"])

    out = torch.zeros(x.shape[0], heads, dim)
    for part in tile.parts:
        rows = slice(part.at, part.at + part.count)
        state = states[part.run]
        size = 1 if part.decode else KDA_CHUNK
        q, k, v = _convolve(streams[:, rows], size, taps, state.conv[w.layer], part)
        q = l2_norm(q.view(size, heads, dim)) * dim**-0.5
        k = l2_norm(k.view(size, heads, dim))
        args = (q, k, v.view(size, heads, dim), _pad(decay[rows], size), _pad(beta[rows], size))
        k[part.count :] = 0  # padding must not touch the state
        advance = _step if part.decode else _chunk
        out[rows] = advance(args, state.kda[w.layer], workers)[: part.count]

    gate = (
        project("g_proj") if spec.kda.full_rank_gate else project("g_b_proj", project("g_a_proj"))
    )
    normed = gated_norm(out, gate, w.vector("self_attn.o_norm.weight"), spec.eps)
    return project("o_proj", normed)


def _convolve(
    streams: torch.Tensor, size: int, taps: torch.Tensor, tails: torch.Tensor, part: Part
) -> list[torch.Tensor]:
    """q, k, v after convolution and SiLU, each [size, P] float32; moves the conv ``tails`` on."""
    outputs = []
    for stream, tap, tail in zip(streams, taps, tails, strict=True):
        y, moved = short_conv(_pad(stream, size), tail, tap, part.count)
        tail.copy_(moved)
        outputs.append(y)
    return outputs


def _pad(x: torch.Tensor, size: int) -> torch.Tensor:
    """``x`` [n, ...] with zero rows added up to ``size``."""
    if x.shape[0] == size:
        return x.contiguous()
    padded = x.new_zeros(size, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded


def _chunk(args: Sequence[torch.Tensor], state: torch.Tensor, workers: Workers) -> torch.Tensor:
    """``args`` [64, h, ...] -> o [64, h, d], heads in fixed groups."""
    out = torch.empty_like(args[2])

    def task(i: int) -> None:
        group = slice(i * HEAD_GROUP, (i + 1) * HEAD_GROUP)
        q, k, v, g, beta = (a[:, group].transpose(0, 1).contiguous() for a in args)
        out[:, group] = kda_chunk(q, k, v, g, beta, state[group]).transpose(0, 1)

    workers.map(task, -(-state.shape[0] // HEAD_GROUP))
    return out


def _step(args: Sequence[torch.Tensor], state: torch.Tensor, workers: Workers) -> torch.Tensor:
    """``args`` [1, h, ...] -> o [1, h, d], heads in fixed groups."""
    out = torch.empty_like(args[2])

    def task(i: int) -> None:
        group = slice(i * HEAD_GROUP, (i + 1) * HEAD_GROUP)
        q, k, v, g, beta = (a[0, group] for a in args)
        out[0, group] = kda_step(q, k, v, g, beta, state[group])

    workers.map(task, -(-state.shape[0] // HEAD_GROUP))
    return out
