"""Conversations to token ids, in K3's chat format.

``Encoder`` takes messages as OpenAI's requests have them.  It knows the order of what a model is
told and how each kind of message is written.  Text is encoded here and nowhere else, piece by piece
and as plain text: whatever a user, a tool, a name, an argument or a schema spells, no token that
steers the format comes from it.  ``chat_parse.Parser`` reads what the model answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Final

from . import chat_bodies as bodies
from .chat_bodies import Bodies
from .chat_format import END, Attribute, Marks, Segment, closed, opened
from .chat_messages import (
    Call,
    Message,
    as_json,
    json_type,
    named_tool,
    read_messages,
    read_tools,
)
from .errors import TokenizerError, UsageError
from .tokenizer import Tokenizer

#: How much to think, as far as the released renderer accepts it.
EFFORTS: Final = ("low", "high", "max")
USUAL_EFFORT: Final = "max"  #: what the released tokenizer asks for where nothing is said


class Encoder:
    """Messages to token ids for one model.  Make one with :meth:`of`."""

    def __init__(self, tokenizer: Tokenizer, wording: Bodies) -> None:
        """Raises ``UsageError`` for a vocabulary without the markers of the format."""
        self._tokenizer, self._bodies = tokenizer, wording
        self._marks = Marks.of(tokenizer)
        self._special = frozenset(tokenizer.specials.values())

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path | None = None) -> Encoder:
        """For a model in ``folder``, which has the wording of system messages."""
        return cls(tokenizer, Bodies.read(folder))

    @property
    def usual_effort(self) -> str | None:
        """What the release asks for where nobody says an effort; None without its wording."""
        return USUAL_EFFORT if bodies.EFFORT in self._bodies else None

    def check_effort(self, effort: str) -> None:
        """Raise ``UsageError`` for an effort that the model cannot be told."""
        self._system(bodies.EFFORT, "effort", _effort(effort))

    def encode(
        self,
        messages: Any,
        *,
        tools: Any = None,
        thinking: bool = True,
        effort: str | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt for the next answer.

        ``thinking``: whether the answer begins with reasoning; without, that of earlier answers is
        left out too.  ``effort``: one of ``EFFORTS``; None tells the model nothing.
        ``tool_choice``, ``response_format``: as in OpenAI's requests; they are told to the model,
        and enforced by ``chat_guide``.  Raises ``UsageError`` that begins with the field at
        fault.
        """
        segments = self.segments(
            messages,
            tools=tools,
            thinking=thinking,
            effort=effort,
            tool_choice=tool_choice,
            response_format=response_format,
            generation_prompt=generation_prompt,
        )
        return [token for segment in segments for token in self.tokens(segment)]

    def opening(self, messages: Any, *, tools: Any, thinking: bool, effort: str | None) -> int:
        """How many tokens of the prompt come before the first message that is not the system's:
        declarations and instructions, which an application's prompts have in common."""
        conversation = read_messages(messages)
        count = next((i for i, m in enumerate(conversation) if m.role != "system"), None)
        made = self._beginning(read_tools(tools), effort if thinking else None)
        for message in conversation[:count]:
            made += self._message(message, thinking)
        return sum(len(self.tokens(segment)) for segment in made)

    def _beginning(self, declared: Any, effort: str | None) -> list[Segment]:
        """What a model is told before all messages."""
        made: list[Segment] = []
        if declared:
            made += self._system(bodies.TOOLS, "tools", as_json(declared, "tools"))
        if effort is not None:
            made += self._system(bodies.EFFORT, "effort", _effort(effort))
        return made

    def segments(
        self,
        messages: Any,
        *,
        tools: Any,
        thinking: bool,
        effort: str | None,
        tool_choice: Any,
        response_format: Any,
        generation_prompt: bool,
    ) -> list[Segment]:
        """What ``encode`` encodes, piece by piece."""
        conversation, declared = read_messages(messages), read_tools(tools)
        tools_of_all = [*declared, *(tool for message in conversation for tool in message.tools)]
        names = {tool["function"]["name"] for tool in tools_of_all}
        made = self._beginning(declared, effort if thinking else None)
        for message in conversation:
            made += self._message(message, thinking)
        made += self._choice(tool_choice, names)
        made += self._format(response_format)
        if generation_prompt:
            made += opened("message", Attribute("role", "assistant"))
            made += opened("think" if thinking else "response")
        return made

    def tokens(self, segment: Segment) -> list[int]:
        """The ids of one segment.  Raises ``UsageError`` for text that is no UTF-8."""
        if segment.marker:
            return [self._tokenizer.specials[segment.text]]
        try:
            ids = self._tokenizer.encode(segment.text, specials=False)
        except TokenizerError as error:
            raise UsageError(
                f"{segment.field or 'A body'}: {error.problem}", error.remedy
            ) from None
        if not self._special.isdisjoint(ids):
            raise TokenizerError(
                f"The tokenizer makes special tokens of the plain text {segment.text[:60]!r}.",
                "Fetch the model's tokenizer files again: with these, no conversation is safe.",
            )
        return ids

    def _message(self, message: Message, thinking: bool) -> list[Segment]:
        if message.tools:
            told = as_json(message.tools, f"{message.field}.tools")
            return self._system(bodies.MORE_TOOLS, f"{message.field}.tools", told)
        attributes = [Attribute("role", message.role)]
        if message.role == "tool":
            attributes.append(Attribute("tool", message.tool, f"{message.field}.name"))
            attributes.append(Attribute("index", str(message.index)))
        elif message.name:
            attributes.append(Attribute("name", message.name, f"{message.field}.name"))
        content = [Segment(text, field=f"{message.field}.content") for text in message.content]
        if message.role == "assistant":
            content = [*_answer(message, content, thinking)]
        return [*opened("message", *attributes), *content, *_message_end()]

    def _system(self, body: str, field: str, value: str = "") -> list[Segment]:
        kind = body.partition(" ")[0]
        head = opened("message", Attribute("role", "system"), Attribute("type", kind))
        text = self._bodies.text(body, field, value)
        return [*head, Segment(text, field=field), *_message_end()]

    def _choice(self, choice: Any, tools: Set[str]) -> list[Segment]:
        """What is told of ``choice``, where ``tools`` can be called: of one by name, as much as of
        any, since the format has no words for it."""
        if choice is None or choice == "auto" or (choice == "none" and not tools):
            return []
        if choice == "none":
            return self._system(bodies.NONE, "tool_choice")
        name = named_tool(choice)
        if choice != "required" and name is None:
            raise UsageError(
                f"tool_choice is {str(choice)[:60]!r}.",
                "It must be auto, none, required, or name a function: "
                '{"type": "function", "function": {"name": ...}}.',
            )
        if name is None and not tools:
            raise UsageError("tool_choice is required, and no tools are given.", "Give tools.")
        if name is not None and name not in tools:
            raise UsageError(f"tool_choice names {name!r:.60}, which is no tool.", "Declare it.")
        return self._system(bodies.REQUIRED, "tool_choice")

    def _format(self, given: Any) -> list[Segment]:
        if given is None:
            return []
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind == "text":
            return []
        if kind == "json_object":
            return self._system(bodies.JSON_OBJECT, "response_format")
        if kind != "json_schema":
            raise UsageError(
                f"response_format is {str(given)[:60]!r}.",
                'Its type must be "text", "json_object" or "json_schema".',
            )
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise UsageError("response_format.json_schema has no schema.", "Give it as an object.")
        field = "response_format.json_schema.schema"
        return self._system(bodies.JSON_SCHEMA, "response_format", as_json(schema, field))


def _message_end() -> list[Segment]:
    return [*closed("message"), Segment(END, True)]


def _answer(message: Message, content: list[Segment], thinking: bool) -> Iterator[Segment]:
    """What an assistant said.  The element of its reasoning is there also when that is empty."""
    if thinking:
        yield from opened("think")
        if message.reasoning.strip():
            yield Segment(message.reasoning, field=f"{message.field}.reasoning_content")
        yield from closed("think")
    yield from [*opened("response"), *content, *closed("response")]
    if message.calls:
        yield from opened("tools")
        for index, call in enumerate(message.calls, 1):
            yield from _call(call, index)
        yield from closed("tools")


def _call(call: Call, index: int) -> Iterator[Segment]:
    name = Attribute("tool", call.name, f"{call.field}.function.name")
    field = f"{call.field}.function.arguments"
    yield from opened("call", name, Attribute("index", str(index)))
    if isinstance(call.arguments, str):
        yield from opened("json", Attribute("type", "object"))
        yield Segment(call.arguments, field=field)
        yield from closed("json")
    else:
        for key, value in call.arguments.items():
            kind = Attribute("type", json_type(value))
            yield from opened("argument", Attribute("key", key, field), kind)
            text = value if isinstance(value, str) else as_json(value, field, compact=False)
            yield Segment(text, field=field)
            yield from closed("argument")
    yield from closed("call")


def _effort(effort: Any) -> str:
    if effort not in EFFORTS:
        raise UsageError(f"effort is {effort!r}.", f"It must be {', '.join(EFFORTS)}.")
    return str(effort)
