"""Prompts begin to read what the next layer will certainly ask for (``Schedule.read_on``)."""

from __future__ import annotations

import numpy as np
import pytest

from k3offload import load
from k3offload.scheduler.counts import Counts
from k3offload.scheduler.predict_router import Predictor
from k3offload.scheduler.schedule import SURE, Schedule
from k3offload.scheduler.store import ExpertStore
from tests.helpers_engine import Logits, logits_of, same_bits
from tests.helpers_golden import TRAINED
from tests.helpers_store import Tier, make, pages

PROMPT = list((TRAINED / "config.json").read_bytes()[:300])
ALIKE = [7] * 300


def started(rows: list[list[int]], present: tuple[int, ...] = ()) -> tuple[ExpertStore, Tier]:
    store, tier = make(12)  # room for three guesses, or six that are sure
    if present:
        store.prefetch(pages(*present, layer=1))
        tier.settle()
    Schedule(store, Predictor((0, 1), 8, 2), 2).read_on(1, np.array(rows), 8)
    return store, tier


def test_only_what_enough_rows_would_choose_is_read_in_the_order_of_the_disk() -> None:
    rows = [[6, 4]] * SURE + [[7, 3]] * (SURE - 1) + [[3, 1]]
    store, tier = started(rows)
    assert tier.waiting() == pages(3, 4, 6, layer=1)
    assert store.counts.prefetches == 3


def test_what_is_in_ram_is_not_read_again() -> None:
    store, tier = started([[6, 4]] * SURE + [[1, 2]], present=(6,))
    assert tier.waiting() == pages(4, layer=1)
    assert store.counts.prefetches == 2


def test_the_most_wanted_find_room() -> None:
    rows = [[e, 7] for e in range(7) for _ in range(SURE + e)]
    _, tier = started(rows)
    assert tier.waiting() == pages(2, 3, 4, 5, 6, 7, layer=1)


def test_rows_that_are_all_alike_make_nothing_certain() -> None:
    _, tier = started([[6, 4], [6, 4], [1, 4]] * SURE)
    assert tier.waiting() == []


def prompt(predict: str, tokens: list[int]) -> tuple[Logits, Counts]:
    """All logits, and the expert counts of an engine with slots for three experts in ten."""
    with load(TRAINED) as whole:
        slots, each = int(0.3 * whole.plan.experts), whole.plan.slot_bytes
    with load(TRAINED, predict=predict, cache=slots * each) as engine:
        assert engine.plan.slots == slots
        return logits_of(engine, tokens), engine.counts()["experts"]


@pytest.mark.parametrize("tokens", [PROMPT, ALIKE], ids=["text", "alike"])
def test_a_prompt_reads_on_without_reading_in_vain_or_moving_a_bit(tokens: list[int]) -> None:
    wanted, plain = prompt("none", tokens)
    found, counts = prompt("combined", tokens)
    assert same_bits(found, wanted)
    assert plain.prefetches == 0
    assert (counts.useful >= 100) == (tokens is PROMPT)
    assert counts.wasted == 0
    assert counts.bytes == plain.bytes, "each expert once, as without guesses"


def decoded(predict: str, sessions: int) -> tuple[list[Logits], Counts]:
    """The logits of so many sessions that decode together, and the expert counts of that sweep."""
    with load(TRAINED) as whole:
        slots, each = int(0.3 * whole.plan.experts), whole.plan.slot_bytes
    with load(
        TRAINED, predict=predict, cache=slots * each, sessions=sessions, context=64
    ) as engine:
        every = [engine.session() for _ in range(sessions)]
        for at, session in enumerate(every):
            session.append(PROMPT[at : at + 8])
        engine.advance(every)
        for at, session in enumerate(every):
            session.append_sampled(PROMPT[at + 8])
        before = engine.counts()["experts"]
        engine.advance(every)
        after = engine.counts()["experts"]
        for field in ("prefetches", "useful", "wasted"):
            setattr(after, field, getattr(after, field) - getattr(before, field))
        return [session.logits() for session in every], after


def test_a_crowd_that_decodes_reads_on_like_a_prompt_and_moves_no_bit() -> None:
    crowd = SURE * 48 // 4  # nano has 48 experts, of which a row chooses 4
    wanted, plain = decoded("none", crowd)
    found, counts = decoded("combined", crowd)
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
    assert plain.prefetches == 0
    assert counts.prefetches > 2 * (counts.requests - plain.requests) and counts.useful > 50
    assert counts.useful >= 100 and counts.wasted == 0
    assert counts.bytes == plain.bytes, "each expert once, as without guesses"
