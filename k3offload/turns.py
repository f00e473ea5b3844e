"""Which waiting tokens of which sessions a sweep computes, and what each session gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from .errors import DoesNotFit, K3Error, ScratchError, SessionError
from .model import Run
from .scheduler.sweep import cut
from .session import Session

if TYPE_CHECKING:
    from .engine import Engine


class Turns:
    """The turns of the sessions of ``engine``: who got nothing comes first next time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._passed_over: WeakSet[Session] = WeakSet()  # got nothing in the last sweep
        self.rows = (0, 0)  #: that decoded, and of prompts, in the last sweep

    def sweep(self, sessions: Sequence[Session]) -> dict[Session, K3Error]:
        """As ``Engine.sweep``."""
        with self._engine.lock:
            return self._sweep(sessions)

    def _sweep(self, sessions: Sequence[Session]) -> dict[Session, K3Error]:
        self._check(sessions)
        failed: dict[Session, K3Error] = {}
        taken: list[Session] = []
        runs: list[Run] = []
        turn = sorted(sessions, key=lambda s: (s not in self._passed_over, not s.decoding))
        self._passed_over.clear()
        for session in turn:
            try:
                count = self._prepare(session, sum(len(run.tokens) for run in runs))
            except (DoesNotFit, ScratchError) as error:
                # its traceback would keep the others' states alive
                failed[session] = error.with_traceback(None)
                session.state.settle()
                continue
            if not count:
                self._passed_over.add(session)
                continue
            taken.append(session)
            keep = 1 if session.on_rows is None else count
            runs.append(Run(session.state, session.waiting()[:count], keep, session.decoding))
        decoding = sum(run.decode for run in runs)
        self.rows = decoding, sum(len(run.tokens) for run in runs) - decoding

        def emit(run: int, position: int, rows: torch.Tensor) -> None:
            taken[run].keep_logits(rows.numpy()[-1])
            if (wanted := taken[run].on_rows) is not None:
                wanted(rows)

        if runs:
            try:
                self._engine.run(runs, emit)
            finally:
                for session in taken:
                    session.state.settle()
        failed.update({s: r.error for s, r in zip(taken, runs, strict=True) if r.error})
        return failed

    def _prepare(self, session: Session, taken: int) -> int:
        """How many waiting tokens of ``session`` a sweep takes beside ``taken`` others; makes room
        for them.  Raises ``DoesNotFit``, ``ScratchError``."""
        engine = self._engine
        prefixes = engine.prefixes if session.on_rows is None else None
        with engine.blamed():
            session.know_last()
            if prefixes is not None:
                prefixes.jump(session)
            count = cut(session.position, len(session.waiting()), engine.plan.sweep_rows - taken)
            if count:
                session.state.reserve(count)
                session.prepare(count)
                if prefixes is not None:
                    prefixes.mark(session, count)
        return count

    def _check(self, sessions: Sequence[Session]) -> None:
        if len(set(map(id, sessions))) < len(sessions):
            raise SessionError("A session stands twice in one call.", "Fork it, or call twice.")
        for session in sessions:
            if session.engine is not self._engine:
                raise SessionError("A session is of another engine.", "Use its own engine.")
            if not session.length:
                raise SessionError("The session has no tokens.", "Append a prompt first.")
            self._engine.check_context(session.length)
