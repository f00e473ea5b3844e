"""router by the native library: logits by its linear, choice and weights by native/seq_rows.h."""

from __future__ import annotations

import torch

from .c_function import CFunction, threads_of, wide
from .linear_native import linear
from .linear_reference import Weight
from .workers import Workers

_CALL = CFunction("k3_route", "pqqqifppppp")


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
    scores: the lower expert number wins; NaN comes before every number.
    """
    logits = linear(x, gate, workers, decode, torch.float32)
    return route(logits, bias, top_k, renormalize, scale, workers)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scale: float,
    workers: Workers | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `router` does with its ``logits`` [R, E] float32."""
    logits, bias = wide(logits), wide(bias)
    rows, count = logits.shape
    assert 0 < top_k <= count, (top_k, count)
    scores = torch.empty_like(logits)
    experts = torch.empty(rows, top_k, dtype=torch.int64)
    weights = torch.empty(rows, top_k)
    _CALL(
        threads_of(workers), rows, count, top_k, renormalize, scale, logits, bias,
        scores, experts, weights,
    )  # fmt: skip
    return experts, weights, scores
