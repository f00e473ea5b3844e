"""How the memory of spilled arrays is shared out: slots of the hot window, and two buffers that
cold blocks are read into.  Arithmetic alone."""

from __future__ import annotations

from typing import NamedTuple

from ..config import READ_ALIGN, align_up

PIECE = 8 << 20  #: most bytes of a buffer, but for a whole tile
GOOD = 48 << 20  #: bytes of memory with which reads are long enough to be quick


VIEW = 1024  #: bytes of the objects through which a block is seen


class Room(NamedTuple):
    """Blocks of memory: slots of the hot window, and each of the two buffers."""

    slots: int
    piece: int


def stride(block: int) -> int:
    """Bytes of memory that a block of ``block`` bytes takes."""
    return align_up(block, READ_ALIGN)


def place(block: int) -> int:
    """Bytes that a block of ``block`` bytes takes in all."""
    return stride(block) + VIEW


def least_room(tile: int = 1) -> int:
    """Blocks of memory that arrays can do with: a buffer in use, one being read, two slots."""
    return 2 * tile + 2


def room_for(size: int, block: int, tile: int = 1) -> Room | None:
    """How ``size`` bytes are shared out, where ``tile`` blocks must fit into a buffer; None if they
    are too few for anything."""
    most = size // place(block)
    if most < least_room(tile):
        return None
    piece = max(tile, min(PIECE // stride(block), most // 8))
    return Room(most - 2 * piece, piece)
