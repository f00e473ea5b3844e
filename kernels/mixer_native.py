"""mixer by the native library (native/seq_mixer.h): head by head, the bits of its parts alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import native
from .c_function import CFunction, addresses, dtype_of
from .mixer import UNIT_EPS, MixerRows, MixerWeights
from .workers import Workers

CHUNK = 64  #: tokens of a chunk at most; MOST of native/seq_kda.h
_CALL = CFunction("k3_kda_mixer", "piiqqqqffffp")


def mixer(
    rows: MixerRows,
    tails: Sequence[torch.Tensor],
    state: torch.Tensor,
    w: MixerWeights,
    decode: bool,
    workers: Workers,
) -> torch.Tensor:
    """As ``mixer.composed`` with native operators."""
    heads, dim = state.shape[:2]
    wide = (rows.raw.shape[0], heads * dim)
    n, taps, dtype = wide[0], w.convs[0].shape[1], rows.raw.dtype
    assert n <= (1 if decode else CHUNK), (n, decode)
    own = []
    for x, tail, conv in zip(rows.qkv, tails, w.convs, strict=True):
        assert x.shape == wide and conv.shape == (wide[1], taps), (x.shape, conv.shape)
        assert tail.shape == (taps - 1, wide[1]) and tail.dtype == dtype, (tail.shape, tail.dtype)
        own += [x, tail, conv]
    assert rows.raw.shape == rows.gate.shape == wide and rows.beta.shape == (n, heads)
    assert state.shape == (heads, dim, dim) and w.lower != 0
    assert w.a_log.shape == (heads,) and w.dt_bias.shape == (wide[1],) and w.norm.shape == (dim,)
    kept = [*rows.qkv, rows.raw, rows.beta, rows.gate, *tails]
    floats = [*w.convs, w.a_log, w.dt_bias, w.norm, state]
    assert all(x.dtype == dtype for x in kept) and all(x.dtype == torch.float32 for x in floats)
    assert all(x.is_contiguous() for x in (*kept, *floats))
    out = torch.empty_like(rows.gate)
    own += [rows.raw, rows.beta, rows.gate, w.a_log, w.dt_bias, w.norm, state, out]
    _CALL(
        native.pool(workers), dtype_of(out), decode, n, heads, dim, taps, w.lower or 0.0,
        dim**-0.5, UNIT_EPS, w.eps, addresses(own), also=own,
    )  # fmt: skip
    return out
