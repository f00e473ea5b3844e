"""Native calls of decode rows that are put off: the same bits, nothing read early or let go."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import k3offload
from k3offload.kernels import (
    c_function,
    choose,
    native,
    residual,
    residual_native,
    rms_norm_native,
)
from k3offload.kernels.choose import Kernels
from k3offload.kernels.linear_native import linear
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.rms_norm_native import rms_norm
from k3offload.kernels.workers import Workers
from k3offload.make_tiny import make_tiny
from tests.contract.test_kernel import generator, same_bits
from tests.helpers_ops import randn

SOLO = Workers(1)
ISAS = native.isas()
pytestmark = pytest.mark.skipif(not ISAS, reason="there is no native library")
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [(1, 7), (3, 64), (70, 1000)])
def test_residual_has_the_bits_of_torch(
    shape: tuple[int, int], parts: tuple[bool, bool], dtype: torch.dtype, isa: str
) -> None:
    g = generator(1)
    base, y, more = (
        randn(g, *shape, dtype=dtype) if there else None for there in (parts[0], True, parts[1])
    )
    assert y is not None
    wanted, got = torch.empty(shape, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    with native.using(isa):
        found = residual_native.residual(base, y, more, got, True, SOLO)
        assert residual_native.residual(base, y, more, got, False, SOLO) is None
    peaks = residual.residual(base, y.clone(), more, wanted, True, SOLO)
    assert found is not None and peaks is not None
    assert same_bits(got, wanted) and same_bits(found, peaks)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_peak_is_finite_only_if_all_of_its_row_is(
    bad: float, dtype: torch.dtype, isa: str
) -> None:
    for at in range(0, 53, 4):
        x = randn(generator(at), 3, 53, dtype=dtype)
        x[1, at] = bad
        with native.using(isa):
            found = residual_native.residual(None, x, None, torch.empty_like(x), True, SOLO)
        assert found is not None and found.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (3, 64), (70, 1000)])
def test_output_gate_is_that_of_torch_row_by_row(
    shape: tuple[int, int], dtype: torch.dtype, isa: str
) -> None:
    g = generator(5)
    x, gate = randn(g, *shape), 6 * randn(g, *shape, dtype=dtype)
    gate[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, -104, 88])
    wanted = residual.output_gate(x.clone(), gate, SOLO)
    gapped = torch.stack((x, x), 2).view(shape[0], -1)[:, ::2]
    with native.using(isa):
        got = residual_native.output_gate(x, gate, SOLO)
        assert same_bits(residual_native.output_gate(gapped, gate, Workers(3)), got)
        for row in {0, shape[0] - 1}:
            one = slice(row, row + 1)
            assert same_bits(residual_native.output_gate(x[one], gate[one], SOLO), got[one])
    near = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got, wanted, rtol=near, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("decode", [True, False])
def test_a_float32_result_is_that_of_a_float32_row(decode: bool, isa: str) -> None:
    g = generator(2)
    x, weight = randn(g, 5, 192, dtype=torch.bfloat16), randn(g, 40, 192, dtype=torch.bfloat16)
    with native.using(isa):
        wanted = linear(x.float(), DenseWeight(weight), SOLO, decode)
        got = linear(x, DenseWeight(weight), SOLO, decode, torch.float32)
    assert got.dtype == torch.float32 and same_bits(got, wanted)


def test_what_a_waiting_call_needs_stays_until_it_has_run() -> None:
    x, weight = randn(generator(3), 1, 4096), torch.ones(4096)
    wanted = rms_norm(rms_norm(x, weight, 1e-5), weight, 1e-5)
    with c_function.PutOff():
        y = rms_norm(x.clone(), weight.clone(), 1e-5)
        z = rms_norm(y, weight.clone(), 1e-5)
        del y
        gc.collect()
        kept = [torch.full((1, 4096), torch.nan) for _ in range(8)]  # takes what memory is free
        c_function.finish()
        assert same_bits(z, wanted)
        later = rms_norm(x, weight, 1e-5)
    del kept
    assert same_bits(later, rms_norm(x, weight, 1e-5))  # the end of the block runs them too


@pytest.mark.parametrize("bad", [1 << 63, 0.5, "x"])
def test_a_call_with_a_bad_argument_leaves_the_others_whole(bad: Any) -> None:
    x, weight, call = torch.ones(1, 64), torch.ones(64), rms_norm_native._CALL
    wanted = rms_norm(x, weight, 1e-5)
    with c_function.PutOff():
        first = rms_norm(x, weight, 1e-5)
        with pytest.raises((TypeError, OverflowError)):
            call(None, 0, 0, 1, bad, 1e-5, x, weight, x)
        second = rms_norm(x, weight, 1e-5)
    assert same_bits(first, wanted) and same_bits(second, wanted)


def test_an_error_drops_what_waits() -> None:
    x, weight, y = torch.ones(1, 64), torch.ones(64), torch.ones(0)

    def stopped() -> None:
        nonlocal y
        with c_function.PutOff():
            y = rms_norm(x, weight, 1e-5)
            y.fill_(7)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stopped()
    assert y.eq(7).all()
    assert rms_norm(x, weight, 1e-5).ne(7).all()  # made at once again


def test_columns_of_a_waiting_result_are_copied_after_it() -> None:
    x, weight = randn(generator(4), 3, 96), torch.ones(96)
    wanted = rms_norm(rms_norm(x, weight, 1e-5)[:, :64], weight[:64], 1e-5)
    with c_function.PutOff():
        got = rms_norm(rms_norm(x, weight, 1e-5)[:, :64], weight[:64], 1e-5)
    assert same_bits(got, wanted)


def test_only_native_kernels_and_few_rows_wait() -> None:
    x, weight = torch.ones(1, 64), torch.ones(64)
    for wanted, rows, waits in (
        ({}, choose.FEW_ROWS, True),
        ({}, choose.FEW_ROWS + 1, False),
        ({"experts": "reference"}, 1, False),
    ):
        with Kernels(SOLO, wanted).put_off(rows):
            rms_norm(x, weight, 1e-5)
            assert c_function.waiting() == waits


@pytest.mark.parametrize("options", [{}, {"cache": "120K"}, {"predict": "router"}])
@pytest.mark.parametrize("sessions", [1, 3])
def test_logits_are_those_of_calls_made_at_once(
    sessions: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path / "model", "nano")

    def run(few: int) -> list[bytes]:
        monkeypatch.setattr(choose, "FEW_ROWS", few)
        found = []
        with k3offload.load(tmp_path / "model", sessions=sessions, **options) as engine:
            some = [engine.session() for _ in range(sessions)]
            for i, session in enumerate(some):
                session.append(range(3 + i, 70 + 9 * i))
            for token in range(6):
                engine.advance(some)
                found += [session.logits().tobytes() for session in some]
                for session in some:
                    session.append_sampled(token)
        return found

    assert run(choose.FEW_ROWS) == run(0)
