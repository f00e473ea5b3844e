"""How runs are cut and packed: every token once, nothing that depends on the company."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload.config import GROUP_ROWS, KDA_CHUNK
from k3offload.scheduler.sweep import Group, Part, Span, cut, pack

prefill = st.builds(Span, st.integers(0, 700), st.integers(1, 400), st.just(False))
decode = st.builds(Span, st.integers(0, 10**6), st.just(1), st.just(True))
spans_of_a_sweep = st.lists(st.one_of(prefill, decode), max_size=12)


def check_pack(spans: list[Span], groups: list[Group]) -> None:
    """What the forward pass relies on."""
    seen: dict[int, list[int]] = {run: [] for run in range(len(spans))}
    kinds = [group.decode for group in groups]
    assert kinds == sorted(kinds, reverse=True), "decode rows come first"
    row = 0
    for group in groups:
        assert group.begin == row, "rows lie without gaps"
        for part in group.parts:
            assert part.row == row
            assert part.count >= 1
            assert group.decode == spans[part.run].decode
            first, last = part.start, part.start + part.count - 1
            assert first // KDA_CHUNK == last // KDA_CHUNK, "a part stays inside one chunk"
            seen[part.run] += range(first, last + 1)
            row += part.count
        assert 0 < group.end - group.begin <= GROUP_ROWS
        assert group.end == row
        assert group.rows == slice(group.begin, row)
    for run, span in enumerate(spans):
        assert seen[run] == list(range(span.start, span.start + span.count)), "each token once"


def shapes(groups: list[Group], run: int) -> list[tuple[int, int]]:
    return [(p.start, p.count) for group in groups for p in group.parts if p.run == run]


@settings(max_examples=300)
@given(spans=spans_of_a_sweep)
def test_pack(spans: list[Span]) -> None:
    check_pack(spans, pack(spans))


@settings(max_examples=150)
@given(spans=spans_of_a_sweep.filter(bool))
def test_parts_do_not_depend_on_the_company(spans: list[Span]) -> None:
    groups = pack(spans)
    for run, span in enumerate(spans):
        assert shapes(groups, run) == shapes(pack([span]), 0)


def test_pack_examples() -> None:
    assert pack([]) == []
    assert pack([Span(0, 64, False)]) == [Group(0, 64, False, (Part(0, 0, 0, 64),))]
    groups = pack([Span(60, 10, False), Span(9, 1, True)])
    assert groups == [
        Group(0, 1, True, (Part(1, 0, 9, 1),)),
        Group(1, 11, False, (Part(0, 1, 60, 4), Part(0, 5, 64, 6))),
    ]
    assert groups[1].own(groups[1].parts[1]) == slice(4, 10)
    decodes = pack([Span(i, 1, True) for i in range(GROUP_ROWS + 1)])
    assert [group.end - group.begin for group in decodes] == [GROUP_ROWS, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        [Group(0, 100, False, (Part(0, 0, 32, 64), Part(0, 64, 96, 36)))],
        [Group(0, 96, False, (Part(0, 0, 32, 32), Part(0, 32, 64, 64)))],
        [Group(0, 101, False, (Part(0, 0, 32, 32), Part(0, 32, 64, 64), Part(0, 96, 127, 5)))],
        [Group(0, 100, False, (Part(0, 0, 32, 32), Part(0, 33, 64, 64), Part(0, 97, 128, 4)))],
    ],
    ids=["crosses_a_chunk", "loses_the_last_tokens", "repeats_a_token", "leaves_a_gap"],
)
def test_planted_wrong_packs_are_refused(wrong: list[Group]) -> None:
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
