"""What an engine leaves behind: after a failed load, a close, an interruption at any line.

R25 (interruption), R45, R65 and R70 (nothing leaks).
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import psutil
import pytest

import k3offload
from k3offload.engine import Engine
from k3offload.errors import CheckpointError, SessionError, UsageError
from k3offload.generate import Done, Request, generate
from k3offload.loading import load
from k3offload.machine import default_threads
from k3offload.model import Model
from k3offload.options import Options
from k3offload.sampling import Sampling
from k3offload.session import Session
from k3offload.state import SequenceState
from tests.helpers_checkpoint import Raw, change_shard, shards, tiny
from tests.helpers_engine import BRIEF, checkpoint, same_bits, session_with, some_tokens

FREE = Sampling(ignore_end=True)
PATIENCE = 60.0  #: seconds after which a thread counts as stuck


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", sessions=8) as made:
        yield made


# ---- loading and closing ----


def _damage(tensors: dict[str, Raw]) -> None:
    """A number behind the heads in use of the stored ``A_log``."""
    (name,) = (n for n in tensors if n.endswith("A_log"))
    raw = tensors[name]
    values = np.frombuffer(raw.data, np.float32).copy()
    values[-1] = 1.5
    tensors[name] = raw._replace(data=values.tobytes())


def test_a_failed_load_leaves_nothing_open(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", **BRIEF)
    change_shard(shards(folder)[2], _damage)
    open_before = {file.path for file in psutil.Process().open_files()}
    threads_before = set(threading.enumerate())
    me, seen = psutil.Process(), []
    for _ in range(4):
        with pytest.raises(CheckpointError, match="A_log"):
            load(folder, threads=2)
        seen.append((me.num_fds(), threading.active_count()))
    assert seen[1:] == seen[:1] * 3
    assert {file.path for file in me.open_files()} <= open_before
    assert set(threading.enumerate()) <= threads_before


def test_closing_lets_go_of_the_memory() -> None:
    """With the variable, a session and a snapshot still bound."""
    engine = load(checkpoint(**BRIEF), threads=2)
    session = session_with(engine, [1, 2, 3])
    session.logits()
    point = session.snapshot()
    assert engine.store is not None
    parts = (engine.weights, engine.store, engine._model, engine.store._slots[0].base)
    held: list[Callable[[], object]] = [weakref.ref(part) for part in parts]
    del parts
    threads = {t.name for t in threading.enumerate()}
    assert any(name.startswith("k3-read") for name in threads)
    engine.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    session.append([4])
    with pytest.raises(SessionError, match="engine is closed"):
        session.logits()
    assert point.tokens == (1, 2, 3)
    assert engine.counts()["experts"].requests > 0  # the account stays readable


def test_close_waits_for_a_sweep_under_way() -> None:
    engine = load(checkpoint(**BRIEF), threads=2)
    session = session_with(engine, some_tokens(20))
    inside, go_on = threading.Event(), threading.Event()

    def hold(layer: int) -> None:
        if layer == 2:
            inside.set()
            assert go_on.wait(PATIENCE)

    engine.hooks.before_layer = hold
    found: list[Any] = []
    work = threading.Thread(target=lambda: found.append(session.logits()), daemon=True)
    close = threading.Thread(target=engine.close, daemon=True)
    work.start()
    assert inside.wait(PATIENCE)
    close.start()
    close.join(0.3)
    assert close.is_alive() and not engine._closed
    go_on.set()
    work.join(PATIENCE)
    close.join(PATIENCE)
    assert not work.is_alive() and not close.is_alive() and engine._closed
    with load(checkpoint(**BRIEF)) as other, session_with(other, some_tokens(20)) as again:
        assert same_bits(found[0], again.logits())


def test_too_many_threads_are_refused() -> None:
    most = 4 * default_threads()
    assert Options(threads=most).threads == most
    for threads in (most + 1, 10**6):
        with pytest.raises(UsageError, match=f"threads is {threads}.*{most} at most"):
            load(checkpoint(**BRIEF), threads=threads)
    with pytest.raises(UsageError, match="threads is 0"):
        load(checkpoint(**BRIEF), threads=0)


# ---- a session changed under a generator ----


@pytest.mark.parametrize("change", [Session.reset, Session.close])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_session_taken_away_while_generating(
    engine: Engine, change: Callable[[Session], None], after: int
) -> None:
    """A ``SessionError`` or an end, no raw error; the other request's session goes on."""
    session, other = session_with(engine, some_tokens(30)), session_with(engine, [5, 6])
    events = generate(engine, [Request(session, 6, FREE), Request(other, 6, FREE)])
    for _ in range(after):
        next(events)
    change(session)
    with suppress(SessionError):  # anything else fails this test
        assert any(isinstance(e, Done) and e.request == 0 for e in events)
        list(events)
    made = other.tokens[2:]
    with session_with(engine, [5, 6]) as alone:
        list(alone.generate(max(1, len(made)), FREE))
        assert alone.tokens[2 : 2 + len(made)] == made
    assert list(other.generate(1, FREE))
    if change is Session.reset:
        assert session.tokens == () or session.position == 0
        session.reset()
        session.append([1])
        session.logits()
    session.close()
    other.close()


# ---- interrupted at any line ----


class Interrupt:
    """Raises ``KeyboardInterrupt`` before the ``at``-th line of ``codes`` that is run."""

    def __init__(self, codes: set[CodeType], at: int) -> None:
        self._codes, self._at, self.seen = codes, at, 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code in self._codes else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self._at:
                raise KeyboardInterrupt
        return self._line


CODES = {
    f.__code__
    for f in (
        Model.sweep, Model._check, Model._stream, Engine.sweep, Engine.run, Session.keep_logits,
        SequenceState.reserve, SequenceState.usable,
    )
}  # fmt: skip
PAST, NEXT = [some_tokens(70, 1), some_tokens(9, 2)], [some_tokens(4, 3), [8]]


def _interrupted(engine: Engine, sessions: list[Session], at: int) -> bool:
    """Sweep ``sessions`` with an interruption at line ``at``; False if there are fewer lines."""
    before = sys.gettrace()
    trace = Interrupt(CODES, at)
    sys.settrace(trace)
    try:
        engine.sweep(sessions)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert trace.seen < at
    return False


def test_interrupted_at_any_line_never_half_advanced(engine: Engine) -> None:
    """Each session is lost and says so, or is whole: where it was or where it was going."""
    roots = [session_with(engine, tokens) for tokens in PAST]
    engine.advance(roots)
    wanted = []
    for root, tokens in zip(roots, NEXT, strict=True):
        with root.fork() as session:
            session.append(tokens)
            wanted.append(session.logits())
    lost = whole = at = 0
    while True:
        at += 1
        sessions = [root.fork() for root in roots]
        for session, tokens in zip(sessions, NEXT, strict=True):
            session.append(tokens)
        if not _interrupted(engine, sessions, at):
            break
        for i, session in enumerate(sessions):
            if session.state.broken is not None:
                lost += 1
                with pytest.raises(SessionError, match="interrupted"):
                    session.logits()
            else:
                whole += 1
                assert session.position in (len(PAST[i]), len(PAST[i]) + len(NEXT[i]))
                assert same_bits(session.logits(), wanted[i]), at
            session.close()
    assert at > 60 and lost > 60 and whole > 20, (at, lost, whole)
    for root in roots:
        root.close()


def test_interrupted_while_the_position_moves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first and the second state of a sweep, the last moment there is."""
    first, second = session_with(engine, PAST[0]), session_with(engine, PAST[1])
    plain = SequenceState.__setattr__

    def moved(state: SequenceState, name: str, value: object) -> None:
        if name == "position" and state is second.state:
            raise KeyboardInterrupt
        plain(state, name, value)

    monkeypatch.setattr(SequenceState, "__setattr__", moved)
    with pytest.raises(KeyboardInterrupt):
        engine.sweep([first, second])
    monkeypatch.undo()
    assert first.position == len(PAST[0])
    with session_with(engine, PAST[0]) as alone:
        assert same_bits(first.logits(), alone.logits())
    with pytest.raises(SessionError, match="interrupted"):
        second.logits()
    second.reset()
    second.append(PAST[1])
    with session_with(engine, PAST[1]) as alone:
        assert same_bits(second.logits(), alone.logits())
    first.close()
    second.close()


def test_load_stays_a_function_whatever_is_imported() -> None:
    """A module of the same name in the package would take its place once imported."""
    first = k3offload.load
    with first("nano", context=64, device="cpu"):
        assert k3offload.load is first and callable(k3offload.load)
