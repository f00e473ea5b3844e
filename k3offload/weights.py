"""The trunk's weights: some layers resident, the others read anew for every sweep; experts' bytes.

A cyclic scan defeats LRU, so what is resident is decided once, by the plan; the other layers take
turns in the buffers of a ring, which reads ahead.  The same goes for the head, in blocks of rows.
With a smaller precision the large matrices are quantised as they are read, unless the folder is a
pack that holds them so: the codes are the same bytes either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from .arena import DTYPES, LayerWeights, Memory, as_bytes, holds_nan
from .checkpoint import Checkpoint, Tensor
from .config import TENSOR_ALIGN, align_up
from .errors import CheckpointError
from .fetch import Fetch
from .kernels.linear_reference import DenseWeight, Weight
from .kernels.mxfp4 import Mxfp4Weight
from .kernels.workers import Workers
from .layout import EMBED, HEAD, arena_size, head_buffers, head_cuts, head_tensors, rows_of
from .ring import Ring, Urgency, demand
from .scheduler.counts import Counts
from .scheduler.plan import Plan
from .tiers.base import Buffer, Location, PageId, Priority
from .tiers.tier_disk import DiskTier, windows
from .tiers.tier_ram import Slab

Expert = tuple[Weight, Weight, Weight]  #: gate, up and down


class Weights:
    """Trunk of a checkpoint under a plan.  Reads through ``disk``; counts page requests.

    ``precision``: what the trunk is held in; ``workers``: threads that quantise while the caller
    waits; ``elsewhere``: layers that are held on a device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        disk: DiskTier,
        plan: Plan,
        precision: str = "bfloat16",
        workers: Workers | None = None,
        elsewhere: frozenset[int] = frozenset(),
    ) -> None:
        self._checkpoint, self._disk, self._plan = checkpoint, disk, plan
        self._precision, self._workers, self._elsewhere = precision, workers, elsewhere
        self.spec = checkpoint.spec
        self.counts = Counts()  # layers
        self.head_counts = Counts()  # passes over the head
        self.embed_counts = Counts()  # rows of the embedding
        self._resident: dict[int, LayerWeights] = {}
        self._experts: dict[int, tuple[PageId, Memory, Expert]] = {}  # by the id of the slot
        self._embed = checkpoint.globals()[EMBED]
        head = head_tensors(checkpoint)
        self._tied, self._head = not head, head or [self._embed]
        self._cuts = head_cuts(self.spec, self._head, precision)
        self.globals: LayerWeights
        self._embed_held: LayerWeights | None = None
        self._head_held: LayerWeights | None = None
        self._blocks: list[tuple[int, int, Weight]] = []  # of a resident head
        self._head_ring: Ring | None = None
        self._ring: Ring | None = None
        if plan.ring_bytes:
            order = [la.index for la in self.spec.layers if la.index not in plan.resident_layers]
            buffers = [Slab(plan.ring_bytes).bytes for _ in range(plan.ring_buffers)]
            self._ring = Ring(order, buffers, self.laid_in, self._fetch, self.counts, workers)

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read what the plan keeps resident; ``progress(bytes done, bytes in all)``."""
        total, done = self._plan.resident_bytes, 0
        every = self._checkpoint.globals().items()
        self.globals = self._read(
            -1, [t for n, t in every if n != EMBED and not n.startswith(HEAD)]
        )
        for layer in sorted(self._plan.resident_layers - self._elsewhere):
            self._resident[layer] = self._read(layer, self._checkpoint.trunk(layer))
            done += self._resident[layer].size
            progress(done, total)
        if self._plan.embed_resident:
            self._embed_held = self._read(-1, [self._embed])
        if not self._plan.head_resident:
            self._stream_head()
        elif self._tied and self._embed_held is not None:
            self._head_held = self._embed_held
        else:
            self._head_held = self._read(-1, self._head)
        progress(total, total)

    def memory(self, layers: int, head: bool) -> list[Buffer]:
        """Where the first ``layers`` layers, and the head, lie or pass through in RAM: what copies
        to a device come from."""
        held = [weights.arena for index, weights in self._resident.items() if index < layers]
        held += self._ring.buffers if self._ring is not None and layers else []
        if head:
            held += [self._head_held.arena] if self._head_held is not None else []
            held += self._head_ring.buffers if self._head_ring is not None else []
        return [some for some in held if not isinstance(some, torch.Tensor)]

    @property
    def trunk_bytes(self) -> int:
        """Bytes of all layers and the head as they lie in memory, resident or streamed."""
        layers = [self._checkpoint.trunk(la.index) for la in self.spec.layers]
        return sum(arena_size(tensors, self._precision) for tensors in [*layers, self._head])

    def close(self) -> None:
        """Give up reads under way: after this nothing writes to the trunk's memory."""
        for ring in (self._ring, self._head_ring):
            if ring is not None:
                ring.close()

    # ---- layers ----

    def layer(self, index: int, urgency: Urgency = demand) -> AbstractContextManager[LayerWeights]:
        """The weights of layer ``index``, valid inside the ``with`` block; see ``Ring.use``."""
        if index in self._resident:
            self.counts.requests += 1
            self.counts.hits += 1
            return nullcontext(self._resident[index])
        assert self._ring is not None
        return self._ring.use(index, urgency)

    def hasten(self, layer: int) -> None:
        """Somebody waits for ``layer``, which is being read for a device."""
        if self._ring is not None:
            self._ring.hasten(layer)

    def hasten_head(self, number: int) -> None:
        """As ``hasten``, for a block of the head."""
        if self._head_ring is not None:
            self._head_ring.hasten(number)

    def holds(self, index: int) -> bool:
        """Whether layer ``index`` stays in RAM."""
        return index in self._resident

    def peek(self, index: int) -> LayerWeights | None:
        """The weights of layer ``index`` if they are here now; they may go with the next read."""
        here = self._resident.get(index)
        return self._ring.peek(index) if here is None and self._ring is not None else here

    @contextmanager
    def staged(self, layer: int) -> Iterator[LayerWeights]:
        """The weights of layer ``layer``, in memory that is given back after the ``with`` block."""
        yield self._read(layer, self._checkpoint.trunk(layer))

    def laid_in(self, layer: int, arena: Memory) -> LayerWeights:
        """Layer ``layer`` in ``arena``, which holds nothing of it yet."""
        tensors = self._checkpoint.trunk(layer)
        return LayerWeights(layer, tensors, self._precision, arena, self.spec)

    def _fetch(self, key: int, weights: LayerWeights, priority: Priority) -> Fetch:
        return Fetch(weights, self._disk, priority)

    def _read(self, layer: int, tensors: Sequence[Tensor]) -> LayerWeights:
        """Read ``tensors`` into memory of their own."""
        arena = Slab(arena_size(tensors, self._precision), claim=False).bytes
        weights = LayerWeights(layer, tensors, self._precision, arena, self.spec)
        Fetch(weights, self._disk, Priority.DEMAND).wait(self._workers)
        return weights

    # ---- embedding and head ----

    def embed(self, tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rows of the embedding, [n, H] in ``dtype``; read from disk unless resident."""
        counts = self.embed_counts
        counts.requests += len(tokens)
        if self._embed_held is not None:
            counts.hits += len(tokens)
            held = self._embed_held.tensor(EMBED)
            if len(tokens) == 1:  # a slice: an index costs a step of one row several times as much
                return held[tokens[0] : tokens[0] + 1].to(dtype, copy=True)
            return held[torch.tensor(tokens)].to(dtype)
        places = [rows_of(self._embed, t, t + 1).location for t in tokens]
        rows = np.empty((len(tokens), places[0].length if places else 0), np.uint8)
        begin = time.perf_counter()
        self._disk.read_scatter(list(zip(places, rows, strict=True))).wait()
        counts.wait_seconds += time.perf_counter() - begin
        counts.bytes += rows.nbytes
        counts.misses += len(tokens)
        return torch.from_numpy(rows).view(DTYPES[self._embed.dtype]).to(dtype)

    def head_blocks(self) -> Iterator[tuple[int, int, Weight]]:
        """One pass over the head: (first row, end row, weight) in blocks of whole weight tiles.
        A weight is valid until the next block is asked for."""
        self.begin_head()
        if self._head_held is not None:
            if not self._blocks:
                for begin, end in self._cuts:
                    self._blocks.append((begin, end, self.head_rows(self._head_held, begin, end)))
            yield from self._blocks
            return
        for number, (begin, end) in enumerate(self._cuts):
            with self.head_block(number) as (block, _):
                yield begin, end, self.head_matrix(block)

    def begin_head(self) -> None:
        """Count a pass over the head."""
        self.head_counts.requests += 1
        self.head_counts.hits += self._head_held is not None
        self.head_counts.misses += self._head_held is None

    @contextmanager
    def head_block(
        self, number: int, urgency: Urgency = demand
    ) -> Iterator[tuple[LayerWeights, int]]:
        """Weights in RAM that hold block ``number`` of the head, and its first row there; valid
        inside the ``with`` block."""
        if self._head_held is not None:
            yield self._head_held, self._cuts[number][0]
            return
        ring = self._head_ring
        assert ring is not None
        with ring.use(number, urgency) as block:
            self.head_counts.bytes = ring.counts.bytes
            self.head_counts.wait_seconds = ring.counts.wait_seconds
            yield block, 0

    @property
    def head_cuts(self) -> Sequence[tuple[int, int]]:
        """First row and end row of each block of the head."""
        return self._cuts

    def head_bytes(self, number: int | None) -> int:
        """Bytes of block ``number`` of the head, or of all of it, in memory."""
        cut = (0, self.spec.vocab) if number is None else self._cuts[number]
        return arena_size([rows_of(tensor, *cut) for tensor in self._head], self._precision)

    def head_laid_in(self, number: int | None, arena: Memory) -> LayerWeights:
        """Block ``number`` of the head, or all of it, in ``arena``, which holds nothing of it."""
        tensors = self._head
        if number is not None:
            tensors = [rows_of(tensor, *self._cuts[number]) for tensor in self._head]
        return LayerWeights(-1, tensors, self._precision, arena, self.spec)

    def head_matrix(self, block: LayerWeights) -> Weight:
        """The weight that a block of the head is."""
        return block.matrix(EMBED if self._tied else HEAD)

    def head_rows(self, head: LayerWeights, begin: int, end: int) -> Weight:
        """Rows ``begin:end`` of the whole ``head``."""
        return head.rows(EMBED if self._tied else HEAD, begin, end)

    def _stream_head(self) -> None:
        buffers = [Slab(n).bytes for n in head_buffers(self._checkpoint, self._precision)]
        order = range(len(self._cuts))
        self._head_ring = Ring(
            order, buffers, self.head_laid_in, self._fetch, Counts(), self._workers
        )

    # ---- experts: bytes in a slot -> weights ----

    def expert(self, page: PageId, buffer: Memory) -> Expert:
        """Gate, up and down weights of the expert whose page lies in the slot ``buffer``.

        They are made, and their scales checked, once for each page that comes to a slot, where it
        is read from disk by the thread that read it (`arrived`): both take as long as a few percent
        of the page's arithmetic."""
        known = self._experts.get(id(buffer))
        if known is not None and known[0] == page:
            return known[2]
        return self._arrived(page, buffer)

    def arrived(self, page: PageId, buffer: Buffer) -> None:
        """The page has come to the slot ``buffer``.  ``CheckpointError`` if it is damaged."""
        self._arrived(page, buffer)

    def _arrived(self, page: PageId, buffer: Memory) -> Expert:
        self._experts.pop(id(buffer), None)
        expert = self._expert(page, buffer)
        self._experts[id(buffer)] = (page, buffer, expert)  # kept, so no other object has its id
        return expert

    def forget(self, buffer: Memory) -> None:
        """Whatever lay in the slot ``buffer`` is no expert."""
        self._experts.pop(id(buffer), None)

    def device_pieces(self, page: PageId, buffer: Buffer) -> list[tuple[Buffer, int]]:
        """The pieces of a page in RAM and where each goes in a slot of a device: close together, at
        boundaries that its kernels like, whatever its place in a file was.  ``CheckpointError`` for
        a page that holds what is no number; on the device nobody looks again."""
        self.expert(page, buffer)  # looks at it once, however often it is copied
        extents = self._checkpoint.expert(page.layer, page.expert).extents
        places = zip(windows(extents)[0], extents, device_starts(extents), strict=True)
        return [(buffer[begin : begin + e.length], to) for begin, e, to in places]

    def _expert(self, page: PageId, buffer: Memory) -> Expert:
        m = self.spec.moe
        assert m is not None
        page_map = self._checkpoint.expert(page.layer, page.expert)
        on_device = isinstance(buffer, torch.Tensor)
        extents = page_map.extents
        starts = device_starts(extents) if on_device else windows(extents)[0]
        raw = {}
        for key, extent, delta, size in page_map.parts:
            at = starts[extent] + delta
            raw[key] = as_bytes(buffer[at : at + size])

        def weight(name: str, n: int, k: int) -> Weight:
            if m.format == "bf16":
                tensor = raw[f"{name}.weight"].view(DTYPES[self._checkpoint.expert_dtype])
                return DenseWeight(tensor.view(n, k), aligned=False)
            scale = raw[f"{name}.weight_scale"]
            if not on_device and holds_nan(scale.numpy()):
                raise CheckpointError(
                    f"Layer {page.layer}, expert {page.expert}: {name}.weight_scale holds "
                    "255, which is not a number.",
                    "The file is damaged: run k3offload check MODEL --full and fetch it again.",
                )
            return Mxfp4Weight(raw[f"{name}.weight_packed"].view(n, k // 2), scale.view(n, -1))

        return (
            weight("w1", m.width, m.io), weight("w3", m.width, m.io), weight("w2", m.io, m.width),
        )  # fmt: skip


def device_starts(extents: Sequence[Location]) -> list[int]:
    """Where each extent of a page begins in a slot of a device."""
    starts, end = [], 0
    for extent in extents:
        starts.append(end)
        end = align_up(end + extent.length, TENSOR_ALIGN)
    return starts
