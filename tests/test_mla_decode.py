"""mla_decode: against softmax attention in float64; rows that hold no token reach nothing (R75)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from k3offload.config import LATENT_BLOCK
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import backends, randn

Decode = Callable[..., tuple[torch.Tensor, torch.Tensor]]

MODULES = backends("mla_decode")
SOLO = Workers(1)
H, NOPE, ROPE, V, RANK = 11, 24, 8, 40, 72
SCALE = (NOPE + ROPE) ** -0.5


def make(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [h, nope + rope], latents [length, rank + rope], up-projection [h * (nope + v), rank]."""
    g = generator(length)
    q = randn(g, H, NOPE + ROPE, dtype=dtype)
    up = randn(g, H * (NOPE + V), RANK, dtype=torch.bfloat16) / 8
    return q, randn(g, length, RANK + ROPE, dtype=dtype), up


def in_blocks(latents: torch.Tensor, fill: float) -> list[torch.Tensor]:
    """Blocks of 256 rows, the rest of the last one filled with ``fill``."""
    blocks = []
    for part in torch.split(latents, LATENT_BLOCK):
        block = torch.full((LATENT_BLOCK, latents.shape[1]), fill, dtype=latents.dtype)
        block[: len(part)] = part
        blocks.append(block)
    return blocks


def cut(blocks: list[torch.Tensor], at: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """``blocks`` in pieces that begin at 0 and at each of ``at``.  All pieces lie in the same
    memory, one after the other, and NaN lies there in between."""
    memory = torch.empty_like(torch.stack(blocks)) if at else None
    for begin, end in zip((0, *at), (*at, len(blocks)), strict=True):
        if memory is None:
            yield blocks
            continue
        memory.view(torch.uint8).fill_(0xFF)  # NaN, whatever type it has
        for place, block in zip(memory, blocks[begin:end], strict=False):
            place.copy_(block)
        yield list(memory[: end - begin])


def exact(
    q: torch.Tensor, latents: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    c, extra = latents[:, :RANK].double(), latents[:, RANK:].double()
    kv = torch.einsum("hwr,tr->htw", up.double().view(H, NOPE + V, RANK), c)
    k = torch.cat((kv[..., :NOPE], extra.expand(H, -1, -1)), -1)
    scores = torch.einsum("hd,htd->ht", q.double(), k) * SCALE
    out = torch.einsum("ht,htv->hv", torch.softmax(scores, -1), kv[..., NOPE:])
    return out, torch.logsumexp(scores, -1)


def run(
    decode: Decode,
    inputs: tuple[torch.Tensor, ...],
    fill: float,
    workers: Workers = SOLO,
    at: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    q, latents, up = inputs
    blocks = in_blocks(latents, fill)
    with poisoned():
        return decode(q, cut(blocks, at), len(latents), DenseWeight(up), NOPE, V, SCALE, workers)


def check(decode: Decode, length: int, dtype: torch.dtype) -> None:
    inputs = make(length, dtype)
    for got, want in zip(run(decode, inputs, float("nan")), exact(*inputs), strict=True):
        assert got.dtype == torch.float32
        assert (got.double() - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 100, 255, 256, 257, 700])
@pytest.mark.parametrize("backend", MODULES)
def test_mla_decode_r75(backend: str, length: int, dtype: torch.dtype) -> None:
    """NaN lies in the rows that hold no token."""
    check(MODULES[backend].mla_decode, length, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", MODULES)
def test_no_cut_into_pieces_changes_a_bit(backend: str, dtype: torch.dtype) -> None:
    """Every cut of 5 blocks, the last of them half full; pieces take turns in one memory."""
    decode, inputs = MODULES[backend].mla_decode, make(4 * LATENT_BLOCK + 77, dtype)
    base, workers = run(decode, inputs, float("nan")), Workers(2)
    for count in range(1, 5):
        for at in itertools.combinations(range(1, 5), count):
            for a, b in zip(base, run(decode, inputs, float("nan"), workers, at), strict=True):
                assert same_bits(a, b), at
    workers.close()


@pytest.mark.parametrize("backend", MODULES)
def test_pieces_that_hold_too_little_are_refused(backend: str) -> None:
    q, latents, up = make(300, torch.float32)
    blocks = in_blocks(latents, 0.0)
    for pieces in ([], [blocks[:1]]):
        with pytest.raises(AssertionError), torch.inference_mode():
            MODULES[backend].mla_decode(q, pieces, 300, DenseWeight(up), NOPE, V, SCALE, SOLO)


@pytest.mark.parametrize("backend", MODULES)
def test_threads_and_stale_rows_change_no_bit(backend: str) -> None:
    decode, inputs = MODULES[backend].mla_decode, make(300, torch.bfloat16)
    base = run(decode, inputs, 0.0)
    for threads in (1, 2, 3):
        workers = Workers(threads)
        for fill in (1e30, float("inf")):
            for a, b in zip(base, run(decode, inputs, fill, workers), strict=True):
                assert same_bits(a, b)
        workers.close()


def test_planted_wrong_attention_is_refused() -> None:
    right = MODULES["reference"].mla_decode

    def forgets_the_maximum(
        q: torch.Tensor, pieces: Iterator[list[torch.Tensor]], length: int, *rest: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Right for one piece; weighs pieces alike, whatever their scores."""
        done = []
        for blocks in pieces:
            held = min(length, len(blocks) * LATENT_BLOCK)
            done.append(right(q, [[b.clone() for b in blocks]], held, *rest))
            length -= held
        return torch.stack([o for o, _ in done]).mean(0), done[0][1]

    def one_row_less(
        q: torch.Tensor, blocks: list[torch.Tensor], length: int, *rest: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return right(q, blocks, max(1, length - 1), *rest)  # type: ignore[no-any-return]

    with pytest.raises(AssertionError):
        check(one_row_less, 100, torch.float32)
    inputs = make(2 * LATENT_BLOCK, torch.float32)
    base, got = (run(forgets_the_maximum, inputs, 0.0, SOLO, at)[0] for at in ((), (1,)))
    assert same_bits(base, run(right, inputs, 0.0)[0]) and not same_bits(base, got)
