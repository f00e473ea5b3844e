"""The latents of a sequence in pieces: runs of whole blocks that attention takes one by one.

Whoever has all of them in memory gives one piece.  Attention carries its running maximum, sums and
shares from piece to piece, block by block in their order, so that no cut changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .latent_format import LatentFormat

#: Runs of blocks [256, kv_lora + rope], in order.  A piece is not touched any more once the next
#: one is asked for, so its memory may be used again; pieces that are a list stay as they are.
Pieces = Iterable[Sequence[torch.Tensor]]


class Piece(NamedTuple):
    """``blocks`` that hold the tokens ``first`` to ``end`` of a sequence."""

    blocks: Sequence[torch.Tensor]
    first: int
    end: int
    last: bool  #: nothing comes after it


def walk(pieces: Pieces, length: int) -> Iterator[Piece]:
    """``pieces`` of ``length`` tokens with their places.  What comes after the last token is not
    asked for."""
    first, kind, shape = 0, None, None
    for blocks in pieces:
        for block in blocks:
            assert shape in (None, block.shape) and kind in (None, block.dtype), block.shape
            shape, kind = block.shape, block.dtype
        size = blocks[0].shape[0]
        full = first + len(blocks) * size
        end = min(full, length)
        assert full - size < end, (first, len(blocks), length)  # no block without a token
        yield Piece(blocks, first, end, end == length)
        if end == length:
            return
        first = end
    raise AssertionError(f"{first} of {length} latents were given")


def unpacked(
    pieces: Pieces,
    length: int,
    form: LatentFormat,
    most: int,
    out: tuple[torch.dtype, torch.device],
    unpack: Callable[[Sequence[torch.Tensor], int, LatentFormat, torch.Tensor], None],
) -> Iterator[Sequence[torch.Tensor]]:
    """Packed ``pieces`` as numbers of the type and at the device ``out``, ``most`` blocks at a
    time, in memory that is used again.  This is where attention's latents are unpacked, whatever
    computes it.  Rows from ``length`` on are left as that memory is."""
    room: torch.Tensor | None = None
    for blocks, first, end, _ in walk(pieces, length):
        size = blocks[0].shape[0]
        if room is None:
            shape = (min(most, -(-length // size)), size, form.width)
            room = torch.empty(shape, dtype=out[0], device=out[1])
        for begin in range(0, len(blocks), most):
            some = blocks[begin : begin + most]
            count = min(len(some) * size, end - first - begin * size)
            unpack(some, count, form, room)
            yield list(room[: len(some)])
