"""One gated NoPE MLA sublayer over a group of rows: latents, exact attention by blocks, output.

There is no position encoding.  Rows of prompts use the plain form (keys and values are expanded
from each latent block, once for all parts of the group); decode rows use the absorbed form (the
query is brought into the latent space instead).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arena import LayerWeights
from .kernels.choose import Kernels
from .kernels.linear_reference import Weight
from .kernels.mla_prefill_reference import Query
from .kernels.rows import by_lanes
from .scheduler.sweep import Group, Part
from .spec import MlaSpec, ModelSpec
from .state import Latents, SequenceState


def mla(
    x: torch.Tensor,
    group: Group,
    states: Sequence[SequenceState],
    w: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``x`` [R, H] (normed) -> [R, H].  Appends the latents of all rows."""
    m = spec.mla

    def project(name: str, source: torch.Tensor) -> torch.Tensor:
        return kernels.linear(source, w.matrix(f"self_attn.{name}.weight"), group.decode)

    def norm(name: str, source: torch.Tensor) -> torch.Tensor:
        weight = w.vector(f"self_attn.{name}_layernorm.weight")
        return kernels.rms_norm(source.contiguous(), weight, spec.mla_eps)

    of_x = ["q_proj" if m.q_lora is None else "q_a_proj", "kv_a_proj_with_mqa"]
    if m.output_gate:
        of_x.append("g_proj")
    bundle = w.bundle(*(f"self_attn.{name}.weight" for name in of_x))
    q, kv, *gate = kernels.linears(x, bundle, group.decode)
    if m.q_lora is not None:
        q = project("q_b_proj", norm("q_a", q))
    latent = torch.cat((norm("kv_a", kv[:, : m.kv_lora]), kv[:, m.kv_lora :]), 1)
    latents = [state.latents[w.layer] for state in states]
    for part in group.parts:
        latents[part.run].append(latent[group.own(part)])

    q = q.view(-1, m.heads, m.nope + m.rope)
    up = w.matrix("self_attn.kv_b_proj.weight")
    attend_group = _decode if group.decode else prefill
    attended = attend_group(q, group, latents, up, m, kernels).flatten(1)
    if gate:
        attended *= by_lanes(torch.sigmoid, gate[0].float())
    return project("o_proj", attended.to(x.dtype))


def _decode(
    q: torch.Tensor,
    group: Group,
    latents: Sequence[Latents],
    up: Weight,
    m: MlaSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``q`` [R, h, nope + rope], a token of another sequence in each row -> [R, h, v] float32."""
    out = q.new_empty(q.shape[0], m.heads, m.v, dtype=torch.float32)
    for i, part in enumerate(group.parts):
        own = latents[part.run]
        blocks = [own.rows(b) for b in range(own.blocks)]
        scale = (m.nope + m.rope) ** -0.5
        out[i] = kernels.mla_decode(q[i], blocks, own.length, up, m.nope, m.v, scale)
    return out


def prefill(
    q: torch.Tensor,
    group: Group,
    latents: Sequence[Latents],
    up: Weight,
    m: MlaSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``q`` [R, h, nope + rope] of prompts -> [R, h, v] float32, sequence by sequence."""
    out = q.new_empty(q.shape[0], m.heads, m.v, dtype=torch.float32)
    runs: dict[int, list[Part]] = {}
    for part in group.parts:
        runs.setdefault(part.run, []).append(part)
    for run, parts in runs.items():
        own, scale = latents[run], (m.nope + m.rope) ** -0.5
        blocks = [own.rows(b) for b in range(own.blocks)]
        queries = [Query(q[group.own(part)], part.start) for part in parts]
        done = kernels.mla_prefill(queries, blocks, own.length, up, m.nope, m.v, scale)
        for part, attended in zip(parts, done, strict=True):
            out[group.own(part)] = attended
    return out
