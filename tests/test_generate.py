"""The loop that samples: order of events, ways to end, requests side by side.

R06, R07, R23, R71, R72.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k3offload.engine import Engine
from k3offload.errors import ReadError, UsageError
from k3offload.generate import Done, Event, Prefill, Request, Token, generate
from k3offload.loading import load
from k3offload.sampling import Sampling
from k3offload.session import Session
from tests.helpers_checkpoint import shards, tiny
from tests.helpers_engine import (
    BRIEF,
    checkpoint,
    gone_on,
    greedy,
    same_bits,
    session_with,
    some_tokens,
)
from tests.helpers_golden import TRAINED

PROMPT = "And Jesus said unto him,"
FREE = Sampling(ignore_end=True)
HOT = Sampling(temperature=1.0, seed=7, ignore_end=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The embedded model: real text, so that stop strings mean something."""
    with load(TRAINED, sessions=10) as made:
        yield made


@pytest.fixture(scope="module")
def synthetic() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", sweep=64, sessions=10) as made:
        yield made


def answer(engine: Engine, sampling: Sampling = FREE, count: int = 16) -> list[Event]:
    with engine.session() as session:
        session.append(PROMPT)
        return list(session.generate(count, sampling))


def tokens_of(events: list[Event]) -> list[int]:
    return [e.token for e in events if isinstance(e, Token)]


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, Token | Done))


def end_of(events: list[Event]) -> Done:
    (done,) = (e for e in events if isinstance(e, Done))
    assert done is events[-1]
    return done


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Event]:
    """Sixteen greedy tokens that end by length."""
    return answer(engine)


def test_order_of_events(synthetic: Engine) -> None:
    """Prefill of three sweeps, tokens, and Done as the last."""
    with session_with(synthetic, some_tokens(150)) as session:
        events = list(session.generate(4, FREE))
        assert [(e.done, e.total) for e in events if isinstance(e, Prefill)] == [
            (64, 150), (128, 150), (150, 150),
        ]  # fmt: skip
        assert [type(e) for e in events] == [Prefill] * 3 + [Token] * 4 + [Done]
        assert end_of(events) == Done(0, "length", end_of(events).text, 4)
        assert session.tokens[150:] == tuple(tokens_of(events))
        again = list(session.generate(2, FREE))  # goes on where it ended
        assert [type(e) for e in again] == [Prefill, Token, Token, Done]
    assert tokens_of(events) + tokens_of(again) == _one_by_one(synthetic)


def _one_by_one(engine: Engine) -> list[int]:
    return greedy(engine, some_tokens(150), 6)


def test_length(plain: list[Event]) -> None:
    assert end_of(plain).finish_reason == "length"
    assert end_of(plain).tokens == len(tokens_of(plain)) == 16


def test_text_is_the_decoded_tokens(engine: Engine, plain: list[Event]) -> None:
    assert text_of(plain) == engine.tokenizer.decode(tokens_of(plain))
    assert len(text_of(plain)) > 16


@pytest.mark.parametrize("which", [0, 1])
def test_either_end_id_stops_r07(
    engine: Engine, plain: list[Event], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two end ids, of which the model happens to choose one: not in the text, not counted."""
    greedy_tokens = tokens_of(plain)
    at = next(i for i in range(3, 16) if greedy_tokens[i] not in greedy_tokens[:i])
    ends = [greedy_tokens[at], engine.spec.vocab - 1]
    monkeypatch.setattr(engine.tokenizer, "end_ids", frozenset(ends[which:] + ends[:which]))
    events = answer(engine, Sampling())
    assert end_of(events).finish_reason == "stop"
    assert tokens_of(events) == greedy_tokens[:at]
    assert end_of(events).tokens == at
    assert text_of(events) == engine.tokenizer.decode(greedy_tokens[:at])
    assert tokens_of(answer(engine)) == greedy_tokens  # with ignore_end it goes on


def test_every_declared_end_id_is_one_r07(synthetic: Engine) -> None:
    """The config's and the tokenizer's: the union of all sources."""
    assert set(synthetic.spec.eos) <= synthetic.tokenizer.end_ids
    assert len(synthetic.tokenizer.end_ids) >= 2


@pytest.mark.parametrize("size", [1, 2, 7])
def test_stop_strings_r23(engine: Engine, plain: list[Event], size: int) -> None:
    """Any piece of the text, over all token edges: the answer ends right before it."""
    text = text_of(plain)
    for begin in range(4, len(text) - size, 13):
        stop = text[begin : begin + size]
        events = answer(engine, Sampling(stop=(stop, "never said"), ignore_end=True))
        assert text_of(events) == text[: text.index(stop)]
        assert end_of(events).finish_reason == "stop"
        known = engine.tokenizer.decode(tokens_of(events)[:-1])
        assert stop not in known  # no step more than needed


@pytest.mark.parametrize("sampling", [FREE, HOT], ids=["greedy", "drawn"])
def test_an_answer_gone_on_with_stops_over_the_border_r23(
    engine: Engine, sampling: Sampling
) -> None:
    """Left after any number of tokens, it ends where it would have: before a stop string that
    began before that, too."""
    text, over = text_of(answer(engine, sampling)), 0
    for begin in range(4, len(text) - 9, 11):
        stopping = replace(sampling, stop=(text[begin : begin + 9], "never said"))
        whole = answer(engine, stopping)
        assert end_of(whole).finish_reason == "stop"
        tokens = tokens_of(whole)
        for left in range(1, len(tokens)):
            said, events = gone_on(engine, PROMPT, stopping, 16, left)
            assert said + text_of(events) == text_of(whole)
            assert tokens[:left] + tokens_of(events) == tokens
            assert end_of(events).finish_reason == "stop"
            assert end_of(events).tokens == len(tokens)
            over += len(said) < len(engine.tokenizer.decode(tokens[:left]))
    assert over > 5  # how often the stop string had begun


def test_a_stop_string_that_never_comes_holds_nothing_back(
    engine: Engine, plain: list[Event]
) -> None:
    text = text_of(plain)
    events = answer(engine, Sampling(stop=(text[-3:] + "\x00",), ignore_end=True))
    assert text_of(events) == text
    assert end_of(events).finish_reason == "length"
    assert end_of(events).text == text[-3:]


def test_seeds_r71(engine: Engine) -> None:
    first = tokens_of(answer(engine, HOT, 8))
    assert tokens_of(answer(engine, HOT, 8)) == first
    other = Sampling(temperature=1.0, seed=8, ignore_end=True)
    assert tokens_of(answer(engine, other, 8)) != first
    cold = Sampling(temperature=1.0, top_k=1, seed=8, ignore_end=True)
    assert tokens_of(answer(engine, cold, 8)) == tokens_of(answer(engine, FREE, 8))


def _together(engine: Engine, requests: list[Request]) -> list[list[Event]]:
    events = list(generate(engine, requests))
    return [[e for e in events if e.request == i] for i in range(len(requests))]


def test_requests_together_equal_each_alone_r72(synthetic: Engine) -> None:
    """Greedy and sampled, long and short, ending at different steps: same tokens, same bits."""
    prompts = [some_tokens(n, n) for n in (150, 3, 64, 90)]
    kinds = [FREE, HOT, Sampling(temperature=0.7, top_p=0.9, seed=3, ignore_end=True), FREE]
    counts = [3, 6, 4, 1]
    alone, last = [], []
    for prompt, kind, count in zip(prompts, kinds, counts, strict=True):
        with session_with(synthetic, prompt) as session:
            alone.append(tokens_of(list(session.generate(count, kind))))
            last.append(session.logits())
    sessions = [session_with(synthetic, prompt) for prompt in prompts]
    found = _together(synthetic, [
        Request(*r) for r in zip(sessions, counts, kinds, strict=True)
    ])  # fmt: skip
    for i, events in enumerate(found):
        assert tokens_of(events) == alone[i]
        assert end_of(events).finish_reason == "length"
        assert same_bits(sessions[i].logits(), last[i])
        sessions[i].close()


def test_eight_equal_requests_r72(synthetic: Engine) -> None:
    sessions = [session_with(synthetic, some_tokens(70)) for _ in range(8)]
    found = _together(synthetic, [Request(s, 4, FREE) for s in sessions])
    for events in found:
        assert tokens_of(events) == tokens_of(found[0])
        assert len(tokens_of(events)) == 4
    rows = [session.logits() for session in sessions]
    for session, row in zip(sessions, rows, strict=True):
        assert same_bits(row, rows[0])
        session.close()
    with session_with(synthetic, some_tokens(70)) as alone:
        assert tokens_of(list(alone.generate(4, FREE))) == tokens_of(found[0])


def test_a_prompt_computed_before_needs_no_prefill(synthetic: Engine) -> None:
    with session_with(synthetic, some_tokens(70)) as session:
        session.logits()
        before = synthetic.counts()["trunk"].requests
        events = list(session.generate(1, FREE))
        assert [type(e) for e in events] == [Token, Done]
        assert synthetic.counts()["trunk"].requests == before


def test_wrong_requests_are_refused_before_any_work(synthetic: Engine) -> None:
    before = synthetic.counts()["trunk"].requests
    with synthetic.session() as session:
        with pytest.raises(UsageError, match="no tokens"):
            list(session.generate(1))
        session.append([1])
        for count in (0, -1):
            with pytest.raises(UsageError, match=f"max_new_tokens is {count}"):
                list(session.generate(count))
        with pytest.raises(UsageError, match="context of 4,096"):
            list(session.generate(4096))
    assert synthetic.counts()["trunk"].requests == before


def test_a_generator_left_early_leaves_a_usable_session(synthetic: Engine) -> None:
    """What was sampled belongs to the timeline; the next answer goes on from there."""
    with session_with(synthetic, some_tokens(150)) as session:
        for seen, event in enumerate(session.generate(6, FREE)):
            if isinstance(event, Token) and seen >= 4:
                break
        made = len(session.tokens) - 150
        rest = tokens_of(list(session.generate(6 - made, FREE)))
        assert [*session.tokens[150:]] == _one_by_one(synthetic)
        assert len(rest) == 6 - made > 0


def test_a_shard_shortened_while_running_r06(tmp_path: Path) -> None:
    """The request fails with the file's name; no token is made of what was not read."""
    folder = tiny(tmp_path / "m", **BRIEF)
    with load(folder, cache=20_000) as engine, session_with(engine, some_tokens(5)) as session:
        events = session.generate(50, FREE)
        seen: list[Event] = [next(events), next(events)]
        shard = shards(folder)[2]
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size // 2)
        seen.extend(events)
        done = seen[-1]
        assert isinstance(done, Done) and done.finish_reason == "error"
        assert isinstance(done.error, ReadError) and shard.name in str(done.error)
        assert len(tokens_of(seen)) <= 1
        _usable_again(engine, session)


def _usable_again(engine: Engine, session: Session) -> None:
    session.reset()
    assert session.position == 0
    with engine.session() as other:
        assert other.tokens == ()
