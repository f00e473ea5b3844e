"""What stands around the documents of a batch, and its beginning, which is computed once.

The beginning is shared where the engine keeps prefixes: a snapshot is taken of its whole chunks,
and every document goes on from it.  This file knows the prompt and no document.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

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
        self._prefixes = engine.prefixes
        self._done = self._prefixes is None

    def compute(self, tokens: Sequence[int]) -> None:
        """Compute what ``tokens``, the first prompt, has of it in whole chunks: all prompts will
        find it.  Raises ``DoesNotFit`` or ``ScratchError``, and may then be tried again."""
        if self._done or self._prefixes is None:
            return
        head, same = self._engine.encode(self.text), 0
        while same < min(len(head), len(tokens) - 1) and head[same] == tokens[same]:
            same += 1
        whole = list(tokens[: same // KDA_CHUNK * KDA_CHUNK])
        if whole and not self._prefixes.has(whole):
            self._prefixes.ask(whole)
            # whatever is wrong with it is wrong with each document, and told there
            wrong = suppress(NumericError, ReadError, CheckpointError)
            with self._engine.session() as session, wrong:
                session.append(whole)
                session.logits()
        self._done = True
