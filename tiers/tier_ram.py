"""The RAM tier's memory: one anonymous slab, claimed at start, cut into slots.

Claiming means touching: a budget that the machine cannot give fails before the first token and
not an hour later, and the peak of a run is the plan that was printed.
"""

from __future__ import annotations

import mmap

import numpy as np

from ..errors import DoesNotFit
from .base import Buffer

_PIECE = 64 << 20


class Slab:
    """``size`` bytes of page-aligned anonymous memory; ``claim`` touches every page of it."""

    def __init__(self, size: int, claim: bool = True) -> None:
        self.size = size
        length = max(size, mmap.PAGESIZE)
        try:
            self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DoesNotFit(
                f"The system refused {length:,} bytes of memory ({error}).",
                "Lower --ram, or lift the limit on this process's address space.",
                missing=length,
            ) from error
        self.bytes: Buffer = np.frombuffer(self._map, dtype=np.uint8)[:size]
        if claim and size >= _PIECE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if claim:
            for begin in range(0, size, _PIECE):
                self.bytes[begin : begin + _PIECE : mmap.PAGESIZE] = 0

    def slots(self, stride: int) -> list[Buffer]:
        """The slab cut into pieces of ``stride`` bytes (a multiple of the page size)."""
        return [self.bytes[i : i + stride] for i in range(0, self.size - stride + 1, stride)]
