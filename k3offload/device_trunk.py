"""The trunk of layers that a device computes: held there, or copied from RAM for every sweep.

``Weights`` keeps what the device does not, and reads it from disk where RAM does not hold it.
Layers that do not stay on the device take turns in a ring of its buffers, as layers that do not
stay in RAM do there, so the next one is copied while one is computed; so do blocks of the head.
What is copied ahead is read ahead from disk, and hurries there once it is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from .arena import LayerWeights, as_bytes, raw_bytes
from .fetch import Fetch
from .kernels.linear_reference import Weight
from .kernels.workers import Workers
from .ring import Ring, Urgency
from .scheduler.counts import Counts
from .scheduler.plan import Plan
from .tiers.base import Buffer, Cancelled, PageId, Priority, Ticket
from .tiers.device import Device, Mark
from .weights import Expert, Weights

PIECE = 16 << 20  #: bytes of the trunk that are copied at a time: what an expert waits for at most
#: How urgent it is -> weights in RAM, and the row of each where what is wanted begins
Host = Callable[[Urgency], AbstractContextManager[tuple[LayerWeights, int]]]


class DeviceFetch(Fetch):
    """Copies a layer, or a block of the head, from RAM, where ``host`` may have to read it first,
    once the kernels have passed that read what its buffer held.  ``hasten(key)`` says
    that somebody waits for part ``key``, which this is, or with None for all on their way."""

    def __init__(
        self,
        weights: LayerWeights,
        key: int,
        host: Host,
        hasten: Callable[[int | None], None],
        device: Device,
        one_at_a_time: threading.Lock,
        priority: Priority,
    ) -> None:
        super().__init__(weights, None, priority)
        self._key, self._host, self._hasten = key, host, hasten
        self._device, self._turn = device, one_at_a_time
        self._after: Mark | None = device.mark()

    def raise_to(self, priority: Priority) -> None:
        super().raise_to(priority)
        if self._priority is Priority.DEMAND and self._begun.locked() and not self.ended():
            self._hasten(self._key)

    def _fill(self, workers: Workers | None) -> None:
        if self._turn.locked() and self._priority is Priority.DEMAND:
            self._hasten(None)  # or this would wait for what is only read ahead
        with self._turn:
            if self._dropped:
                raise Cancelled("nobody wants the layer any more")
            with self._host(lambda: self._priority) as (own, first):
                copy(self._device, own, self.weights, self._after, first)


def copy(
    device: Device, own: LayerWeights, to: LayerWeights, after: Mark | None = None, first: int = 0
) -> None:
    """Copy weights in RAM to those of a device; returns when they are there.  ``to`` holds all of
    ``own``, or rows of each of its arrays from ``first`` on."""
    source = own.arena
    assert not isinstance(source, torch.Tensor)
    if own.size == to.size:  # laid out alike: their arrays too, in few large copies
        copy_bytes(device, [(source[: own.size], as_bytes(to.arena)[: to.size])], after)
        return
    copy_bytes(device, [(raw_bytes(own.tensor(n)[first : first + len(t)]).numpy(), raw_bytes(t))
                        for n, t in to.arrays()], after)  # fmt: skip


def copy_bytes(
    device: Device, pairs: Sequence[tuple[Buffer, torch.Tensor]], after: Mark | None = None
) -> None:
    """Copy each buffer to memory of the device, in pieces; returns when all are there."""
    pieces = [
        (source[begin : begin + PIECE], to[begin : begin + PIECE])
        for source, to in pairs
        for begin in range(0, source.nbytes, PIECE)
    ]
    landed = Ticket(len(pieces))
    for source, to in pieces:
        device.copy(source, to, after, landed.finish, urgent=False)
    landed.wait()


class DeviceTrunk:
    """As ``Weights``: ``layers`` (and the head, with ``head``) as the device has them under its
    ``plan``, all others as ``host`` has them.  What a sweep asks for, one caller at a time."""

    def __init__(
        self, host: Weights, device: Device, plan: Plan, layers: Sequence[int], head: bool
    ) -> None:
        self.host, self.spec = host, host.spec
        self.counts = Counts()  # layers that the device was asked for
        self._device, self._plan, self._head = device, plan, head
        self._layers = frozenset(layers)
        self._held: dict[int, LayerWeights] = {}
        self._head_blocks: list[tuple[int, int, Weight]] = []
        self.head_counts = Counts()  # blocks of the head, where they pass through
        self._turn, self._head_turn = threading.Lock(), threading.Lock()
        self._ring: Ring | None = None
        self._head_ring: Ring | None = None
        self.globals = host.globals
        self._load()

    def _load(self) -> None:
        for layer in sorted(self._layers & self._plan.resident_layers):
            with self.host.staged(layer) as own:
                self._held[layer] = self._moved(own)
        if self._head:
            self.globals = self._moved(self.host.globals)
            self._load_head()
        order = sorted(self._layers - self._plan.resident_layers)
        if order:
            size = self._plan.ring_bytes
            buffers = [self._device.allocate(size) for _ in range(self._plan.ring_buffers)]
            self._ring = Ring(order, buffers, self._lay, self._fetch, self.counts)

    def _load_head(self) -> None:
        host, cuts = self.host, self.host.head_cuts
        if not self._plan.head_resident:
            size, numbers = host.head_bytes(0), range(len(cuts))
            buffers = [self._device.allocate(size) for _ in numbers[:2]]
            self._head_ring = Ring(
                numbers, buffers, host.head_laid_in, self._fetch_head, self.head_counts
            )
            return
        held = host.head_laid_in(None, self._device.allocate(host.head_bytes(None)))
        for number, (begin, end) in enumerate(cuts):
            with host.head_block(number) as (own, first):
                copy_bytes(
                    self._device,
                    [
                        (
                            raw_bytes(own.tensor(n)[first : first + end - begin]).numpy(),
                            raw_bytes(t[begin:end]),
                        )
                        for n, t in held.arrays()
                    ],
                )
            self._head_blocks.append((begin, end, host.head_rows(held, begin, end)))

    def _moved(self, own: LayerWeights) -> LayerWeights:
        """The same weights in memory of the device that is theirs alone."""
        to = own.laid_in(self._device.allocate(own.size))
        copy(self._device, own, to)
        return to

    def _lay(self, layer: int, arena: object) -> LayerWeights:
        assert isinstance(arena, torch.Tensor)
        return self.host.laid_in(layer, arena)

    def _fetch(self, layer: int, weights: LayerWeights, priority: Priority) -> DeviceFetch:
        @contextmanager
        def own(urgency: Urgency) -> Iterator[tuple[LayerWeights, int]]:
            with self.host.layer(layer, urgency) as held:
                yield held, 0

        return DeviceFetch(weights, layer, own, self._hasten, self._device, self._turn, priority)

    def _fetch_head(self, number: int, weights: LayerWeights, priority: Priority) -> DeviceFetch:
        own, turn = partial(self.host.head_block, number), self._head_turn
        return DeviceFetch(weights, number, own, self._hasten_head, self._device, turn, priority)

    def _hasten(self, layer: int | None) -> None:
        """Somebody waits for a layer that RAM reads for us, or for all that are on their way."""
        if layer is not None:
            self.host.hasten(layer)
        elif self._ring is not None:
            self._ring.hasten(None)

    def _hasten_head(self, number: int | None) -> None:
        if number is not None:
            self.host.hasten_head(number)
        elif self._head_ring is not None:
            self._head_ring.hasten(None)

    def close(self) -> None:
        """Give up copies under way."""
        for ring in (self._ring, self._head_ring):
            if ring is not None:
                ring.close()

    # ---- what a sweep asks for ----

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerWeights]:
        """The weights of layer ``index`` where it is computed, valid inside the ``with`` block."""
        if index not in self._layers:
            # only what passes through the ring of RAM has to keep off the copies from there
            held = self.host.holds(index)
            if not held:
                self._hasten(None)  # as a fetch does
            with nullcontext() if held else self._turn, self.host.layer(index) as weights:
                yield weights
        elif index in self._held:
            self.counts.requests += 1
            self.counts.hits += 1
            yield self._held[index]
        else:
            assert self._ring is not None
            with self._ring.use(index) as weights:
                self._device.handed_out(as_bytes(weights.arena))
                yield weights

    def peek(self, index: int) -> LayerWeights | None:
        """The weights of layer ``index`` if they are here now; they may go with the next copy."""
        if index not in self._layers:
            return self.host.peek(index)
        held = self._held.get(index)
        return self._ring.peek(index) if held is None and self._ring is not None else held

    def embed(self, tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rows of the embedding, [n, H] in RAM."""
        return self.host.embed(tokens, dtype)

    def head_blocks(self) -> Iterator[tuple[int, int, Weight]]:
        """As ``Weights.head_blocks``, where the head is computed."""
        if self._head_blocks:
            yield from self._head_blocks
        elif self._head_ring is None:
            yield from self.host.head_blocks()
        else:
            self.host.begin_head()
            for number, (begin, end) in enumerate(self.host.head_cuts):
                with self._head_ring.use(number) as block:
                    self._device.handed_out(as_bytes(block.arena))
                    yield begin, end, self.host.head_matrix(block)

    def expert(self, page: PageId, slot: Buffer | torch.Tensor) -> Expert:
        """As ``Weights.expert``, of a slot in RAM or on the device."""
        return self.host.expert(page, slot)
