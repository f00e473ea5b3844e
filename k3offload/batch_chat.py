"""Documents of a batch that are chats: messages to a prompt, an answer under way to a message.

A stop string ends the content alone, and markers are no text, so the parser looks for it and not
the loop.  This file knows the model's chat format and no sweeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .chat import Encoder
from .chat_guide import guide
from .chat_parse import Answer, Parser
from .documents_chat import ASKED
from .errors import UsageError

if TYPE_CHECKING:
    from .generate import Guide
    from .tokenizer import Tokenizer

FIELDS: Final = frozenset({*ASKED, "thinking"})


def thinks(chat: Mapping[str, Any]) -> bool:
    """Whether the answer to ``chat`` begins with reasoning."""
    return bool(chat.get("thinking", True))


class Chats:
    """Encodes the chats of one batch, and reads the answers to them."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        """``folder``: of the model, for the wording of system messages."""
        self._tokenizer, self._folder = tokenizer, folder
        self._encoder: Encoder | None = None

    def encode(self, chat: Mapping[str, Any]) -> list[int]:
        """The prompt.  Raises ``UsageError`` that begins with the field at fault, or for a model
        that does not chat in this format."""
        if unknown := chat.keys() - FIELDS:
            raise UsageError(f"A chat has no field {min(unknown)!r}.", "Leave it out.")
        effort = chat.get("reasoning_effort")
        if effort is not None and not thinks(chat):
            raise UsageError("reasoning_effort is given, and no thinking.", "Leave one out.")
        if self._encoder is None:
            self._encoder = Encoder.of(self._tokenizer, self._folder)
        return self._encoder.encode(
            chat.get("messages"),
            tools=chat.get("tools"),
            thinking=thinks(chat),
            effort=self._encoder.usual_effort if effort is None else effort,
            tool_choice=chat.get("tool_choice"),
            response_format=chat.get("response_format"),
        )

    def guide(self, chat: Mapping[str, Any]) -> Guide | None:
        """What holds the answer to ``chat``, which has been encoded, to its format and its choice
        of tools.  Raises ``UsageError`` that begins with the field, for what cannot be enforced."""
        made = guide(
            self._tokenizer,
            chat["messages"],
            tools=chat.get("tools"),
            tool_choice=chat.get("tool_choice"),
            response_format=chat.get("response_format"),
            thinking=thinks(chat),
        )
        return None if made is None else made()

    def reading(self, chat: Mapping[str, Any], stop: Sequence[str]) -> Reading:
        """Reads the answer to ``chat``; the strings of ``stop`` end its content."""
        return Reading(Parser(self._tokenizer, thinks(chat), stop))


class Reading:
    """An answer under way."""

    def __init__(self, parser: Parser) -> None:
        self._parser, self._answer = parser, Answer()

    @property
    def done(self) -> bool:
        """Whether nothing more can come: whoever generates should stop."""
        return self._parser.done

    def feed(self, tokens: Iterable[int]) -> None:
        """It has more tokens."""
        self._answer.add(self._parser.feed(tokens))

    def end(self, reason: str) -> tuple[str, dict[str, Any]]:
        """Why it ended, in the words of a chat, and the message, if the loop says ``reason``."""
        complete = self._parser.done and reason == "length"
        self._answer.add(self._parser.end("stop" if complete else reason))
        return self._answer.finish_reason or reason, self._answer.message()
