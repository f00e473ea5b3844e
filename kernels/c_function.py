"""Functions of the native library as Python calls them: types of arguments, addresses of tensors.

Calls can be put off and made together, in their order: Python that runs right after a kernel finds
nothing of itself in the caches, which takes most of its time.  So they are kept as a list of words
that one call of the library walks through.  Results of calls that are put off hold nothing yet;
whoever reads them other than by another such call says `finish` first.

Knows ctypes and torch, nothing of operators.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from array import array
from collections.abc import Iterable
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from . import native
from .workers import Workers

if TYPE_CHECKING:
    Words: TypeAlias = array[int]
else:
    Words = array  #: whole numbers of 64 bits

_LETTERS = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "q": ctypes.c_int64,
    "f": ctypes.c_float,
}
_NUMBERS = {getattr(torch, name): number for number, name in enumerate(native.DTYPES)}


class _Calls:
    """``words``: a list for k3_calls; ``kept``: of each call what its addresses point to."""

    def __init__(self) -> None:
        self.words, self.kept = array("q"), list[object]()


class _Later(threading.local):
    """The calls of a thread that were put off; None where calls are made at once."""

    calls: _Calls | None = None


_later = _Later()


class PutOff:
    """Calls from this thread inside the block wait for `finish`, or for its end; an error drops
    them.  With ``wait`` false they are made at once, whatever an interrupt may have left behind: no
    generator, whose end would come whenever and wherever it is collected."""

    def __init__(self, wait: bool = True) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        _later.calls = _Calls() if self._wait else None

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
    return _later.calls is not None and bool(_later.calls.kept)


def finish() -> None:
    """Make the calls of this thread that were put off.  An error drops those behind it."""
    calls = _later.calls
    if calls is None or not calls.kept:
        return
    _later.calls = _Calls()
    native.check(_make_calls()(calls.words.buffer_info()[0], len(calls.kept)))


@lru_cache(maxsize=1)
def _make_calls() -> Any:
    f = native.loaded().k3_calls
    f.argtypes, f.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int
    return f


class CFunction:
    """The function ``name`` with ``types`` of arguments by letter: ``p`` address, ``i`` int, ``q``
    64-bit int, ``f`` float.  It returns 0, or raises MemoryError.  Looked up at the first call."""

    def __init__(self, name: str, types: str) -> None:
        self._name, self._types = name, types
        self._addresses = [i for i, letter in enumerate(types) if letter == "p"]
        self._floats = [i for i, letter in enumerate(types) if letter == "f"]
        self._f: Any = None
        self._head: list[int] = []  # of its words in a list of calls

    def __call__(self, *args: Any, also: object = None) -> None:
        """Tensors and arrays stand for their addresses.  A call that is put off keeps its arguments
        alive, and ``also``: what they point to besides."""
        if self._f is None:
            self._look_up()
        assert len(args) == len(self._types), (self._name, len(args))
        places = list(args)
        for i in self._addresses:
            place = places[i]
            if isinstance(place, torch.Tensor):
                places[i] = place.data_ptr()
            elif isinstance(place, array):
                places[i] = place.buffer_info()[0]
            elif place is None:
                places[i] = 0
        calls = _later.calls
        if calls is None:
            native.check(self._f(*places))
            return
        for i in self._floats:
            places[i] = _bits(places[i])
        calls.words.fromlist(self._head + places)  # all of them, or none and an error
        calls.kept.append((args, also))

    def _look_up(self) -> None:
        library = native.loaded()
        by_words = getattr(library, f"{self._name}_words")
        address = ctypes.cast(by_words, ctypes.c_void_p).value
        assert address is not None
        self._head = [address, len(self._types)]
        f = getattr(library, self._name)
        f.argtypes, f.restype = [_LETTERS[t] for t in self._types], ctypes.c_int
        self._f = f


@lru_cache(maxsize=256)
def _bits(number: float) -> int:
    """The float32 that ``number`` is nearest to, as a word."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits


def addresses(tensors: Iterable[torch.Tensor]) -> Words:
    """Where each of ``tensors`` lies."""
    return array("q", [x.data_ptr() for x in tensors])


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
