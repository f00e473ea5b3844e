"""mla_decode: against softmax attention in float64; rows that hold no token reach nothing (R75)."""

from __future__ import annotations

from collections.abc import Callable

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
    decode: Decode, inputs: tuple[torch.Tensor, ...], fill: float, workers: Workers = SOLO
) -> tuple[torch.Tensor, torch.Tensor]:
    q, latents, up = inputs
    blocks = in_blocks(latents, fill)
    with poisoned():
        return decode(q, blocks, len(latents), DenseWeight(up), NOPE, V, SCALE, workers)


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

    def one_row_less(
        q: torch.Tensor, blocks: list[torch.Tensor], length: int, *rest: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return right(q, blocks, max(1, length - 1), *rest)  # type: ignore[no-any-return]

    with pytest.raises(AssertionError):
        check(one_row_less, 100, torch.float32)
