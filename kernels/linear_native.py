"""linear: y = x W^T by the native library (native/linear_*.cpp).

A value's operations depend on its row of x, its row of the weight, the instruction set and
``decode`` alone.  With ``decode``, and for float32 activations, weights are decoded in registers
and summed in float32.  Else, on machines with AMX, weights become bfloat16 as in the reference.
"""

from __future__ import annotations

import ctypes

import torch

from . import native
from .c_function import CFunction, dtype_of
from .int8 import Int8Weight
from .linear_reference import DenseWeight, Weight
from .mxfp4 import Mxfp4Weight
from .workers import Workers

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  #: enum Kind of native/linear.h
INT8, MXFP4 = 3, 4

_linear = CFunction("k3_linear", "pipqippqqpi")

Place = tuple[int, int, int]  #: kind, address of the numbers, address of the scales or 0


def place_of(weight: Weight) -> Place:
    """Where the library finds ``weight``; remembered with it.  TypeError for a kind that is not
    among ours, or one that is not contiguous."""
    known: Place | None = vars(weight).get("native_place")
    if known is not None:
        return known
    if isinstance(weight, DenseWeight):
        kind, parts = KINDS[weight.tensor.dtype], [weight.tensor]
    elif isinstance(weight, Mxfp4Weight):
        kind, parts = MXFP4, [weight.packed, weight.scale]
    elif isinstance(weight, Int8Weight):
        kind, parts = INT8, [weight.q, weight.scale]
    else:
        raise TypeError(f"no native kernel for {type(weight).__name__}")
    if not all(p.is_contiguous() and p.device.type == "cpu" for p in parts):
        raise TypeError("the native kernels need contiguous weights in memory")
    place = (kind, parts[0].data_ptr(), parts[1].data_ptr() if len(parts) > 1 else 0)
    vars(weight)["native_place"] = place
    return place


def linear(x: torch.Tensor, weight: Weight, workers: Workers, decode: bool = False) -> torch.Tensor:
    """``x`` [R, K] times ``weight`` [N, K] -> [R, N] in ``x``'s dtype, summed in float32."""
    n, k = weight.shape
    assert x.shape[1] == k, (x.shape, weight.shape)
    kind, data, scale = place_of(weight)
    x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty(rows, n, dtype=x.dtype)
    _linear(
        native.pool(workers), dtype_of(x), x.data_ptr(), rows, kind, data, scale, n, k,
        out.data_ptr(), decode,
    )  # fmt: skip
    return out


def scratch_bytes(threads: int, rows: int, job_rows: int, k: int, inner: int) -> int:
    """Upper bound of the library's own memory for ``linear`` and ``experts``: ``rows`` rows of x
    at a time, ``job_rows`` in all jobs of a call, ``k`` columns of the widest x, ``inner`` between
    the weights of the widest job.  Kept from call to call by the threads that took it."""
    count = native.loaded().k3_linear_scratch
    count.argtypes, count.restype = [ctypes.c_int, *[ctypes.c_int64] * 4], ctypes.c_int64
    return int(count(threads, rows, job_rows, k, inner))
