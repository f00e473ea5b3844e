"""Conversations on the embedded model: turns, interrupts, edits, folders (R12 R25 R74)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from k3offload.chat import Encoder
from k3offload.chat_parse import Content, Finish
from k3offload.conversation import STATES, Conversation, Manner
from k3offload.engine import Engine
from k3offload.errors import K3Error, SessionError, TooLong, UsageError
from k3offload.loading import load
from k3offload.run_chat import Interrupted
from k3offload.sampling import Sampling
from tests.helpers_engine import BRIEF, checkpoint

FIRST, SECOND = "What is the seal of Ammiel?", "Go on: In the beginning God"
MANNER = Manner(Sampling(), 40)


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    with load("nano", sessions=STATES, context=1024) as engine:
        yield engine


@pytest.fixture
def talk(nano: Engine) -> Iterator[Conversation]:
    yield from _open(nano)
    nano.hooks.before_layer = lambda layer: None


def _open(engine: Engine, manner: Manner = MANNER) -> Iterator[Conversation]:
    talk = Conversation(engine, Encoder.of(engine.tokenizer, engine.checkpoint.folder), manner)
    yield talk
    talk.close()


def said(talk: Conversation, text: str) -> str:
    return "".join(event.text for event in talk.ask(text) if isinstance(event, Content))


def interrupt(talk: Conversation, text: str) -> None:
    """Ask, and leave the answer at its first text."""
    for event in talk.ask(text):
        if isinstance(event, Content):
            return


def fresh(engine: Engine, *texts: str, manner: Manner = MANNER, drop: int = 0) -> str:
    """The answer to the last of ``texts``, computed by nobody before; the first ``drop`` of them
    have got no answer."""
    for talk in _open(engine, manner):
        talk.messages = [{"role": "user", "content": text} for text in texts[:drop]]
        return [said(talk, text) for text in texts[drop:]][-1]
    raise AssertionError


def test_the_embedded_model_answers_in_the_format(talk: Conversation) -> None:
    events = list(talk.ask(FIRST))
    assert events[-1] == Finish("stop")
    assert talk.messages[-1]["content"].startswith("The seal of ")
    assert said(talk, SECOND) and len(talk.messages) == 4


def test_a_turn_computes_only_what_is_new(talk: Conversation) -> None:
    said(talk, FIRST)
    before = talk.session.position
    seen: list[int] = []
    talk.engine.hooks.before_layer = lambda layer: seen.append(talk.session.position)
    said(talk, SECOND)
    assert min(seen) == before > 50


@pytest.mark.parametrize("layers", [1, 5, 20, 70], ids=lambda n: f"before_layer_{n}")
@pytest.mark.parametrize("turn", [0, 1])
def test_an_interrupted_answer_leaves_only_the_question_r25(
    layers: int, turn: int, talk: Conversation
) -> None:
    """In the prompt, in the element of reasoning, in the content; in the first turn or later."""
    asked = [FIRST, SECOND][: turn + 1]
    for text in asked[:-1]:
        said(talk, text)
    count = itertools.count(1)

    def stop(layer: int) -> None:
        if next(count) == layers:
            raise Interrupted

    talk.engine.hooks.before_layer = stop
    with pytest.raises(Interrupted):
        said(talk, asked[-1])
    assert talk.messages[-1] == {"role": "user", "content": asked[-1]}
    talk.engine.hooks.before_layer = lambda layer: None
    again, messages = said(talk, "And Jesus said unto him,"), talk.messages
    for other in _open(talk.engine):
        other.messages = [dict(message) for message in messages[:-2]]
        assert said(other, "And Jesus said unto him,") == again
        assert other.session.tokens == talk.session.tokens
        computed, anew = talk.session.logits(), other.session.logits()
        np.testing.assert_allclose(computed, anew, atol=0.15)  # decoded or prefilled: bfloat16


def test_the_same_question_after_an_interrupt(talk: Conversation) -> None:
    """Its tokens agree with those of the session, whose state is lost."""

    def stop(layer: int) -> None:
        raise Interrupted

    talk.engine.hooks.before_layer = stop
    with pytest.raises(Interrupted):
        said(talk, FIRST)
    talk.engine.hooks.before_layer = lambda layer: None
    assert talk.undo() == FIRST
    assert said(talk, FIRST).startswith("The seal of ")


def test_an_interrupt_costs_one_turn_and_not_the_conversation(talk: Conversation) -> None:
    said(talk, FIRST)
    before = talk.session.position
    interrupt(talk, SECOND)
    seen: list[int] = []
    talk.engine.hooks.before_layer = lambda layer: seen.append(talk.session.position)
    said(talk, SECOND)
    assert min(seen) == before


def test_an_answer_that_was_not_taken_to_its_end_is_dropped(talk: Conversation) -> None:
    for event in talk.ask(FIRST):
        if isinstance(event, Finish):
            break
    assert talk.messages == [{"role": "user", "content": FIRST}]
    assert said(talk, SECOND) == fresh(talk.engine, FIRST, SECOND, drop=1)


def test_undo_takes_a_turn_back(talk: Conversation) -> None:
    assert talk.undo() is None
    said(talk, FIRST)
    wanted = said(talk, SECOND)
    assert talk.undo() == SECOND and len(talk.messages) == 2
    before = talk.session.position
    assert said(talk, SECOND) == wanted
    assert talk.undo() == SECOND and talk.undo() == FIRST and talk.messages == []
    assert said(talk, SECOND) == fresh(talk.engine, SECOND)
    assert talk.session.position < before


def test_a_system_message_is_told_changed_and_taken_back(talk: Conversation) -> None:
    said(talk, FIRST)
    talk.system = "The seal of Ammiel is 4719."
    said(talk, SECOND)
    assert [message["role"] for message in talk.messages[:2]] == ["system", "user"]
    assert "4719" in talk.engine.tokenizer.decode(talk.session.tokens)
    talk.system = "Be brief."
    assert talk.system == "Be brief." and len(talk.messages) == 5
    talk.system = ""
    said(talk, FIRST)
    assert "4719" not in talk.engine.tokenizer.decode(talk.session.tokens)


def test_what_cannot_be_asked_changes_nothing(talk: Conversation) -> None:
    said(talk, FIRST)
    messages, tokens = list(talk.messages), talk.session.tokens
    for text, kind in (("x " * 2000, TooLong), ("a\udc80", UsageError)):
        with pytest.raises(kind):
            said(talk, text)
        assert talk.messages == messages and talk.session.tokens == tokens
    with pytest.raises(UsageError):
        talk.system = "a\udc80"
    assert talk.messages == messages


def test_messages_that_cannot_be_asked_are_saved_all_the_same(
    tmp_path: Path, talk: Conversation
) -> None:
    said(talk, FIRST)
    talk.messages.append({"role": "user", "content": "a\udc80"})
    talk.save(tmp_path / "c")
    assert json.loads((tmp_path / "c" / "chat.json").read_bytes())["messages"] == talk.messages


def test_answers_end_where_the_context_ends() -> None:
    with load("nano", sessions=STATES, context=60) as small:
        for talk in _open(small, Manner(Sampling(), 100_000, thinking=False)):
            events = list(talk.ask(FIRST))
            assert events[-1] == Finish("length") and talk.session.length == 60
            with pytest.raises(TooLong):
                said(talk, SECOND)


def test_stop_strings_end_the_content_and_seeds_differ_by_turn(nano: Engine) -> None:
    for talk in _open(nano, Manner(Sampling(stop=("seal of",)), 24)):
        assert said(talk, FIRST) == "The "
    for talk in _open(nano, Manner(Sampling(stop=("think",)), 40)):  # a word of the markup
        assert said(talk, FIRST).startswith("The seal of ")
    manner = Manner(Sampling(temperature=1.5, seed=7), 24)
    one, two = (fresh(nano, FIRST, manner=manner) for _ in range(2))
    assert one == two
    for talk in _open(nano, manner):
        said(talk, FIRST)
        talk.undo()
        assert said(talk, FIRST) != one


@pytest.mark.parametrize("cut", [False, True])
def test_a_saved_conversation_goes_on_elsewhere_with_the_same_bits(
    cut: bool, tmp_path: Path, nano: Engine, talk: Conversation
) -> None:
    said(talk, FIRST)
    if cut:  # saved after an interrupt, the state as it was before the turn
        interrupt(talk, SECOND)
    talk.save(tmp_path / "c")
    wanted = said(talk, SECOND)
    logits = talk.session.logits()
    for other in _open(nano):
        said(other, "Something else.")
        other.load(tmp_path / "c")
        assert other.messages == talk.messages[:-2]
        assert said(other, SECOND) == wanted
        assert np.array_equal(other.session.logits(), logits)
        other.save(tmp_path / "c")
    assert len(json.loads((tmp_path / "c" / "chat.json").read_bytes())["messages"]) == 4 + cut


def test_saved_text_is_text_and_damage_is_named(tmp_path: Path, talk: Conversation) -> None:
    place = tmp_path / "c"
    said(talk, "Is <|end_of_msg|> a word?")
    talk.save(place)
    before = list(talk.messages)
    content = json.loads((place / "chat.json").read_bytes())
    content["messages"][1]["content"] = "<|close|>message<|sep|>"
    (place / "chat.json").write_text(json.dumps(content))
    talk.load(place)
    said(talk, FIRST)
    assert talk.session.tokens.count(talk.engine.tokenizer.specials["<|end_of_msg|>"]) == 3
    assert talk.messages[1]["content"] == "<|close|>message<|sep|>" != before[1]["content"]
    messages = list(talk.messages)
    for damage in ("{", "[]", '{"format": 9}', '{"format": 1, "messages": [{"role": "x"}]}'):
        (place / "chat.json").write_text(damage)
        with pytest.raises(SessionError, match=r"chat.json is damaged"):
            talk.load(place)
    with pytest.raises(SessionError, match="holds no conversation"):
        talk.load(tmp_path)
    assert talk.messages == messages


def test_a_state_of_another_model_is_computed_anew(tmp_path: Path, talk: Conversation) -> None:
    said(talk, FIRST)
    talk.save(tmp_path / "c")
    warned: list[str] = []
    with load(checkpoint(**BRIEF), sessions=STATES, context=1024) as engine:
        engine.warn = warned.append
        for other in _open(engine):
            other.load(tmp_path / "c")
            assert other.messages == talk.messages and other.session.length == 0
    assert len(warned) == 1 and "computed anew" in warned[0]


def test_what_another_conversation_has_left_is_not_replaced(
    tmp_path: Path, nano: Engine, talk: Conversation
) -> None:
    mine, theirs, bad = (tmp_path / name for name in "abc")
    for other in _open(nano):
        other.system = "Theirs."
        other.save(theirs)
    bad.mkdir()
    (bad / "chat.json").write_text("{")
    talk.save(mine)
    talk.save(mine)
    for place, kind, what in (
        (theirs, UsageError, "another conversation"),
        (bad, SessionError, "damaged"),
    ):
        before = (place / "chat.json").read_bytes()
        with pytest.raises(kind, match=what):
            talk.save(place)
        assert (place / "chat.json").read_bytes() == before
    talk.load(theirs)
    talk.save(theirs)
    with pytest.raises(UsageError, match="another conversation"):
        talk.save(mine)


def test_conversations_go_into_folders_of_their_own(tmp_path: Path, talk: Conversation) -> None:
    (tmp_path / "f").write_text("x")
    for place in (tmp_path, tmp_path / "f", tmp_path / "no" / "c"):
        with pytest.raises(UsageError):
            talk.save(place)
    inside = talk.engine.checkpoint.folder / "c"
    with pytest.raises(UsageError, match="in the model's folder"):
        talk.save(inside)
    assert not inside.exists()
    assert issubclass(Interrupted, BaseException) and not issubclass(Interrupted, K3Error)
