"""attnres: Block Attention Residuals, the softmax mix over block summaries and the running sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .rows import by_tiles


def attnres(
    entries: Sequence[torch.Tensor], norm: torch.Tensor, query: torch.Tensor, eps: float
) -> torch.Tensor:
    """Mix ``entries`` (each [R, H]; the running sum is last) -> [R, H] in their dtype.

    score_j = sum(entry_j * rsqrt(mean(entry_j^2) + eps) * (norm * query)); the values are the
    raw entries.  All in float32, in the order of the entries.  One entry is returned as it is.
    """
    if len(entries) == 1:
        return entries[0]
    learned = norm.float() * query.float().view(-1)

    def tile(*entries: torch.Tensor) -> torch.Tensor:
        scores = []
        for entry in entries:
            wide = entry.float()
            inverse = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / entry.shape[-1] + eps)
            scores.append(((wide * inverse) * learned).sum(-1))
        top = scores[0]
        for score in scores[1:]:
            top = torch.maximum(top, score)
        shares = [torch.exp(score - top) for score in scores]
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        mixed = (shares[0] / total)[:, None] * entries[0].float()
        for share, entry in zip(shares[1:], entries[1:], strict=True):
            mixed = mixed + (share / total)[:, None] * entry.float()
        return mixed.to(entries[0].dtype)

    return by_tiles(tile, *entries)
