"""How runs are cut and packed: every token once, nothing that depends on the company."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload.config import KDA_CHUNK, ROW_TILE
from k3offload.scheduler.sweep import Part, Span, Tile, cut, pack

prefill = st.builds(Span, st.integers(0, 700), st.integers(1, 400), st.just(False))
decode = st.builds(Span, st.integers(0, 10**6), st.just(1), st.just(True))
spans_of_a_sweep = st.lists(st.one_of(prefill, decode), max_size=12)


def check_pack(spans: list[Span], tiles: list[Tile]) -> None:
    """What the forward pass relies on."""
    seen: dict[int, list[int]] = {run: [] for run in range(len(spans))}
    for number, tile in enumerate(tiles):
        assert tile.begin == number * ROW_TILE
        assert tile.rows == slice(tile.begin, tile.begin + ROW_TILE)
        at = 0
        for part in tile.parts:
            assert part.at == at, "parts lie without gaps"
            assert part.count >= 1
            assert part.decode == spans[part.run].decode
            first, last = part.start, part.start + part.count - 1
            assert first // KDA_CHUNK == last // KDA_CHUNK, "a part stays inside one chunk"
            seen[part.run] += range(first, last + 1)
            at += part.count
        assert 0 < tile.used == at <= ROW_TILE
    for run, span in enumerate(spans):
        assert seen[run] == list(range(span.start, span.start + span.count)), "each token once"


def shapes(tiles: list[Tile], run: int) -> list[tuple[int, int]]:
    return [(p.start, p.count) for tile in tiles for p in tile.parts if p.run == run]


@settings(max_examples=300)
@given(spans=spans_of_a_sweep)
def test_pack(spans: list[Span]) -> None:
    check_pack(spans, pack(spans))


@settings(max_examples=150)
@given(spans=spans_of_a_sweep.filter(bool))
def test_parts_do_not_depend_on_the_company(spans: list[Span]) -> None:
    tiles = pack(spans)
    for run, span in enumerate(spans):
        assert shapes(tiles, run) == shapes(pack([span]), 0)


def test_pack_examples() -> None:
    assert pack([]) == []
    assert pack([Span(0, 64, False)]) == [Tile(0, 64, (Part(0, 0, 0, 64, False),))]
    tiles = pack([Span(60, 10, False), Span(9, 1, True)])
    assert tiles == [
        Tile(0, 11, (Part(0, 0, 60, 4, False), Part(0, 4, 64, 6, False), Part(1, 10, 9, 1, True)))
    ]
    decodes = pack([Span(i, 1, True) for i in range(65)])
    assert [tile.used for tile in decodes] == [64, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        [Tile(0, 64, (Part(0, 0, 32, 64, False),)), Tile(64, 36, (Part(0, 0, 96, 36, False),))],
        [Tile(0, 32, (Part(0, 0, 32, 32, False),)), Tile(64, 64, (Part(0, 0, 64, 64, False),))],
        [
            Tile(0, 32, (Part(0, 0, 32, 32, False),)),
            Tile(64, 64, (Part(0, 0, 64, 64, False),)),
            Tile(128, 5, (Part(0, 0, 127, 5, False),)),
        ],
    ],
    ids=["crosses_a_chunk", "loses_the_last_tokens", "repeats_a_token"],
)
def test_planted_wrong_packs_are_refused(wrong: list[Tile]) -> None:
    spans = [Span(32, 100, False)]
    check_pack(spans, pack(spans))
    with pytest.raises(AssertionError):
        check_pack(spans, wrong)


# ---- cut ----


@settings(max_examples=300)
@given(position=st.integers(0, 1000), waiting=st.integers(1, 2000), budget=st.integers(0, 1000))
def test_cut_falls_on_chunk_multiples(position: int, waiting: int, budget: int) -> None:
    """Also when other runs left little of the budget: no cut splits a chunk."""
    count = cut(position, waiting, budget)
    assert 0 <= count <= min(waiting, budget)
    assert count == waiting or count == 0 or (position + count) % KDA_CHUNK == 0
    if count < waiting:
        following = (position + count) // KDA_CHUNK * KDA_CHUNK + KDA_CHUNK
        assert following > position + budget, "as much as goes into the budget"


@given(position=st.integers(0, 1000), waiting=st.integers(1, 2000))
def test_cut_of_a_whole_chunk_always_advances(position: int, waiting: int) -> None:
    assert cut(position, waiting, KDA_CHUNK) > 0


@settings(max_examples=100)
@given(
    length=st.integers(1, 600),
    budgets=st.lists(st.integers(0, 300), min_size=1, max_size=8),
)
def test_chunks_of_a_prompt_do_not_depend_on_the_budgets(length: int, budgets: list[int]) -> None:
    """However a prompt is spread over sweeps, it is computed in the same parts."""
    parts: list[tuple[int, int]] = []
    position, sweep = 0, 0
    while position < length:
        budget = budgets[sweep % len(budgets)] if sweep < 50 else KDA_CHUNK
        count = cut(position, length - position, budget)
        if count:
            parts += shapes(pack([Span(position, count, False)]), 0)
        position, sweep = position + count, sweep + 1
    assert parts == shapes(pack([Span(0, length, False)]), 0)
