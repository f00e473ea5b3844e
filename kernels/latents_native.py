"""latents by the native library (native/seq_latents.h): rows shared out between the threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import native
from .c_function import CFunction, addresses, dtype_of
from .latent_format import LatentFormat
from .workers import Workers

_CALL = CFunction("k3_unpack_latents", "piiqqqqqqqpp")


def unpack(
    blocks: Sequence[torch.Tensor],
    count: int,
    form: LatentFormat,
    out: torch.Tensor,
    workers: Workers,
) -> None:
    """The first ``count`` rows of packed ``blocks`` [256, row], in order, as numbers into ``out``
    [at least so many blocks, 256, kv_lora + rope].  No other row is read or written."""
    size = out.shape[1]
    assert count <= size * len(blocks) <= size * len(out) and out.is_contiguous(), out.shape
    assert out.dtype.itemsize == form.item and out.shape[2] == form.width, (out.shape, form)
    for block in blocks:
        assert block.shape == (size, form.row) and block.is_contiguous(), block.shape
    _CALL(
        native.pool(workers), dtype_of(out), form.precision == "fp8", count, size, form.row,
        form.scales, form.codes, form.kv_lora, form.rope, addresses(blocks), out, also=blocks,
    )  # fmt: skip
