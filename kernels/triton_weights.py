"""What the Triton kernels of linear and experts are given: weights by kind, tables of addresses.

The torch side alone: this file does not import Triton.  Kernels of the decode family read weights
and activations as 64-bit words of consecutive columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .int8 import Int8Weight
from .linear_reference import DenseWeight, Weight
from .mxfp4 import Mxfp4Weight
from .transfer import sent

#: Kinds of numbers, as the kernels know them.
F32, BF16, F16, INT8, MXFP4 = range(5)
KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
COLUMNS = (2, 4, 4, 8, 16)  #: of each kind that a 64-bit word holds
TYPES = ("fp32", "bf16", "fp16", "i8", "u8")  #: of each kind, as Triton spells it
ALIGN = 16  #: bytes; what a lane reads at once


class Parts:
    """A weight as the kernels read it: its kind, its tensor, its scales (the tensor itself where
    there are none)."""

    def __init__(self, weight: Weight) -> None:
        if isinstance(weight, DenseWeight):
            self.kind, tensors = KINDS[weight.tensor.dtype], (weight.tensor, weight.tensor)
        elif isinstance(weight, Int8Weight):
            self.kind, tensors = INT8, (weight.q, weight.scale)
        elif isinstance(weight, Mxfp4Weight):
            self.kind, tensors = MXFP4, (weight.packed, weight.scale)
        else:
            raise TypeError(f"no Triton kernel for {type(weight).__name__}")
        self.n, self.k = weight.shape
        self.data, self.scale = (aligned(t) for t in tensors)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy of it at an address from which lanes can read 16 bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGN == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def numbers(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` [N, K] rounded to ``dtype``, or as it lies where that changes no value.  No
    precision of the trunk makes codes of what the router and attention use."""
    if not isinstance(weight, DenseWeight):
        raise TypeError(f"no Triton kernel for {type(weight).__name__} here")
    own = weight.tensor.dtype
    if own == dtype or (own, dtype) == (torch.bfloat16, torch.float32):
        return weight.tensor.contiguous()
    return weight.tensor.to(dtype).contiguous()


def x_in_words(x: torch.Tensor, kind: int) -> torch.Tensor:
    """``x`` [R, K] as whole 64-bit words for the decode family.

    Columns of zeros are added where K ends inside a word, and bfloat16 is widened for float32
    weights, whose words hold less.  (No size of K3 needs either.)"""
    x = x.float() if kind == F32 else x
    return aligned(F.pad(x, (0, -x.shape[1] % 4))).view(torch.int64)


def in_words(w: Parts) -> torch.Tensor:
    """The data of ``w`` as [N, words] of 64 bits; zeros fill up a last word."""
    spare = -w.k % 4 if w.kind <= F16 else 0
    return (F.pad(w.data, (0, spare)) if spare else w.data).view(torch.int64)


def x_kind(dtype: torch.dtype, kind: int) -> int:
    """The kind of what ``x_in_words`` gives."""
    return F32 if kind == F32 else KINDS[dtype]


def scale_type(kind: int) -> str:
    """Of the scales of a kind of weights, as Triton spells it; floats have none."""
    return "bf16" if kind == INT8 else "u8"


class Table(NamedTuple):
    """What a launch pair reads besides x: ``data`` int64 on the device holds the addresses of the
    jobs (gate, up, down, each followed by its scales), at ``tiles`` three numbers of each tile
    (its job, its first row, the end of the job's rows among all rows of all jobs), and at ``rows``
    the row of x of each row."""

    data: torch.Tensor
    tiles: int
    rows: int
    tile_count: int


def table_of(
    jobs: Sequence[tuple[Parts, Parts, Parts]],
    taken: Sequence[Sequence[int]],
    words: bool,
    tile: int,
    device: torch.device,
) -> tuple[Table, list[torch.Tensor]]:
    """The table of ``jobs``, whose rows are ``taken``, in tiles of ``tile`` rows, and the tensors
    that must live as long; weights in ``words`` for the decode family."""
    numbers, kept = array("q"), []
    for job in jobs:
        for part in job:
            data = in_words(part) if words else part.data
            numbers.extend((data.data_ptr(), part.scale.data_ptr()))
            kept += [data, part.scale]
    tiles = len(numbers)
    begin = 0
    for j, own in enumerate(taken):
        end = begin + len(own)
        for first in range(begin, end, tile):
            numbers.extend((j, first, end))
        begin = end
    rows = len(numbers)
    for own in taken:
        numbers.extend(own)
    data = torch.frombuffer(numbers, dtype=torch.int64)
    return Table(sent(data.clone(), device), tiles, rows, (rows - tiles) // 3), kept
