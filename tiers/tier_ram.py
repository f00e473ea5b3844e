"""The RAM tier's memory: one anonymous slab, claimed at start, cut into slots.

Claiming means touching: a budget that the machine cannot give fails before the first token and
not an hour later, and the peak of a run is the plan that was printed.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from ..errors import DoesNotFit
from .base import Buffer

_PIECE = 64 << 20
HUGE = 2 << 20  #: bytes of a huge page


class Slab:
    """``size`` bytes of page-aligned anonymous memory; ``claim`` touches every page of it.

    What there is of whole huge pages is asked for as such: direct reads into them were 1.4 times
    as fast (see LOG.md), because the drive is handed fewer and longer runs of memory.
    """

    def __init__(self, size: int, claim: bool = True) -> None:
        self.size = size
        room = HUGE - mmap.PAGESIZE if size >= HUGE else 0  # to begin at a huge page; not touched
        try:
            self._map = mmap.mmap(
                -1, max(size, 1) + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise DoesNotFit(
                f"The system refused {size:,} bytes of memory ({error}).",
                "Lower --ram, or lift the limit on this process's address space.",
                missing=size,
            ) from error
        every: Buffer = np.frombuffer(self._map, dtype=np.uint8)
        begin = -every.ctypes.data % HUGE if room else 0
        self.bytes = every[begin : begin + size]
        whole = size - size % HUGE
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE, begin, whole)
        if claim:
            for begin in range(0, size, _PIECE):
                self.bytes[begin : begin + _PIECE : mmap.PAGESIZE] = 0

    def slots(self, stride: int) -> list[Buffer]:
        """The slab cut into pieces of ``stride`` bytes (a multiple of the page size)."""
        return [self.bytes[i : i + stride] for i in range(0, self.size - stride + 1, stride)]
