"""What every implementation of an operator must pass: right values, and bits that depend on the
row alone (R72).

Values are compared with the definition in float64, and other backends with the reference.  Fresh
memory is filled with NaN while a kernel runs, so what it forgets to write is seen.  Operators that
are not row by row (KDA, convolution, attention, experts) have their own files: tests/test_kda.py,
tests/test_attend.py, tests/test_mla_decode.py, tests/test_experts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from k3offload import registry
from k3offload.config import ROW_TILE, tile_rows
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.workers import Workers, single_threaded
from tests.helpers_ops import (
    OPS,
    TILES,
    Function,
    Inputs,
    Op,
    Tensors,
    dense,
    implementations,
    randn,
)

SOLO = Workers(1)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh tensors are NaN; torch runs on one thread, as in a sweep."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with torch.inference_mode(), single_threaded():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(op: Op, f: Function, inputs: Inputs, workers: Workers = SOLO) -> Tensors:
    with poisoned():
        return tuple(t.clone() for t in op.call(f, inputs, workers))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


# ---- the contract ----


def check_values(op: Op, f: Function, dtype: torch.dtype) -> None:
    """Close to the definition; integers equal it."""
    for seed in range(2):
        inputs = op.make(ROW_TILE * (seed + 1), generator(seed), dtype)
        kept = {name: inputs[name].clone() for name in op.rows}
        outputs, exact = run(op, f, inputs), op.exact(inputs)
        assert len(outputs) == len(exact)
        for got, want in zip(outputs, exact, strict=True):
            assert got.shape == want.shape
            if not want.is_floating_point():
                assert torch.equal(got, want)
                continue
            assert torch.isfinite(got).all()
            rounding = 2.0**-8 if got.dtype == torch.bfloat16 else 0.0
            # the norms round twice: once before the weight, once after it
            allowed = (op.tolerance + 2 * rounding) * want.abs().max()
            assert (got.double() - want).abs().max() <= allowed
        for name in op.rows:
            assert same_bits(inputs[name], kept[name]), f"{name} was changed"


def rows_of(inputs: Inputs, op: Op, pick: torch.Tensor) -> Inputs:
    return {**inputs, **{name: inputs[name][pick].contiguous() for name in op.rows}}


def check_position(op: Op, f: Function, dtype: torch.dtype) -> None:
    """Rows in another order give the same bits in that order."""
    inputs = op.make(ROW_TILE, generator(0), dtype)
    base = run(op, f, inputs)
    for seed in range(3):
        order = torch.randperm(ROW_TILE, generator=generator(seed))
        for was, now in zip(base, run(op, f, rows_of(inputs, op, order)), strict=True):
            assert same_bits(was[order], now)


def check_companions(op: Op, f: Function, dtype: torch.dtype) -> None:
    """What the other rows hold, be it huge, infinite or NaN, never reaches a row."""
    inputs = op.make(ROW_TILE, generator(0), dtype)
    base = run(op, f, inputs)
    for fill in (0.0, 1e30, float("inf"), float("nan")):
        for row in (0, 17, ROW_TILE - 1):
            others = torch.arange(ROW_TILE) != row
            company = dict(inputs)
            for name in op.rows:
                company[name] = inputs[name].clone()
                if inputs[name].is_floating_point():
                    company[name][others] = fill
            for was, now in zip(base, run(op, f, company), strict=True):
                assert same_bits(was[row], now[row]), (fill, row)


def check_tiles(op: Op, f: Function, dtype: torch.dtype) -> None:
    """A row gives the same bits among any number of rows, and at any place among them."""
    inputs = op.make(3 * ROW_TILE, generator(0), dtype)
    base = run(op, f, inputs)
    for tile in range(3):
        pick = torch.arange(ROW_TILE) + tile * ROW_TILE
        for was, now in zip(base, run(op, f, rows_of(inputs, op, pick)), strict=True):
            assert same_bits(was[pick], now)
    for count in (1, 2, 5, 17, 33, 100):
        pick = torch.randperm(3 * ROW_TILE, generator=generator(count))[:count]
        for was, now in zip(base, run(op, f, rows_of(inputs, op, pick)), strict=True):
            assert same_bits(was[pick], now), count
    mixed = torch.randperm(3 * ROW_TILE, generator=generator(1))
    for was, now in zip(base, run(op, f, rows_of(inputs, op, mixed)), strict=True):
        assert same_bits(was[mixed], now)


def check_threads(op: Op, f: Function, dtype: torch.dtype) -> None:
    inputs = op.make(2 * ROW_TILE, generator(0), dtype)
    base = run(op, f, inputs)
    for threads in (2, 3, 4):
        workers = Workers(threads)
        for _ in range(2):
            for was, now in zip(base, run(op, f, inputs, workers), strict=True):
                assert same_bits(was, now)
        workers.close()


Check = Callable[[Op, Function, torch.dtype], None]
CHECKS: list[Check] = [
    check_values,
    check_position,
    check_companions,
    check_tiles,
    check_threads,
]
WHICH = [
    pytest.param(key, backend, dtype, id=f"{key}-{backend}-{str(dtype).removeprefix('torch.')}")
    for key, op in OPS.items()
    for backend in implementations(op)
    for dtype in op.dtypes
    # weights of several tiles are for threads to share; a GPU's kernel has none of them, and the
    # interpreter takes minutes
    if not ("tiles" in key and backend == "triton")
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("key", "backend", "dtype"), WHICH)
def test_kernel(key: str, backend: str, dtype: torch.dtype, check: Check) -> None:
    check(OPS[key], implementations(OPS[key])[backend], dtype)


@pytest.mark.parametrize(("key", "backend", "dtype"), WHICH)
def test_kernel_equals_the_reference(key: str, backend: str, dtype: torch.dtype) -> None:
    """Every backend within the tolerance of the reference; the reference within none."""
    op = OPS[key]
    found = implementations(op)
    inputs = op.make(ROW_TILE, generator(5), dtype)
    got, want = run(op, found[backend], inputs), run(op, found["reference"], inputs)
    for a, b in zip(got, want, strict=True):
        if backend == "reference" or not b.is_floating_point():
            assert same_bits(a, b)
            continue
        rounding = 2.0**-7 if b.dtype == torch.bfloat16 else 0.0
        allowed = (2 * op.tolerance + rounding) * b.abs().max()
        assert (a.float() - b.float()).abs().max() <= allowed


def test_every_reference_is_tested() -> None:
    """A reference file that no contract knows would go untested."""
    own = {
        "attend",
        "kda",
        "short_conv",
        "experts",
        "mla_decode",
        "mla_prefill",
        "latents",
    }  # files of their own
    homes = {op.home for op in OPS.values()} | own
    folder = Path(registry.__file__).parent / "kernels"
    files = {p.stem.removesuffix("_reference") for p in folder.glob("*_reference.py")}
    assert files == homes
    assert all("reference" in implementations(op) for op in OPS.values())


# ---- linear: other shapes, other places ----


def _given(inputs: Inputs, rows: int, g: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Inputs of 64 rows, as often as it takes."""
    return {**inputs, "x": inputs["x"].repeat(rows // ROW_TILE, 1)}


@pytest.mark.parametrize(("n", "k"), [(1, 8), (33, 7), (40, 74), (64, 4096), (300, 4096)])
def test_linear_shapes(n: int, k: int) -> None:
    op = OPS["linear-dense"]
    for dtype in op.dtypes:
        g = generator(n)
        inputs = {"x": randn(g, ROW_TILE, k, dtype=dtype), "weight": dense(g, dtype, n, k)}
        shaped = replace(op, make=partial(_given, inputs), tolerance=1e-5)
        for check in (check_values, check_position, check_companions, check_threads):
            check(shaped, implementations(op)["reference"], dtype)


def test_several_tiles_are_several() -> None:
    assert tile_rows(*TILES) < TILES[0]


def test_linear_alignment_of_the_weight_is_no_matter() -> None:
    """A weight that lies anywhere gives the bits of an aligned one, if it says so."""
    op = OPS["linear-dense"]
    f = implementations(op)["reference"]
    for dtype in op.dtypes:
        inputs = op.make(ROW_TILE, generator(0), dtype)
        tensor = inputs["weight"].tensor
        (base,) = run(op, f, inputs)
        for shift in (1, 3, 8):
            memory = torch.zeros(tensor.numel() + shift, dtype=dtype)
            moved = memory[shift:].view(tensor.shape).copy_(tensor)
            (got,) = run(op, f, {**inputs, "weight": DenseWeight(moved, aligned=False)})
            assert same_bits(base, got)


# ---- planted wrong kernels ----


def _reference(key: str) -> Function:
    return implementations(OPS[key])["reference"]


def global_max(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales by the largest number of the whole tile: close in value, and rows meet."""
    top = x.abs().max().float()
    wide = x.float() / top
    scale = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps / top**2)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)


def eps_outside(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = 1 / ((wide * wide).mean(-1, keepdim=True).sqrt() + eps)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)


def eps_on_the_mean(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    out: torch.Tensor = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) / x.shape[-1] ** 0.5
    return out


def loses_the_last_row(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:-1] = _reference("rms_norm")(x, weight, eps)[:-1]
    return out


def depends_on_position(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out: torch.Tensor = _reference("rms_norm")(x, weight, eps)
    out[::2] = torch.nextafter(out[::2].float(), torch.tensor(9e9)).to(x.dtype)
    return out


def depends_on_count(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out: torch.Tensor = _reference("rms_norm")(x, weight, eps)
    return out if x.shape[0] == ROW_TILE else torch.nextafter(out, torch.tensor(9e9))


def depends_on_threads(
    x: torch.Tensor, weight: object, workers: Workers, decode: bool
) -> torch.Tensor:
    out: torch.Tensor = _reference("linear-dense")(x, weight, workers)
    return out if workers.threads < 3 else torch.nextafter(out, torch.tensor(9e9))


def changes_its_input(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out: torch.Tensor = _reference("rms_norm")(x, weight, eps)
    x[0] = 0
    return out


def gate_and_up_swapped(
    a: torch.Tensor, b: torch.Tensor, beta: float, linear_beta: float | None
) -> torch.Tensor:
    return _reference("situ")(b, a, beta, linear_beta)  # type: ignore[no-any-return]


def capped_sigmoid(
    a: torch.Tensor, b: torch.Tensor, beta: float, linear_beta: float | None
) -> torch.Tensor:
    capped = beta * torch.tanh(a / beta)
    up = b if linear_beta is None else linear_beta * torch.tanh(b / linear_beta)
    return capped * torch.sigmoid(capped) * up


def bias_in_the_weights(x: torch.Tensor, gate: object, bias: torch.Tensor, *rest: Any) -> Tensors:
    experts, weights, scores = _reference("router")(x, gate, bias, *rest)
    return experts, weights + bias[experts] * 0.01, scores


def normed_values(
    entries: list[torch.Tensor], norm: torch.Tensor, query: torch.Tensor, eps: float
) -> torch.Tensor:
    """Mixes the normalised entries instead of the raw ones."""
    out: torch.Tensor = _reference("attnres-2")(
        [e / (e.square().mean(-1, keepdim=True) + eps).sqrt() for e in entries], norm, query, eps
    )
    return out


PLANTED: list[tuple[str, Function, Check]] = [
    ("rms_norm", global_max, check_companions),
    ("rms_norm", eps_outside, check_values),
    ("rms_norm", loses_the_last_row, check_values),
    ("rms_norm", depends_on_position, check_position),
    ("rms_norm", depends_on_count, check_tiles),
    ("rms_norm", changes_its_input, check_values),
    ("l2_norm", eps_on_the_mean, check_values),
    ("linear-dense", depends_on_threads, check_threads),
    ("situ", gate_and_up_swapped, check_values),
    ("situ", capped_sigmoid, check_values),
    ("router", bias_in_the_weights, check_values),
    ("attnres-2", normed_values, check_values),
]


@pytest.mark.parametrize(("key", "wrong", "check"), PLANTED)
def test_planted_wrong_kernels_are_refused(key: str, wrong: Function, check: Check) -> None:
    with pytest.raises(AssertionError):
        check(OPS[key], wrong, torch.float32)
