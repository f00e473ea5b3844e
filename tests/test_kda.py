"""kda_step, kda_chunk, short_conv: against the recurrence in float64, and against one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from k3offload.config import KDA_CHUNK
from k3offload.kernels.kda_reference import kda_chunk, kda_step
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import backends, randn

Args = tuple[torch.Tensor, ...]  # q, k, g [h, T, dk], v [h, T, dv], beta [h, T] as q, k, v, g, beta
Chunk = Callable[..., torch.Tensor]

MODULES = backends("kda")
CONVS = backends("short_conv")
SOLO = Workers(1)
H, DK, DV = 3, 32, 20
GATES = {
    "-5": lambda g, t: torch.full((H, t, DK), -5.0),
    "slow": lambda g, t: -torch.rand(H, t, DK, generator=g) * 0.01,
    "mixed": lambda g, t: -5 * torch.rand(H, t, DK, generator=g).pow(4),
    "none": lambda g, t: torch.zeros(H, t, DK),
}


def make(seed: int, tokens: int, gate: str) -> tuple[Args, torch.Tensor]:
    """Inputs with correlated keys (one direction plus noise), beta near 1, and a state."""
    g = generator(seed)
    keys = randn(g, H, 1, DK) + 0.3 * randn(g, H, tokens, DK)
    k = keys / keys.norm(dim=-1, keepdim=True)
    q = randn(g, H, tokens, DK)
    q = q / q.norm(dim=-1, keepdim=True) * DK**-0.5
    beta = 1 - 0.3 * torch.rand(H, tokens, generator=g)
    args = (q, k, randn(g, H, tokens, DV), GATES[gate](g, tokens), beta)
    return args, randn(g, H, DK, DV)


def exact(args: Args, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in float64: outputs [h, T, dv] and the state after each token [T, h, ...]."""
    q, k, v, g, beta = (a.double() for a in args)
    s, outputs, states = state.double(), [], []
    for t in range(q.shape[1]):
        s = torch.exp(g[:, t])[:, :, None] * s
        error = v[:, t] - torch.einsum("hkv,hk->hv", s, k[:, t])
        s = s + beta[:, t, None, None] * torch.einsum("hk,hv->hkv", k[:, t], error)
        outputs.append(torch.einsum("hkv,hk->hv", s, q[:, t]))
        states.append(s)
    return torch.stack(outputs, 1), torch.stack(states)


def by_steps(step: Chunk, args: Args, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state, outputs = state.clone(), []
    with poisoned():
        for t in range(args[0].shape[1]):
            q, k, v, g, beta = (a[:, t] for a in args)
            outputs.append(step(q, k, v, g, beta, state, SOLO).clone())
        return torch.stack(outputs, 1), state


def by_chunks(chunk: Chunk, args: Args, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state, outputs, tokens = state.clone(), [], args[0].shape[1]
    with poisoned():
        for begin in range(0, tokens, KDA_CHUNK):
            own = [a[:, begin : begin + KDA_CHUNK].transpose(0, 1).contiguous() for a in args]
            outputs.append(chunk(*own, state, SOLO).transpose(0, 1).clone())
        return torch.cat(outputs, 1), state


def check_chunk(chunk: Chunk, lengths: Sequence[int], gate: str) -> None:
    """Prompts of these lengths, each the beginning of one."""
    args, state = make(8, max(lengths), gate)
    outputs, states = exact(args, state)
    for tokens in lengths:
        prompt = tuple(a[:, :tokens] for a in args)
        got = by_chunks(chunk, prompt, state)
        for a, b in zip(got, (outputs[:, :tokens], states[tokens - 1]), strict=True):
            assert torch.isfinite(a).all()
            assert (a.double() - b).abs().max() <= 2e-5 * b.abs().max()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("backend", MODULES)
def test_chunk_equals_the_recurrence(backend: str, gate: str) -> None:
    """Prompts of every length from 1 to 70, and some of several chunks; the interpreter of Triton
    is slow and walks the edges of sub-blocks and chunks alone."""
    short = (1, 2, 15, 16, 17, 33, 63, 64, 65) if backend == "triton" else range(1, 71)
    check_chunk(MODULES[backend].kda_chunk, (*short, 128, 200), gate)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("backend", MODULES)
def test_step_equals_the_recurrence(backend: str, gate: str) -> None:
    args, state = make(1, 70, gate)
    outputs, states = exact(args, state)
    got = by_steps(MODULES[backend].kda_step, args, state)
    for a, b in zip(got, (outputs, states[-1]), strict=True):
        assert (a.double() - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("backend", MODULES)
def test_chunk_equals_steps(backend: str, gate: str) -> None:
    module = MODULES[backend]
    args, state = make(2, 64, gate)
    chunk, steps = by_chunks(module.kda_chunk, args, state), by_steps(module.kda_step, args, state)
    for a, b in zip(chunk, steps, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


@pytest.mark.parametrize("backend", MODULES)
def test_chunk_and_step_equal_the_reference(backend: str) -> None:
    args, state = make(3, 100, "mixed")
    for walk, name in ((by_chunks, "kda_chunk"), (by_steps, "kda_step")):
        got = walk(getattr(MODULES[backend], name), args, state)
        want = walk(getattr(MODULES["reference"], name), args, state)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", MODULES)
def test_rows_behind_the_prompt_reach_nothing(backend: str) -> None:
    """The first tokens of a chunk have the same bits whatever follows them, and none is needed."""
    chunk = MODULES[backend].kda_chunk
    args, state = make(4, KDA_CHUNK, "mixed")
    whole, _ = by_chunks(chunk, args, state)
    for count in (1, 15, 16, 17, 63):
        part, _ = by_chunks(chunk, tuple(a[:, :count] for a in args), state)
        assert same_bits(part, whole[:, :count])


@pytest.mark.parametrize("name", ["kda_chunk", "kda_step"])
@pytest.mark.parametrize("backend", MODULES)
def test_threads_change_no_bit(backend: str, name: str) -> None:
    g = generator(9)
    heads = 5 if backend == "triton" else 35  # its interpreter is slow, and knows no threads
    shape = (heads,) if name == "kda_step" else (50, heads)
    q, k, v = (randn(g, *shape, 32) for _ in range(3))
    decay, beta, state = -randn(g, *shape, 32).abs(), randn(g, *shape), randn(g, heads, 32, 32)
    results = []
    for threads in (1, 2, 3, 4):
        workers, own = Workers(threads), state.clone()
        with poisoned():
            out = getattr(MODULES[backend], name)(q, k / 6, v, decay, beta, own, workers)
        results.append((out, own))
        workers.close()
    for again in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], again, strict=True))


@pytest.mark.parametrize("backend", MODULES)
def test_chunk_exponents_are_safe(backend: str) -> None:
    """g = -5 everywhere: the decay of the chunk is e^-320, whose inverse no float32 holds."""
    args, state = make(5, KDA_CHUNK, "-5")
    out, after = by_chunks(MODULES[backend].kda_chunk, args, state * 1e10)
    assert torch.isfinite(out).all()
    assert torch.isfinite(after).all()
    assert after.abs().max() < 10, "nothing of the old state is left"


@pytest.mark.parametrize("backend", MODULES)
@pytest.mark.parametrize("name", ["kda_chunk", "kda_step"])
def test_heads_do_not_meet(backend: str, name: str) -> None:
    """A head's bits do not depend on what the heads of its group hold (R72)."""
    f = getattr(MODULES[backend], name)
    walk = by_chunks if name == "kda_chunk" else by_steps
    args, state = make(6, 5 if name == "kda_step" else KDA_CHUNK, "mixed")
    out, after = walk(f, args, state)
    for fill in (0.0, 1e20, float("nan")):
        company, other_state = tuple(a.clone() for a in args), state.clone()
        for tensor in (*company, other_state):
            tensor[torch.arange(H) != 1] = fill
        again, after_again = walk(f, company, other_state)
        assert same_bits(out[1], again[1])
        assert same_bits(after[1], after_again[1])


def no_last_row(*args: Any) -> torch.Tensor:
    out: torch.Tensor = MODULES["reference"].kda_chunk(*args)
    out[-1] = out[-2]
    return out


def unsafe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    workers: Workers,
) -> torch.Tensor:
    """Divides by the decay of the whole chunk."""
    q, k, v, g = (x.transpose(0, 1) for x in (q, k, v, g))
    beta = beta.T
    total = torch.cumsum(g, 1)
    pairs = torch.bmm(k * torch.exp(total), (k * torch.exp(-total)).transpose(1, 2)).tril(-1)
    right = v - torch.bmm(k * torch.exp(total), state)
    u = torch.linalg.solve_triangular(
        pairs * beta[:, None], right, upper=False, unitriangular=True
    ) * beta[:, :, None]  # fmt: skip
    mixed = torch.bmm(q * torch.exp(total), (k * torch.exp(-total)).transpose(1, 2)).tril()
    out = torch.bmm(q * torch.exp(total), state) + torch.bmm(mixed, u)
    last = total[:, -1:]
    state.mul_(torch.exp(last).transpose(1, 2))
    state.add_(torch.bmm((k * torch.exp(last - total)).transpose(1, 2), u))
    return out.transpose(0, 1)


def decays_after(*args: Any) -> torch.Tensor:
    """Applies each token's decay after its update instead of before it."""
    q, k, v, g, *rest = args
    late = torch.cat((torch.zeros_like(g[:1]), g[:-1]))
    return MODULES["reference"].kda_chunk(q, k, v, late, *rest)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("wrong", "tokens", "gate"),
    [(no_last_row, 64, "mixed"), (unsafe, 64, "-5"), (decays_after, 40, "mixed")],
)
def test_planted_wrong_chunks_are_refused(wrong: Chunk, tokens: int, gate: str) -> None:
    with pytest.raises(AssertionError):
        check_chunk(wrong, (tokens,), gate)


def test_the_planted_unsafe_chunk_is_right_where_decay_is_slow() -> None:
    check_chunk(unsafe, (64,), "slow")


# ---- short_conv ----

TAPS, C = 4, 48
Conv = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def conv_exact(x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y_t = SiLU(sum_j w_j x_{t-3+j}), the last tap on the current token."""
    window = torch.cat((tail, x)).double()
    taps = weight.shape[1]
    rows = [sum(weight[:, j].double() * window[t + j] for j in range(taps)) for t in range(len(x))]
    y = torch.stack([torch.as_tensor(row) for row in rows])
    return y * torch.sigmoid(y)


def conv_inputs(dtype: torch.dtype, tokens: int = 64) -> Args:
    g = generator(7)
    return randn(g, tokens, C, dtype=dtype), randn(g, TAPS - 1, C, dtype=dtype), randn(g, C, TAPS)


def check_conv(conv: Conv, dtype: torch.dtype) -> None:
    whole, tail, weight = conv_inputs(dtype)
    with poisoned():
        for count in (1, 2, 3, 4, 63, 64):
            x = whole[:count]
            y, moved = conv(x, tail, weight)
            want = conv_exact(x, tail, weight)
            rounding = 2.0**-8 if dtype == torch.bfloat16 else 2e-6
            assert y.dtype == torch.float32
            assert (y.double() - want).abs().max() <= rounding * want.abs().max()
            assert same_bits(y, y.to(dtype).float()), "stored in the model's precision"
            assert same_bits(moved, torch.cat((tail, x))[count:])
            assert moved.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", CONVS)
def test_short_conv(backend: str, dtype: torch.dtype) -> None:
    check_conv(CONVS[backend].short_conv, dtype)


@pytest.mark.parametrize("backend", CONVS)
def test_short_conv_in_pieces(backend: str) -> None:
    """Two pieces that hand on the tail give the bits of one."""
    conv = CONVS[backend].short_conv
    x, tail, weight = conv_inputs(torch.bfloat16, 128)
    with poisoned():
        whole, end = conv(x, tail, weight)
        for cut in (1, 2, 3, 30, 64, 127):
            head, between = conv(x[:cut], tail, weight)
            rest, last = conv(x[cut:], between, weight)
            assert same_bits(whole, torch.cat((head, rest)))
            assert same_bits(end, last)


def test_planted_wrong_convolutions_are_refused() -> None:
    right = CONVS["reference"].short_conv

    def reversed_taps(
        x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return right(x, tail, weight.flip(1))  # type: ignore[no-any-return]

    def tail_too_early(
        x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return right(x, tail, weight)[0], torch.cat((tail, x))[-TAPS:-1].clone()

    for wrong in (reversed_taps, tail_too_early):
        with pytest.raises(AssertionError):
            check_conv(wrong, torch.float32)
    check_conv(right, torch.float32)


@pytest.mark.parametrize("floor", [-0.05, -1.0, -4.9, -40.0])
def test_the_chunk_is_as_accurate_as_the_step(floor: float) -> None:
    """Running sums of g reach -320 in a chunk: in float32 their differences lose ten times more."""
    generator = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = unit(draw(8, 64, 32), dim=-1) / 32**0.5, unit(draw(8, 64, 32) + 0.5, dim=-1)
    v, state = draw(8, 64, 32), draw(8, 32, 32)
    g, beta = floor * draw(8, 64, 32).sigmoid(), draw(8, 64).sigmoid()

    def stepped(kind: torch.dtype) -> torch.Tensor:
        own, rows = state.to(kind, copy=True), []
        for t in range(64):
            qt, kt, vt, gt, bt = (x[:, t].to(kind) for x in (q, k, v, g, beta))
            rows.append(kda_step(qt, kt, vt, gt, bt, own, SOLO))
        return torch.stack(rows, 1)

    exact = stepped(torch.float64)

    def error(out: torch.Tensor) -> float:
        return float(((out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())

    allowed = 2 * error(stepped(torch.float32))
    q, k, v, g, beta = (x.transpose(0, 1).contiguous() for x in (q, k, v, g, beta))
    chunk = kda_chunk(q, k, v, g, beta, state.clone(), SOLO).transpose(0, 1)
    assert error(chunk) <= allowed
