"""mla_decode by the native library (native/seq_mla.h): heads in groups that share a reading of the
latents, blocks merged in order by their running maximum."""

from __future__ import annotations

import torch

from ..config import align_up
from . import native
from .c_function import CFunction, addresses, dense, dtype_of, finish
from .linear_reference import DenseWeight, Weight
from .pieces import Pieces, walk
from .workers import Workers

SHARING = 16  #: heads that share a reading of the latents at most; MLA_HEADS of native/seq_mla.h
CACHED = 2 << 20  #: bytes of latents at a time; 20 % less work than all at once (see LOG.md)
BEGINS, ENDS = 1, 2  #: of a piece: the first one, the last one
_CALL = CFunction("k3_mla_decode", "piiiiqqqqqqqqfpppppp")


def mla_decode(
    q: torch.Tensor,
    pieces: Pieces,
    length: int,
    up: Weight,
    nope: int,
    v: int,
    scale: float,
    workers: Workers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [h, nope + rope] over ``length`` latents in ``pieces`` of blocks [256, kv_lora + rope].

    ``up`` is [h * (nope + v), kv_lora].  Returns (o [h, v], log-sum-exp of the scores [h]), both
    float32.  Rows of the last block from ``length`` on are never read.
    """
    heads, kv_lora, rope = q.shape[0], up.shape[1], q.shape[1] - nope
    assert up.shape[0] == heads * (nope + v), (up.shape, heads, nope, v)
    q, weight = dense(q), _numbers(up, q.dtype, workers)
    out, sums = torch.empty(heads, v), torch.empty(heads)
    each = max(1, min(SHARING, heads // workers.threads))
    state: torch.Tensor | None = None
    for blocks, first, end, last in walk(_cut(pieces), length):
        part = BEGINS * (first == 0) | ENDS * last
        if state is None and not last:
            numbers = align_up(kv_lora + rope, 16) + align_up(kv_lora, 16) + 2
            state = torch.empty(heads * numbers)
        size = blocks[0].shape[0]
        for block in blocks:
            assert block.shape == (size, kv_lora + rope), block.shape
            assert block.is_contiguous()
        _CALL(
            native.pool(workers), dtype_of(q), dtype_of(blocks[0]), dtype_of(weight), part, heads,
            each, size, end - first, nope, rope, v, kv_lora, scale, q,
            addresses(blocks), weight, out, sums, state, also=blocks,
        )  # fmt: skip
        if not isinstance(pieces, list):
            finish()  # the blocks are not ours any more once others are asked for
    return out, sums


def _cut(pieces: Pieces) -> Pieces:
    """``pieces`` in such as a core's second cache holds: every group of heads reads them all."""
    for blocks in pieces:
        step = max(1, CACHED // blocks[0].nbytes)
        for begin in range(0, len(blocks), step):
            yield blocks[begin : begin + step]


def _numbers(up: Weight, dtype: torch.dtype, workers: Workers) -> torch.Tensor:
    """``up`` [N, K] rounded to ``dtype``, or as it lies where that changes no value."""
    if isinstance(up, DenseWeight) and up.tensor.is_contiguous():
        own = up.tensor.dtype
        if own == dtype or (own, dtype) == (torch.bfloat16, torch.float32):
            return up.tensor
    return up.rows(0, up.shape[0], dtype, workers).contiguous()
