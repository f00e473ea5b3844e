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

    def tile(*entries: torch.Tensor) -> torch.Tensor:
        parts = _parts(entries, norm, query, eps)
        mixed = parts[0][:, None] * entries[0].float()
        for part, entry in zip(parts[1:], entries[1:], strict=True):
            mixed = mixed + part[:, None] * entry.float()
        return mixed.to(entries[0].dtype)

    return by_tiles(tile, *entries)


def shares(
    entries: Sequence[torch.Tensor], norm: torch.Tensor, query: torch.Tensor, eps: float
) -> torch.Tensor:
    """[R, entries]: the share of each entry in the mix, for whoever wants to see it."""
    return torch.stack(_parts(entries, norm, query, eps), dim=1)


def _parts(
    entries: Sequence[torch.Tensor], norm: torch.Tensor, query: torch.Tensor, eps: float
) -> list[torch.Tensor]:
    learned, scores = norm.float() * query.float().view(-1), []
    for entry in entries:
        wide = entry.float()
        inverse = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / entry.shape[-1] + eps)
        scores.append(((wide * inverse) * learned).sum(-1))
    top = scores[0]
    for score in scores[1:]:
        top = torch.maximum(top, score)
    parts = [torch.exp(score - top) for score in scores]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return [part / total for part in parts]
