"""latents as a Triton kernel: packed rows (latent_format.py) to numbers, some rows of a block each.

Codes of ``fp8`` become numbers by their bits, since not every GPU knows the type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..config import LATENT_BLOCK
from .latent_format import GROUP, PRECISIONS, LatentFormat
from .mla_decode_triton import padded
from .transfer import tables
from .triton_round import narrow
from .triton_run import FUSION, Compiled, Sizes, upcast
from .triton_weights import aligned
from .workers import Workers

ROWS = 4  #: of a program; all of them lie in one block
TOGETHER = 64  #: the same in the interpreter, which needs a millisecond for a program


@triton.jit
def _small_floats(code):
    """E4M3 (bias 7) as float32; its NaN is not told apart."""
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # eighths of 2**-6
    return tl.where(code < 0, -number, number)


@triton.jit(do_not_specialize=["count"])
def _unpack(
    table, out, count, SIZE: tl.constexpr, ROW: tl.constexpr, SCALES: tl.constexpr,
    CODES: tl.constexpr, K: tl.constexpr, R: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr, FLOATS: tl.constexpr, WORD: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """``WORD``: an integer as wide as a number of ``out``, whose last R are copied as they are."""
    first = tl.program_id(0) * ROWS
    block = tl.multiple_of(tl.load(table + first // SIZE).to(tl.pointer_type(tl.int8)), 16)
    lane, k, r = tl.arange(0, ROWS)[:, None], tl.arange(0, KP)[None, :], tl.arange(0, RP)[None, :]
    row = block + (first % SIZE + lane) * ROW
    known = first + lane < count
    code = tl.load(row + CODES + k, mask=known & (k < K), other=0).to(tl.int32)
    scale = (row + SCALES).to(tl.pointer_type(tl.int16)) + k // SHARED
    scale = tl.load(scale, mask=known & (k < K), other=0).to(tl.int32) << 16
    number = _small_floats(code) if FLOATS else code.to(tl.float32)
    number = number * scale.to(tl.float32, bitcast=True)
    to = (first + lane).to(tl.int64) * (K + R)
    TYPE: tl.constexpr = out.dtype.element_ty
    tl.store(out + to + k, narrow(number, TYPE, UPCAST), mask=known & (k < K))
    rest = row.to(tl.pointer_type(WORD)) + r
    rest = tl.load(rest, mask=known & (r < R), other=0)
    tl.store(out.to(tl.pointer_type(WORD)) + to + K + r, rest, mask=known & (r < R))


def unpack(
    blocks: Sequence[torch.Tensor],
    count: int,
    form: LatentFormat,
    out: torch.Tensor,
    workers: Workers,
) -> None:
    """The first ``count`` rows of packed ``blocks`` [256, row], in order, as numbers into ``out``
    [at least so many blocks, 256, kv_lora + rope].  No other row is read or written."""
    held = [aligned(block) for block in blocks]
    rows = TOGETHER if upcast() else ROWS
    assert out.shape[1:] == (LATENT_BLOCK, form.width) and count <= len(blocks) * LATENT_BLOCK
    _unpack[(triton.cdiv(count, rows),)](
        tables(held, out.device), out, count, *_constants(form).values(), rows,
        form.precision == "fp8", tl.int16 if form.item == 2 else tl.int32, upcast(), num_warps=4,
        **FUSION,
    )  # fmt: skip


def _constants(form: LatentFormat) -> dict[str, int]:
    """The arguments of the kernel that follow from ``form``, in their order."""
    return {
        "SIZE": LATENT_BLOCK, "ROW": form.row, "SCALES": form.scales, "CODES": form.codes,
        "K": form.kv_lora, "R": form.rope, "KP": padded(form.kv_lora), "RP": padded(form.rope),
        "SHARED": GROUP,
    }  # fmt: skip


def compiled(sizes: Sizes) -> list[Compiled]:
    """The launches of this file at ``sizes``."""
    launches = []
    for precision in PRECISIONS:
        form = LatentFormat(sizes.kv_lora, sizes.rope, 2, precision)
        given = _constants(form) | {
            "ROWS": ROWS, "FLOATS": precision == "fp8", "WORD": tl.int16, "UPCAST": False,
        }  # fmt: skip
        signature = {"table": "*i64", "out": "*bf16", "count": "i32"}
        signature |= dict.fromkeys(given, "constexpr")
        name = f"latents_{precision}"
        launches.append(
            Compiled(name, _unpack, signature, given, 4, decode=True, aligned=("table", "out"))
        )
    return launches
