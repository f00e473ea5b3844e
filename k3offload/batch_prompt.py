"""What stands around the documents of a batch, and its beginning, which is computed once.

The beginning is shared where the engine keeps prefixes: a snapshot is taken of its whole chunks,
and every document goes on from it.  This file knows the prompt and no document.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from .budget import state_bytes
from .config import KDA_CHUNK
from .errors import CheckpointError, NumericError, ReadError, UsageError

if TYPE_CHECKING:
    from .engine import Engine

PLACE = "{text}"  #: where a document goes in the prompt


def around(prompt: str) -> tuple[str, str]:
    """What stands before and behind the document; raises ``UsageError`` unless it has one place."""
    if prompt.count(PLACE) != 1:
        raise UsageError(
            f"The prompt has {prompt.count(PLACE)} places for a document.",
            f"Write {PLACE} once, where the document goes.",
        )
    head, tail = prompt.split(PLACE)
    return head, tail


class Head:
    """The beginning ``text`` of all prompts."""

    def __init__(self, engine: Engine, text: str) -> None:
        self._engine, self.text = engine, text
        self._done = engine.prefixes is None

    def compute(self, tokens: Sequence[int]) -> None:
        """Compute what ``tokens``, the first prompt, has of it in whole chunks: all prompts will
        find it.  Raises ``DoesNotFit`` or ``ScratchError``, and may then be tried again."""
        if not self._done:
            _compute(self._engine, shared(tokens, self._engine.encode(self.text)))
            self._done = True


class ChatHead:
    """The beginning that chats have in common: instructions, tools, examples.

    Nobody says where it ends, so it is what the second one shares with the first.  Where a chat
    does not begin with it, it is what that one shares with the chat before; but not before another
    round of places has passed, since computing a beginning takes a sweep of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._wait = engine, 0
        self._head: list[int] = []
        self._before: list[int] = []

    def compute(self, tokens: list[int]) -> None:
        """The next chat has ``tokens``; as ``Head.compute``."""
        engine, before = self._engine, self._before
        if engine.prefixes is None or before == tokens:  # the same, or one that had no room
            return
        self._before, self._wait = tokens, self._wait - 1
        if self._wait >= 0 or (self._head and tokens[: len(self._head)] == self._head):
            return
        head, room = shared(tokens, before), engine.prefixes.ledger.capacity
        while head and room < state_bytes(
            engine.spec, engine.options.dtype, len(head), engine.options.latent_dtype
        ):
            del head[-KDA_CHUNK:]
        if head:
            _compute(engine, head)
            self._head, self._wait = head, engine.options.sessions


def shared(tokens: Sequence[int], other: Sequence[int]) -> list[int]:
    """What a prompt of ``tokens`` has of ``other`` in whole chunks, one token at least left."""
    same, most = 0, min(len(other), len(tokens) - 1)
    while same < most and tokens[same] == other[same]:
        same += 1
    return list(tokens[: same // KDA_CHUNK * KDA_CHUNK])


def _compute(engine: Engine, whole: list[int]) -> None:
    """Leave a snapshot behind ``whole`` chunks, unless there is one."""
    prefixes = engine.prefixes
    if whole and prefixes is not None and not prefixes.has(whole):
        prefixes.ask(whole)
        # whatever is wrong with it is wrong with each document, and told there
        wrong = suppress(NumericError, ReadError, CheckpointError)
        with engine.session() as session, wrong:
            session.append(whole)
            session.logits()
