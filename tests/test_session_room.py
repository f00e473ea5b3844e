"""Sessions where every planned byte is taken, and where something goes wrong in the middle: nothing
is lost, nothing is taken for known that is not (R02, R29)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from k3offload.engine import Engine
from k3offload.errors import DoesNotFit, SessionError
from k3offload.loading import load
from k3offload.session import Session
from k3offload.session_manifest import read_manifest
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

LONG = some_tokens(700, 1)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Room for one session of the whole context, and not a byte more."""
    starve(monkeypatch)
    with load(checkpoint(**BRIEF), dtype="float32", context=700, sessions=1) as engine:
        engine._ledger.capacity = engine._ledger.planned
        yield engine


def cold(engine: Engine, tokens: list[int]) -> Logits:
    row: Logits = logits_of(engine, tokens, keep=1)[0]
    return row


def test_a_session_at_its_full_length_can_be_edited(full: Engine) -> None:
    wanted = cold(full, LONG[:650])
    with session_with(full, LONG) as session:
        for edit in (
            lambda: session.truncate(650),
            lambda: session.sync(LONG[:650]),
            lambda: session.reset(),
        ):
            session.logits()
            assert full._ledger.used == full._ledger.planned
            edit()
            session.append(LONG[session.length : 650])
            assert same_bits(session.logits(), wanted)
            session.append(LONG[650:])


def test_a_snapshot_without_room_leaves_a_session_that_works(full: Engine) -> None:
    full._ledger.capacity *= 3
    other = session_with(full, LONG[300:400])
    wanted = cold(full, LONG[:200])
    with session_with(full, LONG[:256]) as session:
        session.mark(192)
        session.logits()
        held = [session.snapshot() for _ in range(2)]
        full._ledger.capacity = full._ledger.used + 11_000  # what is held shares the full block
        with pytest.raises(DoesNotFit):
            session.truncate(200)
        assert session.position == 0 and session.known_logits is None
        full._ledger.capacity = full._ledger.planned * 4
        session.truncate(200)
        full.advance([session, other])
        assert same_bits(session.logits(), wanted)
        assert same_bits(other.logits(), cold(full, LONG[300:400]))
        del held
    other.close()


def test_unknown_logits_are_computed_again(full: Engine, tmp_path: Path) -> None:
    """A saved session may know none, as a kept prefix does."""
    wanted = cold(full, LONG[:128])
    session = session_with(full, LONG[:128])
    session.logits()
    session._logits = None
    session.save(tmp_path / "s")
    session.close()
    assert not read_manifest(tmp_path / "s").logits
    with full.load_session(tmp_path / "s") as again:
        assert again.known_logits is None and not again.waiting()
        assert same_bits(again.logits(), wanted)


def test_a_jump_forgets_the_logits_of_before() -> None:
    """A prompt that goes on from a shared prefix, and then has no room for the rest."""
    with load(
        checkpoint(**BRIEF), dtype="float32", context=700, sessions=2, prefix_cache="20M"
    ) as engine:
        wanted = cold(engine, LONG[:512])
        with session_with(engine, LONG[:513]) as first:
            first.logits()
        kept, engine.prefixes = engine.prefixes, None
        session = session_with(engine, LONG[:128])
        before = session.logits()
        engine.prefixes = kept
        session.append(LONG[128:700])
        capacity = engine._ledger.capacity
        fixed = engine.spec.kda_state_bytes(4) + engine.spec.vocab * 4
        engine._ledger.capacity = fixed + 1000
        with pytest.raises(DoesNotFit):
            session.logits()
        assert session.position == 512
        engine._ledger.capacity = capacity
        session.truncate(512)
        row = session.logits()
        assert same_bits(row, wanted) and not same_bits(row, before)
        session.close()


def test_a_session_that_is_closed_stays_closed(full: Engine) -> None:
    session: Session = session_with(full, LONG[:10])
    session.logits()
    session.close()
    for use in (session.reset, lambda: session.truncate(0), lambda: session.sync([1])):
        with pytest.raises(SessionError, match="session is closed"):
            use()
