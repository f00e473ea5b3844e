"""What a model answers in K3's chat format: token ids to reasoning, content and tool calls.

The prompt has opened an element already (``think``, or ``response``), so the first token is text of
it.  Tokens come one by one, cut wherever they like; what has been given out never has to be taken
back, and all of it together does not depend on how the tokens were cut.  Markers are known by their
ids and never become text, whatever the model makes of them: elements that are not closed, opened
twice or unknown, calls of no tool.  A marker that somebody spells out in letters is text like any
other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .chat_format import Marks, Tag, may_be_tag, read_tag
from .textstream import TextStream
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call begins; ``index``: which one of the answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the arguments of call ``index``."""

    index: int
    text: str


@dataclass(frozen=True)
class Finish:
    """The end: ``stop``, ``length``, ``tool_calls`` in place of a ``stop`` after calls, or what
    else the caller said."""

    reason: str


Event = Reasoning | Content | ToolCall | Arguments | Finish


@dataclass
class Answer:
    """All events of an answer, put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  #: names, and JSON texts
    finish_reason: str | None = None

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, ToolCall):
                self.calls.append((event.name, ""))
            elif isinstance(event, Arguments):
                name, text = self.calls[event.index]
                self.calls[event.index] = (name, text + event.text)
            else:
                self.finish_reason = event.reason

    def message(self, call_id: Callable[[int], str] = "call_{}".format) -> dict[str, Any]:
        """The answer as a message that ``Encoder.encode`` takes back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call_id(index),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(self.calls)
            ]
        return message


def parse(
    tokenizer: Tokenizer, ids: Iterable[int], finish_reason: str = "stop", thinking: bool = True
) -> Answer:
    """The answer that ``ids`` are, all at once."""
    parser, answer = Parser(tokenizer, thinking), Answer()
    answer.add(parser.feed(ids))
    answer.add(parser.end(finish_reason))
    return answer


class _Call:
    """Writes the arguments of one call as JSON text, piece by piece."""

    def __init__(self, index: int, say: Callable[[Event], None]) -> None:
        self.index = index
        self._say = say
        self._form = ""  # "arguments", or "json": text that is passed on as it is
        self._open = ""  # what text is of: "string" or "value" of an argument, or "json"
        self._head = ""  # what comes before its value
        self._held: list[str] = []  # text of a value, which is judged when it is complete

    def argument(self, key: str, kind: str) -> None:
        """An argument begins; ``kind``: its type, as the model says it."""
        if self._form == "json":
            return
        before = ", " if self._form else "{"
        self._form, self._held = "arguments", []
        self._head = f"{before}{_json(key)}: "
        self._open = "string" if kind in ("string", "") else "value"
        if self._open == "string":
            self._write(self._head + '"')

    def raw(self) -> bool:
        """What follows is the text of the arguments, if there are none yet; whether it is."""
        if not self._form:
            self._form = self._open = "json"
        return self._open == "json"

    def text(self, text: str) -> None:
        """More text of what is open."""
        if self._open == "json":
            self._write(text)
        elif self._open == "string":
            self._write(_json(text)[1:-1])  # what a character becomes depends on it alone
        elif self._open:
            self._held.append(text)

    def end_argument(self) -> None:
        """An argument, or the text of all, is complete."""
        if self._open == "string":
            self._write('"')
        elif self._open == "value":
            text = "".join(self._held)
            self._write(self._head + (text.strip() if _is_json(text) else _json(text)))
        self._open = ""

    def end(self) -> None:
        self.end_argument()
        if self._form != "json":
            self._write("}" if self._form else "{}")

    def _write(self, text: str) -> None:
        if text:
            self._say(Arguments(self.index, text))


class _Trimming:
    """The bytes of tokens for a stream; once after each ``trim`` without the blanks in front."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.is_special = tokenizer.is_special
        self._tokenizer, self._next = tokenizer, False

    def trim(self) -> None:
        self._next = True

    def token_bytes(self, token: int) -> bytes:
        found, trim, self._next = self._tokenizer.token_bytes(token), self._next, False
        return found.lstrip() if trim else found


class Parser:
    """Reads one answer; ``feed`` it tokens as they come, then say that it is at its ``end``.

    ``done`` tells that nothing more can come of it: the model has closed its message, or
    the content has reached a stop string.  Whoever generates may then stop.
    """

    def __init__(
        self, tokenizer: Tokenizer, thinking: bool = True, stop: Sequence[str] = ()
    ) -> None:
        """``thinking``: as the prompt was encoded.  ``stop``: texts that end the content, and no
        part of it.  Raises ``UsageError`` for a vocabulary without the format's markers."""
        self._tokenizer, self._marks = tokenizer, Marks.of(tokenizer)
        self._bytes = _Trimming(tokenizer)
        self._content, self._reasoning = TextStream(self._bytes, stop), TextStream(tokenizer)
        self._element = "think" if thinking else "response"  # that text goes to; "" is none
        self._argument = TextStream(self._bytes)
        self._tag: list[int] | None = None  # tokens since a marker that begins a tag
        self._closing = False
        self._call: _Call | None = None
        self._calls = 0
        self._out: list[Event] = []
        self.done = False

    @property
    def element(self) -> str:
        """Where text goes to now: ``think``, ``response``, an element of a call; empty between
        elements, and while a tag is under way."""
        return self._element if self._tag is None else ""

    @property
    def content(self) -> TextStream:
        """The text of the answer, as far as it has come."""
        return self._content

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """What becomes known by the next tokens.  Raises ``TokenizerError`` for an id outside the
        vocabulary."""
        for token in ids:
            if not self.done:
                self._token(token)
        return self._taken()

    def end(self, finish_reason: str) -> list[Event]:
        """What is left, and ``Finish``.  Where the answer was not cut off (``stop``), what is open
        counts as closed; arguments that were cut off stay without their end."""
        if not self.done:
            if finish_reason == "stop":
                self._end_tag()
            self._flush()
            if finish_reason == "stop":
                self._end_call()
        calls = finish_reason == "stop" and self._calls
        self._out.append(Finish("tool_calls" if calls else finish_reason))
        self.done = True
        return self._taken()

    # ---- tokens ----

    def _token(self, token: int) -> None:
        marks = self._marks
        if token in (marks.open, marks.close):
            self._end_tag()
            self._flush()
            self._tag, self._closing = [], token == marks.close
        elif token == marks.sep:
            self._end_tag()
        elif token == marks.end:
            self._end_tag()
            self._finish()
        elif self._tokenizer.is_special(token):
            return
        elif self._tag is None:
            self._text(token)
        else:
            self._tag.append(token)
            if not may_be_tag(self._tag_text(), self._closing):
                held, self._tag = self._tag, None
                for one in held:
                    self._text(one)

    def _tag_text(self) -> str:
        return self._tokenizer.decode(self._tag or [])

    def _end_tag(self) -> None:
        """Another marker has come, so the tag is as complete as it will be."""
        if self._tag is None or self.done:
            return
        tag, self._tag = read_tag(self._tag_text()), None
        if tag is not None and self._closing:
            self._close(tag.name)
        elif tag is not None:
            self._open(tag)

    # ---- elements ----

    def _open(self, tag: Tag) -> None:
        if tag.name in ("argument", "json"):
            self._open_argument(tag)
            return
        self._end_call()
        if tag.name == "message":
            self._element = ""
            if tag.attributes.get("role", "assistant") != "assistant":
                self._finish()  # the turn of somebody else, which is not the model's to write
        elif tag.name == "call":
            if not (name := tag.attributes.get("tool", "")):
                self._element = "tools"  # nobody can answer it, and no message can hold it
                return
            self._element = "call"
            self._call = _Call(self._calls, self._say)
            self._say(ToolCall(self._calls, name))
            self._calls += 1
        else:
            self._element = tag.name

    def _open_argument(self, tag: Tag) -> None:
        if self._call is None:
            self._element = "tools"  # of no call, so nothing can be made of it
            return
        self._call.end_argument()
        self._element = tag.name
        if tag.name == "json":
            self._call.raw()
        else:
            self._call.argument(tag.attributes.get("key", ""), tag.attributes.get("type", ""))

    def _close(self, name: str) -> None:
        if name == "message":
            self._finish()
        elif name == "call" or name == "tools":
            if self._call is None and self._element != "tools":
                return  # of nothing that is open
            self._end_call()
            self._element = "tools" if name == "call" else ""
        elif name == self._element:
            if self._call is not None:
                self._call.end_argument()
            self._element = "" if self._call is None else "call"

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.end()
            self._call = None

    def _finish(self) -> None:
        self._flush()
        self._end_call()
        self.done = True

    # ---- text ----

    def _text(self, token: int) -> None:
        blank = not self._tokenizer.token_bytes(token).strip()
        if self._element == "" and not blank:
            self._element = "response"  # an answer that was not opened is one all the same
            self._bytes.trim()  # as blanks that are tokens of their own are left out
        if self._element == "call" and not blank and self._call and self._call.raw():
            self._element = "json"
            self._bytes.trim()
        if self._element == "think":
            self._say(Reasoning(self._reasoning.push(token)))
        elif self._element == "response":
            self._say(Content(self._content.push(token)))
            self.done = self._content.stopped
        elif self._call is not None and self._element in ("argument", "json"):
            self._call.text(self._argument.push(token))

    def _flush(self) -> None:
        """The text that waits for more of a character, or of a stop string, is complete."""
        self._say(Reasoning(self._reasoning.flush()))
        self._say(Content(self._content.flush()))
        rest = self._argument.flush()
        if self._call is not None:
            self._call.text(rest)

    def _say(self, event: Event) -> None:
        if not isinstance(event, Reasoning | Content) or event.text:
            self._out.append(event)

    def _taken(self) -> list[Event]:
        taken, self._out = self._out, []
        return taken


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
