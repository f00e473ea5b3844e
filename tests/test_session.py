"""Sessions of one engine: append, fork, snapshot, rewind, reset, and what an interruption leaves.

R14 (requests one after another), R16 (state is sized by the chosen context), R45 (nothing leaks
from one to the next), R75 (what lies in a buffer beyond its rows is never read).
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import k3offload.latents
from k3offload.engine import Engine
from k3offload.errors import DoesNotFit, SessionError, UsageError
from k3offload.loading import load
from k3offload.session import Session
from tests.helpers_checkpoint import config, tiny
from tests.helpers_engine import (
    BRIEF,
    Logits,
    checkpoint,
    greedy,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
    starve,
)

A, B = some_tokens(90, 1), some_tokens(75, 2)
REPLY = some_tokens(6, 3)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", context=600, sessions=8) as made:
        yield made


@pytest.fixture(scope="module")
def fresh(engine: Engine) -> dict[str, Logits]:
    """Logits after A and after B, each in a sequence of its own."""
    return {name: logits_of(engine, t, keep=1)[0] for name, t in (("A", A), ("B", B))}


def decoded(session: Session, tokens: list[int]) -> Logits:
    """Feed ``tokens`` as if sampled; the rows, [n, V]."""
    rows = []
    for token in tokens:
        session.append_sampled(token)
        rows.append(session.logits())
    return np.stack(rows)


def test_three_requests_in_one_process_r14(engine: Engine, fresh: dict[str, Logits]) -> None:
    """First ever; an extension that outgrows its latent block; something else; a shorter one."""
    long = A + some_tokens(240, 5)
    with session_with(engine, A) as session:
        assert same_bits(session.logits(), fresh["A"])
        session.append(long[len(A) :])
        grown = session.logits()
        assert session.state.latents[3].blocks == 2
    assert np.abs(grown - logits_of(engine, long, keep=1)[0]).max() < 1e-3
    for name, tokens in (("B", B), ("A", A)):
        with session_with(engine, tokens) as session:
            assert same_bits(session.logits(), fresh[name])
    with session_with(engine, A[:10]) as session:
        assert same_bits(session.logits(), logits_of(engine, A[:10], keep=1)[0])


def test_reset_forgets_everything_r45(engine: Engine, fresh: dict[str, Logits]) -> None:
    session = session_with(engine, A)
    session.logits()
    decoded(session, REPLY)
    session.reset()
    assert session.tokens == () and session.position == 0
    with pytest.raises(SessionError, match="no tokens"):
        session.logits()
    session.append(B)
    assert same_bits(session.logits(), fresh["B"])
    session.close()


def test_fifty_switches_with_an_error_in_between_r45(engine: Engine) -> None:
    """Two conversations and cancellations: each gives what it gives alone."""
    turns = random.Random(4)
    plain: list[Logits] = []
    for tokens, replies in ((A, some_tokens(25, 6)), (B, some_tokens(25, 7))):
        with session_with(engine, tokens) as alone:
            plain.append(np.concatenate((alone.logits()[None], decoded(alone, replies))))
    live = [session_with(engine, A), session_with(engine, B)]
    left = [list(some_tokens(25, 6)), list(some_tokens(25, 7))]
    rows: list[list[Logits]] = [[live[0].logits()], [live[1].logits()]]
    order = [0] * 25 + [1] * 25
    turns.shuffle(order)
    for step, which in enumerate(order):
        if step == 20:
            with session_with(engine, A[:5]) as broken:
                _interrupt(engine, 2, broken)
        live[which].append_sampled(left[which].pop(0))
        rows[which].append(live[which].logits())
    for which in (0, 1):
        assert same_bits(np.stack(rows[which]), plain[which])
        live[which].close()


def test_rewind_restores_bits(engine: Engine) -> None:
    session = session_with(engine, A)
    before = session.logits()
    point = session.snapshot()
    first = decoded(session, REPLY)
    for _ in range(2):  # the snapshot stays usable
        session.rewind(point)
        assert session.tokens == tuple(A) and session.position == len(A)
        assert same_bits(session.logits(), before)
        assert same_bits(decoded(session, REPLY), first)
    session.close()


def test_a_fork_is_independent(engine: Engine) -> None:
    trunk = session_with(engine, A)
    trunk.logits()
    branch = trunk.fork()
    wanted = decoded(trunk, REPLY)
    other = decoded(branch, REPLY[::-1])
    assert not same_bits(other, wanted)
    with session_with(engine, A) as alone:
        alone.logits()
        assert same_bits(decoded(alone, REPLY[::-1]), other)
    trunk.close()
    assert same_bits(decoded(branch, [1]), decoded(_continued(engine, REPLY[::-1]), [1]))
    branch.close()


def _continued(engine: Engine, replies: list[int]) -> Session:
    session = session_with(engine, A)
    session.logits()
    decoded(session, replies)
    return session


@pytest.mark.parametrize("chunks", [1, 4, 5])
def test_snapshot_at_a_chunk_and_the_rest_is_a_cold_run(engine: Engine, chunks: int) -> None:
    """Also where the open latent block is shared (256 tokens) and where it is not."""
    tokens = some_tokens(350, 8)
    cold = logits_of(engine, tokens, keep=1)[0]
    with session_with(engine, tokens[: 64 * chunks]) as session:
        session.logits()
        point = session.snapshot()
        for rest in (tokens[64 * chunks :], some_tokens(30, 9), tokens[64 * chunks :]):
            session.rewind(point)
            session.append(rest)
            last = session.logits()
        assert same_bits(last, cold)


def test_text_is_tokens(engine: Engine) -> None:
    text = "Żółć 通义 🙂"
    with engine.session() as session:
        session.append(text)
        assert session.tokens == tuple(engine.encode(text)) == tuple(text.encode())
        session.append([])
        assert len(session.waiting()) == len(session.tokens)


def test_wrong_use_is_refused(engine: Engine) -> None:
    session = engine.session()
    with pytest.raises(SessionError, match="no tokens"):
        session.logits()
    for token in (-1, 512):
        with pytest.raises(UsageError, match=f"Token {token} .*512"):
            session.append([1, token])
    assert session.tokens == ()
    session.append([1])
    session.close()
    session.close()
    for use in (session.logits, session.snapshot, session.fork, lambda: session.append([1])):
        with pytest.raises(SessionError, match="closed"):
            use()


def test_poisoned_buffers_are_never_read_r75(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent blocks start as NaN; twenty requests of falling length reuse the memory."""
    tokens = some_tokens(270, 10)
    wanted = logits_of(engine, tokens)
    decoded_last = logits_of(engine, tokens, decode_from=269, keep=1)

    class Poisoned(k3offload.latents._Block):
        def __init__(self, *rest: Any) -> None:
            super().__init__(*rest)
            self.data.fill_(float("nan"))

    monkeypatch.setattr(k3offload.latents, "_Block", Poisoned)
    assert same_bits(logits_of(engine, tokens, decode_from=269, keep=1), decoded_last)
    for n in range(270, 0, -14):
        got = logits_of(engine, tokens[:n], keep=1)[0]
        assert np.isfinite(got).all()
        assert same_bits(got, wanted[n - 1]), n


def test_closing_frees_the_state(engine: Engine) -> None:
    gc.collect()
    before = engine._ledger.used
    session = session_with(engine, A)
    session.logits()
    fork, point = session.fork(), session.snapshot()
    tensors = [weakref.ref(s.state.kda[0]) for s in (session, fork)]
    state = engine._ledger.used - before
    spec = engine.spec
    logits = spec.vocab * 4
    per_sequence = spec.kda_state_bytes(4) + logits + 256 * spec.latent_bytes_per_token(4)
    assert state == 3 * per_sequence
    held = sum(t.nbytes for t in (*session.state.kda.values(), *session.state.conv.values()))
    assert held == spec.kda_state_bytes(4)
    session.close()
    fork.close()
    del point
    gc.collect()
    assert engine._ledger.used == before
    assert [t() for t in tensors] == [None, None]


def test_too_many_sessions_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    starve(monkeypatch)
    with load(checkpoint(**BRIEF), context=256, sessions=2) as engine:
        first, second = session_with(engine, A), session_with(engine, B)
        engine.advance([first, second])
        with pytest.raises(DoesNotFit, match=r"KDA state needs .* in use") as refusal:
            session_with(engine, A)
        per_session = engine.spec.kda_state_bytes(2) + engine.spec.vocab * 4
        spare = engine.plan.limit - engine.plan.total
        assert refusal.value.missing == per_session - spare
        with pytest.raises(DoesNotFit):
            first.fork()
        kept = second.logits()
        first.close()
        with session_with(engine, A) as third:
            third.logits()
        assert same_bits(second.logits(), kept)


def test_context_overflow_is_refused_before_any_work(engine: Engine) -> None:
    counts = engine.counts()["trunk"].requests
    with session_with(engine, some_tokens(601, 1)) as session:
        with pytest.raises(UsageError, match=r"601 tokens.*context of 600"):
            session.logits()
    with session_with(engine, some_tokens(590, 1)) as session:
        with pytest.raises(UsageError, match=r"601 tokens.*context of 600"):
            next(session.generate(11))
        assert session.position == 0
    assert engine.counts()["trunk"].requests == counts


class Stop(Exception):
    pass


def _interrupt(
    engine: Engine, layer: int, session: Session, error: type[BaseException] = Stop
) -> None:
    def raise_at(index: int) -> None:
        if index == layer:
            raise error

    engine.hooks.before_layer = raise_at
    try:
        with pytest.raises(error):
            session.logits()
    finally:
        engine.hooks.before_layer = lambda index: None


@pytest.mark.parametrize("layer", [0, 3, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
def test_interrupted_sweep(
    engine: Engine, fresh: dict[str, Logits], layer: int, error: type[BaseException]
) -> None:
    """The session says that its state is lost; rewind and reset bring it back; others go on."""
    other = session_with(engine, B)
    session = session_with(engine, A[:64])
    session.logits()
    point = session.snapshot()
    session.append(A[64:])
    _interrupt(engine, layer, session, error)
    for use in (session.logits, session.snapshot, session.fork, lambda: session.append([1])):
        with pytest.raises(SessionError, match=f"interrupted.*{error.__name__}.*rewind"):
            use()
    assert same_bits(other.logits(), fresh["B"])
    session.rewind(point)
    session.append(A[64:])
    assert same_bits(session.logits(), fresh["A"])
    session.append([5])
    _interrupt(engine, layer, session, error)
    session.reset()
    session.append(B)
    assert same_bits(session.logits(), fresh["B"])
    session.close()
    other.close()


def test_a_snapshot_of_another_engine_is_refused(engine: Engine) -> None:
    with load(checkpoint(seed=1, **BRIEF), dtype="float32") as second:
        with session_with(second, A[:3]) as theirs, session_with(engine, A[:3]) as ours:
            with pytest.raises(SessionError, match="another engine"):
                ours.rewind(theirs.snapshot())
            assert ours.tokens == tuple(A[:3])


def test_a_closed_engine_is_refused() -> None:
    made = load(checkpoint(**BRIEF))
    session = session_with(made, A[:3])
    made.close()
    made.close()
    with pytest.raises(SessionError, match="closed"):
        made.session()
    with pytest.raises(SessionError, match="closed"):
        session.logits()


def _update_text(fields: dict[str, int], top: dict[str, Any]) -> None:
    top["text_config"].update(fields)


def test_an_advertised_million_costs_nothing_r16(tmp_path: Path) -> None:
    """The context is chosen by the caller; the released maximum only bounds it."""
    totals = []
    for positions in (4096, 1_048_576):
        folder = tiny(tmp_path / str(positions), **BRIEF)
        longest = {"max_position_embeddings": positions}
        config(folder, partial(_update_text, longest))
        with load(folder, dtype="float32", context=300) as engine:
            totals.append(sum(size for name, size in engine.plan.purposes if "state" in name))
            assert greedy(engine, A, 10)
    assert totals[0] == totals[1] > 0


def test_growth_past_the_first_block_r16(engine: Engine) -> None:
    """Decoding from token 250 over the block's edge equals the prefill, but for rounding."""
    tokens = some_tokens(262, 12)
    stepped = logits_of(engine, tokens, decode_from=250, keep=5)
    whole = logits_of(engine, tokens, keep=5)
    error = np.linalg.norm(stepped - whole, axis=1) / np.linalg.norm(whole, axis=1)
    assert error.max() < 2e-4
