"""A trunk tensor read and quantised in groups of rows, with the quantisers that also serve a run.

In memory are two groups of rows and the scales of one tensor.  The only file of packing that needs
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from .config import QUANTISE_CHUNK
from .errors import CheckpointError
from .inventory import DTYPE_BITS
from .kernels.quantize import quantize_into
from .kernels.workers import Workers
from .pack_layout import Entry
from .precision import CODES
from .tiers.base import Buffer, Location, Ticket
from .tiers.tier_disk import DiskTier

ROWS: Final = 16 * QUANTISE_CHUNK  #: numbers that are quantised at a time
_FLOATS: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_STORED: Final = {"U8": torch.uint8, "I8": torch.int8, "BF16": torch.bfloat16}


class Quantiser:
    """Reads through ``disk`` and quantises on ``threads`` threads."""

    def __init__(self, disk: DiskTier, threads: int) -> None:
        self._disk, self._workers = disk, Workers(threads)

    def close(self) -> None:
        self._workers.close()

    def __call__(self, entry: Entry) -> Iterator[Buffer]:
        """The bytes of codes, then of scales; no row depends on another, so any grouping gives
        these.  What was yielded is valid until the next.  Raises ``CheckpointError`` for a value
        that is not finite."""
        source = entry.source
        assert source is not None and source.known is not None
        codes, scale = entry.stored
        precision = next(name for name, end in CODES.items() if codes.name.endswith(end))
        rows, columns = source.known.shape
        some = min(rows, max(1, ROWS // columns))
        scales = torch.empty(scale.shape, dtype=_STORED[scale.dtype])
        room = torch.empty(some, codes.shape[1], dtype=_STORED[codes.dtype])
        begin = 0
        for raw in self._read_ahead(source.where, some * columns * DTYPE_BITS[source.dtype] // 8):
            weight = torch.from_numpy(raw).view(_FLOATS[source.dtype]).view(-1, columns)
            end = begin + len(weight)
            made = room[: len(weight)]
            try:
                quantize_into(weight, precision, made, scales[begin:end], self._workers)
            except ValueError as error:
                raise CheckpointError(
                    f"The tensor {source.name} cannot be quantised: {error}.",
                    "Download or copy its shard again.",
                ) from error
            yield made.view(torch.uint8).numpy().reshape(-1)
            begin = end
        yield scales.view(torch.uint8).numpy().reshape(-1)

    def _read_ahead(self, where: Location, step: int) -> Iterator[Buffer]:
        """``where`` in pieces of ``step`` bytes; the next one is read while one is in use."""
        rooms = np.empty((2, step), np.uint8)
        tickets: list[tuple[Buffer, Ticket]] = []
        for number, begin in enumerate(range(0, where.length, step)):
            place = where._replace(
                offset=where.offset + begin, length=min(step, where.length - begin)
            )
            room = rooms[number % 2, : place.length]
            tickets.append((room, self._disk.read_scatter([(place, room)])))
            if number:
                yield _read(*tickets.pop(0))
        yield _read(*tickets.pop())


def _read(room: Buffer, ticket: Ticket) -> Buffer:
    ticket.wait()
    return room
