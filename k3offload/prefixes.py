"""Snapshots that sessions of an engine share, found by the tokens they begin with.

Two prompts with the same beginning need it computed once.  A snapshot is kept at the last multiple
of the KDA chunk of every prompt, where a prompt leaves another that is known, and where its session
says that others will leave it; all are taken while the sweep passes them, so that nothing is
computed for them.  Only what was prefilled as from nothing is kept and used, hence the bits are
those of a run without all this; and the last token of a prompt is always computed.  The least
recently used snapshot makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .config import KDA_CHUNK
from .errors import DoesNotFit, ScratchError
from .latents import Ledger
from .prefix_folder import PrefixFolder
from .state import SequenceState

if TYPE_CHECKING:
    from .session import Session


class Prefixes:
    """At most ``size`` bytes of snapshots in RAM; blocks that several share count once.

    ``make``: an empty state in RAM, charged to a ledger; raises ``DoesNotFit``.  ``below``: where
    snapshots are written to as well.  Without ``ends`` only what was asked for is kept.
    """

    def __init__(
        self,
        size: int,
        make: Callable[[Ledger], SequenceState],
        below: PrefixFolder | None = None,
        ends: bool = True,
    ) -> None:
        self._ends, self._asked = ends, b""
        self.ledger = Ledger(size)
        self._make, self._below = make, below
        self._kept: OrderedDict[bytes, SequenceState] = OrderedDict()  # by tokens, int32

    def __len__(self) -> int:
        return len(self._kept)

    def ask(self, tokens: Sequence[int]) -> None:
        """Say that prompts will begin with ``tokens``, whole chunks: the next one leaves a snapshot
        behind them.  One that keeps ends does so anyway."""
        self._asked = _key(tokens)

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether there is a snapshot behind ``tokens`` in RAM; it counts as used."""
        key = _key(tokens)
        if key in self._kept:
            self._kept.move_to_end(key)
        return key in self._kept

    def jump(self, session: Session) -> None:
        """Let ``session`` go on from the longest snapshot that its tokens begin with, if that is
        further than it has come and its bits are those of a run from nothing."""
        if not session.cold:
            return
        tokens = _key(session.tokens[:-1])
        position = session.position
        best = max((key for key in self._kept if tokens.startswith(key)), key=len, default=b"")
        there = self._below.find(tokens) if self._below else b""
        further = len(there) > max(len(best), 4 * position)
        if self._below and further and self._below.load(session, there):
            return
        if len(best) > 4 * position:
            self._kept.move_to_end(best)
            session.go_on(partial(session.engine.new_state, self._kept[best]))

    def mark(self, session: Session, count: int) -> None:
        """Before ``session`` computes ``count`` more tokens: say where to take snapshots."""
        if not session.cold:
            return
        tokens, state = _key(session.tokens), session.state
        for position in self._wanted(tokens, session.leaves):
            key = tokens[: 4 * position]
            passed = state.position < position <= state.position + count
            if passed and key not in self._kept and self._fits(state, position):
                snapshot = self._room(partial(self._make, self.ledger))
                if snapshot is not None:
                    state.mark(position, snapshot, partial(self._keep, key, state))

    def _fits(self, state: SequenceState, position: int) -> bool:
        """Whether a snapshot has room once all others are gone."""
        return state.bytes_after(position) <= self.ledger.capacity

    def _keep(self, key: bytes, source: SequenceState, snapshot: SequenceState) -> None:
        """``snapshot`` was taken of ``source`` on the way, all but its latents."""

        def complete() -> SequenceState:
            snapshot.take_latents(source, len(key) // 4)
            return snapshot

        if key in self._kept or self._room(complete) is None:  # a companion may have been as quick
            return
        self._kept[key] = snapshot
        if self._below:
            self._below.store(key, snapshot)

    def _wanted(self, tokens: bytes, others: Sequence[int]) -> list[int]:
        """Positions, in order: the end of the prompt, the last one from which the same prompt has a
        token to compute, where it leaves the known one most like it, and where ``others`` are
        expected to leave it."""
        if not self._ends:
            return [len(self._asked) // 4] if tokens.startswith(self._asked) else []
        length = len(tokens) // 4
        known = [*self._kept, *(self._below.keys() if self._below else ())]
        leaves = max((common(tokens, key) for key in known), default=0)
        expected = [min(other, length) for other in others]
        ends = {end // KDA_CHUNK * KDA_CHUNK for end in (length, length - 1, leaves, *expected)}
        return sorted(ends - {0})

    def _room(self, make: Callable[[], SequenceState]) -> SequenceState | None:
        """What ``make`` makes once there is room; None if there never is."""
        while True:
            try:
                return make()
            except DoesNotFit:
                if not self._kept:
                    return None
                self._kept.popitem(last=False)
            except ScratchError:  # latents on disk that cannot be read, or have no room there
                return None

    def clear(self) -> None:
        """Forget all snapshots in RAM."""
        self._kept.clear()


def _key(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def common(a: bytes, b: bytes) -> int:
    """How many tokens two keys have in common at the front."""
    n = min(len(a), len(b))
    differ = np.frombuffer(a, "<i4", n // 4) != np.frombuffer(b, "<i4", n // 4)
    return int(differ.argmax()) if differ.any() else n // 4
