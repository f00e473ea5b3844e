"""Answers to reasoning, content and calls, however they are cut (R09 R10 R23 R39 R73)."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload.chat_format import TAGS
from k3offload.chat_parse import Answer, Content, Finish, Parser, Reasoning, parse
from k3offload.errors import TokenizerError
from tests.helpers_chat import ASSISTANT, CLOSE, END, OPEN, SEP, TOKENIZER, encoder

MARKS = {"«": OPEN, "§": CLOSE, "»": SEP, "■": END}


def script(text: str) -> list[int]:
    """``«think»`` opens, ``§think»`` closes, ``■`` ends the message; ``¦`` is an edge of tokens."""
    ids: list[int] = []
    for part in re.split("([«§»■])|¦", text):
        ids += [MARKS[part]] if part in MARKS else TOKENIZER.encode(part or "")
    return ids


def fields(answer: Answer) -> tuple[Any, ...]:
    return answer.reasoning, answer.content, answer.calls, answer.finish_reason


def fed(ids: list[int], cuts: Iterable[int], reason: str, thinking: bool, *stop: str) -> Answer:
    """The answer from pieces of ``ids`` that are ``cuts`` tokens long."""
    parser, answer, at = Parser(TOKENIZER, thinking, stop), Answer(), 0
    for cut in cuts:
        answer.add(parser.feed(ids[at : at + cut]))
        at += cut
    answer.add(parser.feed(ids[at:]))
    answer.add(parser.end(reason))
    return answer


CALL = '«tools»«call tool="f" index="1"»'
#: What a model emits, and reasoning, content and calls that it means.
WHOLE: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "as trained": ("Hm.§think»«response»Yes.§response»§message»■", "Hm.", "Yes.", []),
    "nothing thought": ("§think»«response»Yes.§response»§message»■", "", "Yes.", []),
    "blanks in the tags": ("Hm.§ think »« response »Yes.§ response »■", "Hm.", "Yes.", []),
    "tag names in many tokens": ("Hm.§th¦in¦k»«r¦es¦pon¦se»Yes.§respo¦nse»■", "Hm.", "Yes.", []),
    "thoughts are not closed": ("Hm.«response»Yes.■", "Hm.", "Yes.", []),
    "thoughts skipped": ("«response»Yes.§response»■", "", "Yes.", []),
    "no separators": ("Hm.§think«response»Yes.§response§message■", "Hm.", "Yes.", []),
    "answer not opened": ("Hm.§think»\n\nYes.§response»■", "Hm.", "Yes.", []),
    "only thoughts": ("Hm.■", "Hm.", "", []),
    "thoughts again": ("A§think»«response»B§response»«think»C§think»«response»D■", "AC", "BD", []),
    "closes what is not open": ("Hm.§response» So.§think»«response»Yes.■", "Hm. So.", "Yes.", []),
    "separators of nothing": ("Hm.»»§think»»«response»Y»es.■", "Hm.", "Yes.", []),
    "unknown elements": ("Hm.§think»«response»a«bold»b§bold»c■", "Hm.", "aboldbboldc", []),
    "a marker, then text": ("Hm.§think»«response»a§ Amen■", "Hm.", "a Amen", []),
    "goes on after its end": ("§think»«response»Yes.■«message role=\"user\"»No?", "", "Yes.", []),
    "writes the user's turn": ('§think»«response»Yes.«message role="user"»No?', "", "Yes.", []),
    "begins anew": ('«message role="assistant"»«think»Hm.«response»Yes.', "Hm.", "Yes.", []),
    "begins anew, bare": ('Hm.«message role="assistant"»Yes.', "Hm.", "Yes.", []),
    "markers in letters": ("§think»«response»<|close|>response<|sep|>■", "",
                           "<|close|>response<|sep|>", []),
    "one call": (f'Hm.§think»«response»§response»{CALL}«argument key="a" type="string"»x "y"\n'
                 "§argument»§call»§tools»§message»■", "Hm.", "", [("f", '{"a": "x \\"y\\"\\n"}')]),
    "every type": (f'§think»{CALL}«argument key="n" type="number"» -1.50 §argument»'
                   '«argument key="t" type="boolean"»true§argument»'
                   '«argument key="o" type="object"»{"b": [1, null]}§argument»'
                   '«argument key="z" type="null"»null§argument»'
                   '«argument key="l" type="array"»[]§argument»§call»', "", "", [
                       ("f", '{"n": -1.50, "t": true, "o": {"b": [1, null]}, "z": null, "l": []}')
                   ]),
    "wrong types": (f'§think»{CALL}«argument key="n" type="number"»one§argument»'
                    '«argument key="t" type="boolean"»True§argument»«argument key="x" '
                    'type="number"»NaN§argument»«argument key="y"»y§argument»§call»', "", "",
                    [("f", '{"n": "one", "t": "True", "x": "NaN", "y": "y"}')]),
    "nothing closed": (f'§think»«response»So:{CALL}«argument key="a" type="string"»x'
                       '«argument key="b" type="number"»1«call tool="g&quot;&amp;h" index="2"»', "",
                       "So:", [("f", '{"a": "x", "b": 1}'), ("g\"&h", "{}")]),
    "calls without their frame": ('§think»«call tool="f"»§call»«call tool="g"»§call»', "", "",
                                  [("f", "{}"), ("g", "{}")]),
    "no JSON": (f'§think»{CALL}«json type="object"»{{"a": 1§json»§call»', "", "",
                [("f", '{"a": 1')]),
    "bare JSON": (f'§think»{CALL}\n {{"a": 1}}§call»§tools»', "", "", [("f", '{"a": 1}')]),
    "JSON behind arguments": (f'§think»{CALL}«argument key="a"»x«json»{{"b": 1}}§json»§call»', "",
                              "", [("f", '{"a": "x"}')]),
    "an argument behind JSON": (f'§think»{CALL}«json»{{"a":1}}§json»«argument key="b"»2§argument»'
                                '§call»', "", "", [("f", '{"a":1}')]),
    "JSON twice": (f'§think»{CALL}«json»{{"a":1}}§json»«json»{{}}§json» {{"b": 2}}§call»', "", "",
                   [("f", '{"a":1}')]),
    "calls of no tool": ('§think»«response»Yes.§response»«tools»«call»«argument key="a"»x§argument»'
                         '§call»«call tool=""»{"a": 1}§call»§tools»■', "", "Yes.", []),
    "calls of no tool and of one": ('§think»«call index="1"»«json»{"a": 1}§json»§call»'
                                    '«call tool="f"»§call»', "", "", [("f", "{}")]),
    "closes what is no call": ("Hm.§call» So.§think»«response»a §call»b§tools» c■", "Hm. So.",
                               "a b c", []),
    "ends within a tag": (f'§think»{CALL}§call»«call tool="g"', "", "", [("f", "{}"), ("g", "{}")]),
    "text between calls": (f'§think»«response»Yes.§response»{CALL}§call» so §tools»', "", "Yes.",
                           [("f", "{}")]),
    "an argument of no call": ('§think»«response»Yes.«argument key="a"»x', "", "Yes.", []),
    "answer after calls": (f"§think»{CALL}§call»§tools»«response»Yes.", "", "Yes.", [("f", "{}")]),
    "many bytes": ("🜁道§think»«response»é🜁§response»", "🜁道", "é🜁", []),
}  # fmt: skip


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def cuttings(count: int) -> Iterable[list[int]]:
    """All ways to cut into pieces of 1 to 4, or many of them."""
    if count <= 9:
        for last in range(1, count + 1):
            yield from (list(c) for c in itertools.product(range(1, 5), repeat=last)
                        if sum(c) == count)  # fmt: skip
        return
    for size, first in itertools.product(range(1, 5), repeat=2):
        yield [first, *[size] * count]
    draw = random.Random(count)
    for _ in range(40):
        yield [draw.randint(1, 4) for _ in range(count)]


@pytest.mark.parametrize("name", WHOLE)
def test_what_models_emit_however_it_is_cut(name: str) -> None:
    text, reasoning, content, calls = WHOLE[name]
    ids = script(text)
    reason = "tool_calls" if calls else "stop"
    assert fields(parse(TOKENIZER, ids)) == (reasoning, content, calls, reason)
    for cuts in cuttings(len(ids)):
        assert fields(fed(ids, cuts, "stop", True)) == (reasoning, content, calls, reason)


def test_blanks_before_what_was_not_opened_are_left_out_however_they_are_tokens() -> None:
    """Also where a stop string begins with one."""
    single = {TOKENIZER.token_bytes(i): i for i in range(256)}
    (one,) = TOKENIZER.encode(" and")
    four = [single[bytes([byte])] for byte in b" and"]
    assert one not in four
    for tokens in ([one], four):
        for more, content in (([], "and"), ([one], "and"), (four, "and")):
            ids = [*script("Hm.§think»"), *tokens, *more]
            answer = fed(ids, [1] * len(ids), "stop", True, " and")
            assert answer.content == content
        ids = [*script(f"§think»{CALL}"), *tokens, *script("§call»")]
        assert parse(TOKENIZER, ids).calls == [("f", "and")]


def test_thinking_off_begins_with_the_answer() -> None:
    for text, reasoning, content in [
        ("Yes.§response»§message»■", "", "Yes."),
        ("«think»Hm.§think»«response»Yes.■", "Hm.", "Yes."),
        ("Yes.", "", "Yes."),
        ("Hm.§think»«response»Yes.■", "", "Hm.Yes."),
    ]:
        ids = script(text)
        for cuts in cuttings(len(ids)):
            answer = fed(ids, cuts, "stop", False)
            assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize("name", ["as trained", "one call", "every type", "no JSON", "many bytes"])
def test_an_answer_that_is_cut_off_anywhere(name: str) -> None:
    """Every beginning gives beginnings of all fields, in one way, and never a marker (R39)."""
    text, reasoning, content, calls = WHOLE[name]
    ids = script(text)
    for count in range(len(ids)):
        answer = parse(TOKENIZER, ids[:count], "length")
        assert fields(answer) == fields(fed(ids[:count], [1] * count, "length", True))
        assert answer.finish_reason == "length"
        assert reasoning.startswith(answer.reasoning.rstrip("\ufffd"))
        assert content.startswith(answer.content.rstrip("\ufffd"))
        for made, whole in zip(answer.calls, calls, strict=False):
            assert made[0] == whole[0] and whole[1].startswith(made[1])
            assert made == whole or not is_json(made[1])
        assert len(answer.calls) <= len(calls)


def test_cut_off_at_the_edges_of_thinking() -> None:
    for text in ["Hm.", "Hm.§", "Hm.§thi", "Hm.§think", "Hm.§think»", "Hm.§think»«respon"]:
        answer = parse(TOKENIZER, script(text), "length")
        assert fields(answer) == ("Hm.", "", [], "length")


def test_characters_in_pieces_come_whole_and_broken_ones_once() -> None:
    raw = [TOKENIZER.encode(c)[0] for c in "a"] + list("道🜁é".encode())
    single = {TOKENIZER.token_bytes(i): i for i in range(256)}
    ids = [raw[0], *(single[bytes([b])] for b in raw[1:])]
    parser, seen = Parser(TOKENIZER), []
    for token in ids:
        seen += [e.text for e in parser.feed([token]) if isinstance(e, Reasoning)]
    assert seen == ["a", "道", "🜁", "é"]
    broken = [single[b"\xe9"], *script("§think»«response»"), single[b"\x81"], *script("x")]
    answer = parse(TOKENIZER, broken)
    assert (answer.reasoning, answer.content) == ("\ufffd", "\ufffdx")
    argument = [*script(f'§think»{CALL}«argument key="a"»x'), single[b"\xc3"]]
    answer = parse(TOKENIZER, [*argument, *script('«argument key="b"»'), single[b"\xa9"]])
    assert answer.calls == [("f", '{"a": "x\ufffd", "b": "\ufffd"}')]


def test_special_tokens_that_are_no_markers_are_passed_over() -> None:
    pad = TOKENIZER.specials["[PAD]"]
    ids = [i for token in script("Hm.§think»«response»Yes.") for i in (pad, token)]
    assert fields(parse(TOKENIZER, ids)) == ("Hm.", "Yes.", [], "stop")


@pytest.mark.parametrize("stop", ["two words", "\nX:", "w"])
def test_stop_strings_end_the_content_alone(stop: str) -> None:
    """Not the thoughts, and the same for every cut (R23)."""
    text = f"I think {stop} of it.§think»«response»A t¦wo¦ tow. {stop}, more§response»{CALL}§call»"
    ids = script(text)
    whole = "A two tow. " + stop
    wanted = whole[: whole.index(stop)]
    for cuts in cuttings(len(ids)):
        answer = fed(ids, cuts, "stop", True, stop)
        assert fields(answer) == (f"I think {stop} of it.", wanted, [], "stop")
    parser, used = Parser(TOKENIZER, stop=[stop]), 0
    while not parser.done:
        parser.feed(ids[used : used + 1])
        used += 1
    assert stop in TOKENIZER.decode(ids[:used]) and used < len(ids)


def test_content_is_given_out_at_once_and_events_say_what_happens() -> None:
    parser = Parser(TOKENIZER)
    for token in script("A b c"):
        assert parser.feed([token]) == [Reasoning(TOKENIZER.decode([token]))]
    assert parser.feed(script("§think»«response»")) == []
    assert parser.feed(TOKENIZER.encode("x")) == [Content("x")]
    assert not parser.done
    assert parser.feed(script("§response»§message»")) == [] and parser.done
    assert parser.end("stop") == [Finish("stop")]


def test_a_string_argument_streams() -> None:
    parser = Parser(TOKENIZER)
    parser.feed(script(f'§think»{CALL}«argument key="a" type="string"»'))
    for token in script('some "long text'):
        assert parser.feed([token])


def test_a_tag_that_never_ends_is_text_after_a_while() -> None:
    head = script('§think»«response»a«call tool="')
    more = TOKENIZER.encode("And he said. " * 400)
    answer = parse(TOKENIZER, head + more, "length")
    assert answer.content.startswith('acall tool="And') and len(answer.content) > 5000


def test_ids_of_no_vocabulary_are_refused() -> None:
    with pytest.raises(TokenizerError, match="2304"):
        Parser(TOKENIZER).feed([2304])


PIECES = [*TAGS, " ", "\n", "x", "th", ' key="a"', ' type="number"', ' tool="f"', ' role="user"']
PIECES += ['="', '"', "1", "{", "}"]
SOUP = st.lists(
    st.one_of(
        st.sampled_from(list(MARKS.values())),
        st.sampled_from(PIECES).map(TOKENIZER.encode),
        st.integers(0, 2303),
    ).map(lambda piece: piece if isinstance(piece, list) else [piece]),
    max_size=40,
).map(lambda pieces: [*itertools.chain(*pieces)])


@settings(max_examples=300)
@given(ids=SOUP, cuts=st.lists(st.integers(1, 4)), reason=st.sampled_from(["stop", "length"]))
def test_any_soup_of_tokens_is_read_alike_whole_and_in_pieces(
    ids: list[int], cuts: list[int], reason: str
) -> None:
    whole = parse(TOKENIZER, ids, reason)
    assert fields(fed(ids, cuts, reason, True)) == fields(whole)
    texts = [whole.reasoning, whole.content, *itertools.chain(*whole.calls)]
    assert not any(name in text for text in texts for name in TOKENIZER.specials if len(name) > 6)


@settings(max_examples=200)
@given(said=ASSISTANT, thinking=st.booleans())
def test_what_is_encoded_is_read_back(said: list[dict[str, Any]], thinking: bool) -> None:
    """The same reasoning, content and calls, token by token, behind the generation prompt."""
    plain, user, message = encoder(), {"role": "user", "content": "?"}, said[0]
    prompt = plain.encode([user], thinking=thinking)
    whole = plain.encode([user, message], thinking=thinking, generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    answer = fed(whole[len(prompt) :], [1] * len(whole), "stop", thinking)
    reasoning = message["reasoning_content"] if thinking else ""
    assert answer.reasoning == (reasoning if reasoning.strip() else "")
    assert answer.content == (message["content"] or "")
    given_calls = [call["function"] for call in message["tool_calls"]]
    assert [name for name, _ in answer.calls] == [call["name"] for call in given_calls]
    for (_, text), call in zip(answer.calls, given_calls, strict=True):
        assert (text if isinstance(call["arguments"], str) else json.loads(text)) == call[
            "arguments"
        ]
    again = plain.encode([user, answer.message()], thinking=thinking, generation_prompt=False)
    assert again == whole


@pytest.mark.parametrize(
    "called",
    [
        '«argument key="a" type="object"»{"b": "\\ud800"}§argument»',
        '«argument key="a" type="array"»[{"\\udfff": 1}]§argument»',
        '«json»{"a": "x\\ud800"}§json»',
    ],
)
def test_arguments_that_spell_half_a_character_can_be_told_again(called: str) -> None:
    said = parse(TOKENIZER, script(f"§think»{CALL}{called}§call»"))
    messages = [{"role": "user", "content": "?"}, said.message()]
    ids = encoder().encode(messages, generation_prompt=False)
    assert "\\ud" in said.calls[0][1]
    assert parse(TOKENIZER, ids[len(encoder().encode(messages[:1])) :]).calls == said.calls


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1e999}', '{"a": NaN}', "null", '"x"'])
def test_arguments_that_are_no_object_come_back_as_they_were(text: str) -> None:
    calls = [{"function": {"name": "f", "arguments": text}}]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    ids = encoder().encode(said, generation_prompt=False)
    assert parse(TOKENIZER, ids[len(encoder().encode(said[:1])) :]).calls == [("f", text)]
