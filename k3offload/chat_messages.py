"""Messages as OpenAI's chat requests have them, checked and put in the order that K3 reads.

This file knows the fields of messages and tools, and what K3's format has no place for: that is
refused by the name of its field, since leaving it out would give another answer than was asked
for.  It knows nothing of tokens or of how elements are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

from .errors import UsageError

#: Newer requests call a system message by the second name.
ROLES: Final = {r: r for r in ("user", "system", "assistant", "tool")} | {"developer": "system"}
#: Fields that change what is asked, and that the format has no place for.
_NO_PLACE: Final = ("function_call", "audio", "refusal", "partial", "prefix")


@dataclass(frozen=True)
class Call:
    """One call of a tool.  ``arguments``: by name, or the text that is no JSON object."""

    id: str | None
    name: str
    arguments: Mapping[str, Any] | str
    field: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    content: its texts; each is encoded by itself.
    tools: of a system message that declares more of them, and has no text.
    tool, index: of a result: the name of the tool, and the index of the call that it answers, as
    the call itself has it: its place among those of the message before, from 1.  A result that is
    of none of them by its id is numbered by its place among the results.
    field: where it stands in the request, ``messages[3]``.
    """

    role: str
    content: tuple[str, ...]
    field: str
    name: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool: str = ""
    index: int = 0
    call_id: str | None = None


def read_messages(messages: Any) -> list[Message]:
    """The conversation, results of tools in the order of their calls.  Raises ``UsageError``."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _wrong("messages", messages, "a list of messages")
    found = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not found:
        raise UsageError("messages is empty.", "Give at least one message.")
    return _in_order(found)


def read_tools(tools: Any, field: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Declarations of functions, as they are.  Raises ``UsageError``."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise _wrong(field, tools, "a list of tools")
    for i, tool in enumerate(tools):
        place = f"{field}[{i}]"
        if _object(tool, place).get("type", "function") != "function":
            raise UsageError(
                f"{place}.type is {_short(tool['type'])}.", "Only functions can be tools."
            )
        _text(
            _object(tool.get("function"), f"{place}.function").get("name"), f"{place}.function.name"
        )
        as_json(tool, place)
    return tuple(tools)


def as_json(value: Any, field: str, compact: bool = True) -> str:
    """``value`` as JSON text; raises ``UsageError`` for what JSON cannot hold.

    Compact with all keys sorted, as declarations are written, or as arguments are.
    """
    try:
        if compact:
            return json.dumps(
                value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False
            )
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{field} is no JSON: {why}.", "Give plain values.") from None


def json_type(value: Any) -> str:
    """How JSON calls the kind of ``value``; true and false are no numbers, as in Python."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number"
    return "object" if isinstance(value, Mapping) else "array"


def named_tool(choice: Any) -> str | None:
    """The function that a ``tool_choice`` names; None if it is of another form."""
    if not isinstance(choice, Mapping) or choice.keys() != {"type", "function"}:
        return None
    function = choice["function"]
    if choice["type"] != "function" or not isinstance(function, Mapping):
        return None
    name = function.get("name")
    return name if isinstance(name, str) and function.keys() == {"name"} else None


def _message(given: Any, field: str) -> Message:
    message = _object(given, field)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(
            f"{field}.role is {_short(role)}.", f"It must be one of {', '.join(ROLES)}."
        )
    role = ROLES[role]
    for name in _NO_PLACE:
        if message.get(name):
            raise UsageError(
                f"{field}.{name} is given, and K3's format has no place for it.", "Leave it out."
            )
    if message.get("tool_calls") and role != "assistant":
        raise UsageError(
            f"{field}.tool_calls is given in a message of the {role}.",
            "Only assistants call tools.",
        )
    tools = read_tools(message.get("tools"), f"{field}.tools")
    if tools and (role != "system" or message.get("content")):
        raise UsageError(
            f"{field}.tools is given beside other things than the role system.",
            "Declare more tools in a system message of their own, without content.",
        )
    optional = role == "assistant" or bool(tools)
    made = Message(
        role,
        _content(message.get("content"), f"{field}.content", optional),
        field,
        name=_optional(message, "name", field),
        tools=tools,
    )
    if role == "assistant":
        reasoning = _optional(message, "reasoning_content", field)
        reasoning = reasoning or _optional(message, "reasoning", field)
        return replace(made, reasoning=reasoning, calls=_calls(message.get("tool_calls"), field))
    if role == "tool":
        named = _optional(message, "tool", field) or made.name
        return replace(made, tool=named, call_id=_optional(message, "tool_call_id", field) or None)
    return made


def _content(content: Any, field: str, optional: bool) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    if content is None and optional:
        return ()
    if not isinstance(content, list | tuple):
        raise _wrong(field, content, "a text or a list of parts")
    return tuple(_part(part, f"{field}[{i}]") for i, part in enumerate(content))


def _part(part: Any, field: str) -> str:
    kind = _object(part, field).get("type")
    if kind != "text":
        raise UsageError(f"{field} is of type {_short(kind)}.", "Only text can be read.")
    return _text(part.get("text"), f"{field}.text", empty=True)


def _calls(calls: Any, field: str) -> tuple[Call, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list | tuple):
        raise _wrong(f"{field}.tool_calls", calls, "a list of calls")
    return tuple(_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls))


def _call(given: Any, field: str) -> Call:
    call = _object(given, field)
    if call.get("type", "function") != "function":
        raise UsageError(f"{field}.type is {_short(call['type'])}.", "Only functions are called.")
    function = _object(call.get("function"), f"{field}.function")
    return Call(
        _optional(call, "id", field) or None,
        _text(function.get("name"), f"{field}.function.name"),
        _arguments(function.get("arguments"), f"{field}.function.arguments"),
        field,
    )


def _arguments(given: Any, field: str) -> Mapping[str, Any] | str:
    """Arguments by name; the text itself where it is no JSON object, or one whose escapes spell
    what is no UTF-8: a model has written it, and sees it again as it was."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, str):
        try:
            parsed = json.loads(given, parse_constant=_no_constant)
            as_json(parsed, field).encode()
        except (ValueError, RecursionError, UsageError):
            return given
        return parsed if isinstance(parsed, dict) else given
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise _wrong(field, given, "an object, or the text of one")
    as_json(given, field)
    return given


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _in_order(messages: list[Message]) -> list[Message]:
    """Each run of results as the calls before it stand; all are named and numbered."""
    ordered: list[Message] = []
    calls: tuple[Call, ...] = ()
    number = 0
    for role, group in groupby(messages, lambda message: message.role):
        if role != "tool":
            ordered += group
            if ordered[-1].role == "assistant":
                calls, number = ordered[-1].calls, 0
            continue
        for message in _sorted(list(group), calls):
            number += 1
            ordered.append(_named(message, number, calls))
    return ordered


def _sorted(run: list[Message], calls: tuple[Call, ...]) -> list[Message]:
    """``run``, each result with the name and index of the call that it says it is of; in the order
    of the calls, if all say one."""
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.id is not None:
            places.setdefault(call.id, place)
    found = []
    for message in run:
        if (at := places.get(message.call_id or "")) is not None:
            message = replace(message, tool=calls[at].name, index=at + 1)
        found.append(message)
    return sorted(found, key=lambda m: m.index) if all(m.index for m in found) else found


def _named(message: Message, number: int, calls: tuple[Call, ...]) -> Message:
    name = message.tool
    if not name and message.call_id is None and number <= len(calls):
        name = calls[number - 1].name
    if not name:
        raise UsageError(
            f"{message.field}.tool_call_id is {_short(message.call_id)}, which is no call of the "
            "message before it.",
            "Give the id of a call, or the name of the tool as name.",
        )
    return replace(message, tool=name, index=message.index or number)


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(field, value, "an object")
    return value


def _text(value: Any, field: str, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise _wrong(field, value, "a text" if empty else "a text that is not empty")
    return value


def _optional(values: Mapping[str, Any], name: str, field: str) -> str:
    value = values.get(name)
    return "" if value is None else _text(value, f"{field}.{name}", empty=True)


def _wrong(field: str, value: Any, wanted: str) -> UsageError:
    return UsageError(f"{field} is {_short(value)}.", f"It must be {wanted}.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
