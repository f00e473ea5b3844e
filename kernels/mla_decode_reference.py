"""mla_decode: attention of one decode token over latent blocks, in the absorbed form.

The query is brought into the latent space: q' = W_k^T q; scores q'.c + q_e.e, result W_v (sum of
shares times c), where W_k and W_v are the halves of the up-projection for each head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..config import HEAD_GROUP
from .attend_reference import Partial, attend
from .linear_reference import Weight
from .pieces import Piece, Pieces, walk
from .workers import Workers


class _Heads(NamedTuple):
    """Some heads: the query in the latent space [1, h, kv_lora + rope], the softmax so far."""

    query: torch.Tensor
    partial: Partial


def mla_decode(
    q: torch.Tensor,
    pieces: Pieces,
    length: int,
    up: Weight,
    nope: int,
    v: int,
    scale: float,
    workers: Workers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [h, nope + rope] over ``length`` latents in ``pieces`` of blocks [256, kv_lora + rope].

    ``up`` is [h * (nope + v), kv_lora].  Returns (o [h, v], log-sum-exp of the scores [h]), both
    float32.  Rows of the last block from ``length`` on are never read.
    """
    heads, kv_lora = q.shape[0], up.shape[1]
    out, sums = torch.empty(heads, v), torch.empty(heads)
    groups: dict[int, _Heads] = {}

    def weight(some: slice) -> torch.Tensor:
        """[h, nope + v, kv_lora]; a thread's scratch, until its next call."""
        rows = up.rows(some.start * (nope + v), some.stop * (nope + v), q.dtype, workers)
        return rows.float().view(-1, nope + v, kv_lora)

    def begin(some: slice) -> _Heads:
        own = q[some].float()
        lifted = torch.bmm(own[:, None, :nope], weight(some)[:, :nope])[:, 0]
        query = torch.cat((lifted, own[:, nope:]), -1)[None]
        return _Heads(query, Partial(1, len(own), kv_lora))

    def extend(group: _Heads, piece: Piece) -> None:
        for b, block in enumerate(piece.blocks):
            valid = min(block.shape[0], piece.end - piece.first - b * block.shape[0])
            keys = torch.zeros(1, *block.shape)
            keys[0, :valid] = block[:valid]
            allowed = (torch.arange(block.shape[0]) < valid).expand(group.query.shape[1], -1)
            values = keys[:, :, :kv_lora].contiguous()
            attend(group.query, keys, values, allowed, scale, group.partial)

    def finish(group: _Heads, some: slice) -> None:
        context, partial = group.partial.result()[0][:, None], group.partial
        out[some] = torch.bmm(context, weight(some)[:, nope:].transpose(1, 2))[:, 0]
        sums[some] = (partial.top + torch.log(partial.total))[0, :, 0]

    for piece in walk(pieces, length):

        def task(i: int, piece: Piece = piece) -> None:
            some = slice(i * HEAD_GROUP, min((i + 1) * HEAD_GROUP, heads))
            group = begin(some) if piece.first == 0 else groups.pop(i)
            extend(group, piece)
            if piece.last:
                finish(group, some)
            else:
                groups[i] = group

        workers.map(task, -(-heads // HEAD_GROUP))
    return out, sums
