"""Lines of OpenAI's batch files that ask for chats: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


STRICT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}


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
        ({"response_format": STRICT}, "asks for response_format.json_schema.strict: True"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "has two numbers of tokens"),
        ({"max_completion_tokens": "5"}, "has max_tokens '5'"),
        ({"thinking": False}, "has the field thinking: False"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "says two things"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "says two things"),
        ({"top_p": 2}, "cannot be sampled"),
    ],
)
def test_refused_by_name(body: dict[str, Any], message: str, tmp_path: Path) -> None:
    whole = {name: value for name, value in ({"messages": ASK} | body).items() if value is not ...}
    assert message in refused(tmp_path, request(whole, url=CHAT))
