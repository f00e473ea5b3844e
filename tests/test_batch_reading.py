"""Answers to chats of a batch that call tools, as they are read and as they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3offload.batch_chat import Chats
from k3offload.batch_openai import openai_line
from tests.helpers_chat import TOKENIZER, encoder, folder_with

ASK = {"role": "user", "content": "Who?"}
CALLS = [
    {"id": f"call_{i}", "type": "function",
     "function": {"name": "look", "arguments": f'{{"n": {i}}}'}}
    for i in range(2)
]  # fmt: skip
ANSWER: dict[str, Any] = {
    "role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": CALLS,
}  # fmt: skip


def answer(tmp_path: Path) -> tuple[Chats, list[int]]:
    """What the model says when it calls both tools, reasoning first."""
    chats = Chats(TOKENIZER, folder_with(tmp_path))
    prompt = chats.encode({"messages": [ASK]})
    made = encoder(tmp_path)
    whole = made.encode([ASK, ANSWER], effort=made.usual_effort, generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    return chats, whole[len(prompt) :]


@pytest.mark.parametrize("cut", [0, 3, 20])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_calls_of_tools_are_read(cut: int, reason: str, tmp_path: Path) -> None:
    """In two parts, as when a run goes on with a saved answer; complete with its last token, even
    if that is the last one that it may have."""
    chats, tokens = answer(tmp_path)
    reading = chats.reading({"messages": [ASK]}, ())
    reading.feed(tokens[:cut])
    assert not reading.done
    reading.feed(tokens[cut:])
    assert reading.done
    assert reading.end(reason) == ("tool_calls", ANSWER)


def test_an_answer_that_is_cut_off(tmp_path: Path) -> None:
    chats, tokens = answer(tmp_path)
    reading = chats.reading({"messages": [ASK]}, ())
    reading.feed(tokens[:2])
    reason, message = reading.end("length")
    assert reason == "length" and message["reasoning_content"] in ("H", "Hm", "Hm.")
    assert "tool_calls" not in message


def test_calls_of_tools_are_written() -> None:
    usage = {"prompt_tokens": 3, "new_tokens": 4, "reused_tokens": 0}
    record = {"id": "a", "digest": "0f" * 32, "text": "", "finish_reason": "tool_calls",
              "error": None, "usage": usage, "message": ANSWER}  # fmt: skip
    line = openai_line(record, "k3", 5)
    (choice,) = line["response"]["body"]["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None
    assert message["reasoning_content"] == "Hm."
    assert [call["function"] for call in message["tool_calls"]] == [c["function"] for c in CALLS]
    assert len({call["id"] for call in message["tool_calls"]} - {c["id"] for c in CALLS}) == 2
