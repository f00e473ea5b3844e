"""What a document asks of the engine: its tokens and settings, and where to go on with it.

Knows one document at a time, and the beginning that prompts have in common; no sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .batch_chat import Chats, Reading, thinks
from .batch_prompt import ChatHead, Head, around
from .batch_results import NEW, Going
from .documents import Document
from .errors import SessionError, UsageError
from .generate import Request
from .sampling import Sampling

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

SETTINGS: Final = frozenset({"temperature", "top_k", "top_p", "min_p", "seed", "stop"})


class Asked(NamedTuple):
    """The request of a document, what an earlier run did of it, and what reads its answer if it is
    a chat."""

    request: Request
    earlier: Going
    reading: Reading | None


class Asking:
    """Makes requests of the documents of a batch."""

    def __init__(
        self,
        engine: Engine,
        prompt: str,
        most: int,
        sampling: Sampling,
        labels: bool,
        going: Callable[[Document], Going | None],
    ) -> None:
        """``most``: new tokens where a document does not say how many; ``labels``: nothing is
        generated.  Raises ``UsageError`` for a ``prompt`` without a place."""
        head, self._tail = around(prompt)
        self._head, self._chat_head = Head(engine, head), ChatHead(engine)
        self._engine, self._most, self._sampling = engine, most, sampling
        self._labels, self._going = labels, going
        self._chats = Chats(engine.tokenizer, engine.checkpoint.folder)

    def request(self, document: Document) -> Asked:
        """Raises ``UsageError`` for settings, messages or a text that cannot be, and what a session
        raises that has no room."""
        settings = dict(document.settings)
        settings.pop("model", None)  # whatever it names, this one answers
        if self._labels and settings:
            raise UsageError(
                f"The setting {min(settings)!r} means nothing beside labels.", "Leave it out."
            )
        most = settings.pop("max_tokens", self._most)
        if unknown := settings.keys() - SETTINGS:
            raise UsageError(f"Nobody knows the setting {min(unknown)!r}.", "Leave it out.")
        sampling = replace(self._sampling, **settings)
        chat, reading, guide = document.chat, None, None
        if chat is None:
            tokens = self._text(document)
        else:
            tokens = self._chat(document, chat, sampling)
            guide = self._chats.guide(chat)
            if guide is not None and sampling.grammar is not None:
                raise UsageError(
                    "A grammar holds the whole answer, and response_format another one.",
                    "Leave one of them out.",
                )
            reading = self._chats.reading(chat, sampling.stop)
            sampling = replace(sampling, stop=())
        self._engine.check_context(len(tokens) + most)
        going = self._going(document)
        if going is not None and (session := self._loaded(document, tokens, going)) is not None:
            made = session.tokens[len(tokens) :]
            if reading is not None:
                reading.feed(made)
            return Asked(Request(session, most, sampling, made, guide), going, reading)
        head = self._head if chat is None else self._chat_head
        head.compute(tokens)
        session = self._engine.session()
        session.append(tokens)
        return Asked(Request(session, most, sampling, guide=guide), NEW, reading)

    def _text(self, document: Document) -> list[int]:
        if not isinstance(document.text, str):
            raise UsageError(f"The document is a {type(document.text).__name__}.", "Give text.")
        text = self._head.text + document.text + self._tail
        if not text:
            raise UsageError("The document is empty.", "Leave it out, or give a prompt around it.")
        return self._engine.encode(text)

    def _chat(self, document: Document, chat: Mapping[str, Any], sampling: Sampling) -> list[int]:
        """The prompt of messages, unless something else is asked that has no place there."""
        if self._labels:
            raise UsageError("A chat is answered, and here are labels.", "Give it as a text.")
        if document.text or self._head.text or self._tail:
            raise UsageError(
                "A chat has messages, and no prompt is put around them.",
                "Leave the prompt out, or say the same in a message.",
            )
        if sampling.grammar is not None and (thinks(chat) or chat.get("tools")):
            raise UsageError(
                "A grammar holds the whole answer, and leaves no reasoning and no calls of tools.",
                'Give the reasoning_effort "none" and no tools, or leave the grammar out.',
            )
        return self._chats.encode(chat)

    def _loaded(self, document: Document, tokens: list[int], going: Going) -> Session | None:
        """The session of an earlier run for a document of ``tokens``."""
        try:
            session = self._engine.load_session(going.folder)
        except (SessionError, OSError) as error:
            self._engine.warn(f"{document.id} is begun anew: {error}")
            return None
        if session.tokens[: len(tokens)] == tuple(tokens):
            return session
        session.close()
        return None
