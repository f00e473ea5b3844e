"""What Triton kernels share: where they can run, how they are launched and compiled offline.

Triton is not imported here, since it takes a second and a hundred megabytes; ``OP_triton.py`` does.

A kernel runs on a GPU, or in Triton's interpreter on tensors of the CPU when the environment says
``TRITON_INTERPRET=1`` before its file is imported.  The interpreter computes bfloat16 wrongly, so
kernels widen to float32 right after a load; products of bfloat16 tiles are kept behind a constant
``UPCAST`` (``upcast()``) that widens both operands when interpreted: exact products summed in
float32 either way.  Multiply-adds are only fused where a kernel writes ``tl.fma`` (``FUSION``).
Numbers that differ from sweep to sweep (rows, lengths) are not specialised: each special value
would be compiled for when it first comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from importlib.util import find_spec
from threading import RLock
from typing import Any, Final, NamedTuple

FUSION: Final = {"enable_fp_fusion": False}  #: an option of every launch: bits by design
ARCHITECTURES: Final = (80, 86, 89, 90, 120)  #: compute capabilities that are compiled for


@lru_cache(maxsize=1)
def installed() -> bool:
    return find_spec("triton") is not None


def upcast() -> bool:
    """Whether kernels are being interpreted on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def interpreted() -> bool:
    """Whether kernels can run on tensors of the CPU."""
    return installed() and upcast()


#: It patches Triton's modules while it runs: one thread at a time.  The same thread may come again:
#: attention asks for its next piece, which another operator unpacks, between two launches.
_INTERPRETER: Final = RLock()


def one_at_a_time(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f``, an operator on Triton, for callers in several threads."""

    @wraps(f)
    def alone(*args: Any, **named: Any) -> Any:
        with _INTERPRETER:
            return f(*args, **named)

    return alone if upcast() else f


class Sizes(NamedTuple):
    """Sizes of a model that kernels are compiled for; the defaults are those of K3."""

    hidden: int = 7168
    latent: int = 3584  #: what experts take and give
    inner: int = 3072  #: of an expert
    experts: int = 896
    top_k: int = 16
    heads: int = 96
    kda_dim: int = 128
    taps: int = 4
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128
    summaries: int = 9  #: block summaries and the running sum that AttnRes mixes, at most


class Compiled(NamedTuple):
    """One way a kernel is launched, for compiling it without a GPU.

    ``signature``: argument -> type as Triton spells it ("*bf16", "i32", "constexpr");
    ``constants``: argument -> value of each constexpr; ``decode``: runs for each token, so that
    registers must not spill; ``aligned``: arguments that a launch finds to be multiples of 16,
    which decides how wide loads are.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 1
    decode: bool = False
    aligned: tuple[str, ...] = ()
