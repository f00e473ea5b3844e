"""mla_decode: attention of one decode token over latent blocks, in the absorbed form.

The query is brought into the latent space: q' = W_k^T q; scores q'.c + q_e.e, result W_v (sum of
shares times c), where W_k and W_v are the halves of the up-projection for each head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import HEAD_GROUP
from .attend_reference import Partial, attend
from .linear_reference import Weight
from .workers import Workers


def mla_decode(
    q: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    length: int,
    up: Weight,
    nope: int,
    v: int,
    scale: float,
    workers: Workers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [h, nope + rope] over ``length`` latents in ``blocks`` of [256, kv_lora + rope].

    ``up`` is [h * (nope + v), kv_lora].  Returns (o [h, v], log-sum-exp of the scores [h]), both
    float32.  Rows of the last block from ``length`` on are never read.
    """
    heads, kv_lora = q.shape[0], up.shape[1]
    out, sums = torch.empty(heads, v), torch.empty(heads)

    def task(i: int) -> None:
        begin, end = i * HEAD_GROUP, min((i + 1) * HEAD_GROUP, heads)
        weight = up.rows(begin * (nope + v), end * (nope + v), q.dtype, workers).float()
        weight = weight.view(end - begin, nope + v, kv_lora)
        own = q[begin:end].float()
        lifted = torch.bmm(own[:, None, :nope], weight[:, :nope])[:, 0]
        query = torch.cat((lifted, own[:, nope:]), -1)[None]
        partial = Partial(1, end - begin, kv_lora)
        for b, block in enumerate(blocks):
            valid = min(block.shape[0], length - b * block.shape[0])
            keys = torch.zeros(1, *block.shape)
            keys[0, :valid] = block[:valid]
            allowed = (torch.arange(block.shape[0]) < valid).expand(end - begin, -1)
            values = keys[:, :, :kv_lora].contiguous()
            attend(query, keys, values, allowed, scale, partial)
        context = partial.result()[0][:, None]
        out[begin:end] = torch.bmm(context, weight[:, nope:].transpose(1, 2))[:, 0]
        sums[begin:end] = (partial.top + torch.log(partial.total))[0, :, 0]

    workers.map(task, -(-heads // HEAD_GROUP))
    return out, sums
