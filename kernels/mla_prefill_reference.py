"""mla_prefill: attention of prompt rows over the latents of their sequence, in plain form.

Per block of 256 latents, k = [W_k c | e] and v = W_v c are expanded once for all queries, then
attended to; blocks merge in their order (attend_reference.py).  There is no position encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..config import HEAD_GROUP, LATENT_BLOCK, ROW_TILE
from .attend_reference import Partial, attend
from .linear_reference import Weight
from .pieces import Piece, Pieces, walk
from .workers import Workers


class Query(NamedTuple):
    """Rows of a prompt: ``q`` [n <= 64, h, nope + rope], the first at position ``start``."""

    q: torch.Tensor
    start: int


def mla_prefill(
    queries: Sequence[Query],
    pieces: Pieces,
    length: int,
    up: Weight,
    nope: int,
    v: int,
    scale: float,
    workers: Workers,
) -> list[torch.Tensor]:
    """``queries`` of one sequence over its ``length`` latents in ``pieces`` of blocks
    [256, kv_lora + rope]; ``up`` is [h * (nope + v), kv_lora].  Returns [n, h, v] float32 for each
    query.

    A row sees the latents up to its own position.  Rows from ``length`` on may hold anything.
    """
    heads, width = queries[0].q.shape[1:]
    padded = []
    for query in queries:
        tile = query.q.new_zeros(heads, ROW_TILE, width)
        tile[:, : len(query.q)] = query.q.transpose(0, 1)
        padded.append(tile)
    out = [torch.empty(len(query.q), heads, v) for query in queries]
    so_far: dict[int, list[Partial]] = {}  # group of heads -> softmax of each query

    def extend(some: slice, piece: Piece, partials: Sequence[Partial]) -> None:
        weight = up.rows(some.start * (nope + v), some.stop * (nope + v), padded[0].dtype, workers)
        own = [tile[some].float() for tile in padded]
        for b, block in enumerate(piece.blocks, piece.first // LATENT_BLOCK):
            k, values = _expanded(block, piece.end - b * LATENT_BLOCK, weight, some, nope, v)
            for query, q, partial in zip(queries, own, partials, strict=True):
                allowed = _causal(query, b)
                if allowed is not None:
                    attend(q, k, values, allowed, scale, partial)

    for piece in walk(pieces, length):

        def task(i: int, piece: Piece = piece) -> None:
            some = slice(i * HEAD_GROUP, min((i + 1) * HEAD_GROUP, heads))
            partials = so_far.pop(i, None)
            if partials is None:
                partials = [Partial(some.stop - some.start, ROW_TILE, v) for _ in queries]
            extend(some, piece, partials)
            if not piece.last:
                so_far[i] = partials
                return
            for query, partial, to in zip(queries, partials, out, strict=True):
                to[:, some] = partial.result()[:, : len(query.q)].transpose(0, 1)

        workers.map(task, -(-heads // HEAD_GROUP))
    return out


def _expanded(
    block: torch.Tensor, held: int, weight: torch.Tensor, heads: slice, nope: int, v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [h, 256, nope + rope] and values [h, 256, v] of a block, float32; rows from ``held`` on
    are those of zero latents."""
    count, kv_lora = heads.stop - heads.start, weight.shape[1]
    if held < LATENT_BLOCK:
        full, block = block, torch.zeros_like(block)
        block[:held] = full[:held]
    c, extra = block[:, :kv_lora].contiguous(), block[:, kv_lora:].float()
    tiles = [F.linear(c[r : r + ROW_TILE], weight) for r in range(0, LATENT_BLOCK, ROW_TILE)]
    kv = torch.cat(tiles).view(LATENT_BLOCK, count, nope + v).transpose(0, 1).float()
    k = torch.cat((kv[..., :nope], extra.expand(count, -1, -1)), -1)
    return k, kv[..., nope:].contiguous()


def _causal(query: Query, block: int) -> torch.Tensor | None:
    """[64, 256]: which keys of the block each row may see; None if all rows end before it."""
    first = block * LATENT_BLOCK
    if first >= query.start + len(query.q):
        return None
    row = torch.arange(ROW_TILE)
    last_key = torch.where(row < len(query.q), query.start + row - first, -1)
    return torch.arange(LATENT_BLOCK)[None, :] <= last_key[:, None]
