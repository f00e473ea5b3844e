"""mla_prefill: against causal softmax attention in float64, rows that hold no token poisoned (R75),
a row's bits the same in any company (R72)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from k3offload.config import ROW_TILE
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.mla_prefill_reference import Query
from k3offload.kernels.pieces import Pieces
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import backends, randn
from tests.test_mla_decode import cut, in_blocks

Prefill = Callable[..., list[torch.Tensor]]

MODULES = backends("mla_prefill")
SOLO = Workers(1)
H, NOPE, ROPE, V, RANK = 3, 24, 8, 40, 72
SCALE = (NOPE + ROPE) ** -0.5
LENGTHS = (1, 63, 64, 65, 255, 256, 257, 512, 513)
DTYPES = [torch.float32, torch.bfloat16]


class Given(NamedTuple):
    q: torch.Tensor  #: [length, h, nope + rope]
    latents: torch.Tensor  #: [length, rank + rope]
    up: torch.Tensor  #: [h * (nope + v), rank]

    def queries(self, *rows: tuple[int, int]) -> list[Query]:
        """Each ``(begin, end)`` of the prompt as a query of its own."""
        return [Query(self.q[begin:end], begin) for begin, end in rows]


def make(length: int, dtype: torch.dtype) -> Given:
    g = generator(length)
    q = randn(g, length, H, NOPE + ROPE, dtype=dtype) * 2
    up = randn(g, H * (NOPE + V), RANK, dtype=dtype) / 8
    return Given(q, randn(g, length, RANK + ROPE, dtype=dtype), up)


def exact(given: Given) -> torch.Tensor:
    """[length, h, v]; keys and values are rounded to the model's dtype, as the model does."""
    q, latents, up = given
    kv = latents[:, :RANK].double() @ up.double().T
    kv = kv.to(q.dtype).double().view(-1, H, NOPE + V)
    extra = latents[:, None, RANK:].double().expand(-1, H, -1)
    k = torch.cat((kv[..., :NOPE], extra), -1)
    scores = torch.einsum("nhd,thd->hnt", q.double(), k) * SCALE
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    shares = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
    return torch.einsum("hnt,thv->nhv", shares, kv[..., NOPE:])


def run(
    prefill: Prefill,
    given: Given,
    queries: Sequence[Query],
    fill: float = float("nan"),
    workers: Workers = SOLO,
    up: torch.Tensor | None = None,
    at: Sequence[int] = (),
) -> list[torch.Tensor]:
    blocks, weight = in_blocks(given.latents, fill), DenseWeight(given.up if up is None else up)
    with poisoned():
        return prefill(
            queries, cut(blocks, at), len(given.latents), weight, NOPE, V, SCALE, workers
        )


def tiles(length: int) -> list[tuple[int, int]]:
    """The last tile of a prompt, and the first and a middle one where there are any."""
    begins = sorted({0, length // 2 // ROW_TILE * ROW_TILE, (length - 1) // ROW_TILE * ROW_TILE})
    return [(begin, min(begin + ROW_TILE, length)) for begin in begins]


def check_values(prefill: Prefill, length: int, dtype: torch.dtype) -> None:
    """NaN lies in the rows that hold no token.

    A key or value may round the other way where the float64 one is a tie but for float32's error.
    """
    given, rows = make(length, dtype), tiles(length)
    want = exact(given)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-9
    for (begin, end), got in zip(rows, run(prefill, given, given.queries(*rows)), strict=True):
        assert got.dtype == torch.float32 and got.shape == (end - begin, H, V)
        error = (got.double() - want[begin:end]).abs()
        assert error.max() <= tolerance * want.abs().max()
        assert error.mean() <= 1e-5 * want.abs().max()  # few of them round the other way


def check_company(prefill: Prefill, length: int = 320, dtype: torch.dtype = torch.bfloat16) -> None:
    """A row's bits: in any tile, beside any other queries, whatever comes after its position."""
    given = make(length, dtype)
    whole = [(begin, min(begin + ROW_TILE, length)) for begin in range(0, length, ROW_TILE)]
    base = torch.cat(run(prefill, given, given.queries(*whole)))
    for rows in ([whole[-1]], [(256, 259)], [(70, 100), (5, 6), (250, 300)]):
        for (begin, end), got in zip(rows, run(prefill, given, given.queries(*rows)), strict=True):
            assert same_bits(base[begin:end].contiguous(), got.contiguous()), (begin, end)
    for end in (64, 257):  # the same prompt, as far as it has come
        part = Given(given.q[:end], given.latents[:end], given.up)
        rows = [(max(0, end - ROW_TILE), end)]
        (got,) = run(prefill, part, part.queries(*rows))
        assert same_bits(base[rows[0][0] : end].contiguous(), got.contiguous()), end


def check_stale(prefill: Prefill) -> None:
    given = make(257, torch.bfloat16)
    queries = given.queries((0, 64), (250, 257))
    base = run(prefill, given, queries)
    for fill in (0.0, 1e30, float("inf")):
        for a, b in zip(base, run(prefill, given, queries, fill), strict=True):
            assert same_bits(a.contiguous(), b.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("backend", MODULES)
def test_values(backend: str, length: int, dtype: torch.dtype) -> None:
    check_values(MODULES[backend].mla_prefill, length, dtype)


@pytest.mark.parametrize("backend", MODULES)
def test_a_row_has_its_bits_in_any_company_r72(backend: str) -> None:
    check_company(MODULES[backend].mla_prefill)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", MODULES)
def test_no_cut_into_pieces_changes_a_bit(backend: str, dtype: torch.dtype) -> None:
    """Pieces take turns in one memory; queries end before, in and behind a cut."""
    prefill, given = MODULES[backend].mla_prefill, make(3 * 256 + 70, dtype)
    queries = given.queries((0, 64), (240, 300), (512, 576), (780, 838))
    base, workers = run(prefill, given, queries), Workers(2)
    for at in ((1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)):
        for a, b in zip(base, run(prefill, given, queries, at=at, workers=workers), strict=True):
            assert same_bits(a.contiguous(), b.contiguous()), at
    workers.close()


@pytest.mark.parametrize("backend", MODULES)
def test_rows_that_hold_no_token_reach_nothing_r75(backend: str) -> None:
    check_stale(MODULES[backend].mla_prefill)


@pytest.mark.parametrize("backend", MODULES)
def test_other_rows_of_a_query_reach_nothing_r72(backend: str) -> None:
    prefill, given = MODULES[backend].mla_prefill, make(70, torch.bfloat16)
    (base,) = run(prefill, given, given.queries((0, 64)))
    for fill in (0.0, 1e30, float("inf"), float("nan")):
        company = given.q.clone()
        company[:17], company[18:] = fill, fill
        (got,) = run(prefill, given, Given(company, *given[1:]).queries((0, 64)))
        assert same_bits(base[17].contiguous(), got[17].contiguous())


@pytest.mark.parametrize("backend", MODULES)
def test_threads_change_no_bit(backend: str) -> None:
    prefill, given = MODULES[backend].mla_prefill, make(100, torch.bfloat16)
    queries = given.queries((0, 64), (64, 100))
    base = run(prefill, given, queries)
    for threads in (2, 3):
        workers = Workers(threads)
        for a, b in zip(base, run(prefill, given, queries, workers=workers), strict=True):
            assert same_bits(a.contiguous(), b.contiguous())
        workers.close()


# ---- planted wrong attention ----


def _right(*given: Any) -> list[torch.Tensor]:
    done: list[torch.Tensor] = MODULES["reference"].mla_prefill(*given)
    return done


def sees_one_more(queries: list[Query], *rest: Any) -> list[torch.Tensor]:
    return _right([Query(q, start + 1) for q, start in queries], *rest)


def sees_one_less(queries: list[Query], *rest: Any) -> list[torch.Tensor]:
    return _right([Query(q, max(0, start - 1)) for q, start in queries], *rest)


def reads_stale_rows(
    queries: list[Query], pieces: Pieces, length: int, *rest: Any
) -> list[torch.Tensor]:
    """Right where the rows are zero: they are expanded, and only then masked."""
    (blocks,) = pieces
    out = _right(queries, [blocks], length, *rest)
    stale = blocks[-1][length % len(blocks[-1]) :].float()
    return [o + 0 * stale.sum() for o in out]


def depends_on_the_length(
    queries: list[Query], pieces: Pieces, length: int, *rest: Any
) -> list[torch.Tensor]:
    (blocks,) = pieces
    out = _right(queries, [blocks], length, *rest)
    return [torch.nextafter(o, torch.tensor(9e9)) for o in out] if len(blocks) == 1 else out


def depends_on_the_place(queries: list[Query], *rest: Any) -> list[torch.Tensor]:
    out = _right(queries, *rest)
    for o in out:
        o[0] = torch.nextafter(o[0], torch.tensor(9e9))
    return out


def keys_for_values(
    queries: list[Query], pieces: Pieces, length: int, up: DenseWeight, *rest: Any
) -> list[torch.Tensor]:
    halves = up.tensor.view(H, NOPE + V, RANK)
    turned = torch.cat((halves[:, V:], halves[:, :V]), 1)
    return _right(queries, pieces, length, DenseWeight(turned.reshape(-1, RANK)), *rest)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (sees_one_more, lambda f: check_values(f, 256, torch.bfloat16)),
        (sees_one_less, lambda f: check_values(f, 257, torch.bfloat16)),
        (keys_for_values, lambda f: check_values(f, 64, torch.float32)),
        (reads_stale_rows, lambda f: check_values(f, 63, torch.float32)),
        (reads_stale_rows, check_stale),
        (depends_on_the_length, check_company),
        (depends_on_the_place, check_company),
    ],
)
def test_planted_wrong_attention_is_refused(
    wrong: Prefill, check: Callable[[Prefill], None]
) -> None:
    with pytest.raises(AssertionError):
        check(wrong)
