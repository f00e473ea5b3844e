"""The bytes of a shard, block by block: read straight into place, or quantised on the way.

The reads of the next blocks run while a block is written.  This file knows no folder, and not how
a tensor is quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from .pack_layout import Entry
from .tiers.base import Buffer, Location, Ticket
from .tiers.tier_disk import DiskTier

BLOCK: Final = 8 << 20  #: bytes of a block; a multiple of 4096
Quantise = Callable[[Entry], Iterator[Buffer]]  #: the bytes of a tensor that becomes two


@dataclass
class Block:
    """``used`` bytes of a shard in ``buffer``, complete when ``ticket`` is done."""

    buffer: Buffer
    used: int = 0
    pieces: list[tuple[Location, Buffer]] = field(default_factory=list)
    ticket: Ticket | None = None


class _Filler:
    """Puts the bytes of a shard one after the other into blocks."""

    def __init__(
        self, disk: DiskTier, take: Callable[[], Block], give: Callable[[Block], None]
    ) -> None:
        self._disk, self._take, self._give = disk, take, give
        self._block: Block | None = None

    def place(self, count: int) -> Iterator[tuple[int, Buffer]]:
        """Room for ``count`` bytes, in one or more blocks: (bytes before it, where to put them)."""
        done = 0
        while done < count:
            block = self._block = self._block or self._take()
            here = min(count - done, block.buffer.size - block.used)
            block.used += here
            yield done, block.buffer[block.used - here : block.used]
            done += here
            if block.used == block.buffer.size:
                self.flush()

    def put(self, data: Buffer) -> None:
        for begin, room in self.place(data.size):
            room[:] = data[begin : begin + room.size]

    def zeros(self, count: int) -> None:
        for _, room in self.place(count):
            room[:] = 0

    def copy(self, where: Location) -> None:
        for begin, room in self.place(where.length):
            assert self._block is not None
            piece = Location(where.file, where.offset + begin, room.size)
            self._block.pieces.append((piece, room))

    def flush(self) -> None:
        """Start the reads of the block and hand it on."""
        block, self._block = self._block, None
        if block is not None:
            block.ticket = self._disk.read_scatter(block.pieces)
            self._give(block)


def stream(
    head: bytes,
    entries: Iterable[Entry],
    disk: DiskTier,
    take: Callable[[], Block],
    give: Callable[[Block], None],
    quantise: Quantise,
) -> None:
    """Fill blocks from ``take()`` with a shard and hand them to ``give`` in order."""
    filler = _Filler(disk, take, give)
    filler.put(np.frombuffer(head, np.uint8))
    for entry in entries:
        if entry.source is None:
            filler.zeros(entry.nbytes)
        elif len(entry.stored) == 1:
            filler.copy(entry.source.where)
        else:
            for data in quantise(entry):
                filler.put(data)
    filler.flush()
