"""Constants that results depend on, and the sizes and units people type.

The constants below are part of the definition of a result: bits depend on them, so they are
fixed, not tuned per machine.  ``k3offload inspect --json`` prints them.
"""

from __future__ import annotations

import re
import reprlib
from decimal import Decimal
from typing import Final

from .errors import UsageError

KDA_CHUNK: Final = 64  #: tokens of a KDA chunk, at absolute positions
LATENT_BLOCK: Final = 256  #: tokens of an MLA latent block, at absolute positions
ROW_TILE: Final = 64  #: rows of every torch product; shorter tiles are padded with zeros
HEAD_GROUP: Final = 8  #: heads computed together, so that shapes never depend on the threads
SUB_BLOCK: Final = 16  #: tokens of a chunk whose decays are taken pair by pair
TILE_ELEMENTS: Final = 1 << 20  #: weights of a tile: 2 MB in bfloat16, a core's second cache
READ_ALIGN: Final = 4096  #: bytes; offset, length and address of a direct read
TENSOR_ALIGN: Final = 64  #: bytes; address of every weight a matrix product reads

CONSTANTS: Final = {
    "kda_chunk": KDA_CHUNK,
    "latent_block": LATENT_BLOCK,
    "row_tile": ROW_TILE,
    "head_group": HEAD_GROUP,
    "kda_sub_block": SUB_BLOCK,
    "tile_elements": TILE_ELEMENTS,
    "read_align": READ_ALIGN,
    "tensor_align": TENSOR_ALIGN,
}

QUANTISE_CHUNK: Final = 1 << 17  #: numbers quantised at a time: temporaries stay in a cache
CALL_ROWS: Final = 512  #: rows of all experts of one call together; bounds memory, changes no bit
SWEEP: Final = 512  #: prompt tokens of a sweep from which on it is asked whether more would pay
EXPANDED: Final = 4  #: latent blocks that prompt attention on a GPU expands at a time: 50 MB for K3
RANGES: Final = 64  #: parts that decode attention on a GPU cuts a sequence into at most
GROUP_ROWS: Final = 512  #: rows that share one reading of the trunk; bounds memory, changes no bit

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_LARGEST: Final = 2**63 - 1  #: bytes; more than any machine has


def tile_rows(n: int, k: int) -> int:
    """Rows of a tile of a weight [n, k]: a multiple of 32, about ``TILE_ELEMENTS`` numbers."""
    return min(n, max(32, TILE_ELEMENTS // k // 32 * 32))


def parse_size(text: str | int | float) -> int:
    """Bytes from ``"16G"`` (16e9), ``"16GiB"`` (2**34), ``"512M"`` or a plain number of bytes.

    Exact, also where a float would round.  Raises ``UsageError`` for anything else: words, negative
    numbers, NaN, ``True``, or more than 2**63 - 1 bytes.
    """
    size: Decimal | float | None = None
    if isinstance(text, str):
        form = r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt]i?)?b?\s*"
        if match := re.fullmatch(form, text.lower(), re.ASCII):
            unit = match[2] or ""
            size = Decimal(match[1]) * (_BINARY.get(unit) or _UNITS[unit])
    elif isinstance(text, int | float) and not isinstance(text, bool):
        size = text
    if size is None or not 0 <= size <= _LARGEST:  # NaN is not between them either
        shown = f"{Decimal(text):.6g}" if type(text) is int else reprlib.repr(text)
        raise UsageError(f"{shown} is not a size.", "Write it like 16G, 16GiB or 2000000000.")
    return int(size)


def show_size(n: float) -> str:
    """A size as a person reads it, in decimal units: ``17.5 MB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= scale:
            return f"{n / scale:.3g} {unit}" if abs(n) < 100 * scale else f"{n / scale:.0f} {unit}"
    return f"{n:.0f} B"


def align_up(n: int, align: int) -> int:
    """The smallest multiple of ``align`` that is >= ``n``."""
    return -(-n // align) * align
