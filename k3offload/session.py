"""One timeline of tokens: append, compute, fork, snapshot, rewind, reset."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .errors import SessionError, UsageError
from .sampling import Sampling
from .state import SequenceState

if TYPE_CHECKING:
    from .engine import Engine
    from .generate import Event


@dataclass(frozen=True)
class Snapshot:
    """A saved point of a session; belongs to the engine that made it."""

    tokens: tuple[int, ...]
    state: SequenceState
    logits: npt.NDArray[np.float32] | None
    sampled: int  # how many tokens at the end were sampled and are not computed yet


class Session:
    """A sequence of tokens and what the model remembers of it.  Made by ``Engine.session()``.

    Tokens are computed when they are needed (``logits``, ``generate``), not when appended.
    Several sessions of one engine are independent: their companions never change a bit.
    """

    def __init__(self, engine: Engine, state: SequenceState | None = None) -> None:
        self.engine = engine
        self._state: SequenceState | None = state or engine.new_state()
        self._tokens: list[int] = []
        self._sampled = 0  # how many tokens at the end were sampled and are not computed yet
        self._logits: npt.NDArray[np.float32] | None = None

    # ---- what it holds ----

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token of the timeline, computed or not."""
        return tuple(self._tokens)

    @property
    def length(self) -> int:
        """How many tokens the timeline has, computed or not."""
        return len(self._tokens)

    @property
    def position(self) -> int:
        """How many tokens the state covers."""
        return self.state.position

    @property
    def state(self) -> SequenceState:
        """What the model remembers; raises ``SessionError`` once closed."""
        if self._state is None:
            raise SessionError("This session is closed.", "Open one with engine.session().")
        return self._state

    def waiting(self) -> list[int]:
        """Tokens appended and not computed yet."""
        return self._tokens[self.state.usable().position :]

    @property
    def decoding(self) -> bool:
        """Whether the waiting tokens are exactly one that was sampled."""
        return self._sampled == 1 and len(self._tokens) - self.state.position == 1

    # ---- what it does ----

    def append(self, tokens: Sequence[int] | str) -> None:
        """Add token ids, or text (encoded without specials, nothing added in front).

        Raises ``UsageError`` for what is no id, or outside the vocabulary.
        """
        self.state.usable()
        ids = self.engine.encode(tokens) if isinstance(tokens, str) else self._ids(tokens)
        if ids:
            self._tokens += ids
            self._sampled = 0

    def append_sampled(self, token: int) -> None:
        """Add one token that was sampled from ``logits``; it is computed by a decode run.

        Raises ``UsageError`` as ``append`` does.
        """
        ids = self._ids([token])
        self._sampled = 1 if not self.waiting() else 0
        self._tokens += ids

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        vocab = self.engine.spec.vocab
        try:
            if isinstance(tokens, (bytes, bytearray)):
                raise TypeError("bytes are no token ids")
            ids = [operator.index(token) for token in tokens]
        except TypeError as error:
            raise UsageError(
                f"These are no token ids: {error}.", "Give text, or a flat list of whole numbers."
            ) from error
        for token in ids:
            if not 0 <= token < vocab:
                raise UsageError(
                    f"Token {token} is not in the vocabulary of {vocab}.",
                    "Check that the tokens are of this model.",
                )
        return ids

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits after the last token, [vocab] float32, read-only; computes what is waiting.

        Raises ``SessionError`` for an empty session, ``NumericError`` if numbers failed,
        ``DoesNotFit`` if its state has no room, ``ReadError`` if the model cannot be read.
        """
        self.engine.advance([self])
        assert self._logits is not None
        return self._logits

    def generate(
        self, max_new_tokens: int = 256, sampling: Sampling | None = None
    ) -> Iterator[Event]:
        """Sample up to ``max_new_tokens`` tokens; yields events as they come, ``Done`` last."""
        from .generate import Request, generate

        request = Request(self, max_new_tokens, sampling or Sampling())
        return generate(self.engine, [request])

    def snapshot(self) -> Snapshot:
        """A copy of this point to come back to; its bytes count against the plan."""
        return Snapshot(self.tokens, self.engine.copied(self.state), self._logits, self._sampled)

    def rewind(self, snapshot: Snapshot) -> None:
        """Back to ``snapshot``, which stays usable.  Also the way out of a lost state."""
        if snapshot.state.spec is not self.engine.spec:
            raise SessionError("This snapshot is of another engine.", "Take one of this session.")
        _ = self.state  # a closed session stays closed
        self._state = None  # freed before its replacement is made
        self._state = self.engine.copied(snapshot.state)
        self._tokens = list(snapshot.tokens)
        self._sampled, self._logits = snapshot.sampled, snapshot.logits

    def fork(self) -> Session:
        """An independent session with the same past; full latent blocks are shared."""
        other = Session(self.engine, self.engine.copied(self.state))
        other._tokens, other._sampled = list(self._tokens), self._sampled
        other._logits = self._logits
        return other

    def reset(self) -> None:
        """Forget everything, as if opened anew."""
        _ = self.state  # a closed session stays closed
        self._state = None  # freed before its replacement is made
        self._state = self.engine.new_state()
        self._tokens, self._sampled, self._logits = [], 0, None

    def keep_logits(self, row: npt.NDArray[np.float32]) -> None:
        """Called by the engine with the logits after the last computed token, [vocab]."""
        self._logits = row.copy()
        self._logits.setflags(write=False)

    @property
    def needs_work(self) -> bool:
        """Whether ``logits`` would have to compute something."""
        return self._logits is None or bool(self.waiting())

    def close(self) -> None:
        """Give the state's memory back.  Closing twice is fine."""
        self._state = None
        self._logits = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
