"""One timeline of tokens: append, compute, fork, snapshot, rewind, reset, save."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .config import KDA_CHUNK
from .errors import DoesNotFit, K3Error, ScratchError, SessionError, UsageError
from .sampling import Sampling
from .session_save import Saved, save
from .state import SequenceState

if TYPE_CHECKING:
    import torch

    from .engine import Engine
    from .generate import Event


@dataclass(frozen=True)
class Snapshot:
    """A saved point of a session; belongs to the engine that made it."""

    tokens: tuple[int, ...]
    state: SequenceState
    logits: npt.NDArray[np.float32] | None
    sampled: int  # how many tokens at the end were sampled and are not computed yet


def checked_ids(tokens: Sequence[int], vocab: int) -> list[int]:
    """``tokens`` as a list; raises ``UsageError`` for what is no id, or outside the vocabulary."""
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
        self._saved: Saved | None = None
        self._wanted: set[int] = set()  # where to keep a snapshot
        self._kept: dict[int, SequenceState] = {}  # the snapshots, by position
        #: who wants the logits of every token that is computed, [n, vocab], in order; such a
        #: session neither uses nor leaves snapshots that others share
        self.on_rows: Callable[[torch.Tensor], None] | None = None
        #: places where other prompts are likely to go on in another way: snapshots that sessions
        #: share are taken there, too
        self.leaves: tuple[int, ...] = ()
        self.reused = 0  #: tokens that were taken from a snapshot when it last began or went back

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
        self._check_open()
        assert self._state is not None
        return self._state

    def waiting(self) -> list[int]:
        """Tokens appended and not computed yet."""
        return self._tokens[self.state.usable().position :]

    @property
    def decoding(self) -> bool:
        """Whether the waiting tokens are exactly one that was sampled."""
        return self._sampled == 1 and len(self._tokens) - self.state.position == 1

    @property
    def sampled(self) -> int:
        """1 if the last token was sampled and is not computed yet, else 0."""
        return self._sampled if self.waiting() else 0

    @property
    def known_logits(self) -> npt.NDArray[np.float32] | None:
        """The logits after the last computed token; None before anything was computed."""
        return self._logits

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
        return checked_ids(tokens, self.engine.spec.vocab)

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
        self._check_open()
        self._forget_marks()
        self._replace(partial(self.engine.copied, snapshot.state))
        self._tokens = list(snapshot.tokens)
        self._sampled, self._logits = snapshot.sampled, snapshot.logits

    def fork(self) -> Session:
        """An independent session with the same past; full latent blocks are shared."""
        other = Session(self.engine, self.engine.copied(self.state))
        other._tokens, other._sampled = list(self._tokens), self._sampled
        other._logits, other._saved = self._logits, self._saved
        return other

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write everything to the folder ``path``; ``Engine.load_session`` goes on from there.

        Returns the bytes written: a later save into the same folder writes what is new, the open
        chunk and the KDA state.  Until it is complete, the folder holds the save before it.
        Raises ``UsageError`` for a folder of something else, ``SessionError`` if it cannot be
        written; the session goes on either way.
        """
        self._saved, written = save(self, path, self._saved)
        return written

    def restore(
        self, tokens: Sequence[int], sampled: int, logits: npt.NDArray[np.float32] | None,
        saved: Saved,
    ) -> None:  # fmt: skip
        """Called by what has read the state from ``saved``: the rest of it."""
        self._tokens, self._sampled, self._saved = list(tokens), sampled, saved
        if logits is not None:
            self.keep_logits(logits)

    def reset(self) -> None:
        """Forget everything, as if opened anew."""
        self._check_open()
        self._forget_marks()
        self._replace(self.engine.new_state)
        self._tokens, self._sampled = [], 0

    def _check_open(self) -> None:
        if self._state is None:
            raise SessionError("This session is closed.", "Open one with engine.session().")

    def _replace(self, make: Callable[[], SequenceState]) -> None:
        """Take another state, which may need the room of this one, so nobody may hold on to it.  An
        error of ``make`` leaves the session at its beginning."""
        failed: K3Error | None = None
        self._state, self._logits = None, None
        try:
            self._state = make()
        except K3Error as error:
            failed = error.with_traceback(None)  # its frames hold what was begun
        if failed is not None:
            self._state = self.engine.new_state()
            raise failed

    def _forget_marks(self) -> None:
        self._wanted, self._kept, self.reused = set(), {}, 0

    # ---- going back ----

    def mark(self, position: int) -> None:
        """Keep a snapshot when the prompt passes ``position`` (rounded down to a multiple of 64),
        for ``truncate`` and ``sync`` to go back to.  It counts as a sequence state of its own; if
        that has no room, a warning says so.  Forks have no marks.

        Raises ``UsageError`` if the session is past there, or not prefilled from nothing.
        """
        position = operator.index(position) // KDA_CHUNK * KDA_CHUNK
        if position <= self.position or not self.cold:
            raise UsageError(
                f"There can be no snapshot after {position} tokens: {self.position} are computed.",
                "Mark a position of the prompt before it is computed, a multiple of 64.",
            )
        self._wanted.add(position)

    def truncate(self, length: int) -> None:
        """Forget all tokens from number ``length`` on.

        What is behind the longest snapshot before them is computed anew, as a prompt, when it is
        needed: the bits are those of a session that was never longer.
        """
        length = operator.index(length)
        if not 0 <= length <= self.length:
            raise UsageError(
                f"There is no token {length} to go back to.", f"Give 0 to {self.length}."
            )
        if self.state.broken is not None or length < self.position:
            self._go_back(length)
        if length < self.length:
            del self._tokens[length:]
            self._sampled = 0

    def sync(self, tokens: Sequence[int]) -> int:
        """Make ``tokens`` the timeline, keeping what is computed as far as they agree with it.

        Returns how many of them need not be computed.  A session that is only continued goes on
        from where it is, decoded tokens included, as with ``append``.
        """
        ids = self._ids(tokens)
        same = 0
        for old, new in zip(self._tokens, ids, strict=False):
            if old != new:
                break
            same += 1
        self.truncate(same)
        self.append(ids[same:])
        return self.position

    def _go_back(self, length: int) -> None:
        """To the longest snapshot that leaves a token of ``length`` to compute."""
        self._kept = {p: kept for p, kept in self._kept.items() if p < length}
        self._wanted = {position for position in self._wanted if position < length}
        self._sampled = self.reused = 0
        kept = self._kept[max(self._kept)] if self._kept else None
        self._replace(partial(self.engine.new_state, kept))
        self.reused = self.position

    def go_on(self, make: Callable[[], SequenceState]) -> None:
        """Called by who can ``make`` a state after some of the tokens, further than this one is.
        An error of it leaves the session at its beginning."""
        self.reused = 0
        self._replace(make)
        self.reused = self.position

    def know_last(self) -> None:
        """Called by the engine before a sweep: where all is computed but the last logits are not
        known, go back so far that the last token is computed again."""
        if self._logits is None and not self.waiting():
            self._go_back(self.length)

    @property
    def cold(self) -> bool:
        """Whether a prompt may go on from here with the bits of one prefilled from nothing."""
        return self.state.cold and self.position % KDA_CHUNK == 0 and not self.sampled

    def prepare(self, count: int) -> None:
        """Called by the engine before it computes ``count`` more tokens."""
        if self._wanted and self.cold:
            for position in sorted(self._wanted):
                if self.position < position <= self.position + count:
                    with self._without(position):
                        snapshot = self.engine.new_state()
                        self.state.mark(position, snapshot, partial(self._keep, position))

    def _keep(self, position: int, snapshot: SequenceState) -> None:
        with self._without(position):
            snapshot.take_latents(self.state, position)
            self._kept[position] = snapshot

    @contextmanager
    def _without(self, position: int) -> Iterator[None]:
        """A snapshot that has no room is not taken: going back costs more, and nothing changes."""
        try:
            yield
        except (DoesNotFit, ScratchError) as error:
            self._wanted.discard(position)
            self.engine.warn(f"No snapshot is kept after {position:,} tokens: {error.problem}")

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
        self._forget_marks()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
