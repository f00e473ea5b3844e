"""Sweeps over a made-up model, so that Triton compiles before the first token and not during it.

The made-up model is the real forward pass over one layer of each kind, in memory of the device that
holds zeros.  So exactly those kernels are compiled that the model needs, at its sizes.  Nothing is
read, counted or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from .arena import LayerWeights, Memory
from .devices import Placement
from .kernels.experts_reference import Job
from .kernels.linear_reference import Weight
from .latents import Home, Ledger
from .layer_moe import activation
from .model import Hooks, Model, Run, Sides
from .scheduler.plan import Plan
from .spec import LayerSpec, ModelSpec
from .state import SequenceState
from .tiers.base import PageId
from .weights import Expert, Weights

TOKENS = 64  #: of the prompt
SPARE = 4096  #: bytes of a slot between the parts of an expert


class Made:
    """As ``Weights`` and as a store, under ``plan`` of the device; ``sides``: who computes what;
    ``packed``: the precision that latents are kept in, if it is not ``dtype``."""

    def __init__(
        self, weights: Weights, plan: Plan, placed: Placement, sides: Sides, dtype: str,
        packed: str | None = None,
    ) -> None:  # fmt: skip
        self._weights, self._sides, self._dtype = weights, sides, getattr(torch, dtype)
        self._packed = packed
        self._placed = placed
        self.spec = made_spec(weights.spec, placed.layers)
        where = (sides.layers[0] if placed.layers else sides.experts).where
        layers = [plan.layer_sizes[layer.index] for layer in self.spec.layers]
        blocks = [weights.head_bytes(number) for number in self._blocks()]
        self._arena = torch.zeros(max(layers + blocks, default=0), dtype=torch.uint8, device=where)
        own = weights.globals
        self.globals = own.laid_in(torch.zeros(own.size, dtype=torch.uint8, device=where))
        room = weights.spec.expert_bytes + SPARE
        self._slot = torch.zeros(room, dtype=torch.uint8, device=sides.experts.where)
        self._where = where

    def _blocks(self) -> Sequence[int]:
        """Numbers of the head's blocks that differ in size."""
        count = len(self._weights.head_cuts)
        return sorted({0, count - 1}) if self._placed.head else []

    def sweeps(self, progress: Callable[[int, int], None]) -> None:
        """A prompt and a decode step; ``progress(layers done, layers in all)``."""
        if not self.spec.layers:
            self._experts()
            return
        home = Home(self._where, Ledger(1 << 62))
        state = SequenceState(self.spec, self._dtype, home.ledger, lambda layer: home, self._packed)
        sides = self._sides._replace(head=self._sides.layers[0])
        model = Model(cast(Any, self), cast(Any, self), sides, self._dtype)
        done = 0

        def before_layer(layer: int) -> None:
            nonlocal done
            progress(done, 2 * len(self.spec.layers))
            done += 1

        keep = int(self._placed.head)
        for run in (Run(state, [0] * TOKENS, keep), Run(state, [0], keep, decode=True)):
            model.sweep([run], lambda *given: None, Hooks(before_layer))

    def _experts(self) -> None:
        """Where the device computes nothing else."""
        side, moe = self._sides.experts, self.spec.moe
        assert moe is not None
        x = torch.zeros(1, moe.io, dtype=self._dtype, device=side.where)
        job = Job(*self.expert(PageId(self._weights.spec.moe_layers[0], 0), self._slot), [0])
        at = torch.zeros(1, moe.top_k, dtype=torch.int64, device=side.where)
        with side.kernels.in_force():
            for decode in (True, False):
                side.kernels.experts(x, [job], activation(self.spec), decode, torch.empty_like(x))
            side.kernels.combine(x, at, at.float())

    # ---- as weights ----

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerWeights]:
        yield self._weights.laid_in(index, self._arena)

    def embed(self, tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(tokens), self.spec.hidden, dtype=dtype)

    def head_blocks(self) -> Iterator[tuple[int, int, Weight]]:
        for number in self._blocks():
            begin, end = self._weights.head_cuts[number]
            block = self._weights.head_laid_in(number, self._arena)
            yield begin, end, self._weights.head_matrix(block)

    def expert(self, page: PageId, slot: Memory) -> Expert:
        expert = self._weights.expert(page, slot)
        self._weights.forget(slot)
        return expert

    # ---- as a store ----

    def drop_prefetches(self, layer: int) -> None:
        """There are none."""

    @contextmanager
    def lease(
        self, pages: Iterable[PageId], lost: Any = None
    ) -> Iterator[Iterator[list[tuple[PageId, Any]]]]:
        yield iter([[(page, self._slot) for page in pages]])


def made_spec(spec: ModelSpec, layers: int) -> ModelSpec:
    """``spec`` with one layer of each kind, of the first ``layers``."""
    kinds: dict[tuple[str, str], LayerSpec] = {}
    for layer in spec.layers[:layers]:
        kinds.setdefault((layer.attention, layer.ffn), layer)
    return replace(spec, layers=tuple(kinds.values()))
