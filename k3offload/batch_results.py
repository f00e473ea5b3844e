"""What a batch hands out and tells: a document's result, the figures so far, where to go on with a
document.  Knows sessions and errors, and nothing of sweeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .choose_label import LabelScore
from .documents import Document
from .errors import K3Error
from .generate import Done, FinishReason

if TYPE_CHECKING:
    from .batch_request import Asked


@dataclass(frozen=True)
class Result:
    """What became of a document.  ``index``: its number in the input, from 0.

    ``seconds``: from its begin to its end; ``first_token``: to its first token, None without one.
    Where an earlier run was ended in between, both and ``sweeps`` count what was saved of that too.
    ``reused``: prompt tokens that were computed before, for another document.  ``scores``: of all
    labels, where ``text`` is the best of them; nothing was generated then.  ``message``: of a chat,
    as OpenAI's answers have it, with ``reasoning_content`` and ``tool_calls``; ``text`` is its
    content.
    """

    id: str
    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | Literal["tool_calls"]
    error: K3Error | None = None
    prompt_tokens: int = 0
    reused: int = 0
    seconds: float = 0.0
    first_token: float | None = None
    sweeps: int = 0  #: that it took part in
    scores: tuple[LabelScore, ...] = ()
    message: Mapping[str, Any] | None = None


@dataclass
class Tally:
    """What a batch has done so far."""

    documents: int = 0  #: ended
    failed: int = 0  #: of them
    running: int = 0
    prompt_tokens: int = 0  #: of the documents that have begun
    new_tokens: int = 0
    sweeps: int = 0
    rows: int = 0  #: that the last sweep computed
    seconds: float = 0.0  #: from the end of the sweep before to that of the last one
    experts: float = 0.0  #: different ones that the last sweep asked for, a layer
    bytes: int = 0  #: that the last sweep read from disk
    read: Counter[str] = field(default_factory=Counter)  #: from disk, by kind of page, in all
    copied: Counter[str] = field(default_factory=Counter)  #: from RAM to a device, likewise

    def moved(self, kind: str, size: int, device: bool) -> None:
        """The last sweep read ``size`` bytes of ``kind``, or copied them to a ``device``."""
        if size:
            (self.copied if device else self.read)[kind] += size
            self.bytes += 0 if device else size


class Going(NamedTuple):
    """A document that was under way when an earlier run ended: the folder in which its session was
    saved, and what ``Result`` would have said of it by then."""

    folder: Path
    reused: int = 0
    seconds: float = 0.0
    first_token: float | None = None
    sweeps: int = 0


NEW = Going(Path())  #: a document that no run has begun


class Job:
    """A document under way, begun ``now`` (seconds) after ``sweeps`` sweeps of this run."""

    def __init__(
        self, index: int, document: Document, asked: Asked, said: str, now: float, sweeps: int
    ) -> None:
        """``said``: the text of what an earlier run did of it."""
        self.index, self.document, self.request = index, document, asked.request
        request, earlier, self._reading = asked
        self.session, self._earlier = request.session, earlier
        self.begin, self._swept = now - earlier.seconds, sweeps - earlier.sweeps
        self.prompt = request.session.length - len(request.made)
        self.first = earlier.first_token
        self.tokens: list[int] = list(request.made)
        self._pieces: list[str] = [said]

    def token(self, token: int, text: str, now: float) -> None:
        """It has one more."""
        if self.first is None:
            self.first = now - self.begin
        self.tokens.append(token)
        self._pieces.append(text)
        if self._reading is not None:
            self._reading.feed([token])

    @property
    def complete(self) -> bool:
        """Whether nothing more can come, whatever the loop makes of it."""
        return self._reading is not None and self._reading.done

    def answer(self, done: Done) -> dict[str, Any]:
        """What ``Result`` says of the answer when it has come to its end."""
        if self._reading is None:
            text = "".join(self._pieces) + done.text
            return {"text": text, "finish_reason": done.finish_reason}
        reason, message = self._reading.end(done.finish_reason)
        return {"text": message["content"], "finish_reason": reason, "message": message}

    def going(self, folder: Path, now: float, sweeps: int) -> Going:
        """Where to go on with it after ``sweeps`` sweeps of this run."""
        reused = self._earlier.reused or self.session.reused
        return Going(folder, reused, now - self.begin, self.first, sweeps - self._swept)


def bare(error: K3Error) -> K3Error:
    """``error`` without what it came from, which may be large (a file that is no UTF-8)."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
