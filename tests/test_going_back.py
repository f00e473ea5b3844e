"""Edits and regenerations: truncate and sync go back to snapshots that were taken on the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from k3offload.engine import Engine
from k3offload.errors import SessionError, UsageError
from k3offload.loading import load
from tests.helpers_engine import (
    BRIEF,
    Logits,
    checkpoint,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
    starve,
)
from tests.helpers_saved import REPLY, decode

LONG = some_tokens(600, 1)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", context=700, sessions=8) as made:
        yield made


def cold(engine: Engine, tokens: list[int]) -> Logits:
    """The last logits of ``tokens``, computed from nothing."""
    row: Logits = logits_of(engine, tokens, keep=1)[0]
    return row


def test_truncate_goes_back_to_the_longest_mark_before(engine: Engine) -> None:
    with session_with(engine, LONG[:500]) as session:
        for position in (130, 300, 450):
            session.mark(position)
        session.logits()
        for length, kept in ((460, 448), (448, 256), (301, 256), (257, 256), (256, 128), (100, 0)):
            session.truncate(length)
            assert session.tokens == tuple(LONG[:length])
            assert (session.position, session.reused) == (kept, kept)
            assert same_bits(session.logits(), cold(engine, LONG[:length]))
        session.append(LONG[100:300])
        assert len(session.waiting()) == 200


def test_another_ending_and_another_reply(engine: Engine) -> None:
    """An edit in the prompt, and a reply that is generated anew."""
    with session_with(engine, LONG[:300]) as session:
        session.mark(256)
        first = decode(session, REPLY)
        session.truncate(300)
        assert session.position == 256
        assert same_bits(session.logits(), cold(engine, LONG[:300]))
        assert same_bits(decode(session, REPLY), first)
        session.truncate(280)
        session.append([1, 2, 3])
        assert session.position == 256
        assert same_bits(session.logits(), cold(engine, [*LONG[:280], 1, 2, 3]))


def test_waiting_tokens_are_forgotten_without_going_back(engine: Engine) -> None:
    with session_with(engine, LONG[:100]) as session:
        row = session.logits()
        session.append_sampled(5)
        session.truncate(101)
        assert session.decoding
        session.truncate(100)
        assert session.position == 100 and not session.needs_work
        assert same_bits(session.logits(), row)
        session.append(LONG[100:160])
        session.truncate(120)
        assert session.position == 100 and len(session.waiting()) == 20


def test_sync_keeps_what_agrees(engine: Engine) -> None:
    with engine.session() as session:
        session.mark(128)
        assert session.sync(LONG[:200]) == 0
        session.logits()
        assert session.sync(LONG[:200]) == 200 and not session.needs_work
        assert session.sync(LONG[:260]) == 200  # only continued
        session.logits()
        edited = [*LONG[:150], 7, *LONG[151:300]]
        assert session.sync(edited) == 128
        assert same_bits(session.logits(), cold(engine, edited))
        assert session.sync([9, 9]) == 0
        assert same_bits(session.logits(), cold(engine, [9, 9]))
        assert session.sync([]) == 0 and session.tokens == ()


def test_sweeps_that_pass_several_marks(engine: Engine) -> None:
    with load(checkpoint(**BRIEF), dtype="float32", context=700, sessions=8, sweep=192) as other:
        with session_with(other, LONG) as session:
            for position in (64, 128, 192, 256, 576):
                session.mark(position)
            session.logits()
            for length, kept in ((577, 576), (300, 256), (193, 192), (192, 128), (65, 64)):
                session.truncate(length)
                assert session.position == kept
                assert same_bits(session.logits(), cold(engine, LONG[:length]))


def test_a_lost_state_comes_back(engine: Engine) -> None:
    with session_with(engine, LONG[:200]) as session:
        session.mark(128)
        session.logits()
        session.append([1])

        def stop(layer: int) -> None:
            raise RuntimeError

        engine.hooks.before_layer = stop
        with pytest.raises(RuntimeError):
            session.logits()
        engine.hooks.before_layer = lambda layer: None
        session.truncate(200)
        assert session.position == 128
        assert same_bits(session.logits(), cold(engine, LONG[:200]))


def test_what_cannot_be_marked(engine: Engine) -> None:
    with session_with(engine, LONG[:100]) as session:
        with pytest.raises(UsageError, match="no snapshot after 0 tokens"):
            session.mark(63)
        session.logits()
        for position in (64, 640):
            with pytest.raises(UsageError, match=f"no snapshot after {position} tokens"):
                session.mark(position)
        for length in (-1, 101):
            with pytest.raises(UsageError, match=f"no token {length} .*0 to 100"):
                session.truncate(length)
    with pytest.raises(SessionError, match="closed"):
        session.truncate(0)


def test_marks_are_given_back(engine: Engine) -> None:
    gc.collect()
    used = engine._ledger.used
    session = session_with(engine, LONG[:300])
    session.mark(256)
    session.logits()
    spec = engine.spec
    one = spec.kda_state_bytes(4) + spec.vocab * 4
    assert engine._ledger.used - used == 2 * one + 2 * 256 * spec.latent_bytes_per_token(4)
    session.reset()
    assert engine._ledger.used - used == one
    session.close()
    assert engine._ledger.used == used


def test_no_room_for_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    starve(monkeypatch)
    with load(checkpoint(**BRIEF), context=128, sessions=1) as other:
        warned: list[str] = []
        other.warn = warned.append
        with session_with(other, LONG[:100]) as session:
            session.mark(64)
            row = session.logits()
            assert len(warned) == 1 and "No snapshot is kept after 64 tokens" in warned[0]
            session.append([5])
            session.logits()
            session.truncate(100)
            assert session.position == 0 and same_bits(session.logits(), row)


def test_going_back_needs_no_room_for_another_state() -> None:
    """Not a byte beyond the states there are, where the plan has no more than these."""
    with load(checkpoint(**BRIEF), context=256, sessions=2) as engine:
        engine._ledger.capacity = engine._ledger.planned
        with session_with(engine, some_tokens(150)) as session:
            session.logits()
            snapshot = session.snapshot()
            session.append(some_tokens(100, 1))
            session.logits()
            session.rewind(snapshot)
            assert session.position == 150
            session.reset()
            session.rewind(snapshot)
            assert session.length == 150
