"""The native kda_step, kda_chunk and mla_decode (native/seq_kda.h, seq_mla.h) on every instruction
set that runs here, odd sizes included, against their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch

from k3offload.kernels import native
from k3offload.kernels.kda_native import kda_chunk, kda_step
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.mla_decode_native import mla_decode
from k3offload.kernels.workers import Workers, single_threaded
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import randn

if not native.available():
    pytest.skip(native.why_not(), allow_module_level=True)

Tensors = tuple[torch.Tensor, ...]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAN = float("nan")
#: Those of tiles have no code of their own here.
ISAS = [isa for isa in native.isas() if isa not in native.TILES]
SOLO = Workers(1)
#: heads, dk, dv
SIZES = [(3, 40, 40), (2, 32, 20), (1, 7, 5), (2, 128, 128), (2, 48, 200)]
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slow": lambda u: -0.01 * u,
    "mixed": lambda u: -5 * u**4,
    "-5": lambda u: -5 + 0 * u,
    "-40": lambda u: -40 * u,
    "none": lambda u: 0 * u,
}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.using(request.param), single_threaded():
        yield request.param


def make(
    n: int, size: tuple[int, int, int], gate: str, seed: int = 0
) -> tuple[Tensors, torch.Tensor]:
    """q, k, v, g, beta of ``n`` tokens, keys close to one direction; and a state."""
    heads, dk, dv = size
    g = generator(seed)
    unit = torch.nn.functional.normalize
    q = unit(randn(g, n, heads, dk), dim=-1) * dk**-0.5
    k = unit(randn(g, 1, heads, dk) + 0.3 * randn(g, n, heads, dk), dim=-1)
    decay = GATES[gate](torch.rand(n, heads, dk, generator=g))
    beta = 1 - 0.3 * torch.rand(n, heads, generator=g)
    return (q, k, randn(g, n, heads, dv), decay, beta), randn(g, heads, dk, dv)


def exact(args: Tensors, state: torch.Tensor) -> Iterator[Tensors]:
    """The recurrence in float64: S <- diag(e^g) S; S <- S + b k (v - S^T k)^T; o = S^T q.  All
    outputs so far and the state after each token."""
    s, outputs = state.double(), []
    for q, k, v, g, beta in zip(*(a.double() for a in args), strict=True):
        s = torch.exp(g)[:, :, None] * s
        error = v - (s * k[:, :, None]).sum(1)
        s = s + (beta[:, None] * k)[:, :, None] * error[:, None]
        outputs.append((s * q[:, :, None]).sum(1))
        yield torch.stack(outputs), s


LENGTHS = (1, 15, 16, 17, 63, 64, 100)


@cache
def known(size: tuple[int, int, int], gate: str) -> dict[int, Tensors]:
    """What the recurrence gives for prompts of these lengths, each the beginning of one."""
    steps = enumerate(exact(*make(max(LENGTHS), size, gate)), 1)
    return {n: result for n, result in steps if n in LENGTHS}


def by_steps(args: Tensors, state: torch.Tensor, workers: Workers = SOLO) -> Tensors:
    own, rows = state.clone(), []
    with poisoned():
        for t in range(len(args[0])):
            q, k, v, g, beta = (a[t] for a in args)
            rows.append(kda_step(q, k, v, g, beta, own, workers))
        return torch.stack(rows), own


def by_chunks(args: Tensors, state: torch.Tensor, workers: Workers = SOLO) -> Tensors:
    own, rows = state.clone(), []
    with poisoned():
        for q, k, v, g, beta in zip(*(torch.split(a, 64) for a in args), strict=True):
            rows.append(kda_chunk(q, k, v, g, beta, own, workers))
        return torch.cat(rows), own


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_against_exact(
    walk: Callable[..., Tensors], size: tuple[int, int, int], gate: str, most: int = 64
) -> None:
    args, state = make(max(LENGTHS), size, gate)
    for n, right in known(size, gate).items():
        if n <= most:
            prompt = tuple(a[:n].clone() for a in args)
            for got, want in zip(walk(prompt, state), right, strict=True):
                assert torch.isfinite(got).all()
                assert error(got, want) <= 1e-6
            assert all(same_bits(a, b[:n]) for a, b in zip(prompt, args, strict=True))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_step_and_chunk_equal_the_recurrence(
    size: tuple[int, int, int], gate: str, isa: str
) -> None:
    check_against_exact(by_steps, size, gate, 17)
    check_against_exact(by_chunks, size, gate, max(LENGTHS))


@pytest.mark.parametrize("gate", ["slow", "mixed", "-5", "-40"])
def test_the_chunk_is_as_accurate_as_the_step(gate: str, isa: str) -> None:
    size = SIZES[3]
    args, state = make(max(LENGTHS), size, gate)
    own, want = tuple(a[:64] for a in args), known(size, gate)[64]
    for chunk, step, right in zip(by_chunks(own, state), by_steps(own, state), want, strict=True):
        assert error(chunk, right) <= 2 * error(step, right) + 5e-8


def test_a_chunk_survives_decay_that_no_float_holds(isa: str) -> None:
    args, state = make(64, (2, 128, 128), "-5")
    out, after = by_chunks(args, state * 1e10)
    assert torch.isfinite(out).all()
    assert after.abs().max() < 10, "nothing of the old state is left"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_of_a_head_and_of_a_prompt(size: tuple[int, int, int], isa: str) -> None:
    """A head's bits do not depend on other heads; a token's not on later tokens, even if these are
    NaN; nothing depends on threads or on where the numbers lie."""
    heads = 9
    args, state = make(64, (heads, *size[1:]), "mixed")
    for walk, n in ((by_chunks, 64), (by_steps, 3)):
        own = tuple(a[:n] for a in args)
        out, after = walk(own, state)
        alone = walk(tuple(a[:, 4:5].contiguous() for a in own), state[4:5])
        assert same_bits(out[:, 4:5], alone[0])
        assert same_bits(after[4:5], alone[1])
        company = [torch.full_like(a, NAN) for a in (*own, state)]
        for a, b in zip(company[:-1], own, strict=True):
            a[:, 4] = b[:, 4]
        company[-1][4] = state[4]
        again = walk(tuple(company[:-1]), company[-1])
        assert same_bits(out[:, 4], again[0][:, 4])
        assert same_bits(after[4], again[1][4])
        moved = [torch.cat((a.flatten()[:1], a.flatten()))[1:].view(a.shape) for a in own]
        for threads in (2, 3, 4):
            workers = Workers(threads)
            for a, b in zip((out, after), walk(tuple(moved), state, workers), strict=True):
                assert same_bits(a, b)
            workers.close()
    whole = by_chunks(args, state)[0]
    for n in (1, 16, 37):
        cut = by_chunks(tuple(a[:n] for a in args), state)[0]
        later = tuple(torch.cat((a[:n], torch.full_like(a[n:], NAN))) for a in args)
        assert same_bits(whole[:n], cut)
        assert same_bits(whole[:n], by_chunks(later, state)[0][:n])


def test_planted_wrong_chunks_are_refused() -> None:
    def late_decay(args: Tensors, state: torch.Tensor) -> Tensors:
        q, k, v, g, beta = args
        return by_chunks((q, k, v, torch.cat((torch.zeros_like(g[:1]), g[:-1])), beta), state)

    def stale_state(args: Tensors, state: torch.Tensor) -> Tensors:
        return by_chunks(args, state)[0], by_chunks(tuple(a[:-1] for a in args), state)[1]

    for wrong in (late_decay, stale_state):
        with pytest.raises(AssertionError):
            check_against_exact(wrong, SIZES[0], "mixed")


# ---- mla_decode ----

BLOCK = 256
#: heads, nope, rope, v, kv_lora
SHAPES = [(3, 24, 8, 56, 40), (6, 32, 16, 32, 64), (2, 128, 64, 128, 512), (9, 5, 3, 7, 17)]
Shape = tuple[int, int, int, int, int]


def attention(shape: Shape, length: int, dtype: torch.dtype, up_dtype: torch.dtype) -> Tensors:
    """q, latents [length, kv_lora + rope], up; scores of some size."""
    heads, nope, rope, v, lora = shape
    g = generator(length)
    latents = randn(g, length, lora + rope, dtype=dtype)
    up = (randn(g, heads * (nope + v), lora) / lora**0.5).to(up_dtype)
    return (randn(g, heads, nope + rope) * 2).to(dtype), latents, up


def blocks_of(latents: torch.Tensor, offset: int = 0) -> list[torch.Tensor]:
    """Blocks of 256 rows, ``offset`` elements from a boundary; NaN beyond the last row."""
    blocks = []
    for part in torch.split(latents, BLOCK):
        memory = torch.full((offset + BLOCK * part.shape[1],), NAN, dtype=part.dtype)
        block = memory[offset:].view(BLOCK, -1)
        block[: len(part)] = part
        blocks.append(block)
    return blocks


def decode(
    shape: Shape,
    args: Tensors,
    workers: Workers = SOLO,
    offset: int = 0,
    heads: slice = slice(None),
) -> Tensors:
    _, nope, rope, v, _ = shape
    q, latents, up = args
    each = up.view(-1, nope + v, up.shape[1])[heads].flatten(0, 1)
    scale = (nope + rope) ** -0.5
    blocks, weight = blocks_of(latents, offset), DenseWeight(each)
    with poisoned():
        return mla_decode(q[heads], [blocks], len(latents), weight, nope, v, scale, workers)


def plain(shape: Shape, args: Tensors) -> Tensors:
    """softmax(q [W_k c | e]) W_v c with keys and values written out; the scores' log-sum-exp."""
    heads, nope, rope, v, lora = shape
    q, latents, up = (a.double() for a in args)
    up = args[2].to(args[0].dtype).double().view(heads, nope + v, lora)
    c, extra = latents[:, :lora], latents[:, lora:]
    keys = torch.cat((c @ up[:, :nope].transpose(1, 2), extra.expand(heads, -1, -1)), -1)
    scores = (keys @ q[:, :, None])[..., 0] * (nope + rope) ** -0.5
    values = c @ up[:, nope:].transpose(1, 2)
    return (torch.softmax(scores, -1)[:, None] @ values)[:, 0], torch.logsumexp(scores, -1)


@pytest.mark.parametrize(
    ("dtype", "up_dtype"),
    [(F32, F32), (F32, BF16), (BF16, BF16), (BF16, F32), (BF16, F16)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mla_decode(shape: Shape, dtype: torch.dtype, up_dtype: torch.dtype, isa: str) -> None:
    for length in (1, 2, 255, 256, 257, 700):
        args = attention(shape, length, dtype, up_dtype)
        for got, want in zip(decode(shape, args), plain(shape, args), strict=True):
            assert got.dtype == F32
            assert ((got.double() - want).abs() <= 3e-6 * want.abs().max()).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_mla_decode_bits_of_pieces(shape: Shape, dtype: torch.dtype, isa: str) -> None:
    """Query, sums and shares wait between pieces without loss, on any number of threads."""
    _, nope, rope, v, _ = shape
    q, latents, up = attention(shape, 700, dtype, BF16)
    base, blocks = decode(shape, (q, latents, up)), blocks_of(latents)
    for threads in (1, 3):
        workers = Workers(threads)
        for pieces in ([blocks[:1], blocks[1:]], [blocks[:2], blocks[2:]], [[b] for b in blocks]):
            with poisoned():
                got = mla_decode(
                    q, pieces, 700, DenseWeight(up), nope, v, (nope + rope) ** -0.5, workers
                )
            assert all(same_bits(a, b) for a, b in zip(base, got, strict=True))
        workers.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_mla_decode_bits_of_a_head(shape: Shape, dtype: torch.dtype, isa: str) -> None:
    """Alone or in company, on any number of threads, wherever the latents lie; and a NaN in one
    head's query reaches no other head."""
    args = attention(shape, 600, dtype, BF16)
    base = decode(shape, args)
    for threads in (1, 2, 3, 4):
        workers = Workers(threads)
        for a, b in zip(base, decode(shape, args, workers, offset=threads), strict=True):
            assert same_bits(a, b)
        workers.close()
    for head in range(shape[0]):
        own = slice(head, head + 1)
        for a, b in zip(base, decode(shape, args, heads=own), strict=True):
            assert same_bits(a[own], b)
    q = args[0].clone()
    q[1] = NAN
    out, sums = decode(shape, (q, *args[1:]))
    assert out[1].isnan().all()
    assert sums[1].isnan()
    others = torch.arange(shape[0]) != 1
    assert same_bits(out[others], base[0][others])


def test_mla_decode_merges_by_the_sums(isa: str) -> None:
    """Two halves and their log-sum-exp give the whole: what spilled latents will need."""
    shape = SHAPES[1]
    q, latents, up = attention(shape, 700, F32, F32)
    whole, total = decode(shape, (q, latents, up))
    (a, la), (b, lb) = (decode(shape, (q, part, up)) for part in (latents[:300], latents[300:]))
    merged = a * torch.exp(la - total)[:, None] + b * torch.exp(lb - total)[:, None]
    torch.testing.assert_close(merged, whole, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(torch.logaddexp(la, lb), total)


def test_mla_decode_survives_large_scores(isa: str) -> None:
    shape = SHAPES[1]
    q, latents, up = attention(shape, 600, F32, F32)
    got, want = decode(shape, (q * 1e4, latents, up)), plain(shape, (q * 1e4, latents, up))
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).abs() <= 1e-3 * b.abs().max()).all()


def test_instruction_sets_with_fused_arithmetic_agree() -> None:
    """avx2 and all sets above it have the same bits; the portable code of x86 rounds twice."""
    same = [isa for isa in native.isas() if isa in ("avx2", "avx512", *native.TILES)]
    if len(same) < 2:
        pytest.skip("this machine runs fewer than two of them")
    results: list[Sequence[torch.Tensor]] = []
    args, state = make(64, SIZES[3], "mixed")
    shape = SHAPES[0]
    for isa in same:
        with native.using(isa):
            latent = decode(shape, attention(shape, 600, BF16, BF16))
            results.append([*by_chunks(args, state), *by_steps(args, state), *latent])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_log_of_the_sum_of_equal_scores() -> None:
    """1000 keys of zero: the log-sum-exp is log 1000."""
    shape = SHAPES[1]
    q, latents, up = attention(shape, 1000, F32, F32)
    _, sums = decode(shape, (q, latents * 0, up))
    assert (sums.double() - math.log(1000)).abs().max() <= 5e-7
