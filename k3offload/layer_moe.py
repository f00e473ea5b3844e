"""The feed-forward sublayers: dense, and LatentMoE in three passes over a sweep.

Pass one, tile by tile: router, latent projection, shared expert.  Pass two, expert by expert as
their pages arrive: every row of the sweep that chose it, in tiles of 64.  Pass three, tile by
tile: the weighted sum in rising expert number, norm, up-projection, plus the shared result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .config import ROW_TILE, align_up
from .kernels.glu_reference import silu, situ
from .kernels.linear_reference import Weight, linear
from .kernels.rms_norm_reference import rms_norm
from .kernels.router_reference import router
from .kernels.workers import Workers
from .scheduler.store import ExpertStore
from .scheduler.sweep import Tile
from .spec import ModelSpec
from .tiers.base import Buffer, PageId
from .weights import LayerWeights

ExpertWeights = Callable[[PageId, Buffer], tuple[Weight, Weight, Weight]]  #: gate, up, down
EXPERT_ROWS = 512  #: rows for which an expert's weights are decoded once; bounds the working set
OnRoute = Callable[[int, Tile, torch.Tensor, torch.Tensor], None]  #: layer, tile, experts, weights


def mlp(
    x: torch.Tensor, gate: Weight, up: Weight, down: Weight, spec: ModelSpec, workers: Workers
) -> torch.Tensor:
    """down(act(gate x, up x)): ``x`` [R, in] -> [R, out]."""
    a, b = linear(x, gate, workers), linear(x, up, workers)
    for begin in range(0, x.shape[0], ROW_TILE):  # bounds the float32 temporaries
        rows = slice(begin, begin + ROW_TILE)
        if spec.activation == "situ":
            a[rows] = situ(a[rows], b[rows], spec.situ_beta, spec.situ_linear_beta)
        else:
            a[rows] = silu(a[rows], b[rows])
    return linear(a, down, workers)


def named_mlp(
    x: torch.Tensor, prefix: str, w: LayerWeights, spec: ModelSpec, workers: Workers
) -> torch.Tensor:
    """The MLP whose weights are ``prefix``.{gate,up,down}_proj: dense layers, shared experts."""
    gate, up, down = (w.matrix(f"{prefix}.{n}_proj.weight") for n in ("gate", "up", "down"))
    return mlp(x, gate, up, down, spec, workers)


@dataclass
class _Routed:
    """Pass one's results for the whole sweep, R rows of which some are padding."""

    latent: torch.Tensor  # [R, Z]
    shared: torch.Tensor | None  # [R, H]
    experts: torch.Tensor  # [R, k] int64, -1 in padding rows
    weights: torch.Tensor  # [R, k] float32


def moe(
    normed: Callable[[Tile], torch.Tensor],
    emit: Callable[[Tile, torch.Tensor], None],
    tiles: Sequence[Tile],
    w: LayerWeights,
    spec: ModelSpec,
    store: ExpertStore,
    expert_weights: ExpertWeights,
    workers: Workers,
    on_route: OnRoute | None,
) -> None:
    """LatentMoE of one layer: calls ``emit(tile, [64, H])`` once for each tile."""
    routed = _route(normed, tiles, w, spec, workers, on_route)
    outputs = _run_experts(routed, w.layer, spec, store, expert_weights, workers)
    for tile in tiles:
        emit(tile, _combine(routed, outputs, tile, w, spec, workers))


def _route(
    normed: Callable[[Tile], torch.Tensor],
    tiles: Sequence[Tile],
    w: LayerWeights,
    spec: ModelSpec,
    workers: Workers,
    on_route: OnRoute | None,
) -> _Routed:
    assert spec.moe is not None
    m, rows = spec.moe, len(tiles) * ROW_TILE
    experts = torch.full((rows, m.top_k), -1)
    weights = torch.zeros(rows, m.top_k)
    latents, shared = [], []
    gate = w.matrix("block_sparse_moe.gate.weight")
    bias = w.vector("block_sparse_moe.gate.e_score_correction_bias")
    for tile in tiles:
        x = normed(tile)
        chosen, share = router(x, gate, bias, m.top_k, m.renormalize, m.scale, workers)
        used = slice(tile.begin, tile.begin + tile.used)
        experts[used], weights[used] = chosen[: tile.used], share[: tile.used]
        if on_route is not None:
            on_route(w.layer, tile, chosen, share)
        if m.latent is not None:
            down = w.matrix("block_sparse_moe.routed_expert_down_proj.weight")
            latents.append(linear(x, down, workers))
        else:
            latents.append(x)
        if m.shared_width:
            prefix = "block_sparse_moe.shared_experts"
            shared.append(named_mlp(x, prefix, w, spec, workers))
    return _Routed(torch.cat(latents), torch.cat(shared) if shared else None, experts, weights)


def _run_experts(
    routed: _Routed,
    layer: int,
    spec: ModelSpec,
    store: ExpertStore,
    expert_weights: ExpertWeights,
    workers: Workers,
) -> torch.Tensor:
    """[R, k, Z]: each row's output of each of its experts, in whatever order pages arrive."""
    rows, k = routed.experts.shape
    outputs = routed.latent.new_empty(rows, k, routed.latent.shape[1])
    flat = routed.experts.view(-1)
    order = torch.argsort(flat, stable=True)
    numbers, counts = torch.unique_consecutive(flat[order], return_counts=True)
    ends = counts.cumsum(0)
    places = {
        PageId(layer, number): order[end - count : end]
        for number, count, end in zip(numbers.tolist(), counts.tolist(), ends.tolist(), strict=True)
        if number >= 0
    }
    with store.lease(places) as arrivals:
        for page, buffer in arrivals:
            gate, up, down = expert_weights(page, buffer)
            for chosen in torch.split(places[page], EXPERT_ROWS):
                source = torch.div(chosen, k, rounding_mode="floor")
                x = routed.latent.new_zeros(align_up(len(chosen), ROW_TILE), outputs.shape[2])
                x[: len(chosen)] = routed.latent[source]
                y = mlp(x, gate, up, down, spec, workers)
                outputs.view(rows * k, -1)[chosen] = y[: len(chosen)]
    return outputs


def _combine(
    routed: _Routed,
    outputs: torch.Tensor,
    tile: Tile,
    w: LayerWeights,
    spec: ModelSpec,
    workers: Workers,
) -> torch.Tensor:
    assert spec.moe is not None
    total = torch.zeros(ROW_TILE, outputs.shape[2])
    used = slice(tile.begin, tile.begin + tile.used)
    for j in range(spec.moe.top_k):
        part = torch.zeros_like(total)
        part[: tile.used] = outputs[used, j].float()
        total = total + routed.weights[tile.rows, j, None] * part
    y = total.to(outputs.dtype)
    if spec.moe.latent_norm:
        y = rms_norm(y, w.vector("block_sparse_moe.routed_expert_norm.weight"), spec.eps)
    if spec.moe.latent is not None:
        y = linear(y, w.matrix("block_sparse_moe.routed_expert_up_proj.weight"), workers)
    return y if routed.shared is None else y + routed.shared[tile.rows]
