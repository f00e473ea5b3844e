"""Packed rows of latents: bytes, errors and bits of every implementation; attention over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from k3offload.config import LATENT_BLOCK
from k3offload.kernels import native
from k3offload.kernels.choose import Kernels
from k3offload.kernels.latent_format import GROUP, PRECISIONS, LatentFormat
from k3offload.kernels.latents_reference import kept, pack
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.mla_prefill_reference import Query
from k3offload.kernels.pieces import unpacked
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import backends, randn
from tests.test_mla_decode import NOPE, RANK, ROPE, SCALE, H, V, cut, in_blocks

Unpack = Callable[..., None]
MODULES = backends("latents")
SOLO = Workers(1)
WIDTHS = [(512, 64), (RANK, ROPE), (64, 16), (5, 3), (130, 7)]  # whole and broken groups, lanes
DTYPES = [torch.bfloat16, torch.float32]


def form_of(precision: str, widths: tuple[int, int], dtype: torch.dtype) -> LatentFormat:
    return LatentFormat(*widths, dtype.itemsize, precision)


def rows_of(form: LatentFormat, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [count, width] of every size; row 1 is zero, row 2 has one number alone."""
    g = generator(form.row)
    rows = randn(g, count, form.width) * torch.exp(3 * randn(g, count, 1))
    rows[1:2], rows[2:3, 1:] = 0, 0
    return rows.to(dtype)


def unpack_all(unpack: Unpack, packed: torch.Tensor, form: LatentFormat, dtype: Any) -> Any:
    """[blocks and one more, 256, width], NaN where nothing is written; rows that hold no token
    would give zeros."""
    blocks = in_blocks(packed, 0)
    out = torch.full((len(blocks) + 1, LATENT_BLOCK, form.width), float("nan"), dtype=dtype)
    with poisoned():
        unpack(blocks, len(packed), form, out, SOLO)
    return out


# ---- the format ----


def test_bytes_of_k3() -> None:
    for precision in PRECISIONS:
        form = LatentFormat(512, 64, 2, precision)
        assert (form.scales, form.codes, form.row) == (128, 144, 656)
        assert form.row * LATENT_BLOCK % 4096 == 0
    assert LatentFormat(512, 64, 2).row == 1152 and LatentFormat(512, 64, 4).row == 2304
    assert LatentFormat(512, 64, 4, "int8").row == 784


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_round_trip(precision: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    """Within the error that the format names; what is not packed has its bits."""
    form = form_of(precision, widths, dtype)
    rows = rows_of(form, 300, dtype)
    packed = pack(rows, form)
    assert packed.dtype == torch.uint8 and packed.shape == (300, form.row)
    assert form.row % 16 == 0 and kept(form, dtype) == (form.row, torch.uint8)
    back = unpack_all(MODULES["reference"].unpack, packed, form, dtype).flatten(0, 1)[:300]
    latent, got = rows[:, : form.kv_lora].double(), back[:, : form.kv_lora].double()
    largest = torch.cat(
        [g.abs().amax(1, True).expand(g.shape) for g in torch.split(latent, GROUP, 1)], 1
    )
    # the scale is rounded up by less than 2**-7, and results once more to their type
    step = largest / 127 / 2 if precision == "int8" else latent.abs() / 16 + largest * 2**-18
    bound = step * (1 + 2**-7) + latent.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-23)
    assert (got - latent).abs().le(bound + 1e-30).all()
    assert same_bits(back[:, form.kv_lora :].contiguous(), rows[:, form.kv_lora :].contiguous())
    assert not back[1].any() and (got[2] != 0).sum() == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_is_packed_from_itself_alone(precision: str) -> None:
    form = form_of(precision, (RANK, ROPE), torch.bfloat16)
    rows = rows_of(form, 130, torch.bfloat16)
    whole = pack(rows, form)
    for size in (1, 7, 64):
        assert torch.equal(torch.cat([pack(part, form) for part in torch.split(rows, size)]), whole)
    order = torch.randperm(130, generator=generator(0))
    assert torch.equal(pack(rows[order], form), whole[order])


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter computes with numpy
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_that_are_not_finite_stay_seen(precision: str, bad: float) -> None:
    """So that a sweep's check finds them."""
    form = form_of(precision, (512, 64), torch.bfloat16)
    rows = rows_of(form, 4, torch.bfloat16)
    rows[3, 70] = bad
    for module in MODULES.values():
        back = unpack_all(module.unpack, pack(rows, form), form, torch.bfloat16)[0]
        assert not back[3].isfinite().all() and back[:3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_packed_are_kept_as_they_are(dtype: torch.dtype) -> None:
    form = LatentFormat(RANK, ROPE, dtype.itemsize)
    rows = rows_of(form, 3, dtype)
    assert pack(rows, form) is rows and kept(form, dtype) == (form.width, dtype)
    assert form.room(10**6, 1 << 20) == 0
    pieces = [[rows]]
    assert Kernels(SOLO).unpacked(pieces, 3, form, dtype, True) is pieces


# ---- implementations ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", sorted(set(MODULES) - {"reference"}))
def test_the_bits_of_the_reference(
    backend: str, precision: str, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    form = form_of(precision, widths, dtype)
    for count in (1, 255, 600):
        packed = pack(rows_of(form, max(3, count), dtype)[:count], form)
        want = unpack_all(MODULES["reference"].unpack, packed, form, dtype)
        got = unpack_all(MODULES[backend].unpack, packed, form, dtype)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        assert got.flatten(0, 1)[count:].isnan().all()  # nothing else is written


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", MODULES)
def test_every_code(backend: str, precision: str) -> None:
    """All bytes but those of NaN, against the definition of the number."""
    form = form_of(precision, (256, 2), torch.float32)
    packed = torch.zeros(1, form.row, dtype=torch.uint8)
    scale = torch.tensor([0.5, 2.0, 0.75, 1.0], dtype=torch.bfloat16)
    packed[0, form.scales : form.codes] = scale.view(torch.uint8)
    packed[0, form.codes : form.codes + 256] = torch.arange(256)
    got = unpack_all(MODULES[backend].unpack, packed, form, torch.float32)[0, 0, :256]
    for code, number in enumerate(got.tolist()):
        if precision == "int8":
            want = float(code - 256 if code > 127 else code)
        else:
            sign, exponent, rest = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
            want = sign * (
                rest / 8 * 2**-6 if not exponent else (1 + rest / 8) * 2.0 ** (exponent - 7)
            )
            if code & 127 == 127:
                continue
        assert number == want * float(scale[code // 64]), code


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_instruction_sets_and_threads_change_no_bit(precision: str) -> None:
    form = form_of(precision, (512, 64), torch.bfloat16)
    packed = pack(rows_of(form, 2000, torch.bfloat16), form)
    blocks, found = in_blocks(packed, 0), []
    for isa in native.isas():
        for threads in (1, 3):
            out = torch.zeros(8, LATENT_BLOCK, 576, dtype=torch.bfloat16)
            workers = Workers(threads)
            with native.using(isa):
                MODULES["native"].unpack(blocks, 2000, form, out, workers)
            workers.close()
            found.append(out)
    assert all(same_bits(found[0], other) for other in found[1:])


# ---- attention ----


@dataclass
class Case:
    """Packed latents of 4 blocks and a bit, and the numbers that they stand for."""

    form: LatentFormat
    packed: list[torch.Tensor]
    numbers: list[torch.Tensor]
    length: int = 4 * LATENT_BLOCK + 77

    @classmethod
    def of(cls, precision: str, dtype: torch.dtype) -> Case:
        form = form_of(precision, (RANK, ROPE), dtype)
        packed = pack(randn(generator(1), cls.length, form.width, dtype=dtype), form)
        whole = unpack_all(MODULES["reference"].unpack, packed, form, dtype)
        numbers = in_blocks(whole.flatten(0, 1)[: cls.length], float("nan"))
        return cls(form, in_blocks(packed, 255), numbers)

    def pieces(self, backend: str, dtype: torch.dtype, most: int, at: Sequence[int]) -> Any:
        unpack = partial(MODULES[backend].unpack, workers=SOLO)
        where = torch.device("cpu")
        return unpacked(_cut(self.packed, at), self.length, self.form, most, (dtype, where), unpack)


def _cut(blocks: list[torch.Tensor], at: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """As ``cut``, for bytes: what lies in the memory in between is ones."""
    for piece in cut([block.float() for block in blocks], at):
        yield [block.nan_to_num(255.0).to(torch.uint8) for block in piece]


CUTS: list[tuple[int, tuple[int, ...]]] = [(5, ()), (1, ()), (2, ()), (2, (3,)), (3, (1, 2, 4))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", MODULES)
def test_attention_has_the_bits_of_the_numbers(
    backend: str, precision: str, dtype: torch.dtype
) -> None:
    """However pieces are cut, and however many blocks are unpacked at a time."""
    case, g = Case.of(precision, dtype), generator(2)
    up = DenseWeight(randn(g, H * (NOPE + V), RANK, dtype=torch.bfloat16) / 8)
    q = randn(g, 64, H, NOPE + ROPE, dtype=dtype)
    queries = [Query(q, 3 * LATENT_BLOCK), Query(q[:13], 4 * LATENT_BLOCK + 64)]

    def attend(op: str, pieces: Any) -> list[torch.Tensor]:
        asked = queries if op == "mla_prefill" else q[0]
        home = backends(op).get(backend, backends(op)["reference"])
        with poisoned():
            found = getattr(home, op)(asked, pieces, case.length, up, NOPE, V, SCALE, SOLO)
        return list(found)

    slow = backend == "triton"  # in the interpreter
    cuts = CUTS[-1:] if slow else CUTS
    for op in ("mla_decode",) if slow else ("mla_decode", "mla_prefill"):
        want = attend(op, [case.numbers])
        for most, at in cuts:
            got = attend(op, case.pieces(backend, dtype, most, at))
            assert all(same_bits(a, b) for a, b in zip(want, got, strict=True)), (op, most, at)


def test_planted_rows_beyond_the_end_are_seen() -> None:
    """An operator that unpacks what holds no token writes where it must not."""

    def eager(blocks: Any, count: int, form: LatentFormat, out: torch.Tensor, w: Workers) -> None:
        MODULES["reference"].unpack(blocks, len(blocks) * LATENT_BLOCK, form, out, w)

    form = form_of("int8", (64, 16), torch.bfloat16)
    packed = pack(rows_of(form, 100, torch.bfloat16), form)
    got = unpack_all(eager, packed, form, torch.bfloat16)
    assert not got.flatten(0, 1)[100:256].isnan().all()
