"""One gated NoPE MLA sublayer over a group of rows: latents, exact attention by blocks, output.

There is no position encoding.  Attention reads rows as they are kept, packed or not, those of this
very sweep included.  Rows of prompts use the plain form (keys and values are expanded
from each latent block, once for all parts of the group); decode rows use the absorbed form (the
query is brought into the latent space instead).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arena import LayerWeights
from .kernels.choose import Kernels
from .kernels.latents_reference import pack
from .kernels.linear_reference import Weight
from .kernels.mla_prefill_reference import Query
from .latents import Latents
from .scheduler.sweep import Group, Part
from .spec import MlaSpec, ModelSpec
from .state import SequenceState


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
        return kernels.rms_norm(kernels.dense(source), weight, spec.mla_eps)

    of_x = ["q_proj" if m.q_lora is None else "q_a_proj", "kv_a_proj_with_mqa"]
    if m.output_gate:
        of_x.append("g_proj")
    bundle = w.bundle(*(f"self_attn.{name}.weight" for name in of_x))
    q, kv, *gate = kernels.linears(x, bundle, group.decode)
    if m.q_lora is not None:
        q = project("q_b_proj", norm("q_a", q))
    latent = norm("kv_a", kv[:, : m.kv_lora])
    _keep(latent, kv[:, m.kv_lora :], group, states, w.layer, kernels)

    q = q.view(-1, m.heads, m.nope + m.rope)
    up = w.matrix("self_attn.kv_b_proj.weight")
    attend_group = _decode if group.decode else _prefill
    attended = attend_group(q, group, states, w.layer, up, m, kernels).flatten(1)
    if gate:
        attended = kernels.output_gate(attended, gate[0])
    else:
        kernels.finish()
        attended = attended.to(x.dtype)
    return project("o_proj", attended)


def _keep(
    latent: torch.Tensor,
    rope: torch.Tensor,
    group: Group,
    states: Sequence[SequenceState],
    layer: int,
    kernels: Kernels,
) -> None:
    """Append ``latent`` [R, kv_lora] (normed) and ``rope`` [R, rope] to the sequences' latents."""
    state = states[group.parts[0].run]
    own = state.latents[layer]
    if len(latent) == 1 and state.form.precision is None and isinstance(own, Latents):
        row, width = own.next_row(), latent.shape[1]  # by calls that may be put off
        kernels.residual(None, latent, None, row[:, :width])
        kernels.residual(None, rope, None, row[:, width:])
        return
    kernels.finish()
    rows = pack(torch.cat((latent, rope), 1), state.form)
    for part in group.parts:
        with states[part.run].losing():
            states[part.run].latents[layer].append(rows[group.own(part)])


def _decode(
    q: torch.Tensor,
    group: Group,
    states: Sequence[SequenceState],
    layer: int,
    up: Weight,
    m: MlaSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``q`` [R, h, nope + rope], a token of another sequence in each row -> [R, h, v] float32."""
    done: list[torch.Tensor] = []
    scale = (m.nope + m.rope) ** -0.5
    for i, part in enumerate(group.parts):
        state = states[part.run]
        own = state.latents[layer]
        if state.failed is None:
            with state.losing():
                pieces = kernels.unpacked(own.pieces(), own.length, state.form, q.dtype, True)
                done.append(kernels.mla_decode(q[i], pieces, own.length, up, m.nope, m.v, scale))
        if len(done) == i:  # he has lost his latents
            done.append(q.new_zeros(m.heads, m.v, dtype=torch.float32))
    return kernels.joined([y[None] for y in done])


def _prefill(
    q: torch.Tensor,
    group: Group,
    states: Sequence[SequenceState],
    layer: int,
    up: Weight,
    m: MlaSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``q`` [R, h, nope + rope] of prompts -> [R, h, v] float32, sequence by sequence."""
    out = q.new_zeros(q.shape[0], m.heads, m.v, dtype=torch.float32)  # of who lost his latents
    scale = (m.nope + m.rope) ** -0.5
    runs: dict[int, list[Part]] = {}
    for part in group.parts:
        runs.setdefault(part.run, []).append(part)
    for run, parts in runs.items():
        state = states[run]
        own = state.latents[layer]
        if state.failed is not None:
            continue
        queries = [Query(q[group.own(part)], part.start) for part in parts]
        with state.losing():
            pieces = kernels.unpacked(own.pieces(), own.length, state.form, q.dtype, False)
            done = kernels.mla_prefill(queries, pieces, own.length, up, m.nope, m.v, scale)
            for part, attended in zip(parts, done, strict=True):
                out[group.own(part)] = attended
    return out
