"""Lines of OpenAI's batch files that ask for chats: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3offload.run_batch import digest_of
from tests.test_documents_jsonl import jsonl, refused, request

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Who?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chat(**body: Any) -> dict[str, Any]:
    return request({"messages": ASK, **body}, url=CHAT)


def test_a_chat_and_its_settings(tmp_path: Path) -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": "\n"}
    asked = {"tools": TOOLS, "tool_choice": "auto", "response_format": {"type": "json_object"}}
    usual = {"n": 1, "stream": False, "logprobs": False, "parallel_tool_calls": True, "user": None}
    (found,) = jsonl(
        tmp_path, chat(model="k3", max_completion_tokens=5, **settings, **asked, **usual)
    )
    assert found.error is None and (found.id, found.text) == ("r1", "")
    assert found.chat == {"messages": ASK, "thinking": True, **asked}
    assert found.settings == {**settings, "stop": ("\n",), "max_tokens": 5, "model": "k3"}
    assert found.size > len("Who?")


@pytest.mark.parametrize(
    ("said", "thinking", "effort"),
    [
        ({}, True, None),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, False, None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, True, "high"),
    ],
)
def test_whether_to_think(
    said: dict[str, Any], thinking: bool, effort: str | None, tmp_path: Path
) -> None:
    (found,) = jsonl(tmp_path, chat(**said))
    assert found.chat is not None and found.chat["thinking"] is thinking
    assert found.chat.get("reasoning_effort") == effort


def tools_of(parameters: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", "parameters": parameters}}]


def nested(depth: int) -> dict[str, Any]:
    """Lists and objects inside one another."""
    value: dict[str, Any] = {}
    for _ in range(depth // 2 - 1):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": ...}, "has none in its body, and needs a list of messages"),
        ({"messages": "Who?"}, "has messages that are a text"),
        ({"prompt": "a"}, "asks for 'prompt': 'a', which cannot be done"),
        ({"n": 2}, "asks for 'n': 2, which cannot be done"),
        ({"logprobs": True}, "asks for 'logprobs': True"),
        ({"parallel_tool_calls": False}, "asks for 'parallel_tool_calls': False"),
        ({"echo": False}, "asks for 'echo': False"),
        ({"functions": []}, "asks for 'functions': []"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "has two numbers of tokens"),
        ({"max_completion_tokens": "5"}, "has max_tokens '5'"),
        ({"thinking": False}, "has the field thinking: False"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "says two things"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "says two things"),
        ({"top_p": 2}, "cannot be sampled"),
        ({"tools": tools_of(nested(300))}, "has more than 200 lists and objects inside one"),
    ],
)
def test_refused_by_name(body: dict[str, Any], message: str, tmp_path: Path) -> None:
    whole = {name: value for name, value in ({"messages": ASK} | body).items() if value is not ...}
    assert message in refused(tmp_path, request(whole, url=CHAT))


def test_what_cannot_be_written_down_again(tmp_path: Path) -> None:
    """A number that JSON has and no float: it would end the run where the answer is hashed."""
    line = json.dumps(chat(tools=tools_of({"maximum": "BIG"})))
    for number in ("1e999", "-1e999"):
        (found,) = jsonl(tmp_path, line.replace('"BIG"', number))
        assert "has a number that is too large in its body" in str(found.error)
    (found,) = jsonl(tmp_path, chat(tools=tools_of(nested(190)), seed=1))
    assert found.error is None
    assert digest_of("", found)
