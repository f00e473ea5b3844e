"""Where the trunk's tensors lie in memory, and the bytes that follow from it.  Numbers only.

Every array begins at a 64-byte boundary whatever its place in the file, because the bits of
torch's matrix products may depend on alignment.  Where the file has it at such a boundary too, as a
pack does, a large one lies as far from a page's begin as there, so that it is read without a copy.
A tensor that the trunk's precision touches lies there as codes and scales, under the names a pack
stores them by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from .checkpoint import ExpertPage, Tensor
from .config import QUANTISE_CHUNK, READ_ALIGN, TENSOR_ALIGN, align_up, tile_rows
from .precision import Part, parts
from .spec import ModelSpec
from .tiers.base import Location

HEAD_BUFFER = 32 << 20  #: bytes of each of the two buffers of a streamed head
HEAD = "lm_head.weight"
EMBED = "embed_tokens.weight"
BLOCK = 2 << 20  #: bytes that are read and quantised at a time (one row, if it is larger)
DEPTH = 3  #: of such blocks at a time
TEMPORARIES = 4 * 4 * QUANTISE_CHUNK  #: bytes that one quantising thread needs meanwhile
ALIKE = 1 << 18  #: bytes from which on an array's place in a page follows the file


class Item(NamedTuple):
    """A tensor of the file and the arrays it becomes: itself, or codes and scales."""

    tensor: Tensor
    parts: tuple[Part, ...]
    at: tuple[int, ...]  #: where each begins in memory

    @property
    def quantised(self) -> bool:
        return len(self.parts) > 1


def lay_out(tensors: Iterable[Tensor], precision: str) -> tuple[list[Item], int]:
    """Where ``tensors`` lie, in the order of the file, and the bytes they take together."""
    items, end = [], 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.location):
        held = parts(tensor.name, tensor.dtype, tensor.shape, precision)
        at = []
        for part in held:
            begin = align_up(end, TENSOR_ALIGN)
            if (
                len(held) == 1
                and part.nbytes >= ALIKE
                and not tensor.location.offset % TENSOR_ALIGN
            ):
                begin = end + (tensor.location.offset - end) % READ_ALIGN
            at.append(begin)
            end = begin + part.nbytes
        items.append(Item(tensor, held, tuple(at)))
    return items, align_up(end, TENSOR_ALIGN)


def arena_size(tensors: Iterable[Tensor], precision: str = "bfloat16") -> int:
    """Bytes that ``tensors`` take in memory under ``precision``."""
    return lay_out(tensors, precision)[1]


def rows_of(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Rows ``begin:end`` of a tensor of the file, as a tensor of their own."""
    row = tensor.location.length // tensor.shape[0]
    place = Location(
        tensor.location.file, tensor.location.offset + begin * row, (end - begin) * row
    )
    return tensor._replace(shape=(end - begin, *tensor.shape[1:]), location=place)


class Layout(Protocol):
    """What the byte counts of a plan need to know: a checkpoint, or a guess at one."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def expert_bytes(self) -> int: ...

    def trunk(self, layer: int) -> Sequence[Tensor]: ...

    def globals(self) -> dict[str, Tensor]: ...

    def expert(self, layer: int, expert: int) -> ExpertPage: ...


def head_tensors(layout: Layout) -> list[Tensor]:
    """What the head is stored as: one tensor, or codes and scales; none if it is the embedding."""
    return [tensor for name, tensor in layout.globals().items() if name.startswith(HEAD)]


def head_rows(spec: ModelSpec, row_bytes: int) -> int:
    """Rows of a head block: whole weight tiles, so that streaming changes no shape."""
    step = tile_rows(spec.vocab, spec.hidden)
    return min(spec.vocab, max(1, HEAD_BUFFER // row_bytes // step) * step)


def head_buffers(layout: Layout, precision: str = "bfloat16") -> list[int]:
    """Bytes of each buffer of a streamed head: one if it fits into one block, else two."""
    tensors = head_tensors(layout) or [layout.globals()[EMBED]]
    cuts = head_cuts(layout.spec, tensors, precision)
    size = max(arena_size([rows_of(t, *cut) for t in tensors], precision) for cut in cuts)
    return [size] * min(2, len(cuts))


def head_cuts(spec: ModelSpec, tensors: Sequence[Tensor], precision: str) -> list[tuple[int, int]]:
    """First row and end row of each block of the head."""
    step, rows = head_rows(spec, arena_size(tensors, precision) // spec.vocab), spec.vocab
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def quantising(layout: Layout, precision: str, threads: int) -> int:
    """Bytes that quantising takes while weights are read; 0 if nothing is to be quantised.

    Loading uses all threads.  While running, a layer and a head block may be on their way in the
    background while the caller fetches a third."""
    tensors = [t for la in layout.spec.layers for t in layout.trunk(la.index)]
    items, _ = lay_out([*tensors, *head_tensors(layout)], precision)
    rows = [i.tensor.location.length // i.tensor.shape[0] for i in items if i.quantised]
    if not rows:
        return 0
    return 3 * DEPTH * max(BLOCK, *rows) + (threads + 2) * TEMPORARIES
