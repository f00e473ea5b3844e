"""One KDA sublayer over a group of rows: projections, convolutions, gated delta rule, output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arena import LayerWeights
from .kernels.choose import Kernels
from .kernels.rows import by_lanes
from .scheduler.sweep import Group, Part
from .spec import ModelSpec
from .state import SequenceState


def kda(
    x: torch.Tensor,
    group: Group,
    states: Sequence[SequenceState],
    w: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``x`` [R, H] (normed) -> [R, H].  Advances the KDA state of each sequence in the group."""

    def project(name: str, source: torch.Tensor = x) -> torch.Tensor:
        return kernels.linear(source, w.matrix(f"self_attn.{name}.weight"), group.decode)

    streams = [project("q_proj"), project("k_proj"), project("v_proj")]
    raw = project("f_b_proj", project("f_a_proj"))
    beta = by_lanes(torch.sigmoid, project("b_proj").float())
    gate = (
        project("g_proj") if spec.kda.full_rank_gate else project("g_b_proj", project("g_a_proj"))
    )
    out = torch.empty_like(streams[0])
    for part in group.parts:  # float32 only for the rows of one part at a time
        rows, state = group.own(part), states[part.run]
        own = [stream[rows] for stream in streams]
        attended = _delta_rule(
            own, raw[rows], beta[rows], part, group.decode, state, w, spec, kernels
        )
        norm = w.vector("self_attn.o_norm.weight")
        out[rows] = kernels.gated_norm(attended, gate[rows], norm, spec.eps)
    return project("o_proj", out)


def _delta_rule(
    streams: Sequence[torch.Tensor],
    raw: torch.Tensor,
    beta: torch.Tensor,
    part: Part,
    decode: bool,
    state: SequenceState,
    w: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``streams`` q, k, v [n, P] of one part -> [n, h, d] float32; moves its state on."""
    heads, dim = spec.kda.heads, spec.kda.head_dim
    mixed = []
    for stream, name, tail in zip(streams, "qkv", state.conv[w.layer], strict=True):
        y, moved = kernels.short_conv(stream, tail, w.conv(f"self_attn.{name}_conv1d.weight"))
        tail.copy_(moved)
        mixed.append(y.view(part.count, heads, dim))
    q, k, v = kernels.l2_norm(mixed[0]) * dim**-0.5, kernels.l2_norm(mixed[1]), mixed[2]
    a_log = w.vector("self_attn.A_log")[:heads]  # stored wider; the tail was checked to be zero
    bias, lower = w.vector("self_attn.dt_bias"), spec.kda.gate_lower_bound
    g = kernels.kda_gate(raw, a_log, bias, lower)
    matrix = state.kda[w.layer]
    if decode:
        return kernels.kda_step(q[0], k[0], v[0], g[0], beta[0], matrix)[None]
    return kernels.kda_chunk(q, k, v, g, beta, matrix)
