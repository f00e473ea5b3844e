"""mla_prefill in tiles of bfloat16 (native/mla_tiles.cpp); by torch for everything else, and on
machines without products of bfloat16.  Which of the two follows from machine and model alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from ..config import HEAD_GROUP, LATENT_BLOCK, ROW_TILE, align_up
from . import mla_prefill_reference, native
from .c_function import CFunction, addresses, finish
from .linear_reference import DenseWeight, Weight
from .mla_decode_native import BEGINS, ENDS
from .mla_prefill_reference import Query
from .pieces import Pieces, walk
from .workers import Workers

_CALL = CFunction("k3_mla_prompt", "piqqqqqqqqfqpppp")


def mla_prefill(
    queries: Sequence[Query],
    pieces: Pieces,
    length: int,
    up: Weight,
    nope: int,
    v: int,
    scale: float,
    workers: Workers,
) -> list[torch.Tensor]:
    """As ``mla_prefill_reference.mla_prefill``."""
    heads, width = queries[0].q.shape[1:]
    kv_lora = up.shape[1]
    if not (_takes(up) and queries[0].q.dtype == torch.bfloat16 and native.isa() in native.TILES):
        return mla_prefill_reference.mla_prefill(
            queries, pieces, length, up, nope, v, scale, workers
        )
    assert isinstance(up, DenseWeight)
    rows = [query.q.contiguous() for query in queries]
    out = [torch.empty(len(q), heads, v) for q in rows]
    fields = [
        number
        for query, q, to in zip(queries, rows, out, strict=True)
        for number in (q.data_ptr(), to.data_ptr(), len(q), query.start)
    ]
    each = max(1, min(HEAD_GROUP, heads // workers.threads))
    state: torch.Tensor | None = None
    for blocks, first, end, last in walk(pieces, length):
        for block in blocks:
            assert block.shape == (LATENT_BLOCK, kv_lora + width - nope), block.shape
            assert block.dtype == torch.bfloat16 and block.is_contiguous()
        if state is None and not last:  # the running softmax of every row
            state = torch.empty(heads * len(rows) * ROW_TILE * (align_up(v, 32) + 2))
        _CALL(
            native.pool(workers), BEGINS * (first == 0) | ENDS * last, heads, each, first, end,
            nope, width - nope, v, kv_lora, scale, len(rows),
            array("q", fields), addresses(blocks), up.tensor, state,
            also=(rows, out, blocks),
        )  # fmt: skip
        finish()  # the blocks are not ours any more once others are asked for
    return out


def _takes(up: Weight) -> bool:
    """Whether ``up`` lies as the library takes it."""
    return (
        isinstance(up, DenseWeight)
        and up.tensor.dtype == torch.bfloat16
        and up.tensor.is_contiguous()
    )
