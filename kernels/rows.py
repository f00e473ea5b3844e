"""Fixed shapes for torch operators, so that a row's bits never depend on how many rows there are.

Vectorised operators treat the end of a range with scalar code, whose exp and sigmoid round
differently; matrix products choose their code by shape.  So rows go through torch in tiles of 64,
filled up with zeros, and single elements in blocks of 64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..config import ROW_TILE

ALIGN = 64  #: bytes; a product may take another path for operands that lie elsewhere
LANES = 64  #: more numbers than any vector of a processor holds, times the unrolling of its loops


def fill_up(x: torch.Tensor) -> torch.Tensor:
    """``x`` [R, ...] with zero rows added up to a multiple of 64, at a 64-byte boundary."""
    missing = -x.shape[0] % ROW_TILE
    if not missing and x.is_contiguous() and x.data_ptr() % ALIGN == 0:
        return x
    full = x.new_zeros(x.shape[0] + missing, *x.shape[1:])
    full[: x.shape[0]] = x
    return full


def by_tiles(f: Callable[..., torch.Tensor], *arrays: torch.Tensor) -> torch.Tensor:
    """``f`` of tiles of 64 rows of ``arrays`` (each [R, ...]), put together to [R, ...]."""
    rows = arrays[0].shape[0]
    tiles = zip(*(torch.split(fill_up(a), ROW_TILE) for a in arrays), strict=True)
    return torch.cat([f(*tile) for tile in tiles])[:rows]


def by_lanes(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The elementwise ``f`` of ``x``, each number in a full block of 64."""
    flat = x.reshape(-1)
    missing = -flat.shape[0] % LANES
    return f(F.pad(flat, (0, missing)) if missing else flat)[: flat.shape[0]].view(x.shape)
