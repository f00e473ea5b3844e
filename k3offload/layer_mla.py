"""One gated NoPE MLA sublayer over a group of tiles: latents, exact attention by blocks, output.

There is no position encoding.  Prefill parts use the plain form (keys and values are expanded
from each latent block, once for all tiles of the group); decode parts use the absorbed form
(the query is brought into the latent space instead).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .config import LATENT_BLOCK, ROW_TILE
from .kernels.attend_reference import Partial, attend
from .kernels.linear_reference import linear
from .kernels.rms_norm_reference import rms_norm
from .kernels.workers import Workers
from .scheduler.sweep import Part, Tile
from .spec import MlaSpec, ModelSpec
from .state import Latents, SequenceState
from .weights import LayerWeights

GROUP_TILES = 8  #: tiles that share the expansion of a latent block
HEAD_GROUP = 8  #: heads computed together; fixed, so that shapes never depend on the threads


@dataclass
class _Query:
    """The queries of one part: ``q`` [h, n, nope + rope] in the model's dtype, n = 64 or 1."""

    part: Part
    q: torch.Tensor
    out: torch.Tensor  # [n, h, v] float32, the attention result


def mla(
    xs: Sequence[torch.Tensor],
    tiles: Sequence[Tile],
    states: Sequence[SequenceState],
    w: LayerWeights,
    spec: ModelSpec,
    workers: Workers,
) -> list[torch.Tensor]:
    """``xs``: [64, H] (normed) for each tile -> [64, H] each.  Appends the latents of all rows."""
    m = spec.mla

    def project(name: str, source: torch.Tensor) -> torch.Tensor:
        return linear(source, w.matrix(f"self_attn.{name}.weight"), workers)

    queries: list[list[_Query]] = []
    for x, tile in zip(xs, tiles, strict=True):
        if m.q_lora is None:
            q = project("q_proj", x)
        else:
            low = rms_norm(
                project("q_a_proj", x), w.vector("self_attn.q_a_layernorm.weight"), spec.mla_eps
            )
            q = project("q_b_proj", low)
        kv = project("kv_a_proj_with_mqa", x)
        c = rms_norm(
            kv[:, : m.kv_lora].contiguous(),
            w.vector("self_attn.kv_a_layernorm.weight"),
            spec.mla_eps,
        )
        latent = torch.cat((c, kv[:, m.kv_lora :]), 1)
        for part in tile.parts:
            states[part.run].latents[w.layer].append(latent[part.at : part.at + part.count])
        queries.append([_query(q, part, m) for part in tile.parts])

    latents = [state.latents[w.layer] for state in states]
    _attend_all([query for tile in queries for query in tile], latents, w, m, workers)

    outputs = []
    for x, tile_queries in zip(xs, queries, strict=True):
        attended = torch.zeros(ROW_TILE, m.heads * m.v)
        for query in tile_queries:
            part = query.part
            attended[part.at : part.at + part.count] = query.out[: part.count].flatten(1)
        if m.output_gate:
            attended = attended * torch.sigmoid(project("g_proj", x).float())
        outputs.append(project("o_proj", attended.to(x.dtype)))
    return outputs


def _query(q: torch.Tensor, part: Part, m: MlaSpec) -> _Query:
    size = 1 if part.decode else ROW_TILE
    own = q.new_zeros(size, m.heads, m.nope + m.rope)
    own[: part.count] = q[part.at : part.at + part.count].view(part.count, m.heads, -1)
    return _Query(part, own.transpose(0, 1).contiguous(), torch.empty(size, m.heads, m.v))


def _attend_all(
    queries: Sequence[_Query],
    latents: Sequence[Latents],
    w: LayerWeights,
    m: MlaSpec,
    workers: Workers,
) -> None:
    runs: dict[int, list[_Query]] = {}
    for query in queries:
        runs.setdefault(query.part.run, []).append(query)
    kv_b = w.matrix("self_attn.kv_b_proj.weight")
    dtype = queries[0].q.dtype

    def task(i: int) -> None:
        begin, end = i * HEAD_GROUP, min((i + 1) * HEAD_GROUP, m.heads)
        up = kv_b.rows(begin * (m.nope + m.v), end * (m.nope + m.v), dtype, workers)
        for run, parts in runs.items():
            attend_run = _absorbed if parts[0].part.decode else _plain
            attend_run(parts, latents[run], up, slice(begin, end), m)

    workers.map(task, -(-m.heads // HEAD_GROUP))


def _plain(
    queries: Sequence[_Query], latents: Latents, up: torch.Tensor, heads: slice, m: MlaSpec
) -> None:
    """Prefill: per block, k = [W_k c | e] and v = W_v c for the heads of ``up``."""
    count = heads.stop - heads.start
    partials = [Partial(count, ROW_TILE, m.v) for _ in queries]
    scale = (m.nope + m.rope) ** -0.5
    q = [query.q[heads].float() for query in queries]
    for b in range(latents.blocks):
        block = latents.block(b)
        c, extra = block[:, : m.kv_lora].contiguous(), block[:, m.kv_lora :].float()
        tiles = [F.linear(c[r : r + ROW_TILE], up) for r in range(0, LATENT_BLOCK, ROW_TILE)]
        kv = torch.cat(tiles).view(LATENT_BLOCK, count, m.nope + m.v).transpose(0, 1).float()
        k = torch.cat((kv[..., : m.nope], extra.expand(count, -1, -1)), -1)
        v = kv[..., m.nope :].contiguous()
        for i, query in enumerate(queries):
            allowed = _causal(query.part, b, ROW_TILE)
            if allowed is not None:
                attend(q[i], k, v, allowed, scale, partials[i])
    for query, partial in zip(queries, partials, strict=True):
        query.out[:, heads] = partial.result().transpose(0, 1)


def _absorbed(
    queries: Sequence[_Query], latents: Latents, up: torch.Tensor, heads: slice, m: MlaSpec
) -> None:
    """Decode: q' = W_k^T q, scores q'.c + q_e.e, result W_v (sum of a c)."""
    (query,) = queries
    count = heads.stop - heads.start
    wide = up.float().view(count, m.nope + m.v, m.kv_lora)
    own = query.q[heads].float()
    lifted = torch.bmm(own[:, :, : m.nope], wide[:, : m.nope])
    q = torch.cat((lifted, own[:, :, m.nope :]), -1).transpose(0, 1).contiguous()
    partial = Partial(1, count, m.kv_lora)
    for b in range(latents.blocks):
        block = latents.block(b).float()[None]
        allowed = _causal(query.part, b, 1)
        assert allowed is not None
        c = block[:, :, : m.kv_lora].contiguous()
        attend(q, block, c, allowed, (m.nope + m.rope) ** -0.5, partial)
    context = partial.result().transpose(0, 1)
    query.out[:, heads] = torch.bmm(context, wide[:, m.nope :].transpose(1, 2)).transpose(0, 1)


def _causal(part: Part, block: int, rows: int) -> torch.Tensor | None:
    """[rows, 256]: which keys of the block each row may see; None if the part ends before it."""
    first = block * LATENT_BLOCK
    if first >= part.start + part.count:
        return None
    row = torch.arange(rows)
    last_key = torch.where(row < part.count, part.start + row - first, -1)
    return torch.arange(LATENT_BLOCK)[None, :] <= last_key[:, None]
