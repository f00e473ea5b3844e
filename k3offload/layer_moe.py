"""The feed-forward sublayers: dense, and LatentMoE in three passes over a sweep.

Pass one: the routers of all rows, then the reads of the experts they chose begin.  Pass two, while
pages load: latent projection and shared expert, then expert by expert as pages arrive, every row
of the sweep that chose it.  Pass three: the weighted sum in rising expert number, norm,
up-projection, plus the shared result.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

import torch

from .adaptive import Adaptive, Outbox
from .arena import LayerWeights
from .config import CALL_ROWS
from .errors import K3Error
from .kernels.choose import Kernels
from .kernels.experts_reference import Job
from .kernels.glu_reference import Activation
from .kernels.linear_reference import Weight
from .scheduler.lease import Leased, Lost
from .scheduler.store import ExpertStore
from .scheduler.sweep import Group
from .spec import ModelSpec
from .tiers.base import Buffer, PageId

ExpertWeights = Callable[[PageId, Buffer], tuple[Weight, Weight, Weight]]  #: gate, up, down
#: layer, group, experts [R, k], weights [R, k], scores [R, E] float32, by which they were chosen
OnRoute = Callable[[int, Group, torch.Tensor, torch.Tensor, torch.Tensor], None]
#: what routed experts are given [R, Z], shared experts' results [R, H]; None where there are none
Ahead = Callable[[torch.Tensor | None, torch.Tensor | None], None]
#: a page that cannot be read, the rows of the sweep that chose it, its error; may raise
OnLost = Callable[[PageId, Sequence[int], K3Error], None]


class Side(NamedTuple):
    """A place where something is computed: its kernels, and the device of its tensors."""

    kernels: Kernels
    where: torch.device


def activation(spec: ModelSpec) -> Activation:
    """The gated activation of every feed-forward part of the model."""
    return Activation(spec.activation, spec.situ_beta, spec.situ_linear_beta)


def mlp(
    x: torch.Tensor, prefix: str, w: LayerWeights, spec: ModelSpec, kernels: Kernels, decode: bool
) -> torch.Tensor:
    """The MLP whose weights are ``prefix``.{gate,up,down}_proj: dense layers, shared experts."""
    gate, up, down = (w.matrix(f"{prefix}.{n}_proj.weight") for n in ("gate", "up", "down"))
    return kernels.experts(x, [Job(gate, up, down)], activation(spec), decode)


def moe(
    normed: Callable[[Group], torch.Tensor],
    emit: Callable[[Group, torch.Tensor, torch.Tensor | None], None],
    groups: Sequence[Group],
    w: LayerWeights,
    spec: ModelSpec,
    store: ExpertStore | Adaptive,
    expert_weights: ExpertWeights,
    kernels: Kernels,
    side: Side,
    on_route: OnRoute | None,
    on_lost: OnLost,
    ahead: Ahead | None = None,
) -> None:
    """LatentMoE of one layer: calls ``emit(group, routed, shared)``, each [R, H], once for each
    group.  ``side`` computes the routed experts.  ``ahead`` is called before the first of them
    runs, with their reads begun.  What rows that ``on_lost`` is told of get means nothing; the
    others get what they always would."""
    assert spec.moe is not None
    m = spec.moe
    xs = [normed(group) for group in groups]
    experts, shares = _route(xs, groups, w, spec, kernels, on_route)
    places = _places(experts, w.layer)
    with ExitStack() as leased:
        arrivals = leased.enter_context(store.lease(places, lost=_losing(places, m.top_k, on_lost)))
        store.drop_prefetches(w.layer)
        latent = _latent(xs, groups, w, spec, kernels)
        if ahead is not None:
            kernels.finish()
            ahead(latent, kernels.joined(xs) if m.shared_width else None)
        results = _Results(side.kernels.here(latent)[0], experts.shape[1], spec)
        decoding = sum(group.end - group.begin for group in groups if group.decode)
        if kernels.waiting and not (isinstance(arrivals, Leased) and arrivals.complete):
            kernels.finish()  # what needs no page, while pages come
        for batch in arrivals:
            weights = [expert_weights(page, buffer) for page, buffer in batch]
            chosen = [places[page] for page, _ in batch]
            if isinstance(store, Adaptive) and not isinstance(batch[0][1], torch.Tensor):
                begin = time.perf_counter()
                results.run(weights, chosen, decoding, store.kernels, store.outbox)
                store.computed(time.perf_counter() - begin, len(batch))
            else:
                results.run(weights, chosen, decoding, side.kernels)
            if results.full:
                break
            kernels.finish()  # its pages may leave
        stay = _stay(store, spec)
        if stay or not kernels.waiting:
            leased.close()  # others wait for the pages; what ran beside the device has landed
        at, shares = side.kernels.here(results.at, shares)
        for group, shared in zip(groups, xs, strict=True):
            of_group = (at, shares) if len(groups) == 1 else (at[group.rows], shares[group.rows])
            own = side.kernels.combine(results.y, *of_group)
            y = _projected(kernels.here(own)[0], group, w, spec, kernels)
            emit(group, y, shared if m.shared_width else None)
        if not stay:
            kernels.finish()  # the last pages may leave


def _route(
    xs: Sequence[torch.Tensor],
    groups: Sequence[Group],
    w: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
    on_route: OnRoute | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [R, k] int64, rising, in RAM, and their weights [R, k] float32, of all rows.

    One wait for each group: which pages to ask for cannot be known without it."""
    experts, weights = [], []
    for x, group in zip(xs, groups, strict=True):
        chosen, share, scores = route(x, w, spec, kernels, group.decode)
        if group.decode and on_route is not None:
            # whoever looks ahead wants the scores too: few, and no wait of their own
            chosen, scores = kernels.to_host(chosen, scores)
        else:
            chosen = kernels.to_host(chosen)[0]
        if on_route is not None:
            on_route(w.layer, group, chosen, share, scores)
        experts.append(chosen)
        weights.append(share)
    if len(groups) == 1:
        return experts[0], weights[0]
    return torch.cat(experts), torch.cat(weights)


def route(
    x: torch.Tensor, w: LayerWeights, spec: ModelSpec, kernels: Kernels, decode: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(experts [R, k], weights [R, k], the scores [R, E] by which they were chosen) for ``x``."""
    assert spec.moe is not None
    m = spec.moe
    gate = w.matrix("block_sparse_moe.gate.weight")
    bias = w.vector("block_sparse_moe.gate.e_score_correction_bias")
    routed = kernels.router(x, gate, bias, m.top_k, m.renormalize, m.scale, decode)
    kernels.finish()
    return routed


def _latent(
    xs: list[torch.Tensor],
    groups: Sequence[Group],
    w: LayerWeights,
    spec: ModelSpec,
    kernels: Kernels,
) -> torch.Tensor:
    """What the routed experts of all rows are given, [R, Z].  The result of the shared experts
    takes the place of their input in ``xs``."""
    assert spec.moe is not None
    latents = []
    for i, group in enumerate(groups):
        down = "block_sparse_moe.routed_expert_down_proj.weight"
        x = xs[i]
        latents.append(kernels.linear(x, w.matrix(down), group.decode) if spec.moe.latent else x)
        if spec.moe.shared_width:
            xs[i] = mlp(x, "block_sparse_moe.shared_experts", w, spec, kernels, group.decode)
    return kernels.joined(latents)


def _stay(store: ExpertStore | Adaptive, spec: ModelSpec) -> bool:
    """Whether all pages have room, so that none leaves, whatever waits for `finish`: letting go of
    them right behind a kernel, from cold caches, takes several times as long as before it."""
    return isinstance(store, ExpertStore) and store.slots >= spec.expert_count


def _losing(places: Mapping[PageId, Sequence[int]], top_k: int, on_lost: OnLost) -> Lost:
    """Whom a lease of the pages in ``places`` tells what it cannot have."""
    return lambda page, error: on_lost(page, [place // top_k for place in places[page]], error)


def _places(experts: torch.Tensor, layer: int) -> dict[PageId, list[int]]:
    """Page -> where in ``experts`` [R, k], as flat numbers in rising order, it was chosen; pages
    in rising order, so that what a cache sees of them does not depend on that of the rows."""
    rows, page = experts.tolist(), PageId
    if len(rows) == 1:  # no expert is chosen twice
        return {page(layer, number): [place] for place, number in enumerate(rows[0])}
    places: dict[int, list[int]] = {}
    for place, number in enumerate(chain.from_iterable(rows)):
        places.setdefault(number, []).append(place)
    return {PageId(layer, number): own for number, own in sorted(places.items())}


class _Results:
    """What experts give, in the order in which they ran: ``y`` [R * k, Z]."""

    def __init__(self, latent: torch.Tensor, top_k: int, spec: ModelSpec) -> None:
        self._count = count = latent.shape[0] * top_k
        self.y = latent.new_empty(count, latent.shape[1])
        self._at = array("q", bytes(8 * count))
        self._latent, self._k, self._act = latent, top_k, activation(spec)
        self._done = 0
        self._moved: torch.Tensor | None = None

    def run(
        self,
        weights: Sequence[tuple[Weight, Weight, Weight]],
        places: Sequence[list[int]],
        decoding: int,
        kernels: Kernels,
        outbox: Outbox | None = None,
    ) -> None:
        """Experts that have arrived; the first ``decoding`` rows decode.  With ``outbox`` the CPU
        computes them, unlike the others, and their results are sent."""
        border = decoding * self._k
        for decode in (True, False):
            if border in (0, self._count):  # rows of one kind: nothing to part
                own = places if decode == (border > 0) else []
            else:
                own = [[p for p in some if (p < border) == decode] for some in places]
            for call in _calls(own):
                jobs = [Job(*weights[i], [p // self._k for p in some]) for i, some in call]
                where = [place for _, some in call for place in some]
                end = self._done + len(where)
                for i, place in enumerate(where, self._done):
                    self._at[place] = i
                y = self.y if len(where) == self._count else self.y[self._done : end]
                if outbox is None:
                    kernels.experts(self._latent, jobs, self._act, decode, y)
                else:
                    given, rows = self._on_cpu(kernels, outbox), outbox.rows(len(where))
                    kernels.experts(given, jobs, self._act, decode, rows)
                    outbox.send(y)
                self._done = end

    def _on_cpu(self, kernels: Kernels, outbox: Outbox) -> torch.Tensor:
        if self._moved is None:
            self._moved = kernels.here(self._latent)[0]
            outbox.aim(self.y)
        return self._moved

    @property
    def full(self) -> bool:
        """Whether all experts have run, or wait to."""
        return self._done == self._count

    @property
    def at(self) -> torch.Tensor:
        """[R, k] int64: where the result of each choice lies in ``y``; 0 for one that was lost."""
        return torch.frombuffer(self._at, dtype=torch.int64).view(-1, self._k)


def _calls(places: Sequence[list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
    """Cut and join the rows of experts into calls of ``CALL_ROWS`` rows at most."""
    call: list[tuple[int, list[int]]] = []
    room = CALL_ROWS
    for i, own in enumerate(places):
        for begin in range(0, len(own), CALL_ROWS):
            piece = own[begin : begin + CALL_ROWS]
            if len(piece) > room:
                yield call
                call, room = [], CALL_ROWS
            call.append((i, piece))
            room -= len(piece)
    if call:
        yield call


def _projected(
    y: torch.Tensor, group: Group, w: LayerWeights, spec: ModelSpec, kernels: Kernels
) -> torch.Tensor:
    """The routed part of a group's result, [R, H], from the sum over experts [R, Z]."""
    assert spec.moe is not None
    if spec.moe.latent_norm:
        y = kernels.rms_norm(y, w.vector("block_sparse_moe.routed_expert_norm.weight"), spec.eps)
    if spec.moe.latent is not None:
        up = w.matrix("block_sparse_moe.routed_expert_up_proj.weight")
        y = kernels.linear(y, up, group.decode)
    return y
