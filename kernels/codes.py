"""Router scores in 8 bits by the native library: what a trace keeps, of many rows at once.

``quantise`` and ``nearest`` of ``scheduler/hints.py`` define them, and give the same bytes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import native
from .workers import Workers

_TYPES = [ctypes.c_void_p] + 5 * [ctypes.c_int64] + 4 * [ctypes.c_void_p]


def coded(
    scores: torch.Tensor,
    top_k: int,
    near: int,
    chosen: torch.Tensor | None = None,
    workers: Workers | None = None,
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """Of biased ``scores`` [R, E] float32 the best k + ``near`` of each row (all, if they are
    fewer): experts by falling code, the lower number first among equals, and their codes.  The
    ``chosen`` [R, k] int64 come before all others.  Computed at once, whatever else is put off.

    Raises ``UsageError`` where the native library is not there.
    """
    scores = scores.contiguous()
    rows, count = scores.shape
    assert scores.dtype == torch.float32 and 0 < top_k <= count, (scores.dtype, top_k, count)
    wide = min(top_k + near, count)
    best, codes = np.empty((rows, wide), np.uint16), np.empty((rows, wide), np.uint8)
    held = None if chosen is None else chosen.contiguous()
    assert held is None or (held.dtype == torch.int64 and held.shape == (rows, top_k)), held
    far = min(max(count // 2, 2 * top_k), count - 1)
    pool = None if workers is None else native.pool(workers)
    failed = _function()(
        pool, rows, count, top_k, wide, far, scores.data_ptr(),
        None if held is None else held.data_ptr(), best.ctypes.data, codes.ctypes.data,
    )  # fmt: skip
    native.check(failed)
    return best, codes


@lru_cache(maxsize=1)
def _function() -> Any:
    found = native.loaded().k3_codes
    found.argtypes, found.restype = _TYPES, ctypes.c_int
    return found
