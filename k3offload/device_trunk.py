"""The trunk of layers that a device computes: held there, or copied from RAM for every sweep.

``Weights`` keeps what the device does not, and reads it from disk where RAM does not hold it.
Layers that do not stay on the device take turns in a ring of its buffers, as layers that do not
stay in RAM do there, so the next one is copied while one is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .arena import LayerWeights, as_bytes
from .fetch import Fetch
from .kernels.int8 import Int8Weight
from .kernels.linear_reference import DenseWeight, Weight
from .kernels.mxfp4 import Mxfp4Weight
from .kernels.workers import Workers
from .ring import Ring
from .scheduler.counts import Counts
from .scheduler.plan import Plan
from .tiers.base import Buffer, Cancelled, PageId, Priority, Ticket
from .tiers.device import Device, Mark
from .weights import Expert, Weights

PIECE = 16 << 20  #: bytes of the trunk that are copied at a time: what an expert waits for at most
HostLayer = Callable[[int], AbstractContextManager[LayerWeights]]


class DeviceFetch(Fetch):
    """Copies a layer from RAM, where ``host`` may have to read it first, once the kernels have
    passed that read what its buffer held."""

    def __init__(
        self,
        weights: LayerWeights,
        host: HostLayer,
        device: Device,
        one_at_a_time: threading.Lock,
        priority: Priority,
    ) -> None:
        super().__init__(weights, None, priority)
        self._host, self._device, self._turn = host, device, one_at_a_time
        self._after: Mark | None = device.mark()

    def _fill(self, workers: Workers | None) -> None:
        with self._turn:
            if self._dropped:
                raise Cancelled("nobody wants the layer any more")
            with self._host(self.weights.layer) as own:
                copy(self._device, own, self.weights, self._after)


def copy(device: Device, own: LayerWeights, to: LayerWeights, after: Mark | None = None) -> None:
    """Copy weights in RAM to those of a device; returns when they are there."""
    source, memory, size = own.arena, as_bytes(to.arena), own.size
    assert not isinstance(source, torch.Tensor) and size == to.size
    cuts = range(0, size, PIECE)
    landed = Ticket(len(cuts))
    for begin in cuts:
        end = min(begin + PIECE, size)
        device.copy(source[begin:end], memory[begin:end], after, landed.finish, urgent=False)
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
        self._turn = threading.Lock()
        self._ring: Ring | None = None
        self.globals = host.globals
        self._load()

    def _load(self) -> None:
        for layer in sorted(self._layers & self._plan.resident_layers):
            with self.host.staged(layer) as own:
                self._held[layer] = self._moved(own)
        if self._head:
            self.globals = self._moved(self.host.globals)
            if self._plan.head_resident:
                blocks = self.host.head_blocks()
                self._head_blocks = [(a, b, moved(w, self._device.where)) for a, b, w in blocks]
        order = sorted(self._layers - self._plan.resident_layers)
        if order:
            size = self._plan.ring_bytes
            buffers = [self._device.allocate(size) for _ in range(self._plan.ring_buffers)]
            self._ring = Ring(order, buffers, self._lay, self._fetch, self.counts)

    def _moved(self, own: LayerWeights) -> LayerWeights:
        """The same weights in memory of the device that is theirs alone."""
        to = own.laid_in(self._device.allocate(own.size))
        copy(self._device, own, to)
        return to

    def _lay(self, layer: int, arena: object) -> LayerWeights:
        assert isinstance(arena, torch.Tensor)
        return self.host.laid_in(layer, arena)

    def _fetch(self, weights: LayerWeights, priority: Priority) -> DeviceFetch:
        return DeviceFetch(weights, self.host.layer, self._device, self._turn, priority)

    def close(self) -> None:
        """Give up copies under way."""
        if self._ring is not None:
            self._ring.close()

    # ---- what a sweep asks for ----

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerWeights]:
        """The weights of layer ``index`` where it is computed, valid inside the ``with`` block."""
        if index not in self._layers:
            # only what passes through the ring of RAM has to keep off the copies from there
            turn = nullcontext() if self.host.holds(index) else self._turn
            with turn, self.host.layer(index) as weights:
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
            return
        for begin, end, weight in self.host.head_blocks():
            yield begin, end, moved(weight, self._device.where) if self._head else weight

    def expert(self, page: PageId, slot: Buffer | torch.Tensor) -> Expert:
        """As ``Weights.expert``, of a slot in RAM or on the device."""
        return self.host.expert(page, slot)


def moved(weight: Weight, where: torch.device) -> Weight:
    """``weight`` with its numbers at ``where``, in memory of their own."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(where, copy=True)

    if isinstance(weight, DenseWeight):
        return DenseWeight(there(weight.tensor), weight.aligned)
    if isinstance(weight, Int8Weight):
        return Int8Weight(there(weight.q), there(weight.scale))
    assert isinstance(weight, Mxfp4Weight)
    return Mxfp4Weight(there(weight.packed), there(weight.scale))
