"""Prompt attention in tiles of bfloat16 beyond what test_mla_prefill.py asks of every kernel: sizes
of K3 and sizes that fit no tile, latents that are packed in several goes, who computes what."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from k3offload.config import LATENT_BLOCK
from k3offload.kernels import mla_prefill_reference, native
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.mla_prefill_reference import Query
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import randn
from tests.test_mla_decode import in_blocks

TILES = [isa for isa in native.isas() if isa in native.TILES]
pytestmark = pytest.mark.skipif(not TILES, reason="no products of bfloat16 here")
if native.available():
    from k3offload.kernels import mla_prefill_native
SOLO = Workers(1)


@pytest.fixture(autouse=True, params=TILES or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every set that computes in tiles, and not only the best one that is here."""
    with native.using(request.param):
        yield


class Sizes(NamedTuple):
    heads: int
    nope: int
    rope: int
    v: int
    rank: int


WIDE = Sizes(2, 128, 64, 128, 512)  # of K3, of which 6 blocks are packed at a time
ODD = (
    Sizes(1, 1, 1, 1, 1),
    Sizes(3, 33, 31, 47, 95),
    Sizes(2, 64, 0, 32, 32),
    Sizes(5, 16, 48, 80, 300),
)


class Given(NamedTuple):
    queries: list[Query]
    latents: torch.Tensor
    up: DenseWeight
    sizes: Sizes


def make(sizes: Sizes, length: int, dtype: torch.dtype = torch.bfloat16) -> Given:
    """Its first tile, one across a block's end, one of a single row, and its last."""
    g, s = generator(length), sizes
    q = randn(g, length, s.heads, s.nope + s.rope, dtype=dtype) * 2
    latents = randn(g, length, s.rank + s.rope, dtype=dtype)
    up = DenseWeight(randn(g, s.heads * (s.nope + s.v), s.rank, dtype=dtype) / s.rank**0.5)
    ends = ((0, 64), (length // 2, length // 2 + 50), (255, 256), (length - 37, length))
    return Given([Query(q[a:b], a) for a, b in ends], latents, up, s)


def run(
    module: ModuleType, given: Given, each: int = 0, workers: Workers = SOLO
) -> list[torch.Tensor]:
    """``each``: blocks of a piece, 0 for all in one; what follows the last token is NaN."""
    blocks, s = in_blocks(given.latents, float("nan")), given.sizes
    step = each or len(blocks)
    pieces = [blocks[i : i + step] for i in range(0, len(blocks), step)]
    with poisoned():
        done: list[torch.Tensor] = module.mla_prefill(
            given.queries, pieces, len(given.latents), given.up, s.nope, s.v,
            (s.nope + s.rope) ** -0.5, workers,
        )  # fmt: skip
    return done


@pytest.mark.parametrize("sizes", [WIDE, *ODD])
def test_every_size_as_the_reference(sizes: Sizes) -> None:
    """Keys and values may round the other way where their sums differ in the last bits."""
    given = make(sizes, 8 * LATENT_BLOCK + 77)
    for got, want in zip(
        run(mla_prefill_native, given), run(mla_prefill_reference, given), strict=True
    ):
        error = (got - want).abs()
        assert got.shape == want.shape and error.max() <= 2.0**-8 * want.abs().max()
        assert error.mean() <= 2e-4 * want.abs().max()


@pytest.mark.parametrize("each", [1, 3, 7])
def test_neither_pieces_nor_threads_nor_goes_change_a_bit(each: int) -> None:
    given, workers = make(WIDE, 14 * LATENT_BLOCK + 5), Workers(2)
    base = run(mla_prefill_native, given)
    for a, b in zip(base, run(mla_prefill_native, given, each, workers), strict=True):
        assert same_bits(a, b)
    alone = given._replace(queries=given.queries[3:])
    assert same_bits(base[3], run(mla_prefill_native, alone, each)[0])
    workers.close()


def test_what_it_does_not_take_is_torch_s() -> None:
    """Other types, and other instruction sets, give the bits of the reference."""
    wide = make(ODD[1], 300, torch.float32)
    assert same_bits(run(mla_prefill_native, wide)[0], run(mla_prefill_reference, wide)[0])
    given = make(ODD[1], 300)
    assert not same_bits(run(mla_prefill_native, given)[3], run(mla_prefill_reference, given)[3])
    with native.using("avx512"):
        assert same_bits(run(mla_prefill_native, given)[3], run(mla_prefill_reference, given)[3])
