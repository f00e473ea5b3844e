"""Text that is safe to show, while tokens still arrive.

Two things are held back: bytes of a character that is not complete yet, and any tail that could
be the beginning of a stop string.  What has been given out never has to be taken back, and all of
it together equals the decoded whole, however the text was split into tokens.  This file knows
nothing of models; which ids end a text is decided by the loop that feeds it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from .errors import UsageError


class Decoder(Protocol):
    """The part of a tokenizer a stream needs."""

    def token_bytes(self, token: int) -> bytes: ...
    def is_special(self, token: int) -> bool: ...


class TextStream:
    """Collects tokens, gives out text, cuts at stop strings.

    The text ends right before the stop string whose last character came first; of several that
    end there, before the longest.  That depends on the text alone, not on how it was split.
    ``stopped`` tells that it happened, ``text`` is everything given out so far.  ``decoded`` and
    ``given`` count characters: of all tokens so far, and of what was given out.
    """

    def __init__(
        self, tokenizer: Decoder, stop: Sequence[str] = (), skip_specials: bool = True
    ) -> None:
        """Raises UsageError for an empty stop string, which would match everywhere."""
        if isinstance(stop, str) or not all(stop):
            raise UsageError(
                f"stop {stop!r} is not a list of non-empty strings.", "Leave it out to have none."
            )
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip = skip_specials
        # UTF-8, incrementally: at most three bytes wait, and a byte that cannot belong to a
        # character becomes U+FFFD at once, so a stream never stalls.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._given: list[str] = []
        self.stopped = False
        self.decoded = self.given = 0

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._given)

    def push(self, token: int) -> str:
        """Adds one token; the text that has become safe to show, often empty.

        Empty for a special token when those are skipped, and for everything after a stop string.
        Raises TokenizerError for an id outside the vocabulary.
        """
        if self.stopped or (self._skip and self._tokenizer.is_special(token)):
            return ""
        return self._take(self._utf8.decode(self._tokenizer.token_bytes(token)), last=False)

    def flush(self) -> str:
        """The text still held back; a character left incomplete becomes U+FFFD."""
        return "" if self.stopped else self._take(self._utf8.decode(b"", final=True), last=True)

    def _take(self, fresh: str, last: bool) -> str:
        self.decoded += len(fresh)
        waiting = self._held + fresh
        ends = [(at + len(s), at) for s in self._stop if (at := waiting.find(s)) >= 0]
        if ends:
            self.stopped = True
            out, self._held = waiting[: min(ends)[1]], ""
        else:
            keep = 0 if last else self._possible_start(waiting)
            out, self._held = waiting[: len(waiting) - keep], waiting[len(waiting) - keep :]
        if out:
            self._given.append(out)
            self.given += len(out)
        return out

    def _possible_start(self, waiting: str) -> int:
        """Characters at the end of ``waiting`` that may turn out to begin a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(waiting)), 0, -1):
            if any(len(s) > n and s.startswith(waiting[-n:]) for s in self._stop):
                return n
        return 0
