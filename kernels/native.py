"""The native library: finding and loading it, its instruction sets, its threads.

Knows ctypes and file names, nothing of operators.  The library (``native/*.cpp``) is an optional
part of the package: without a compiler at installation it is not there, `why_not` says so in one
line, and the torch kernels serve.  Its functions are plain C; a call gives up Python's lock.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ..errors import UsageError
from .workers import Workers

ABI = 10  #: K3_ABI of native/native.h
LIBRARY = "_native.abi3.so"
#: By number, see native/native.h.
ISAS = ("portable", "neon", "avx2", "avx512", "avx512bf16", "amx")
TILES = ("avx512bf16", "amx")  #: sets that compute prompts in tiles of bfloat16
DTYPES = ("float32", "bfloat16", "float16")  #: by number, see native/native.h

_REINSTALL = "Install the package again (pip install -e . in a checkout) on a machine with g++."


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why."""
    path = Path(__file__).with_name(LIBRARY)
    if not path.exists():
        return None, f"The native kernels were not built: there is no {path.name}."
    try:
        library = ctypes.CDLL(str(path))
        found = int(library.k3_abi())
    except (OSError, AttributeError) as error:
        return None, f"The native kernels in {path.name} cannot be loaded: {error}."
    if found != ABI:
        return None, f"The native kernels in {path.name} are of version {found}, not {ABI}."
    library.k3_pool_new.restype = ctypes.c_void_p
    library.k3_pool_new.argtypes = [ctypes.c_int]
    library.k3_pool_delete.restype = None
    library.k3_pool_delete.argtypes = [ctypes.c_void_p]
    return library, ""


def available() -> bool:
    """Whether the native kernels can be used."""
    return _load()[0] is not None


def why_not() -> str:
    """One line that says why they cannot; empty when they can."""
    return _load()[1]


def loaded() -> ctypes.CDLL:
    """The loaded library; UsageError when there is none."""
    found, why = _load()
    if found is None:
        raise UsageError(why, _REINSTALL)
    return found


def isas() -> list[str]:
    """The instruction sets that this machine runs, best first; empty without the library."""
    found = _load()[0]
    if found is None:
        return []
    return [name for i, name in reversed(list(enumerate(ISAS))) if found.k3_isa_runs(i)]


def isa() -> str:
    """The instruction set in force for this thread: the best one until `use` says otherwise."""
    return ISAS[loaded().k3_isa()]


def use(name: str) -> None:
    """Let calls from this thread run ``name`` (of `isas`), so that results have the same bits on
    every machine that has it.  UsageError when this machine does not run it."""
    runs = isas() if available() else []
    if name not in runs:
        loaded()  # says that there is none
        raise UsageError(
            f"The instruction set {name!r} does not run on this machine.",
            f"Use one of: {', '.join(runs)}.",
        )
    loaded().k3_use_isa(ISAS.index(name))


@contextmanager
def using(name: str) -> Iterator[None]:
    """``use(name)`` for the length of a block."""
    before = isa()
    use(name)
    try:
        yield
    finally:
        use(before)


def pool(workers: Workers) -> int | None:
    """The native threads of ``workers`` (as many, made at first use, gone with it); None for one
    thread.  They sleep when idle."""
    found: int | None = workers.__dict__.get("native_pool", 0)
    if found != 0:
        return found
    made = None
    if workers.threads > 1:
        made = loaded().k3_pool_new(workers.threads)
        if made is None:
            raise UsageError(
                f"The system does not give {workers.threads} threads.", "Use fewer (--threads)."
            )
        weakref.finalize(workers, loaded().k3_pool_delete, made)
    workers.__dict__["native_pool"] = made
    return made


def scratch_held() -> int:
    """Bytes of scratch memory that the library's callers and threads hold now."""
    call = loaded().k3_scratch_held
    call.restype = ctypes.c_int64
    return int(call())


def read(workers: Workers, address: int, size: int) -> int:
    """Read ``size`` bytes at ``address`` once with all threads, to measure what memory gives;
    returns their sum as 64-bit words."""
    call = loaded().k3_read
    call.restype = ctypes.c_uint64
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return int(call(pool(workers), address, size // 8))


def check(failed: int) -> None:
    """Raises MemoryError for what a k3_* function returns when it could not get memory."""
    if failed:
        raise MemoryError("A native kernel could not get its scratch memory.")
