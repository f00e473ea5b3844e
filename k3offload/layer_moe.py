"""The feed-forward sublayers: dense, and LatentMoE in three passes over a sweep.

Pass one: the routers of all rows, then the reads of the experts they chose begin.  Pass two, while
pages load: latent projection and shared expert, then expert by expert as pages arrive, every row
of the sweep that chose it.  Pass three: the weighted sum in rising expert number, norm,
up-projection, plus the shared result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .arena import LayerWeights
from .config import CALL_ROWS, ROW_TILE
from .kernels.choose import Kernels
from .kernels.experts_reference import Job
from .kernels.glu_reference import Activation
from .kernels.linear_reference import Weight
from .scheduler.store import ExpertStore
from .scheduler.sweep import Group
from .spec import ModelSpec
from .tiers.base import Buffer, PageId

ExpertWeights = Callable[[PageId, Buffer], tuple[Weight, Weight, Weight]]  #: gate, up, down
#: layer, group, experts [R, k], weights [R, k], scores [R, E] float32, by which they were chosen
OnRoute = Callable[[int, Group, torch.Tensor, torch.Tensor, torch.Tensor], None]


def activation(spec: ModelSpec) -> Activation:
    """The gated activation of every feed-forward part of the model."""
    return Activation(spec.activation, spec.situ_beta, spec.situ_linear_beta)


def mlp(
    x: torch.Tensor, prefix: str, w: LayerWeights, spec: ModelSpec, kernels: Kernels, decode: bool
) -> torch.Tensor:
    """The MLP whose weights are ``prefix``.{gate,up,down}_proj: dense layers, shared experts."""
    gate, up, down = (w.matrix(f"{prefix}.{n}_proj.weight") for n in ("gate", "up", "down"))
    return kernels.experts(x, [Job(gate, up, down)], activation(spec), decode)[0]


@dataclass
class _Routed:
    """What the routers said about each of the R rows of a sweep."""

    experts: torch.Tensor  # [R, k] int64, rising
    weights: torch.Tensor  # [R, k] float32


def moe(
    normed: Callable[[Group], torch.Tensor],
    emit: Callable[[Group, torch.Tensor], None],
    groups: Sequence[Group],
    w: LayerWeights,
    spec: ModelSpec,
    store: ExpertStore,
    expert_weights: ExpertWeights,
    kernels: Kernels,
    on_route: OnRoute,
) -> torch.Tensor:
    """LatentMoE of one layer: calls ``emit(group, [R, H])`` once for each group.  Returns what the
    experts were given, [R, Z]."""
    assert spec.moe is not None
    m = spec.moe
    xs = [normed(group) for group in groups]
    routed = _route(xs, groups, w, spec, kernels, on_route)
    places = _places(routed.experts, w.layer)
    with store.lease(places) as arrivals:
        store.drop_prefetches(w.layer)
        latents = []
        for i, group in enumerate(groups):
            down = "block_sparse_moe.routed_expert_down_proj.weight"
            x = xs[i]
            latents.append(kernels.linear(x, w.matrix(down), group.decode) if m.latent else x)
            if m.shared_width:  # the shared result takes the place of its input
                xs[i] = mlp(x, "block_sparse_moe.shared_experts", w, spec, kernels, group.decode)
        latent = torch.cat(latents) if len(latents) > 1 else latents[0]
        outputs = latent.new_empty(*routed.experts.shape, latent.shape[1])
        decoding = sum(group.end - group.begin for group in groups if group.decode)
        for batch in arrivals:
            weights = [expert_weights(page, buffer) for page, buffer in batch]
            rows = [places[page] for page, _ in batch]
            _run_batch(latent, outputs, weights, rows, decoding, spec, kernels)
    for group, shared in zip(groups, xs, strict=True):
        y = _combine(routed, outputs, group, w, spec, kernels)
        emit(group, y + shared if m.shared_width else y)
    return latent


def _route(
    xs: Sequence[torch.Tensor],
    groups: Sequence[Group],
    w: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
    on_route: OnRoute,
) -> _Routed:
    experts, weights = [], []
    for x, group in zip(xs, groups, strict=True):
        chosen, share, scores = route(x, w, spec, kernels, group.decode)
        on_route(w.layer, group, chosen, share, scores)
        experts.append(chosen)
        weights.append(share)
    return _Routed(torch.cat(experts), torch.cat(weights))


def route(
    x: torch.Tensor, w: LayerWeights, spec: ModelSpec, kernels: Kernels, decode: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(experts [R, k], weights [R, k], the scores [R, E] by which they were chosen) for ``x``."""
    assert spec.moe is not None
    m = spec.moe
    gate = w.matrix("block_sparse_moe.gate.weight")
    bias = w.vector("block_sparse_moe.gate.e_score_correction_bias")
    chosen, share, scores = kernels.router(x, gate, bias, m.top_k, m.renormalize, m.scale, decode)
    return chosen, share, scores + bias.float()


def _places(experts: torch.Tensor, layer: int) -> dict[PageId, torch.Tensor]:
    """Page -> where in ``experts`` [R, k], as flat numbers in rising order, it was chosen."""
    flat = experts.view(-1)
    order = torch.argsort(flat, stable=True)
    numbers, counts = torch.unique_consecutive(flat[order], return_counts=True)
    parts = torch.split(order, counts.tolist())
    return {
        PageId(layer, number): places
        for number, places in zip(numbers.tolist(), parts, strict=True)
    }


def _run_batch(
    latent: torch.Tensor,
    outputs: torch.Tensor,
    weights: Sequence[tuple[Weight, Weight, Weight]],
    places: Sequence[torch.Tensor],
    decoding: int,
    spec: ModelSpec,
    kernels: Kernels,
) -> None:
    """Outputs [R, k, Z] of the experts that have arrived; the first ``decoding`` rows decode."""
    k = outputs.shape[1]
    flat = outputs.view(-1, outputs.shape[2])
    border = decoding * k
    for decode in (True, False):
        if border in (0, len(flat)):  # rows of one kind: nothing to part
            own = list(places) if decode == (border > 0) else []
        else:
            own = [p[p < border] if decode else p[p >= border] for p in places]
        for call in _calls(own):
            where = torch.cat([piece for _, piece in call])
            counts = [len(piece) for _, piece in call]
            rows = torch.split(torch.div(where, k, rounding_mode="floor"), counts)
            jobs = [Job(*weights[i], chosen) for (i, _), chosen in zip(call, rows, strict=True)]
            flat[where] = torch.cat(kernels.experts(latent, jobs, activation(spec), decode))


def _calls(places: Sequence[torch.Tensor]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Cut and join the rows of experts into calls of ``CALL_ROWS`` rows at most."""
    call: list[tuple[int, torch.Tensor]] = []
    room = CALL_ROWS
    for i, own in enumerate(places):
        for piece in torch.split(own, CALL_ROWS) if len(own) else ():
            if len(piece) > room:
                yield call
                call, room = [], CALL_ROWS
            call.append((i, piece))
            room -= len(piece)
    if call:
        yield call


def _combine(
    routed: _Routed,
    outputs: torch.Tensor,
    group: Group,
    w: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
) -> torch.Tensor:
    assert spec.moe is not None
    y = outputs.new_empty(group.end - group.begin, outputs.shape[2])
    for begin in range(group.begin, group.end, ROW_TILE):  # bounds the float32 copies
        rows = slice(begin, min(begin + ROW_TILE, group.end))
        parts = outputs[rows].float() * routed.weights[rows, :, None]
        total = torch.zeros(parts.shape[0], parts.shape[2])
        for j in range(spec.moe.top_k):
            total += parts[:, j]
        y[rows.start - group.begin : rows.stop - group.begin] = total
    if spec.moe.latent_norm:
        y = kernels.rms_norm(y, w.vector("block_sparse_moe.routed_expert_norm.weight"), spec.eps)
    if spec.moe.latent is not None:
        up = w.matrix("block_sparse_moe.routed_expert_up_proj.weight")
        y = kernels.linear(y, up, group.decode)
    return y
