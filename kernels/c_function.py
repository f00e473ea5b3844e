"""Functions of the native library as Python calls them: types of arguments, addresses of tensors.

Calls can be put off and made together, in their order: Python that runs right after a kernel finds
nothing of itself in the caches, which takes most of its time.  Results of calls that are put off
hold nothing yet; whoever reads them other than by another such call says `finish` first.

Knows ctypes and torch, nothing of operators.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType
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


class _Later(threading.local):
    """The calls of a thread that were put off, with what their addresses point to; None where
    calls are made at once."""

    calls: list[tuple[Callable[..., int], list[Any], object]] | None = None


_later = _Later()


class PutOff:
    """Calls from this thread inside the block wait for `finish`, or for its end; an error drops
    them.  With ``wait`` false they are made at once, whatever an interrupt may have left behind: no
    generator, whose end would come whenever and wherever it is collected."""

    def __init__(self, wait: bool = True) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        _later.calls = [] if self._wait else None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                finish()
        finally:
            _later.calls = None


def waiting() -> bool:
    """Whether calls of this thread were put off."""
    return bool(_later.calls)


def finish() -> None:
    """Make the calls of this thread that were put off.  An error drops those behind it."""
    calls = _later.calls
    if not calls:
        return
    _later.calls = []
    for f, places, _ in calls:
        native.check(f(*places))


class CFunction:
    """The function ``name`` with ``types`` of arguments by letter: ``p`` address, ``i`` int, ``q``
    64-bit int, ``f`` float.  It returns 0, or raises MemoryError.  Looked up at the first call."""

    def __init__(self, name: str, types: str) -> None:
        self._name, self._types = name, types
        self._addresses = [i for i, letter in enumerate(types) if letter == "p"]
        self._f: Any = None

    def __call__(self, *args: Any, also: object = None) -> None:
        """Tensors stand for their addresses.  A call that is put off keeps its arguments alive, and
        ``also``: what they point to besides."""
        if self._f is None:
            f = getattr(native.loaded(), self._name)
            f.argtypes, f.restype = [_LETTERS[t] for t in self._types], ctypes.c_int
            self._f = f
        places = list(args)
        for i in self._addresses:
            if isinstance(places[i], torch.Tensor):
                places[i] = places[i].data_ptr()
        if _later.calls is None:
            native.check(self._f(*places))
        else:
            _later.calls.append((self._f, places, (args, also)))


def dtype_of(x: torch.Tensor) -> int:
    """The number of an activation's dtype: float32 or bfloat16, else TypeError."""
    number = _NUMBERS[x.dtype]
    if x.dtype == torch.float16:
        raise TypeError("native kernels compute with float32 and bfloat16, not float16")
    return number


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` as contiguous memory."""
    if x.is_contiguous():
        return x
    finish()
    return x.contiguous()


def narrow(x: torch.Tensor) -> torch.Tensor:
    """A small weight as the library takes it: contiguous float32 or bfloat16, the same values."""
    return (x.float() if x.dtype == torch.float16 else x).contiguous()


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` as contiguous float32."""
    if x.dtype == torch.float32:
        return dense(x)
    finish()
    return x.float().contiguous()


def threads_of(workers: Workers | None) -> int | None:
    """The native threads of ``workers``; None: the caller alone."""
    return None if workers is None else native.pool(workers)
