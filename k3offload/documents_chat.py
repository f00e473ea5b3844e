"""Batch requests of chat: the fields of their body, and which of them can be honoured.

This file knows the names of OpenAI's fields; what stands in messages and tools is checked where
they are encoded.  A field that cannot be honoured is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from .documents_row import kind_of, short
from .errors import DocumentError

URL: Final = "/v1/chat/completions"
#: What is asked, beside the settings that a completion has too.
ASKED: Final[tuple[str, ...]] = (
    "messages",
    "tools",
    "tool_choice",
    "response_format",
    "reasoning_effort",
)
TOKENS: Final[tuple[str, ...]] = (
    "max_tokens",
    "max_completion_tokens",
)  #: two names of one setting
#: Fields that say in these words what is done anyway.
AS_IT_IS: Final[Mapping[str, Any]] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
#: Lists and objects inside one another; how far Python can go depends on who calls it.
DEEPEST: Final = 200

Refuse = Callable[[str, str], DocumentError]


def read_chat(given: Mapping[str, Any], refuse: Refuse) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the body ``given`` asks (``ASKED``, and ``thinking`` as true or false), and the rest of
    it, with ``max_tokens`` under that name.  Null is as if it were not there.

    Raises what ``refuse`` makes of a problem and its remedy.
    """
    rest = {name: value for name, value in given.items() if value is not None}
    chat = {name: rest.pop(name) for name in ASKED if name in rest}
    if not isinstance(chat.get("messages"), list):
        what = f"messages that are {kind_of(chat['messages'])}" if "messages" in chat else "none"
        raise refuse(f"has {what} in its body, and needs a list of messages", "Give it.")
    if wrong := _unwritable(chat):
        raise refuse(f"has {wrong} in its body", "Nobody could write it down as JSON. Change it.")
    chat["thinking"] = _thinking(chat, rest.pop("thinking", None), refuse)
    most = [rest.pop(name) for name in TOKENS if name in rest]
    if most[1:] and most[0] != most[1]:
        raise refuse(f"has two numbers of tokens, {' and '.join(TOKENS)}", "Give one of them.")
    if most:
        rest["max_tokens"] = most[0]
    return chat, rest


def _unwritable(value: Any) -> str:
    """What in ``value`` has no form in JSON that all can write, who have to: a number that was too
    large to read (``1e999``), or what is nested too deeply.  '' if nothing."""
    layer = [value]
    for _ in range(DEEPEST):
        if any(isinstance(one, float) and not math.isfinite(one) for one in layer):
            return "a number that is too large"
        parts = (one.values() if isinstance(one, Mapping) else one
                 for one in layer if isinstance(one, Mapping | list))  # fmt: skip
        if not (layer := [inner for part in parts for inner in part]):
            return ""
    return f"more than {DEEPEST} lists and objects inside one another"


def _thinking(chat: dict[str, Any], given: Any, refuse: Refuse) -> bool:
    """Whether the answer begins with reasoning: not with the effort ``none``, which is no effort
    that a model is told, and not where the field ``thinking`` is of type ``disabled``."""
    without = chat.get("reasoning_effort") == "none"
    if without:
        del chat["reasoning_effort"]
    if given is None:
        return not without
    if given not in ({"type": "enabled"}, {"type": "disabled"}):
        raise refuse(
            f"has the field thinking: {short(given)}", 'Its type is "enabled" or "disabled".'
        )
    thinking = bool(given == {"type": "enabled"})
    if (thinking and without) or (not thinking and "reasoning_effort" in chat):
        raise refuse("says two things, by reasoning_effort and thinking", "Leave one out.")
    return thinking
