"""The server: answers whole and streamed, fields, limits (R04 R07 R10 R23 R38 R39 R71 R73)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from k3offload.chat_parse import Parser
from k3offload.engine import Engine
from k3offload.loading import load
from k3offload.sampling import Sampling
from k3offload.serve_ask import Served
from k3offload.serve_chat import ChatWriter
from k3offload.serve_job import Ask, Ended, Step
from k3offload.serve_schema import ChatRequest
from k3offload.serve_settings import Settings
from tests.helpers_chat import BASE, END, TOKENIZER
from tests.helpers_serve import (
    Server,
    chat_body,
    chatting,
    put_together,
    taken_apart,
)
from tests.test_chat_parse import CALL, script

LIMIT = 512  #: tokens of the context
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(chatting(), sessions=3, context=LIMIT, prefix_cache="4M") as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, body=1 << 20, max_new_tokens=20) as server:
        yield server


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    with load(chatting(), sessions=3, context=LIMIT) as engine, Server(engine, True) as server:
        yield server


def error(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    told: dict[str, Any] = response.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    return told


# ---- streams and wholes ----


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"seed": 3, "temperature": 2.0, "n": 3, "logprobs": True, "top_logprobs": 2},
        {"thinking": {"type": "disabled"}, "stop": [" of", "x"]},
        {"max_tokens": 1},
        {"tools": [TOOL], "tool_choice": "required", "temperature": 0.8, "seed": 1},
        {"response_format": FORMAT, "max_tokens": 60, "temperature": 1.0, "seed": 2},
    ],
    ids=str,
)
def test_a_stream_is_the_same_answer(server: Server, more: dict[str, Any]) -> None:
    whole = server.chat(**more)
    assert whole.status_code == 200, whole.text
    stream = server.stream(stream_options={"include_usage": True}, **more)
    assert {chunk["id"] for chunk in stream} == {stream[0]["id"]}
    for choice in range(more.get("n", 1)):
        assert put_together(stream, choice) == taken_apart(whole.json(), choice)
    usage = whole.json()["usage"]
    for told in (usage, stream[-1]["usage"]):  # what the first has left, the second takes
        told["prompt_tokens_details"].pop("cached_tokens")
    assert stream[-1]["usage"] == usage and stream[-1]["choices"] == []
    assert usage["completion_tokens"] <= more.get("n", 1) * more.get("max_tokens", 12)
    if more.get("logprobs"):
        texts = [taken_apart(whole.json(), choice) for choice in range(3)]
        assert len({text["content"] for text in texts}) > 1
        for text in texts:
            assert "".join(one["token"] for one in text["logprobs"]) == text["content"]
            assert all(len(one["top_logprobs"]) == 2 for one in text["logprobs"])


SCRIPTS = {
    "as trained": ("Hm.§think»«response»Yes.§response»§message»■", "Hm.", "Yes.", [], "stop"),
    "cut in thinking": ("Hm. Then", "Hm. Then", "", [], "length"),
    "cut at the close of thinking": ("Hm.§think", "Hm.", "", [], "length"),
    "cut in the opener": ("Hm.§think»«respo", "Hm.", "", [], "length"),
    "letters in parts": (
        "é🜁§think»«response»道👩‍👩‍👧 Việt■", "é🜁", "道👩‍👩‍👧 Việt", [], "stop",
    ),
    "two calls": (
        f'§think»«response»§response»{CALL}«argument key="a" type="number"»1§argument»§call»'
        '«call tool="g" index="2"»«json type="object"»{"b": 2}§json»§call»§tools»■',
        "", "", [["f", '{"a": 1}'], ["g", '{"b": 2}']], "tool_calls",
    ),
    "cut in a call": (
        f'§think»«response»So:§response»{CALL}«argument key="a" type="string"»b',
        "", "So:", [["f", '{"a": "b']], "length",
    ),
    "a stop string": ("§think»«response»Yes,\nUser: no■", "", "Yes,", [], "stop"),
}  # fmt: skip


IN_BYTES = ("letters in parts", "a stop string")


def in_bytes(text: str) -> list[int]:
    """The tokens of a script, those of text in single bytes."""
    ids: list[int] = []
    for token in script(text):  # the first 256 tokens are the bytes
        ids += [token] if token >= BASE else TOKENIZER.token_bytes(token)
    return ids


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripted_answers_are_the_same_however_they_come(scripted: Server, name: str) -> None:
    text, reasoning, content, calls, reason = SCRIPTS[name]
    for ids in (script(text), in_bytes(text))[: 2 if name in IN_BYTES else 1]:
        scripted.script(ids, 2)
        more: dict[str, Any] = {
            "max_tokens": len(ids) if reason == "length" else 400,
            "stop": ["\nUser"],
        }
        wanted = {
            "reasoning": reasoning, "content": content, "calls": calls, "logprobs": [],
            "finish_reason": reason,
        }  # fmt: skip
        whole = scripted.chat(**more)
        assert taken_apart(whole.json()) == wanted
        stream = scripted.stream(stream_options={"include_usage": True}, **more)
        assert put_together(stream) == wanted
        assert stream[-1]["usage"] == whole.json()["usage"]
        counted = [*itertools.takewhile(lambda token: token != END, ids)]
        if name != "a stop string":
            assert whole.json()["usage"]["completion_tokens"] == len(counted)


def test_no_step_more_than_a_stop_string_needs(scripted: Server) -> None:
    ids = script("§think»«response»a b\nc d e f g h")
    needed = len(script("§think»«response»a b\n"))
    scripted.script(ids)
    usage = scripted.chat(stop="\n", max_tokens=len(ids)).json()["usage"]
    assert usage["completion_tokens"] == needed


@pytest.mark.parametrize("end", [END, BASE + 1])
def test_every_end_token_ends_an_answer_and_is_no_part_of_it(scripted: Server, end: int) -> None:
    text = script("§think»«response»Yes")
    scripted.script([*text, end, *text], 2)
    whole = scripted.chat(max_tokens=100).json()
    assert taken_apart(whole)["content"] == "Yes" and whole["usage"]["completion_tokens"] == len(
        text
    )
    assert taken_apart(whole)["finish_reason"] == "stop"
    assert put_together(scripted.stream(max_tokens=100)) == taken_apart(whole)
    scripted.script([65, end, 66], 2)
    for more, told in (({}, ("A", "stop", 1)), ({"ignore_eos": True}, ("AB", "length", 3))):
        done = scripted.complete("x", max_tokens=3, **more).json()
        one = done["choices"][0]
        assert (one["text"], one["finish_reason"], done["usage"]["completion_tokens"]) == told


@pytest.mark.parametrize("name", SCRIPTS)
def test_writers_say_the_same_for_every_split(engine: Engine, name: str) -> None:
    text, reasoning, content, calls, reason = SCRIPTS[name]
    ids, served = script(text), Served.of(engine, Settings("nano"))
    body = ChatRequest(**chat_body())
    ask = Ask("id", "chat", [1], 1, (Sampling(),), lambda: Parser(TOKENIZER))
    reason = "length" if reason == "length" else "stop"
    for cuts in itertools.product(range(1, 5), repeat=4):
        parser, steps, at = Parser(TOKENIZER, True, ["\nUser"]), [], 0
        for cut in itertools.cycle(cuts):
            steps.append(Step(0, parser.feed(ids[at : at + cut])))
            at += cut
            if at >= len(ids):
                break
        steps.append(Step(0, parser.end(reason)))
        ended = Ended(0, len(ids), 0)
        writer = ChatWriter(served, ask, body)
        streamed = [*writer.begin(), *(c for step in steps for c in writer.step(step))]
        made = put_together([*streamed, *writer.end(ended)])
        assert made == taken_apart(writer.whole(steps, ended))
        assert (made["reasoning"], made["content"], made["calls"]) == (reasoning, content, calls)
