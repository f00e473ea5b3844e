"""attend and the latents it reads: blocks merge to one pass, stale bytes reach nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from k3offload import registry
from k3offload.config import LATENT_BLOCK, ROW_TILE
from k3offload.errors import DoesNotFit
from k3offload.kernels.attend_reference import Partial
from k3offload.latents import Home, Latents, Ledger
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import randn

Attend = Callable[..., None]
MODULES = registry.implementations("kernels", "attend")
BACKENDS = {name: module.attend for name, module in MODULES.items()}
H, DK, DV = 3, 40, 24
SCALE = DK**-0.5


def make(keys: int, rows: int = ROW_TILE, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q [h, rows, dk], k [h, keys, dk], v [h, keys, dv], allowed [rows, keys]: row r sees its
    first keys, row 0 none; peaked scores, so that the running maximum moves."""
    g = generator(seed)
    q, k, v = randn(g, H, rows, DK) * 3, randn(g, H, keys, DK), randn(g, H, keys, DV)
    seen = torch.randint(1, keys + 1, (rows,), generator=g)
    seen[0], seen[-1] = 0, keys
    return q, k, v, torch.arange(keys)[None] < seen[:, None]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T * scale) v over the allowed keys in float64; no key gives zero."""
    scores = (q.double() @ k.double().transpose(1, 2)) * SCALE
    shares = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1).nan_to_num(0.0)
    return shares @ v.double()


def in_blocks(attend: Attend, inputs: tuple[torch.Tensor, ...], block: int) -> torch.Tensor:
    q, k, v, allowed = inputs
    with poisoned():
        partial = Partial(q.shape[0], q.shape[1], v.shape[2])
        for begin in range(0, k.shape[1], block):
            part = slice(begin, begin + block)
            attend(q, k[:, part], v[:, part], allowed[:, part], SCALE, partial)
        return partial.result().clone()


def check_values(attend: Attend) -> None:
    for keys, block in ((1, 1), (256, 256), (200, 64), (700, 256), (513, 256), (64, 1)):
        inputs = make(keys)
        got, want = in_blocks(attend, inputs, block), exact(*inputs)
        assert torch.isfinite(got).all()
        assert (got.double() - want).abs().max() <= 3e-6 * want.abs().max()
        assert (got[:, 0] == 0).all(), "a row without keys is zero"


def check_rows_alone(attend: Attend) -> None:
    """A row's bits depend neither on its place nor on its companions (R72)."""
    q, k, v, allowed = make(600)
    base = in_blocks(attend, (q, k, v, allowed), LATENT_BLOCK)
    order = torch.randperm(ROW_TILE, generator=generator(1))
    moved = in_blocks(attend, (q[:, order].contiguous(), k, v, allowed[order]), LATENT_BLOCK)
    assert same_bits(base[:, order], moved)
    for fill in (0.0, 1e30, float("inf"), float("nan")):
        for row in (1, 33, ROW_TILE - 1):
            others = torch.arange(ROW_TILE) != row
            company, seen = q.clone(), allowed.clone()
            company[:, others], seen[others] = fill, True
            again = in_blocks(attend, (company, k, v, seen), LATENT_BLOCK)
            assert same_bits(base[:, row], again[:, row])


def check_hidden_keys(attend: Attend) -> None:
    """Keys a row may not see have no influence on any bit, as long as they are finite."""
    q, k, v, allowed = make(600)
    base = in_blocks(attend, (q, k, v, allowed), LATENT_BLOCK)
    row = 7
    hidden = ~allowed[row]
    assert hidden.any()
    for fill in (0.0, 1e6, -1e6):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, hidden], other_v[:, hidden] = fill, fill
        again = in_blocks(attend, (q, other_k, other_v, allowed), LATENT_BLOCK)
        assert same_bits(base[:, row], again[:, row])


def check_hidden_blocks(attend: Attend) -> None:
    """A whole block of which a row sees nothing changes no bit of it."""
    q, k, v, allowed = make(LATENT_BLOCK)
    base = in_blocks(attend, (q, k, v, allowed), LATENT_BLOCK)
    g = generator(2)
    more_k, more_v = randn(g, H, 300, DK) * 9, randn(g, H, 300, DV) * 9
    longer = (
        q,
        torch.cat((k, more_k), 1),
        torch.cat((v, more_v), 1),
        torch.cat((allowed, torch.zeros(ROW_TILE, 300, dtype=torch.bool)), 1),
    )
    assert same_bits(base, in_blocks(attend, longer, LATENT_BLOCK))


CHECKS = [check_values, check_rows_alone, check_hidden_keys, check_hidden_blocks]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attend(backend: str, check: Callable[[Attend], None]) -> None:
    check(BACKENDS[backend])


@pytest.mark.parametrize("backend", BACKENDS)
def test_r75_small_blocks_equal_one_pass(backend: str) -> None:
    """200 keys in blocks of 64 need four merges."""
    inputs = make(200)
    one, four = (in_blocks(BACKENDS[backend], inputs, block) for block in (200, 64))
    assert (one - four).abs().max() <= 2e-6 * one.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_attend_survives_large_scores(backend: str) -> None:
    """Scores of thousands: the running maximum keeps exponents at or under zero."""
    q, k, v, allowed = make(300)
    got = in_blocks(BACKENDS[backend], (q * 1000, k, v, allowed), 64)
    assert torch.isfinite(got).all()
    want = exact(q * 1000, k, v, allowed)
    assert (got.double() - want).abs().max() <= 1e-3 * want.abs().max()


# ---- planted wrong kernels ----


def ignores_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    partial: Partial,
) -> None:
    BACKENDS["reference"](q, k, v, torch.ones_like(allowed), scale, partial)


def forgets_to_rescale(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    partial: Partial,
) -> None:
    before = partial.sum.clone()
    BACKENDS["reference"](q, k, v, allowed, scale, partial)
    if partial.total.any() and before.any():
        partial.sum += before * 0.01


def shared_maximum(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    partial: Partial,
) -> None:
    """One maximum for all rows: right in value until rows differ much, and rows meet."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale).masked_fill_(~allowed, float("-inf"))
    top = torch.maximum(partial.top, scores.amax((1, 2), keepdim=True))
    base = torch.where(torch.isinf(top), 0.0, top)
    shares, keep = torch.exp(scores - base), torch.exp(partial.top - base)
    partial.total.mul_(keep).add_(shares.sum(-1, keepdim=True))
    partial.sum.mul_(keep).add_(torch.bmm(shares, v))
    partial.top = top


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (ignores_mask, check_values),
        (ignores_mask, check_hidden_keys),
        (forgets_to_rescale, check_values),
        (shared_maximum, check_rows_alone),
    ],
)
def test_planted_wrong_attention_is_refused(wrong: Attend, check: Callable[[Attend], None]) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


# ---- latents (R75) ----

WIDTH, CPU = 6, torch.device("cpu")


def latents(blocks: int = 8) -> Latents:
    return Latents(Home(CPU, Ledger(blocks * LATENT_BLOCK * WIDTH * 4)), WIDTH, torch.float32)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 600])
def test_r75_stale_rows_never_show(length: int) -> None:
    """Fresh blocks are NaN, and nothing but tokens is ever written to them."""
    rows = randn(generator(length), length, WIDTH)
    with poisoned():
        some = latents()
        for begin in range(0, length, 100):
            some.append(rows[begin : begin + 100])
        assert some.blocks == -(-length // LATENT_BLOCK)
        got = torch.cat([some.rows(b) for b in range(some.blocks)] or [rows])
    assert same_bits(got[:length], rows)
    assert got[length:].isnan().all()


def test_r75_copies_do_not_meet() -> None:
    """A copy shares full blocks, and no token added to either reaches the other."""
    g = generator(0)
    rows, ours, theirs = randn(g, 300, WIDTH), randn(g, 300, WIDTH), randn(g, 300, WIDTH)
    with poisoned():
        some = latents()
        some.append(rows)
        other = some.copy(some._home, some.length)
        some.append(ours)
        other.append(theirs)
        for made, tail in ((some, ours), (other, theirs)):
            got = torch.cat([made.rows(b) for b in range(made.blocks)])
            assert same_bits(got[:600], torch.cat((rows, tail)))
            assert got[600:].isnan().all()
        assert some._blocks[0] is other._blocks[0]


def test_latents_are_charged_to_the_ledger() -> None:
    block = LATENT_BLOCK * WIDTH * 4
    ledger = Ledger(2 * block)
    some = Latents(Home(CPU, ledger), WIDTH, torch.float32)
    some.append(torch.zeros(LATENT_BLOCK + 1, WIDTH))
    assert ledger.used == 2 * block
    with pytest.raises(DoesNotFit) as caught:
        some.append(torch.zeros(LATENT_BLOCK, WIDTH))
    assert caught.value.missing == block
    del some, caught
    gc.collect()
    assert ledger.used == 0
