"""One KDA sublayer over a group of rows: projections, convolutions, gated delta rule, output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arena import LayerWeights
from .kernels.choose import Kernels
from .kernels.mixer import MixerRows, MixerWeights
from .scheduler.sweep import Group
from .spec import ModelSpec
from .state import SequenceState

#: what a layer's input is multiplied by, with a low-rank gate and with one of full rank
OF_X = tuple(
    tuple(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "f_a", "b", gate))
    for gate in ("g_a", "g")
)


def kda(
    x: torch.Tensor,
    group: Group,
    states: Sequence[SequenceState],
    w: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``x`` [R, H] (normed) -> [R, H].  Advances the KDA state of each sequence in the group."""

    def project(name: str, source: torch.Tensor) -> torch.Tensor:
        return kernels.linear(source, w.matrix(f"self_attn.{name}.weight"), group.decode)

    full = spec.kda.full_rank_gate
    *qkv, raw, beta, gate = kernels.linears(x, w.bundle(*OF_X[full]), group.decode)
    raw = project("f_b_proj", raw)
    if not full:
        gate = project("g_b_proj", gate)
    fixed = w.kept(lambda: fixed_weights(w, spec))
    done = []
    for part in group.parts:
        own, state = group.own(part), states[part.run]
        rows = MixerRows(qkv, raw, beta, gate)
        if len(group.parts) > 1:
            rows = MixerRows([stream[own] for stream in qkv], raw[own], beta[own], gate[own])
        tails, matrix = state.conv[w.layer].unbind(), state.kda[w.layer]
        done.append(kernels.mixer(rows, tails, matrix, fixed, group.decode))
        state.passed(w.layer, part.start + part.count, kernels.finish)
    return project("o_proj", kernels.joined(done))


def fixed_weights(w: LayerWeights, spec: ModelSpec) -> MixerWeights:
    """The small weights of a layer; float32 in every checkpoint that is known."""

    def vector(name: str) -> torch.Tensor:
        return w.vector(f"self_attn.{name}").float()

    return MixerWeights(
        tuple(w.conv(f"self_attn.{name}_conv1d.weight") for name in "qkv"),
        vector("A_log")[: spec.kda.heads],  # stored wider; the tail was checked to be zero
        vector("dt_bias"),
        vector("o_norm.weight"),
        spec.kda.gate_lower_bound,
        spec.eps,
    )
