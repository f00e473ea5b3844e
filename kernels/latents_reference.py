"""latents: rows of latents to packed bytes and back (the format: latent_format.py).

Packing is the same for every backend, elementwise and group by group, so that no cut of a prompt
and no companion changes a byte.  Unpacking is an operator; this is its definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F

from .int8 import decode
from .latent_format import GROUP, LatentFormat
from .quantize import scale_of
from .workers import Workers

#: precision -> the largest code, the type of codes
CODES: Final = {"int8": (127.0, torch.int8), "fp8": (448.0, torch.float8_e4m3fn)}


def kept(form: LatentFormat, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Numbers of a row as it is kept where activations are ``dtype``, and their type."""
    return (form.width, dtype) if form.precision is None else (form.row, torch.uint8)


def pack(rows: torch.Tensor, form: LatentFormat) -> torch.Tensor:
    """``rows`` [n, kv_lora + rope] as they are kept: [n, row] uint8, or themselves where ``form``
    packs nothing.  A group that holds NaN or infinity unpacks to numbers that are not finite."""
    if form.precision is None:
        return rows
    top, kind = CODES[form.precision]
    latent = F.pad(rows[:, : form.kv_lora].float(), (0, form.groups * GROUP - form.kv_lora))
    x = latent.view(-1, form.groups, GROUP)
    scale = scale_of(x.abs().amax(2), top)
    x = x / scale[:, :, None]
    codes = (x.round_() if kind == torch.int8 else x).to(kind).flatten(1)[:, : form.kv_lora]
    packed = rows.new_zeros(rows.shape[0], form.row, dtype=torch.uint8)
    parts = {0: rows[:, form.kv_lora :], form.scales: scale.bfloat16(), form.codes: codes}
    for begin, part in parts.items():
        raw = part.contiguous().view(torch.uint8)
        packed[:, begin : begin + raw.shape[1]] = raw
    return packed


def unpack(
    blocks: Sequence[torch.Tensor],
    count: int,
    form: LatentFormat,
    out: torch.Tensor,
    workers: Workers,
) -> None:
    """The first ``count`` rows of packed ``blocks`` [256, row], in order, as numbers into ``out``
    [at least so many blocks, 256, kv_lora + rope].  No other row is read or written."""
    assert form.precision is not None
    kind = CODES[form.precision][1]
    for block, to in zip(blocks, out, strict=False):
        rows, to = block[:count], to[:count]
        scale = rows[:, form.scales : form.codes].contiguous().view(torch.bfloat16)
        codes = rows[:, form.codes : form.codes + form.kv_lora].contiguous().view(kind)
        to[:, : form.kv_lora] = decode(codes, scale)
        to[:, form.kv_lora :] = rows[:, : form.scales].contiguous().view(out.dtype)
        count -= len(rows)
