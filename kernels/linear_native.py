"""linear: y = x W^T by the native library (native/linear_*.cpp).

A value's operations depend on its row of x, its row of the weight, the instruction set and
``decode`` alone.  With ``decode``, and for float32 activations, weights are decoded in registers
and summed in float32.  Else, on machines with products of bfloat16 (AMX, AVX-512 BF16), weights
become bfloat16 as in the reference.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from . import native
from .c_function import CFunction, Words, dense, dtype_of
from .int8 import Int8Weight
from .linear_reference import Bundle, DenseWeight, Weight
from .mxfp4 import Mxfp4Weight
from .workers import Workers

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  #: enum Kind of native/linear.h
INT8, MXFP4 = 3, 4

_linear = CFunction("k3_linear", "piipqqpqpi")

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


def _fields(holder: Weight | Bundle, weights: Sequence[Weight]) -> Words:
    """Kind, numbers, scales and rows of each of ``weights``; remembered with ``holder``."""
    known: Words | None = vars(holder).get("native_fields")
    if known is not None:
        return known
    fields = array("q", [n for w in weights for n in (*place_of(w), w.shape[0])])
    vars(holder)["native_fields"] = fields
    return fields


def linear(
    x: torch.Tensor,
    weight: Weight,
    workers: Workers,
    decode: bool = False,
    result: torch.dtype | None = None,
) -> torch.Tensor:
    """``x`` [R, K] times ``weight`` [N, K] -> [R, N] in ``x``'s dtype, summed in float32.

    With ``result`` float32: as if ``x`` were float32."""
    n, k = weight.shape
    rows = x.shape[0]
    assert x.shape[1] == k, (x.shape, weight.shape)
    fields, x = _fields(weight, (weight,)), dense(x)
    out = torch.empty(rows, n, dtype=result or x.dtype)
    _linear(
        native.pool(workers), dtype_of(x), dtype_of(out), x, rows, k, fields, 1, out, decode,
        also=weight,
    )  # fmt: skip
    return out


def linears(
    x: torch.Tensor, bundle: Bundle, workers: Workers, decode: bool = False
) -> list[torch.Tensor]:
    """``linear`` of each weight of ``bundle``, in one call: the same bits, fewer waits."""
    weights = bundle.weights
    rows, k = x.shape
    assert all(w.shape[1] == k for w in weights), (x.shape, [w.shape for w in weights])
    fields, x = _fields(bundle, weights), dense(x)
    sizes = [w.shape[0] for w in weights]
    out = torch.empty(rows * sum(sizes), dtype=x.dtype)
    _linear(
        native.pool(workers), dtype_of(x), dtype_of(x), x, rows, k, fields, len(weights), out,
        decode, also=weights,
    )  # fmt: skip
    if rows == 1:
        return list(torch.split_with_sizes(out.view(1, -1), sizes, 1))
    return [part.view(rows, -1) for part in torch.split_with_sizes(out, [rows * n for n in sizes])]


def scratch_bytes(threads: int, rows: int, job_rows: int, k: int, inner: int) -> int:
    """Upper bound of the library's own memory for ``linear`` and ``experts``: ``rows`` rows of x
    at a time, ``job_rows`` in all jobs of a call, ``k`` columns of the widest x, ``inner`` between
    the weights of the widest job.  Kept from call to call by the threads that took it."""
    count = native.loaded().k3_linear_scratch
    count.argtypes, count.restype = [ctypes.c_int, *[ctypes.c_int64] * 4], ctypes.c_int64
    return int(count(threads, rows, job_rows, k, inner))
