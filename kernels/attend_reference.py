"""attend: softmax attention over one latent block, merged into running partial results.

Blocks are merged in block order with the log-sum-exp identity of online softmax (Milakov &
Gimelshein, arXiv 1805.02867), so attention over any number of blocks is exact.
"""

from __future__ import annotations

import torch


class Partial:
    """Partial softmax results of ``rows`` queries for each of ``h`` heads (float32)."""

    def __init__(self, h: int, rows: int, width: int) -> None:
        self.top = torch.full((h, rows, 1), float("-inf"))
        self.total = torch.zeros(h, rows, 1)
        self.sum = torch.zeros(h, rows, width)

    def result(self) -> torch.Tensor:
        """[h, rows, width]; rows that saw no key are padding and come out as zero."""
        return self.sum / torch.where(self.total == 0, 1.0, self.total)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    partial: Partial,
) -> None:
    """``q`` [h, n, dk], ``k`` [h, m, dk], ``v`` [h, m, dv], ``allowed`` [n, m] bool; float32.

    Keys that are not allowed have no influence at all, provided that they are finite.
    """
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~allowed, float("-inf"))
    top = torch.maximum(partial.top, scores.amax(-1, keepdim=True))
    base = torch.where(torch.isinf(top), 0.0, top)  # a row without any key so far
    shares = torch.exp(scores.sub_(base))
    keep = torch.exp(partial.top - base)
    partial.total.mul_(keep).add_(shares.sum(-1, keepdim=True))
    partial.sum.mul_(keep).add_(torch.bmm(shares, v))
    partial.top = top
