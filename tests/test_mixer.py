"""mixer: one call (native, Triton) has the bits of its parts, in any company, with any threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch

from k3offload.kernels import mixer_native, native, triton_run
from k3offload.kernels.choose import MIXED, Kernels
from k3offload.kernels.mixer import MixerRows, MixerWeights, composed
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import randn

SOLO = Workers(1)
ISAS = native.isas()
needs_library = pytest.mark.skipif(not ISAS, reason="there is no native library")
needs_triton = pytest.mark.skipif(not triton_run.interpreted(), reason="there is no Triton")
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(3, 40, 50, 4, -5.0), (2, 128, 64, 4, -5.0), (5, 24, 2, 3, None), (4, 7, 17, 4, None)]


class Given(NamedTuple):
    rows: MixerRows
    tails: list[torch.Tensor]
    state: torch.Tensor
    weights: MixerWeights


def made(heads: int, dim: int, n: int, taps: int, lower: float | None, dtype: torch.dtype) -> Given:
    g, wide = generator(5), heads * dim

    def some(*shape: int) -> torch.Tensor:
        return randn(g, *shape, dtype=dtype)

    qkv = [some(n, wide) for _ in range(3)]
    rows = MixerRows(qkv, some(n, wide), some(n, heads), some(n, wide))
    convs = tuple(randn(g, wide, taps) for _ in range(3))
    weights = MixerWeights(convs, randn(g, heads), randn(g, wide), randn(g, dim), lower, 1e-5)
    return Given(rows, [some(taps - 1, wide) for _ in range(3)], randn(g, heads, dim, dim), weights)


def ran(kernels: Kernels, given: Given, decode: bool) -> list[torch.Tensor]:
    """Result, state and tails of a run that leaves ``given`` as it is."""
    tails, state = [tail.clone() for tail in given.tails], given.state.clone()
    with poisoned(), kernels.in_force():
        out = kernels.mixer(given.rows, tails, state, given.weights, decode).clone()
    return [out, state, *tails]


def cut(rows: MixerRows, some: slice) -> MixerRows:
    def piece(x: torch.Tensor) -> torch.Tensor:
        return x[some].contiguous()

    return MixerRows([piece(x) for x in rows.qkv], *(piece(x) for x in rows[1:]))


def alike(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@needs_library
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_one_call_has_the_bits_of_its_parts(
    isa: str, shape: tuple[int, int, int, int, float | None], dtype: torch.dtype, decode: bool
) -> None:
    given = made(*shape, dtype)
    rows = cut(given.rows, slice(0, 1)) if decode else given.rows
    rows = rows._replace(beta=torch.zeros_like(rows.beta))  # whose sigmoid no two ways tell apart
    given, fused, parts = given._replace(rows=rows), Kernels(SOLO, isa=isa), Kernels(SOLO, isa=isa)
    assert all(parts.chosen[op] == "native" for op in MIXED)
    assert fused._f["mixer"] is mixer_native.mixer
    parts._f["mixer"] = partial(composed, dict(parts._f))
    want = ran(parts, given, decode)
    assert alike(ran(fused, given, decode), want)
    for threads in (2, 3):
        workers = Workers(threads)
        assert alike(ran(Kernels(workers, isa=isa), given, decode), want)
        workers.close()


def by_triton() -> Kernels:
    return Kernels(SOLO, dict.fromkeys(MIXED, "triton"))


@needs_triton
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_launches_have_the_bits_of_their_parts(
    shape: tuple[int, int, int, int, float | None], dtype: torch.dtype, decode: bool
) -> None:
    """In the interpreter, where a sum's order is that of numpy; on a GPU within rounding."""
    given = made(*shape, dtype)
    rows = cut(given.rows, slice(0, 1)) if decode else given.rows
    rows = rows._replace(beta=torch.zeros_like(rows.beta))  # whose sigmoid no two ways tell apart
    given, fused, parts = given._replace(rows=rows), by_triton(), by_triton()
    assert fused._f["mixer"].__module__.endswith("mixer_triton")
    parts._f["mixer"] = partial(composed, dict(parts._f))
    assert alike(ran(fused, given, decode), ran(parts, given, decode))


@needs_triton
@pytest.mark.parametrize("decode", [False, True])
def test_triton_heads_do_not_meet(decode: bool) -> None:
    """What the other heads hold, NaN too, reaches neither a head's result nor its state (R72)."""
    heads, dim, n = 3, 24, 1 if decode else 19
    given, mixed = made(heads, dim, n, 4, -5.0, torch.bfloat16), by_triton()
    out, state, *tails = ran(mixed, given, decode)
    own, one = slice(dim, 2 * dim), torch.arange(heads) == 1
    wide = one.repeat_interleave(dim)
    rows = MixerRows(
        [x.masked_fill(~wide, torch.nan) for x in given.rows.qkv],
        given.rows.raw.masked_fill(~wide, torch.nan),
        given.rows.beta.masked_fill(~one, torch.nan),
        given.rows.gate.masked_fill(~wide, torch.nan),
    )
    others = [x.masked_fill(~wide, torch.nan) for x in given.tails]
    filled = given.state.masked_fill(~one[:, None, None], torch.nan)
    again = ran(mixed, Given(rows, others, filled, given.weights), decode)
    assert same_bits(out[:, own], again[0][:, own])
    assert same_bits(state[1], again[1][1])
    assert alike([x[:, own] for x in tails], [x[:, own] for x in again[2:]])


@needs_triton
def test_triton_rows_behind_reach_nothing() -> None:
    """The first tokens of a chunk have the same bits whatever follows; memory behind is NaN."""
    given, mixed = made(2, 24, 64, 4, -5.0, torch.bfloat16), by_triton()
    whole = ran(mixed, given, False)[0]

    def part(x: torch.Tensor, n: int) -> torch.Tensor:
        """The first ``n`` rows, in memory that goes on with NaN."""
        return torch.cat([x[:n], torch.full_like(x, torch.nan)])[:n]

    for n in (1, 2, 3, 15, 16, 17, 48, 63):
        rows = MixerRows(
            [part(x, n) for x in given.rows.qkv], *(part(x, n) for x in given.rows[1:])
        )
        out, _, *tails = ran(mixed, given._replace(rows=rows), False)
        assert same_bits(out, whole[:n]), n
        for x, tail, moved in zip(rows.qkv, given.tails, tails, strict=True):
            assert same_bits(torch.cat([tail, x])[-3:], moved), n


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["default", pytest.param("triton", marks=needs_triton)])
def test_close_to_the_reference(
    backend: str,
    shape: tuple[int, int, int, int, float | None],
    dtype: torch.dtype,
    decode: bool,
) -> None:
    given = made(*shape, dtype)
    if decode:
        given = given._replace(rows=cut(given.rows, slice(0, 1)))
    want = ran(Kernels(SOLO, dict.fromkeys(MIXED, "reference")), given, decode)
    got = ran(Kernels(SOLO) if backend == "default" else by_triton(), given, decode)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        rounding = 2.0**-7 if b.dtype == torch.bfloat16 else 2e-5
        # values of bfloat16 that rounded the other way at a tie move the state by as much
        allowed = (2.0**-7 if dtype == torch.bfloat16 and i == 1 else rounding) * b.abs().max()
        assert (a.float() - b.float()).abs().max() <= allowed


@pytest.mark.parametrize(
    "backend", ["default", "reference", pytest.param("triton", marks=needs_triton)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_two_pieces(backend: str, dtype: torch.dtype) -> None:
    """Tails and state carry over: the convolution exactly, the recurrence within rounding."""
    wanted = None if backend == "default" else dict.fromkeys(MIXED, backend)
    kernels, given = Kernels(SOLO, wanted), made(*SHAPES[0], dtype)
    whole = ran(kernels, given, False)
    first = given._replace(rows=cut(given.rows, slice(0, 21)))
    begin, state, *tails = ran(kernels, first, False)
    rest = Given(cut(given.rows, slice(21, None)), tails, state, given.weights)
    end, *after = ran(kernels, rest, False)
    assert alike(whole[2:], after[1:])
    allowed = (2.0**-7 if dtype == torch.bfloat16 else 2e-5) * whole[0].abs().max()
    assert (torch.cat([begin, end]).float() - whole[0].float()).abs().max() <= allowed


@needs_triton
def test_triton_is_interpreted_for_one_thread_at_a_time() -> None:
    """The interpreter patches Triton's modules while it runs; warming up calls from several."""
    given, mixed = made(2, 7, 3, 4, -5.0, torch.float32), by_triton()
    got: list[torch.Tensor] = []

    def task(_: int) -> None:
        tails, state = [tail.clone() for tail in given.tails], given.state.clone()
        got.append(mixed.mixer(given.rows, tails, state, given.weights, False))

    workers = Workers(3)
    workers.map(task, 6)
    workers.close()
    assert len(got) == 6 and all(same_bits(x, got[0]) for x in got)
