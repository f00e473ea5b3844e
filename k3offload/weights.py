"""The trunk's weights as tensors: some layers resident, the rest read anew for every sweep.

Every tensor lies at a 64-byte boundary whatever its place in the file, because the bits of a
matrix product may depend on alignment.  A cyclic scan defeats LRU, so what is resident is decided
once, by the plan; the other layers take turns in one buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from .checkpoint import Checkpoint, Tensor, check_trunk_values
from .config import TENSOR_ALIGN, align_up
from .errors import CheckpointError
from .kernels.linear_reference import DenseWeight, Weight, tile_rows
from .kernels.mxfp4 import SCALE_NAN, Mxfp4Weight
from .scheduler.plan import Plan
from .scheduler.store import Counts
from .spec import ModelSpec
from .tiers.base import Buffer, Location, PageId
from .tiers.tier_disk import DiskTier, windows
from .tiers.tier_ram import Slab

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
HEAD_BUFFER = 64 << 20  #: bytes of the head that are in memory at a time when it is streamed


class LayerWeights:
    """Named tensors of one layer (or of the model as a whole: ``layer == -1``)."""

    def __init__(self, layer: int, tensors: dict[str, torch.Tensor], spec: ModelSpec) -> None:
        self.layer = layer
        self._tensors = tensors
        self._spec = spec

    def matrix(self, name: str) -> Weight:
        """``name`` [N, K] for ``linear``."""
        return DenseWeight(self._tensors[name])

    def vector(self, name: str) -> torch.Tensor:
        """``name`` flattened, as stored."""
        return self._tensors[name].reshape(-1)

    def conv(self, name: str) -> torch.Tensor:
        """A depthwise convolution, stored [C, 1, taps] or [C, taps] -> [C, taps] float32."""
        return self._tensors[name].reshape(-1, self._spec.kda.conv).float()

    def check_values(self) -> None:
        """Refuse a damaged ``A_log``: only zeros belong behind the heads in use."""
        name = "self_attn.A_log"
        if name in self._tensors:
            values = self.vector(name).float().numpy()
            check_trunk_values(f"layers.{self.layer}.{name}", values, self._spec.kda.heads)


def arena_size(tensors: Iterable[Tensor]) -> int:
    """Bytes that ``tensors`` take in memory, each at a 64-byte boundary."""
    return sum(align_up(t.location.length, TENSOR_ALIGN) for t in tensors)


def head_rows(spec: ModelSpec, row_bytes: int) -> int:
    """Rows of a head block: whole weight tiles, so that streaming changes no shape."""
    step = tile_rows(spec.vocab, spec.hidden)
    return min(spec.vocab, max(1, HEAD_BUFFER // row_bytes // step) * step)


class Weights:
    """Trunk of a checkpoint under a plan.  Reads through ``disk``; counts page requests."""

    def __init__(self, checkpoint: Checkpoint, disk: DiskTier, plan: Plan) -> None:
        self._checkpoint, self._disk, self._plan = checkpoint, disk, plan
        self.spec = checkpoint.spec
        self.counts = Counts()  # layers
        self.head_counts = Counts()  # passes over the head
        self.embed_counts = Counts()  # rows of the embedding
        self._trunk = {la.index: checkpoint.trunk(la.index) for la in self.spec.layers}
        self._resident: dict[int, LayerWeights] = {}
        self._ring = Slab(plan.ring_bytes) if plan.ring_bytes else None
        self._in_ring: LayerWeights | None = None
        every = checkpoint.globals()
        self._embed = every.pop("embed_tokens.weight")
        head = every.pop("lm_head.weight", self._embed)
        self._head, self._tied = head, head is self._embed
        self._small = list(every.values())
        self.globals: LayerWeights
        self._embed_rows: torch.Tensor | None = None
        self._head_rows: torch.Tensor | None = None
        self._head_slab: Slab | None = None

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read what the plan keeps resident; ``progress(bytes done, bytes in all)``."""
        total, done = self._plan.resident_bytes, 0
        self.globals = self._read(-1, self._small)
        for layer in sorted(self._plan.resident_layers):
            self._resident[layer] = self._read(layer, self._trunk[layer])
            done += arena_size(self._trunk[layer])
            progress(done, total)
        if self._plan.embed_resident:
            self._embed_rows = self._read_one(self._embed)
        if self._plan.head_resident:
            shared = self._embed_rows if self._tied else None
            self._head_rows = shared if shared is not None else self._read_one(self._head)
        else:
            row = self._row_bytes(self._head)
            self._head_slab = Slab(head_rows(self.spec, row) * row)
        progress(total, total)

    # ---- layers ----

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerWeights]:
        """The weights of layer ``index``, valid inside the ``with`` block."""
        self.counts.requests += 1
        if index in self._resident:
            self.counts.hits += 1
            yield self._resident[index]
            return
        if self._in_ring is not None and self._in_ring.layer == index:
            self.counts.hits += 1
        else:
            self.counts.misses += 1
            self._in_ring = None  # a failed read must not leave the former layer's name on it
            self._in_ring = self._read(index, self._trunk[index], self._ring)
        yield self._in_ring

    def _read(
        self, layer: int, tensors: Sequence[Tensor], slab: Slab | None = None
    ) -> LayerWeights:
        counts = Counts() if slab is None else self.counts  # loading answers no request
        if slab is None:
            slab = Slab(arena_size(tensors), claim=False)
        named, pieces, at = {}, [], 0
        for tensor in tensors:
            place = slab.bytes[at : at + tensor.location.length]
            pieces.append((tensor.location, place))
            named[tensor.name] = _as_tensor(place, tensor)
            at += align_up(tensor.location.length, TENSOR_ALIGN)
        self._read_counted(pieces, counts, 0)
        weights = LayerWeights(layer, named, self.spec)
        weights.check_values()
        return weights

    def _read_one(self, tensor: Tensor) -> torch.Tensor:
        return self._read(-1, [tensor])._tensors[tensor.name]

    # ---- embedding and head ----

    def embed(self, tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rows of the embedding, [n, H] in ``dtype``; read from disk unless resident."""
        counts = self.embed_counts
        counts.requests += len(tokens)
        if self._embed_rows is not None:
            counts.hits += len(tokens)
            return self._embed_rows[torch.tensor(tokens)].to(dtype)
        size = self._row_bytes(self._embed)
        rows = np.empty((len(tokens), size), np.uint8)
        pieces = [(self._rows_of(self._embed, t, 1), rows[i]) for i, t in enumerate(tokens)]
        self._read_counted(pieces, counts, len(tokens))
        return torch.from_numpy(rows).view(DTYPES[self._embed.dtype]).to(dtype)

    def head_blocks(self) -> Iterator[tuple[int, int, Weight]]:
        """One pass over the head: (first row, end row, weight) in blocks of whole weight tiles."""
        self.head_counts.requests += 1
        if self._head_rows is None:
            self.head_counts.misses += 1
        else:
            self.head_counts.hits += 1
        rows, step = self.spec.vocab, head_rows(self.spec, self._row_bytes(self._head))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            if self._head_rows is not None:
                yield begin, end, DenseWeight(self._head_rows[begin:end])
                continue
            assert self._head_slab is not None
            location = self._rows_of(self._head, begin, end - begin)
            place = self._head_slab.bytes[: location.length]
            self._read_counted([(location, place)], self.head_counts, 0)
            block = Tensor("head", self._head.dtype, (end - begin, self.spec.hidden), location)
            yield begin, end, DenseWeight(_as_tensor(place, block))

    def _read_counted(
        self, pieces: Sequence[tuple[Location, Buffer]], counts: Counts, misses: int
    ) -> None:
        begin = time.perf_counter()
        self._disk.read_scatter(pieces).wait()
        counts.wait_seconds += time.perf_counter() - begin
        counts.bytes += sum(location.length for location, _ in pieces)
        counts.misses += misses

    def _row_bytes(self, tensor: Tensor) -> int:
        return tensor.location.length // tensor.shape[0]

    def _rows_of(self, tensor: Tensor, first: int, count: int) -> Location:
        size = self._row_bytes(tensor)
        place = tensor.location
        return Location(place.file, place.offset + first * size, count * size)

    # ---- experts: bytes in a slot -> weights ----

    def expert(self, page: PageId, buffer: Buffer) -> tuple[Weight, Weight, Weight]:
        """Gate, up and down weights of the expert whose page lies in the slot ``buffer``."""
        m = self.spec.moe
        assert m is not None
        page_map = self._checkpoint.expert(page.layer, page.expert)
        starts, _ = windows(page_map.extents)
        raw = {}
        for key, extent, delta, size in page_map.parts:
            at = starts[extent] + delta
            raw[key] = torch.from_numpy(buffer[at : at + size])
        shapes = {"w1": (m.width, m.io), "w3": (m.width, m.io), "w2": (m.io, m.width)}
        weights: dict[str, Weight] = {}
        for name, (n, k) in shapes.items():
            if m.format == "bf16":
                dtype = DTYPES[self._checkpoint.expert_dtype]
                weights[name] = DenseWeight(
                    raw[f"{name}.weight"].view(dtype).view(n, k), aligned=False
                )
                continue
            scale = raw[f"{name}.weight_scale"]
            if bool((scale == SCALE_NAN).any()):
                raise CheckpointError(
                    f"Layer {page.layer}, expert {page.expert}: {name}.weight_scale holds "
                    "255, which is not a number.",
                    "The file is damaged: run k3offload check MODEL --full and fetch it again.",
                )
            packed = raw[f"{name}.weight_packed"].view(n, k // 2)
            weights[name] = Mxfp4Weight(packed, scale.view(n, -1))
        return weights["w1"], weights["w3"], weights["w2"]


def _as_tensor(place: Buffer, tensor: Tensor) -> torch.Tensor:
    return torch.from_numpy(place).view(DTYPES[tensor.dtype]).view(tensor.shape)
