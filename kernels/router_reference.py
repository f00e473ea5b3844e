"""router: which experts a row goes to, and with which weights."""

from __future__ import annotations

import torch

from .linear_reference import Weight, linear
from .rows import by_lanes
from .workers import Workers


def router(
    x: torch.Tensor,
    gate: Weight,
    bias: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scale: float,
    workers: Workers,
    decode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x`` [R, H] -> (experts [R, k] int64 in rising order, weights [R, k] float32, scores [R, E]
    float32, by which they were chosen: sigmoids plus ``bias`` [E]).

    The logits are float32.  The bias takes part in the choice only; the weights are the plain
    sigmoids, divided by their sum if ``renormalize``, times ``scale``.  Equal biased
    scores: the lower expert number wins.
    """
    plain = by_lanes(torch.sigmoid, linear(x.float(), gate, workers, decode))
    scores = plain + bias.float()
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    experts = order[:, :top_k].sort(dim=-1).values
    weights = plain.gather(1, experts)
    if renormalize:
        total = torch.zeros(x.shape[0])
        for j in range(top_k):  # one fixed order of summation
            total = total + weights[:, j]
        weights = weights / (total + 1e-20)[:, None]
    return experts, weights * scale, scores
