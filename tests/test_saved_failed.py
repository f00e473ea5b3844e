"""What a save leaves that fails, is killed, or is read while it is written (R32)."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from k3offload.engine import Engine
from k3offload.errors import SessionError, UsageError
from k3offload.loading import load
from k3offload.session import Session
from k3offload.session_manifest import MANIFEST, read_manifest
from tests.helpers_engine import BRIEF, checkpoint, same_bits, session_with, some_tokens
from tests.helpers_saved import A, B, one_file

zarr = pytest.importorskip("zarr")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", context=9000, sessions=8) as made:
        yield made


def test_places_that_hold_something_else(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear")
    with session_with(engine, B) as session:
        with pytest.raises(UsageError, match="something else"):
            session.save(tmp_path / "mine")
        with pytest.raises(UsageError, match="in the model's folder"):
            session.save(checkpoint(**BRIEF) / "s")
        with pytest.raises(UsageError, match="a is not a folder"):
            session.save(tmp_path / "a" / "b")
        with pytest.raises(UsageError, match=r"diary\.txt is no folder"):
            session.save(tmp_path / "mine" / "diary.txt")
        with pytest.raises(UsageError, match="can be named so"):
            session.save(f"{tmp_path}/a\0b")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["diary.txt"]


def test_a_full_disk_leaves_the_save_before_r32(engine: Engine, tmp_path: Path) -> None:
    """No file may grow beyond some size: it fails in one file or another, and for real."""
    path = tmp_path / "s"
    with session_with(engine, A) as session:
        kept = session.logits()
        session.save(path)
        before = read_manifest(path)
        session.append(some_tokens(500, 8))
        wanted = session.logits()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for most in (0, 100, 1300, 60_000, 100_000, 180_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
            try:
                with pytest.raises(SessionError, match=r"could not be saved.*goes on in memory"):
                    session.save(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert read_manifest(path) == before and len(list(path.iterdir())) <= 3
            with engine.load_session(path) as again:
                assert again.known_logits is not None and same_bits(again.known_logits, kept)
            assert same_bits(session.logits(), wanted)
        session.save(path)
        with engine.load_session(path) as again:
            assert same_bits(again.logits(), wanted)


def test_reading_while_it_is_saved_gives_one_or_the_other_r32(
    engine: Engine, tmp_path: Path
) -> None:
    path, stop, seen, errors = tmp_path / "s", threading.Event(), set(), []
    with session_with(engine, A[:64]) as session:
        rows = {64: session.logits()}
        session.save(path)

        def read() -> None:
            while not stop.is_set():
                try:
                    with engine.load_session(path) as again:
                        known = again.known_logits
                        assert known is not None and same_bits(known, rows[again.position])
                        seen.add(again.position)
                except BaseException as error:
                    errors.append(error)
                    return

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for token in range(25):
                session.append([token])
                rows[session.length] = session.logits()
                session.save(path)
        finally:
            stop.set()
            reader.join()
    assert not errors and len(seen) > 3


def _killed(session: Session, path: Path, step: int) -> bool:
    """Save in a process that kills itself before line number ``step`` of the code that saves;
    whether it came so far."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = step

    def line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line if "session_" in frame.f_code.co_filename else None

    try:
        sys.settrace(call)
        session.save(path)
    finally:
        os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_save_leaves_the_one_before_r32(engine: Engine, tmp_path: Path) -> None:
    """Killed at many lines of the code; each time the folder is the old or the new save."""
    path, new, step = tmp_path / "s", 0, 0
    with session_with(engine, A) as session:
        rows = {len(A): session.logits()}
        session.save(path)
        session.append(some_tokens(60, 9))
        rows[session.length] = session.logits()
        while _killed(session, path, step):
            with engine.load_session(path) as again:
                known = again.known_logits
                assert known is not None and same_bits(known, rows[again.position])
                new += again.position > len(A)
            step += 19
        assert step > 19 * 20 and new
        session.save(path)  # over whatever is left
        assert len(list(path.iterdir())) == 2
        with engine.load_session(path) as again:
            again.append([5])
            session.append([5])
            assert same_bits(again.logits(), session.logits())


def test_a_folder_that_only_looks_like_ours_is_left(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "save-000001").mkdir()
    (tmp_path / "save-000001" / "precious.txt").write_text("x")
    with session_with(engine, A) as session:
        session.logits()
        with pytest.raises(UsageError, match="something else"):
            session.save(tmp_path)
    assert (tmp_path / "save-000001" / "precious.txt").read_text() == "x"


@pytest.mark.parametrize("name", ["open/3.bin", "tokens.bin", "state.bin"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_damaged_save_is_replaced_by_a_whole_one(
    engine: Engine, tmp_path: Path, name: str, how: str
) -> None:
    """Nothing of it is taken over: what is in memory is whole."""
    path = tmp_path / "s"
    with session_with(engine, A) as session:
        session.logits()
        session.save(path)
        place = one_file(path, name)
        data = place.read_bytes()
        if how == "gone":
            place.unlink()
        else:
            place.write_bytes(data[:-40] if how == "cut" else data[:50] + b"~~~" + data[53:])
        session.append(some_tokens(40, 8))
        wanted = session.logits()
        session.save(path)
    with engine.load_session(path) as again:
        assert same_bits(again.logits(), wanted)


def test_a_manifest_that_is_a_folder(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(SessionError, match=f"{MANIFEST} is damaged: it cannot be read"):
        engine.load_session(tmp_path)


def test_nothing_is_saved_of_a_closed_engine(tmp_path: Path) -> None:
    with load(checkpoint(**BRIEF), context=300) as other:
        session = session_with(other, A[:20])
        session.logits()
    with pytest.raises(SessionError, match="engine is closed"):
        session.save(tmp_path / "s")
    assert not (tmp_path / "s").exists()
