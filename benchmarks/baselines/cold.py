"""Files out of the page cache, and how much of them is in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def evict(files: Iterable[Path]) -> int:
    """Drop ``files`` from the page cache; the bytes that stayed, because others use them."""
    left = 0
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)  # pages that are not on the drive yet would stay
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            left += _cached(handle)
        finally:
            os.close(handle)
    return left


def cached(files: Iterable[Path]) -> int:
    """Bytes of ``files`` that the page cache holds."""
    total = 0
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            total += _cached(handle)
        finally:
            os.close(handle)
    return total


def _cached(handle: int) -> int:
    size = os.fstat(handle).st_size
    if not size:
        return 0
    with mmap.mmap(handle, size, access=mmap.ACCESS_COPY) as mapped:
        bytes_ = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        address, count = bytes_.ctypes.data, ctypes.c_size_t(size)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(address), count, ctypes.c_void_p(pages.ctypes.data)
        )
        del bytes_
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum()) * mmap.PAGESIZE
