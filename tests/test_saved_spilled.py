"""Sessions whose latents spill, saved, loaded, gone back with and shared: the bits of sessions that
have all of it in memory (R12, R18, R29, R32, R58)."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.engine import Engine
from k3offload.errors import ScratchError
from k3offload.latents import SpilledLatents
from k3offload.loading import load
from k3offload.session_manifest import MANIFEST
from tests.helpers_engine import (
    BRIEF,
    Logits,
    call,
    checkpoint,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
)
from tests.helpers_saved import REPLY, decode
from tests.test_latents import least, moved, spill

pytest.importorskip("zarr")
LONG = some_tokens(1500, 1)
HOW: dict[str, Any] = {"context": 2000, "sessions": 3, "sweep": 512, "threads": 2}


def loaded(**options: Any) -> Engine:
    return load(checkpoint(**BRIEF), **{**HOW, **options})


def tight_one(scratch: Path, **options: Any) -> Engine:
    """An engine with the least memory for latents."""
    return loaded(latents=least(**{**HOW, **options}), scratch=scratch, **options)


@pytest.fixture(scope="module")
def resident() -> Iterator[Engine]:
    with loaded() as engine:
        assert engine.spilling is None
        yield engine


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Engine]:
    with tight_one(tmp_path / "scratch") as engine:
        yield engine


def story(engine: Engine, folder: Path, other: Engine) -> tuple[list[Logits], list[int]]:
    """Saves on the way, ``other`` going on from each; the logits, and the bytes of each save."""
    rows, written = [], []
    with session_with(engine, LONG[:700]) as session:
        for end in (700, 705, 1100):
            session.append(LONG[session.length : end])
            rows.append(session.logits())
            rows.append(decode(session, REPLY)[-1])
            written.append(session.save(folder))
            with other.load_session(folder) as again:
                assert again.position == session.position
                again.append(LONG[1100:1200])
                rows.append(again.logits())
                rows.append(decode(again, REPLY)[-1])
    return rows, written


@pytest.mark.parametrize("there", ["tight", "resident"])
def test_a_session_goes_from_disk_to_disk_r29(
    resident: Engine, tight: Engine, tmp_path: Path, there: str
) -> None:
    """Saved where latents spill and loaded where they do or do not, as where nothing does; a
    second save adds what is new."""
    wanted, whole = story(resident, tmp_path / "a", resident)
    got, written = story(tight, tmp_path / "b", tight if there == "tight" else resident)
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
    assert written == pytest.approx(whole, abs=64) and written[1] < written[0] / 2
    assert moved(tight)


def test_a_load_waits_for_a_sweep_of_others(
    resident: Engine, tight: Engine, tmp_path: Path
) -> None:
    """Two threads fill latents of one engine: one computes, one loads again and again."""
    with session_with(tight, LONG[:900]) as first:
        first.logits()
        first.save(tmp_path / "s")
    wanted = logits_of(resident, LONG, keep=1)[0]
    rows: list[Logits] = []

    def computes() -> None:
        with session_with(tight, LONG) as session:
            rows.append(session.logits())

    thread = threading.Thread(target=computes)
    thread.start()
    while thread.is_alive():
        tight.load_session(tmp_path / "s").close()
    thread.join()
    with tight.load_session(tmp_path / "s") as session:
        session.append(LONG[900:])
        assert same_bits(session.logits(), logits_of(resident, LONG, keep=1)[0])
    assert same_bits(rows[0], wanted)


def test_a_lost_file_leaves_the_save_before_r32_r58(tight: Engine, tmp_path: Path) -> None:
    with session_with(tight, LONG[:600]) as session:
        session.logits()
        session.save(tmp_path / "s")
        before = (tmp_path / "s" / MANIFEST).read_bytes()
        session.append(LONG[600:])
        session.logits()
        spill(tight).flush()
        assert tight.spilling is not None
        for latents in session.state.latents.values():
            assert isinstance(latents, SpilledLatents)
        for path in tight.spilling.scratch.folder.rglob("*"):
            if path.is_file() and path.stat().st_size > 10_000:
                os.truncate(path, 0)
        with pytest.raises(ScratchError):
            session.save(tmp_path / "s")
    assert (tmp_path / "s" / MANIFEST).read_bytes() == before
    assert len(list((tmp_path / "s").glob("save-*"))) == 1
    with tight.load_session(tmp_path / "s") as again:
        assert again.position == 600 and again.logits().shape


def test_edits_go_back_to_marks(resident: Engine, tight: Engine) -> None:
    with session_with(tight, LONG[:1400]) as session:
        for position in (320, 1024, 1300):
            session.mark(position)
        session.logits()
        for length, kept in ((1350, 1280), (1281, 1280), (1280, 1024), (700, 320), (100, 0)):
            session.truncate(length)
            assert (session.position, session.reused) == (kept, kept)
            assert same_bits(session.logits(), logits_of(resident, LONG[:length], keep=1)[0])
    assert moved(tight)


def test_prefixes_share_blocks_on_disk_r12(resident: Engine, tmp_path: Path) -> None:
    """What RAM holds of a snapshot is its KDA state; the bits are those of a cold run, here and in
    another process that finds it in the folder."""
    options: dict[str, Any] = {"prefix_dir": str(tmp_path / "kept")}
    for first, wanted in ((0, (0, 1088, 1216)), (1088, (1088, 1216, 1216))):
        with tight_one(tmp_path / "scratch", **options) as engine:
            assert engine.prefixes is not None and engine.plan.prefixes < 2_000_000
            reused = []
            for tokens in (LONG[:1100], LONG[:1230], LONG[:1230] + REPLY):
                with session_with(engine, tokens) as session:
                    row = session.logits()
                    reused.append(session.reused)
                assert same_bits(row, logits_of(resident, tokens, keep=1)[0])
            assert tuple(reused) == wanted and reused[0] == first
            assert moved(engine) or first


@pytest.mark.parametrize("where", ["resident", "tight"])
def test_stopped_at_every_layer_and_asked_anew_r18(
    resident: Engine, where: str, request: pytest.FixtureRequest
) -> None:
    """A prompt that is cancelled at any layer leaves nothing behind: another one after it has the
    bits of a fresh engine, and the memory of state and slots is given back."""
    engine: Engine = request.getfixturevalue(where)
    wanted = logits_of(resident, LONG[:600], keep=1)[0]
    used = engine._ledger.used
    for stop in range(len(engine.spec.layers)):

        def before(layer: int, stop: int = stop) -> None:
            if layer == stop:
                raise KeyboardInterrupt

        with session_with(engine, LONG[100:900]) as lost:
            engine.hooks.before_layer = before
            try:
                with pytest.raises(KeyboardInterrupt):
                    lost.logits()
            finally:
                engine.hooks.before_layer = lambda layer: None
            with session_with(engine, LONG[:600]) as after:
                assert same_bits(after.logits(), wanted), stop
        del lost, after
        assert engine._ledger.used == used


def test_recall_is_the_same_from_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = ["evaluate", "recall", "nano", "--longest", 2048, "--trials", 1, "--json"]
    code, out, err = call(base, capsys)
    assert code == 0, err
    code, _, err = call([*base, "--latents", "1"], capsys)
    given = re.search(r"--latents (\d+M)", err)
    assert code and given
    code, spilled, err = call([*base, "--latents", given[1], "--scratch", tmp_path], capsys)
    assert code == 0, err
    assert json.loads(spilled) == json.loads(out)
    assert np.isfinite([row["lead"] for row in json.loads(out)["rows"]]).all()
