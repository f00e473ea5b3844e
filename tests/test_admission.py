"""Who gets into a sweep, and what a call refuses: admission, fairness, wrong arguments.

R14, R16 (room), R45 (a refused session touches nobody), R72 (requests side by side).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from k3offload.engine import Engine
from k3offload.errors import DoesNotFit, SessionError, UsageError
from k3offload.generate import Done, Prefill, Request, Token, generate
from k3offload.loading import load
from k3offload.model import Run
from k3offload.run_logits import spans
from k3offload.sampling import Sampling
from k3offload.scheduler.sweep import Group
from k3offload.session import Session
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

FREE = Sampling(ignore_end=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", context=800, sessions=16) as made:
        yield made


@pytest.fixture(scope="module")
def narrow() -> Iterator[Engine]:
    """Room for 64 rows in a sweep."""
    with load(checkpoint(**BRIEF), dtype="float32", context=800, sessions=8, sweep=64) as made:
        yield made


def alone(engine: Engine, tokens: list[int], more: list[int] | None = None) -> Logits:
    """Logits after ``tokens``, and after ``more`` appended later, nobody else in the sweep."""
    with session_with(engine, tokens) as session:
        last = session.logits()
        if more:
            session.append(more)
            last = session.logits()
        return last


@pytest.fixture
def rows_seen(engine: Engine) -> Iterator[list[int]]:
    """Rows of each sweep of ``engine``, as its router sees them."""
    first, rows = engine.spec.moe_layers[0], list[int]()

    def watch(layer: int, group: Group, *routed: torch.Tensor) -> None:
        if layer == first and group.begin == 0:
            rows.append(0)
        rows[-1] = max(rows[-1], group.end)

    before, engine.hooks.on_route = engine.hooks.on_route, watch
    yield rows
    engine.hooks.on_route = before


def test_a_sweep_takes_no_more_rows_than_planned(engine: Engine, rows_seen: list[int]) -> None:
    """16 prompts of 33 tokens are 528 rows: 15 go into the first sweep whole, none is cut."""
    prompts = [some_tokens(33, seed) for seed in range(16)]
    sessions = [session_with(engine, prompt) for prompt in prompts]
    engine.advance(sessions)
    assert engine.plan.sweep_rows == 512
    assert rows_seen == [15 * 33, 33]
    for session, prompt in zip(sessions, prompts, strict=True):
        assert same_bits(session.logits(), alone(engine, prompt))
        session.close()


@pytest.mark.parametrize("tokens", [65, 128, 200])
def test_a_sweep_larger_than_planned_is_refused(narrow: Engine, tokens: int) -> None:
    state = narrow.new_state()
    with pytest.raises(UsageError, match=r"takes \d+ rows and the plan has 64"):
        narrow.run([Run(state, some_tokens(tokens))], lambda *row: None)
    with pytest.raises(UsageError, match="takes 66 rows"):
        narrow.run([Run(state, [1] * 33), Run(narrow.new_state(), [1] * 33)], lambda *row: None)
    assert state.usable().position == 0
    assert all(latents.length == 0 for latents in state.latents.values())


@pytest.mark.parametrize(
    ("sweep", "rows"), [(1, 64), (13, 64), (64, 64), (65, 128), (100, 128), (512, 512)]
)
def test_a_plan_has_room_for_every_sweep_of_a_prompt(sweep: int, rows: int) -> None:
    with load(checkpoint(**BRIEF), dtype="float32", sweep=sweep, context=400) as engine:
        assert engine.plan.sweep_rows == rows
        state, tokens = engine.new_state(), some_tokens(min(330, 70 + 10 * sweep))
        for begin, end, decode in spans(len(tokens), sweep, None):
            engine.run([Run(state, tokens[begin:end], 0, decode)], lambda *row: None)
        assert state.usable().position == len(tokens)


def _states(session: Session) -> list[torch.Tensor]:
    state = session.state
    return [t.clone() for t in (*state.kda.values(), *state.conv.values())]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Room for three sequences of one latent block, and for a second block in one layer only."""
    starve(monkeypatch)
    with load(checkpoint(**BRIEF), dtype="float32", context=512, sessions=2) as made:
        yield made


LONG, MORE = some_tokens(250, 1), some_tokens(20, 2)
SHORT = [some_tokens(9, seed) for seed in (3, 4)]


def _fill(crowded: Engine) -> list[Session]:
    sessions = [session_with(crowded, tokens) for tokens in (LONG, *SHORT)]
    crowded.advance(sessions)
    for session in sessions:
        session.append(MORE if session is sessions[0] else [7, 8])
    return sessions


def test_no_room_fails_one_session_alone(crowded: Engine, engine: Engine) -> None:
    big, *others = sessions = _fill(crowded)
    before, used = _states(big), crowded._ledger.used
    failed = crowded.sweep(sessions)
    assert list(failed) == [big]
    error = failed[big]
    assert isinstance(error, DoesNotFit) and error.missing > 0
    for session, tokens in zip(others, SHORT, strict=True):
        assert not session.needs_work  # it went on without the other
        assert same_bits(session.logits(), alone(engine, tokens, [7, 8]))
    assert big.state.usable().position == 250 and big.waiting() == MORE
    assert [t.length for t in big.state.latents.values()] == [250, 250]
    assert all(map(torch.equal, _states(big), before))
    assert crowded._ledger.used == used  # what it got in one layer it gave back
    with pytest.raises(DoesNotFit, match=r"latent block.*in use"):
        big.logits()
    others[0].close()
    assert same_bits(big.logits(), alone(engine, LONG, MORE))


def test_no_room_ends_one_request_alone(crowded: Engine, engine: Engine) -> None:
    sessions = _fill(crowded)
    events = list(generate(crowded, [Request(s, 3, FREE) for s in sessions]))
    ends = {e.request: e for e in events if isinstance(e, Done)}
    assert [ends[i].finish_reason for i in range(3)] == ["error", "length", "length"]
    assert isinstance(ends[0].error, DoesNotFit) and ends[0].tokens == 0
    for session, tokens in zip(sessions[1:], SHORT, strict=True):
        with session_with(engine, tokens) as other:
            other.logits()
            other.append([7, 8])
            list(other.generate(3, FREE))
            assert other.tokens == session.tokens
            assert same_bits(other.logits(), session.logits())


# ---- fairness ----


def test_decode_and_a_long_prompt_both_progress(narrow: Engine) -> None:
    """They never fit into one tile, so they take turns: four sweeps of prompt among four others."""
    talk, prompt = some_tokens(5, 1), some_tokens(200, 2)
    wanted = []
    for tokens, count in ((talk, 20), (prompt, 2)):
        with session_with(narrow, tokens) as session:
            list(session.generate(count, FREE))
            wanted.append((session.tokens, session.logits()))
    first, second = session_with(narrow, talk), session_with(narrow, prompt)
    first.logits()
    sweeps: list[int] = []
    narrow.hooks.before_layer = lambda layer: sweeps.append(layer) if layer == 0 else None
    done_after, said = None, 0
    for event in generate(narrow, [Request(first, 20, FREE), Request(second, 2, FREE)]):
        if event == Prefill(1, 200, 200):
            done_after = len(sweeps)
            assert 3 <= said < 20  # the other one was not kept waiting either
        said += isinstance(event, Token) and event.request == 0
    narrow.hooks.before_layer = lambda layer: None
    assert done_after is not None and done_after <= 2 * 4
    for session, (whole, logits) in zip((first, second), wanted, strict=True):
        assert session.tokens == whole
        assert same_bits(session.logits(), logits)
        session.close()


# ---- what a call refuses ----


def _calls(engine: Engine, sessions: list[Session]) -> list[Callable[[], object]]:
    return [
        lambda: engine.advance(sessions),
        lambda: engine.sweep(sessions),
        lambda: generate(engine, [Request(s, 1) for s in sessions]),
    ]


def test_one_session_twice_is_refused(engine: Engine) -> None:
    with session_with(engine, [1, 2, 3]) as session, session_with(engine, [4]) as other:
        for call in _calls(engine, [session, other, session]):
            with pytest.raises(SessionError, match=r"twice|one session"):
                call()
        assert session.state.usable().position == other.state.usable().position == 0
        assert same_bits(session.logits(), alone(engine, [1, 2, 3]))


@pytest.mark.parametrize("computed", [False, True])
def test_a_session_of_another_engine_is_refused(
    engine: Engine, narrow: Engine, computed: bool
) -> None:
    """Even one that needs no work now."""
    with session_with(narrow, [1, 2, 3]) as theirs, session_with(engine, [4]) as ours:
        if computed:
            theirs.logits()
        for call in _calls(engine, [ours, theirs])[computed:]:
            with pytest.raises(SessionError, match="another engine"):
                call()
        assert ours.position == 0 and theirs.length == 3


def test_what_is_no_list_of_ids_is_refused(engine: Engine) -> None:
    wrong: list[Any] = [
        [1.7], [1.0], b"ab", bytearray(b"ab"), [None], ["a"], [[1, 2]], 5, None,
        np.zeros((2, 2), np.int64), np.zeros((3, 1), np.int64), np.array([1.0]), np.array(5),
    ]  # fmt: skip
    with session_with(engine, [9]) as session:
        for tokens in wrong:
            with pytest.raises(UsageError, match="no token ids"):
                session.append(tokens)
        for token in (1.7, None, "a", [1]):
            with pytest.raises(UsageError, match="no token ids"):
                session.append_sampled(token)  # type: ignore[arg-type]
        kept = session.tokens
        assert kept == (9,)
        session.append(np.array([1, 2], np.int32))  # type: ignore[arg-type]
        session.append([np.uint8(3), np.int64(4)])
        session.append(range(5, 7))
        session.append_sampled(np.argmax([0.0, 1.0]))  # type: ignore[arg-type]
        assert list(session.tokens) == [9, 1, 2, 3, 4, 5, 6, 1]
        assert all(type(token) is int for token in session.tokens)


def test_generate_refuses_at_the_call(engine: Engine) -> None:
    with session_with(engine, [9]) as session:
        for count in (0, -1):
            with pytest.raises(UsageError, match="at least one token"):
                session.generate(count)
        with pytest.raises(UsageError, match="context of 800"):
            session.generate(800)


def test_a_closed_session_stays_closed(engine: Engine) -> None:
    session = session_with(engine, [9])
    point = session.snapshot()
    session.close()
    session.close()
    uses: list[Callable[[], object]] = [
        session.reset, lambda: session.rewind(point), session.logits, session.fork,
        lambda: session.append([1]), lambda: session.generate(1),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(SessionError, match="closed"):
            use()


# ---- logits, and points right after an answer ----


def test_logits_belong_to_the_session(engine: Engine) -> None:
    with session_with(engine, some_tokens(40)) as session:
        logits = session.logits()
        kept = logits.copy()
        with pytest.raises(ValueError, match="read-only"):
            logits[0] = 1e9
        changed = session.logits().copy()
        changed[:] = 0
        assert same_bits(session.logits(), kept)
        assert same_bits(kept, logits_of(engine, some_tokens(40), keep=1)[0])
        (token, _) = session.generate(1, FREE)
        assert isinstance(token, Token) and token.token == int(kept.argmax())
        session.logits()
        assert same_bits(logits, kept)  # an array handed out is not written over


def _append_nothing(session: Session) -> Session:
    session.append([])
    session.append("")
    return session


def _rewound(session: Session) -> Session:
    point = session.snapshot()
    session.append(MORE)
    session.logits()
    session.rewind(point)
    return session


@pytest.mark.parametrize("go_on", [_append_nothing, _rewound, Session.fork])
def test_right_after_an_answer(engine: Engine, go_on: Callable[[Session], Session]) -> None:
    """The last token was sampled and is not computed yet; it must stay a decode step."""
    prompt = some_tokens(70, 6)
    with session_with(engine, prompt) as plain:
        list(plain.generate(5, FREE))
        tokens, wanted = plain.tokens, plain.logits()
    with session_with(engine, prompt) as other:
        list(other.generate(4, FREE))
        other.logits()
        other.append([tokens[-1]])  # as a prompt: other bits, or this test shows nothing
        assert other.tokens == tokens and not same_bits(other.logits(), wanted)
    with session_with(engine, prompt) as session:
        list(session.generate(5, FREE))
        other = go_on(session)
        assert other.tokens == tokens
        assert same_bits(other.logits(), wanted)
        assert list(other.generate(1, FREE))
