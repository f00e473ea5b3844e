"""Latents of 8 bits: what a packed row holds and where.  Bytes alone: this file has no torch.

Attention remembers of a token ``kv_lora`` numbers that are normed (the latent) and ``rope`` more
that are not.  A packed row of them is, one behind the other:

* the ``rope`` numbers, as they are, in the type of the activations;
* a scale in bfloat16 for each 64 numbers of the latent (fewer at the end);
* a byte for each number of the latent: its code, a signed integer (``int8``) or a float of 4 bits
  of exponent and 3 of mantissa (``fp8``, E4M3, no infinities);
* zeros up to a multiple of 16 bytes, so that a block of 256 rows is whole pages of a disk.

A number is its code times its scale in float32, rounded once to the type of the activations.  The
scale is the largest magnitude / 127 (448 for ``fp8``), rounded up to bfloat16.  Hence a code is off
by at most half a step of 1/127 of the group's largest number (and what the scale was rounded up
by), or of ``fp8`` by 1/16 of the number itself (by 1/1,024 of the scale where that is more), and
all follows from the row alone.

K3: 512 + 64 numbers take 128 + 16 + 512 = 656 bytes instead of 1,152 in bfloat16 (57 %).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..config import LATENT_BLOCK, align_up

PRECISIONS: Final = ("int8", "fp8")
GROUP: Final = 64  #: numbers that share a scale
SCALE: Final = 2  #: bytes of a scale
ALIGN: Final = 16  #: bytes; rows are multiples of it

#: Bytes of unpacked blocks at a time: for a decode step what a core's second cache holds, for
#: prompts so much that calls are few, on a device so much that launches are few.
DECODE_ROOM, PROMPT_ROOM, DEVICE_ROOM = 1 << 20, 8 << 20, 32 << 20


class LatentFormat(NamedTuple):
    """How rows of latents lie in memory.  ``item``: bytes of an activation; ``precision``: of
    ``PRECISIONS``, or None for rows that are not packed."""

    kv_lora: int
    rope: int
    item: int
    precision: str | None = None

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.kv_lora + self.rope

    @property
    def groups(self) -> int:
        """Scales of a packed row."""
        return -(-self.kv_lora // GROUP)

    @property
    def scales(self) -> int:
        """Where the scales of a packed row begin, in bytes."""
        return self.rope * self.item

    @property
    def codes(self) -> int:
        """Where the codes of a packed row begin, in bytes."""
        return self.scales + self.groups * SCALE

    @property
    def row(self) -> int:
        """Bytes of a row as it is kept."""
        if self.precision is None:
            return self.width * self.item
        return align_up(self.codes + self.kv_lora, ALIGN)

    def at_once(self, room: int) -> int:
        """Unpacked blocks that ``room`` bytes hold, at least one."""
        return max(1, room // (LATENT_BLOCK * self.width * self.item))

    def room(self, context: int, room: int) -> int:
        """Bytes of unpacked blocks that attention over ``context`` tokens needs at a time."""
        if self.precision is None:
            return 0
        blocks = min(self.at_once(room), -(-context // LATENT_BLOCK))
        return blocks * LATENT_BLOCK * self.width * self.item
