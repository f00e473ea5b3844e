"""The native linear and experts: right values, and bits that depend on a row alone (R63, R72).

Every instruction set that this machine runs is tested, whatever is in force elsewhere.  The
contract tests (tests/contract/test_kernel.py) run the best one.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from k3offload.errors import UsageError
from k3offload.kernels import experts_native, native
from k3offload.kernels.experts_reference import Job
from k3offload.kernels.experts_reference import experts as reference
from k3offload.kernels.glu_reference import Activation
from k3offload.kernels.int8 import Int8Weight
from k3offload.kernels.linear_native import linear, linears, scratch_bytes
from k3offload.kernels.linear_reference import Bundle, DenseWeight, Weight
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_native import GUARDED, draw, exact, moved, moved_weight
from tests.helpers_ops import each_job

HAS_COMPILER = any(map(shutil.which, ("g++", "c++", "clang++")))
SOLO = Workers(1)
KINDS = ("mxfp4", "int8", "bfloat16", "float32", "float16")
DTYPES = (torch.float32, torch.bfloat16)
#: N and K: one tile and less, odd ends, several blocks of rows, several blocks of columns
SHAPES = [(5, 1), (33, 25), (40, 88), (70, 160), (31, 192), (300, 2048), (48, 4416)]
ROWS = 37


@pytest.fixture(params=native.isas() or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if not native.available():
        pytest.skip(native.why_not())
    with native.using(request.param):
        yield request.param


#: All that compute in tiles, and the one in force.
TILES = [one for one in native.isas() if one in native.TILES] or native.isas()[:1] or ["none"]
needs_library = pytest.mark.skipif(not native.available(), reason="the library was not built")


@pytest.mark.skipif(not native.available() and not HAS_COMPILER, reason="no C++ compiler")
def test_the_library_was_built() -> None:
    """Where there is a compiler a missing library is a broken build, not a choice."""
    assert native.available(), native.why_not()
    assert native.isas()[-1] == "portable"


def fits(kind: str, k: int) -> bool:
    return k % {"mxfp4": 32, "int8": 64}.get(kind, 1) == 0


@lru_cache(maxsize=64)
def drawn(kind: str, n: int, k: int) -> tuple[Weight, torch.Tensor]:
    weight = draw(kind, n, k)
    return weight, exact(weight)


def rows(k: int, dtype: torch.dtype, n: int = ROWS) -> torch.Tensor:
    return torch.randn(n, k, generator=generator(1)).to(dtype)


# ---- values ----


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_values(isa: str, kind: str, decode: bool) -> None:
    """Close to float64; bfloat16 results within half a step and what rounded weights add."""
    for n, k in (s for s in SHAPES if fits(kind, s[1])):
        weight, numbers = drawn(kind, n, k)
        for dtype in DTYPES:
            x = rows(k, dtype)
            with poisoned():
                y = linear(x, weight, SOLO, decode)
            want = x.double() @ numbers.T
            assert y.dtype == dtype
            error = (y.double() - want).abs().max() / want.abs().max()
            assert error < (2e-6 if dtype == torch.float32 else 2.0**-8)


@lru_cache(maxsize=1)
def every_code() -> list[tuple[Weight, torch.Tensor]]:
    """Weights that hold every finite number of their format, and what they are."""
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)
    packed = codes.repeat(255, 1)[:, torch.randperm(256, generator=generator(0))]
    q = torch.arange(-127, 129).clamp(max=127).to(torch.int8).repeat(255, 1)
    steps = torch.randn(255, 4, generator=generator(2)).bfloat16()
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    halves, brains = (bits.view(t) for t in (torch.float16, torch.bfloat16))
    weights: list[Weight] = [
        Mxfp4Weight(packed, scales.repeat(16, 1).T.contiguous()),
        Int8Weight(q, steps),
        DenseWeight(halves[halves.isfinite()].view(-1, 128)),
        DenseWeight(brains[brains.isfinite()].view(-1, 128)),
    ]
    return [(weight, exact(weight)) for weight in weights]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_every_format(isa: str, dtype: torch.dtype) -> None:
    """One-hot rows read the weights out: they are the definition's, rounded to ``dtype``."""
    for weight, want in every_code():
        want = want[want.isfinite().all(1)]  # the largest scales overflow bfloat16
        for decode in (True, False):
            x = torch.eye(want.shape[1]).to(dtype)
            got = linear(x, weight, SOLO, decode).T[: len(want)].double()
            normal = want.abs() >= 2.0**-126  # the matrix unit takes smaller ones as zero
            assert torch.equal(got[normal], want.to(dtype).double()[normal])
            assert got[~normal].abs().max() <= 2.0**-126


# ---- bits ----


def check_bits(
    weight: Weight, x: torch.Tensor, decode: bool, pools: list[Workers], f: object = linear
) -> None:
    """Any number of rows, any threads, any company, any place in memory."""
    assert callable(f)
    base = f(x, weight, SOLO, decode)
    for count in (1, 2, 3, 7, 8, 15, 16, 17, 33):
        for workers in pools:
            assert same_bits(f(x[-count:], weight, workers, decode), base[-count:])
    order = torch.randperm(len(x), generator=generator(3))
    assert same_bits(f(x[order], weight, pools[-1], decode), base[order])
    for fill in (float("nan"), float("inf"), 1e30):
        company = torch.full_like(x, fill)
        company[5] = x[5]
        assert same_bits(f(company, weight, SOLO, decode)[5], base[5])
    for shift in (1, 3, 8, 40):
        assert same_bits(f(moved(x, shift), moved_weight(weight, shift), SOLO, decode), base)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bits(isa: str, kind: str, decode: bool) -> None:
    pools = [Workers(n) for n in (1, 2, 3, 4)]
    shape = (600, 1056) if isa != "portable" else (100, 192)
    for n, k in (shape, (40, 88), (31, 192)):
        k = k // 64 * 64 if n > 40 and kind == "int8" else k
        if fits(kind, k):
            for dtype in DTYPES:
                few = pools if n == 600 else pools[:1]
                check_bits(draw(kind, n, k), rows(k, dtype), decode, few)
    for workers in pools:
        workers.close()


@pytest.mark.parametrize("isa", TILES, indirect=True)
def test_many_rows_are_as_few(isa: str) -> None:
    """More rows than are computed at a time, in both families."""
    for dtype in DTYPES:
        weight, x = draw("mxfp4", 96, 1184), rows(1184, dtype, 530)
        for decode in (True, False):
            base = linear(x, weight, SOLO, decode)
            for begin, end in ((0, 70), (500, 530), (511, 513), (200, 500)):
                assert same_bits(linear(x[begin:end], weight, SOLO, decode), base[begin:end])


@pytest.mark.parametrize("decode", [True, False])
def test_several_weights_of_one_x(isa: str, decode: bool) -> None:
    """Each gets the bits that it gets alone, whatever kinds stand beside it."""
    workers = Workers(3)
    for dtype in DTYPES:
        weights = [
            draw(kind, n, 192) for kind, n in zip((*KINDS, *KINDS), range(5, 75, 7), strict=True)
        ]
        bundle = Bundle(weights)
        for count in (1, 2, 40):
            x = rows(192, dtype, count)
            for _ in range(2):  # the second time from what is remembered
                together = linears(x, bundle, workers, decode)
                assert len(together) == len(weights)
                for y, weight in zip(together, weights, strict=True):
                    assert y.is_contiguous()
                    assert same_bits(y, linear(x, weight, SOLO, decode))
    workers.close()


@needs_library
def test_planted_wrong_products_are_refused() -> None:
    def by_count(x: torch.Tensor, w: Weight, p: Workers, decode: bool) -> torch.Tensor:
        y = linear(x, w, p, decode)
        return y if len(x) % 16 else torch.nextafter(y, torch.tensor(9e9))

    def by_company(x: torch.Tensor, w: Weight, p: Workers, decode: bool) -> torch.Tensor:
        return linear(x, w, p, decode) + 0 * x.sum()

    def by_threads(x: torch.Tensor, w: Weight, p: Workers, decode: bool) -> torch.Tensor:
        y = linear(x, w, p, decode)
        return y if p.threads == 1 else torch.nextafter(y, torch.tensor(9e9))

    def by_place(x: torch.Tensor, w: Weight, p: Workers, decode: bool) -> torch.Tensor:
        y = linear(x, w, p, decode)
        return y if x.data_ptr() % 8 == 0 else torch.nextafter(y, torch.tensor(9e9))

    pools = [SOLO, Workers(2)]
    check_bits(draw("float32", 40, 88), rows(88, torch.float32), True, pools)
    for wrong in (by_count, by_company, by_threads, by_place):
        with pytest.raises(AssertionError):
            check_bits(draw("float32", 40, 88), rows(88, torch.float32), True, pools, wrong)


@needs_library
def test_nothing_is_read_behind_the_end() -> None:
    """Weights, scales and rows that end where memory ends (in a process of its own)."""
    code = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n{GUARDED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "segfault seen" in done.stdout


# ---- experts ----

ACT = Activation("situ", 4.0, 25.0)


def jobs(kinds: str, z: int = 96, inner: int = 192) -> list[Job]:
    made = []
    picks: list[list[int] | None] = [None, [7], [3, 3, 36, 0], [], list(range(20))]
    for i, pick in enumerate(picks):
        a, b, c = (kinds.split()[(i + j) % len(kinds.split())] for j in range(3))
        made.append(
            Job(draw(a, inner, z, i), draw(b, inner, z, i + 9), draw(c, z, inner, i + 20), pick)
        )
    return made


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("kinds", ["mxfp4", "bfloat16", "int8 mxfp4 float32 bfloat16"])
def test_experts(isa: str, kinds: str, decode: bool) -> None:
    """Close to the reference; each job alone, in parts and with threads gives the same bits."""
    made = jobs(kinds, z=192)
    for dtype in DTYPES:
        x = rows(192, dtype) / 8
        with poisoned():
            got = each_job(experts_native.experts, x, made, ACT, SOLO, decode)
            want = each_job(reference, x, made, ACT, SOLO, decode)
        pool = Workers(3)
        for job, a, b in zip(made, got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if not len(a):
                continue
            allowed = (2.0**-7 if dtype == torch.bfloat16 else 4e-6) * b.float().abs().max()
            assert (a.float() - b.float()).abs().max() <= allowed
            chosen = list(range(len(x))) if job.rows is None else list(job.rows)
            for part in (chosen[:1], chosen[-1:], chosen[::-1]):
                again = experts_native.experts(x, [job._replace(rows=part)], ACT, pool, decode)
                rows_of = {len(chosen): a.flip(0), 1: a[:1] if part[0] == chosen[0] else a[-1:]}
                assert same_bits(again, rows_of[len(part)])
        pool.close()


@pytest.mark.parametrize("isa", TILES, indirect=True)
@pytest.mark.parametrize("decode", [True, False])
def test_experts_with_more_rows_than_are_computed_at_a_time(isa: str, decode: bool) -> None:
    x = rows(64, torch.bfloat16, 1100) / 8
    job = Job(draw("mxfp4", 4096, 64), draw("mxfp4", 4096, 64, 1), draw("mxfp4", 64, 4096, 2))
    base = experts_native.experts(x, [job], ACT, SOLO, decode)
    pick = [0, 511, 512, 1023, 1024, 1099]
    some = experts_native.experts(x, [job._replace(rows=pick)], ACT, SOLO, decode)
    assert same_bits(base[pick], some)


@pytest.mark.parametrize("act", [ACT, Activation("situ", 4.0, None), Activation("silu")])
def test_activations(isa: str, act: Activation) -> None:
    """Through one-hot weights, so that gate and up are the inputs themselves."""
    values = torch.cat([torch.linspace(-120, 120, 4001), torch.logspace(-30, 1, 96)])
    x = torch.stack([values, values.flip(0)], 1)
    one, other = (DenseWeight(row[None].contiguous()) for row in torch.eye(2))
    identity = DenseWeight(torch.ones(1, 1))
    got = experts_native.experts(x, [Job(one, other, identity)], act, SOLO)
    a, b = x.double().T
    cap = act.linear_beta
    want = torch.sigmoid(a) * (b if cap is None else cap * torch.tanh(b / cap))
    want *= a if act.name == "silu" else act.beta * torch.tanh(a / act.beta)
    normal = a > -87  # below, the sigmoid is taken as zero
    assert normal.sum() > 3000
    off = (got[:, 0].double() - want)[normal] / want[normal]
    assert off.abs().max() < 6e-7
    assert got[~normal].abs().max() < 2.0**-110
    nan = torch.full((1, 2), float("nan"))
    assert experts_native.experts(nan, [Job(one, other, identity)], act, SOLO).isnan().all()


# ---- the library ----


@needs_library
def test_torch_and_the_matrix_unit_leave_one_another_alone() -> None:
    x, weight = rows(2048, torch.bfloat16, 64), draw("bfloat16", 600, 2048)
    assert isinstance(weight, DenseWeight)
    theirs, ours = torch.nn.functional.linear(x, weight.tensor), linear(x, weight, SOLO)
    for _ in range(2):
        assert same_bits(torch.nn.functional.linear(x, weight.tensor), theirs)
        assert same_bits(linear(x, weight, SOLO), ours)


@needs_library
def test_two_threads_may_use_the_same_workers() -> None:
    workers, weight, x = Workers(2), draw("float32", 2000, 2048), rows(2048, torch.float32)
    base = linear(x, weight, SOLO)
    right: list[bool] = []

    def run() -> None:
        right.extend(same_bits(linear(x, weight, workers), base) for _ in range(6))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workers.close()
    assert len(right) == 18 and all(right)


@pytest.mark.parametrize(("count", "k", "inner"), [(1, 192, 64), (40, 1024, 320), (600, 544, 96)])
def test_scratch_memory_is_within_its_bound(isa: str, count: int, k: int, inner: int) -> None:
    """And is given back with the threads that took it."""
    gc.collect()  # threads of earlier tests give theirs back
    before = native.scratch_held()
    during: list[int] = []

    def run() -> None:
        workers, x = Workers(2), rows(k, torch.bfloat16, count) / 8
        parts = [Job(draw("mxfp4", inner, k), draw("mxfp4", inner, k), draw("mxfp4", k, inner))] * 3
        with native.using(isa):
            for decode in (True, False):
                for some in (x, x.float()):
                    linear(some, draw("bfloat16", 700, k), workers, decode)
                    experts_native.experts(some, parts, ACT, workers, decode)
            during.append(native.scratch_held() - before)
            during.append(scratch_bytes(2, count, 3 * count, k, inner))
        workers.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    gc.collect()
    assert 0 < during[0] <= during[1]
    assert native.scratch_held() <= before


@needs_library
def test_a_weight_that_has_no_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match="contiguous"):
        linear(torch.ones(1, 8), DenseWeight(torch.ones(8, 8)[:, ::2].T), SOLO)


@needs_library
def test_an_instruction_set_that_is_not_there() -> None:
    before = native.isa()
    with pytest.raises(UsageError, match="portable"):
        native.use("neon" if "neon" not in native.isas() else "avx2")
    with pytest.raises(UsageError, match="'x87'"), native.using("x87"):
        pass
    assert native.isa() == before


def test_a_missing_or_foreign_library_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, words in (("LIBRARY", "no.so", "not built"), ("ABI", -1, "version")):
        with monkeypatch.context() as patch:
            patch.setattr(native, name, value)
            native._load.cache_clear()
            if name == "LIBRARY" or HAS_COMPILER:
                assert words in native.why_not()
            assert not native.available() and native.isas() == []
            with pytest.raises(UsageError, match=r"pip install"):
                native.use("portable")
        native._load.cache_clear()
