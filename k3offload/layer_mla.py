"""One gated NoPE MLA sublayer over a group of rows: latents, exact attention by blocks, output.

There is no position encoding.  Rows of prompts use the plain form (keys and values are expanded
from each latent block, once for all parts of the group); decode rows use the absorbed form (the
query is brought into the latent space instead).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .arena import LayerWeights
from .config import HEAD_GROUP, LATENT_BLOCK, ROW_TILE
from .kernels.attend_reference import Partial, attend
from .kernels.choose import Kernels
from .kernels.linear_reference import Weight
from .kernels.rows import by_lanes
from .kernels.workers import Workers
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

    if m.q_lora is None:
        q = project("q_proj", x)
    else:
        q = project("q_b_proj", norm("q_a", project("q_a_proj", x)))
    kv = project("kv_a_proj_with_mqa", x)
    latent = torch.cat((norm("kv_a", kv[:, : m.kv_lora]), kv[:, m.kv_lora :]), 1)
    latents = [state.latents[w.layer] for state in states]
    for part in group.parts:
        latents[part.run].append(latent[group.own(part)])

    q = q.view(-1, m.heads, m.nope + m.rope)
    up = w.matrix("self_attn.kv_b_proj.weight")
    attend_group = _decode if group.decode else prefill
    attended = attend_group(q, group, latents, up, m, kernels).flatten(1)
    if m.output_gate:
        attended *= by_lanes(torch.sigmoid, project("g_proj", x).float())
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
    out = torch.empty(q.shape[0], m.heads, m.v)
    for i, part in enumerate(group.parts):
        own = latents[part.run]
        blocks = [own.rows(b) for b in range(own.blocks)]
        scale = (m.nope + m.rope) ** -0.5
        out[i] = kernels.mla_decode(q[i], blocks, own.length, up, m.nope, m.v, scale)
    return out


@dataclass
class _Query:
    """The queries of one part: ``q`` [h, 64, nope + rope], ``out`` [n, h, v] float32."""

    part: Part
    q: torch.Tensor
    out: torch.Tensor


def prefill(
    q: torch.Tensor,
    group: Group,
    latents: Sequence[Latents],
    up: Weight,
    m: MlaSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """``q`` [R, h, nope + rope] of prompts -> [R, h, v] float32, heads in fixed groups."""
    out = torch.empty(q.shape[0], m.heads, m.v)
    runs: dict[int, list[_Query]] = {}
    for part in group.parts:
        rows = group.own(part)
        padded = q.new_zeros(m.heads, ROW_TILE, m.nope + m.rope)
        padded[:, : part.count] = q[rows].transpose(0, 1)
        runs.setdefault(part.run, []).append(_Query(part, padded, out[rows]))

    def task(i: int) -> None:
        heads = slice(i * HEAD_GROUP, min((i + 1) * HEAD_GROUP, m.heads))
        for run, queries in runs.items():
            _plain(queries, latents[run], up, heads, m, kernels.workers)

    kernels.workers.map(task, -(-m.heads // HEAD_GROUP))
    return out


def _plain(
    queries: Sequence[_Query],
    latents: Latents,
    up: Weight,
    heads: slice,
    m: MlaSpec,
    workers: Workers,
) -> None:
    """Per block, k = [W_k c | e] and v = W_v c for ``heads``, then attention of all queries."""
    count, width = heads.stop - heads.start, m.nope + m.v
    partials = [Partial(count, ROW_TILE, m.v) for _ in queries]
    scale = (m.nope + m.rope) ** -0.5
    q = [query.q[heads].float() for query in queries]
    weight = up.rows(heads.start * width, heads.stop * width, queries[0].q.dtype, workers)
    for b in range(latents.blocks):
        block = latents.block(b)
        c, extra = block[:, : m.kv_lora].contiguous(), block[:, m.kv_lora :].float()
        tiles = [F.linear(c[r : r + ROW_TILE], weight) for r in range(0, LATENT_BLOCK, ROW_TILE)]
        kv = torch.cat(tiles).view(LATENT_BLOCK, count, width).transpose(0, 1).float()
        k = torch.cat((kv[..., : m.nope], extra.expand(count, -1, -1)), -1)
        v = kv[..., m.nope :].contiguous()
        for i, query in enumerate(queries):
            allowed = _causal(query.part, b)
            if allowed is not None:
                attend(q[i], k, v, allowed, scale, partials[i])
    for query, partial in zip(queries, partials, strict=True):
        query.out[:, heads] = partial.result()[:, : query.part.count].transpose(0, 1)


def _causal(part: Part, block: int) -> torch.Tensor | None:
    """[64, 256]: which keys of the block each row may see; None if the part ends before it."""
    first = block * LATENT_BLOCK
    if first >= part.start + part.count:
        return None
    row = torch.arange(ROW_TILE)
    last_key = torch.where(row < part.count, part.start + row - first, -1)
    return torch.arange(LATENT_BLOCK)[None, :] <= last_key[:, None]
