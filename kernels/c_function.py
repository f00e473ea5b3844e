"""Functions of the native library as Python calls them: types of arguments, addresses of tensors.

Knows ctypes and torch, nothing of operators.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from . import native
from .workers import Workers

_LETTERS = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "q": ctypes.c_int64,
    "f": ctypes.c_float,
}
_NUMBERS = {getattr(torch, name): number for number, name in enumerate(native.DTYPES)}


class CFunction:
    """The function ``name`` with ``types`` of arguments by letter: ``p`` address, ``i`` int, ``q``
    64-bit int, ``f`` float.  It returns 0, or raises MemoryError.  Looked up at the first call."""

    def __init__(self, name: str, types: str) -> None:
        self._name, self._types = name, types
        self._f: Any = None

    def __call__(self, *args: Any) -> None:
        if self._f is None:
            f = getattr(native.loaded(), self._name)
            f.argtypes, f.restype = [_LETTERS[t] for t in self._types], ctypes.c_int
            self._f = f
        native.check(self._f(*args))


def dtype_of(x: torch.Tensor) -> int:
    """The number of an activation's dtype: float32 or bfloat16, else TypeError."""
    number = _NUMBERS[x.dtype]
    if x.dtype == torch.float16:
        raise TypeError("native kernels compute with float32 and bfloat16, not float16")
    return number


def narrow(x: torch.Tensor) -> torch.Tensor:
    """A small weight as the library takes it: contiguous float32 or bfloat16, the same values."""
    return (x.float() if x.dtype == torch.float16 else x).contiguous()


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` as contiguous float32."""
    return x.float().contiguous()


def threads_of(workers: Workers | None) -> int | None:
    """The native threads of ``workers``; None: the caller alone."""
    return None if workers is None else native.pool(workers)
