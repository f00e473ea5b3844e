"""Sessions on disk: what comes back, and what a save costs.

R29 (a saved session is of use after a restart), R32 (disks fill up).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3offload.engine import Engine
from k3offload.loading import load
from k3offload.session_manifest import CHUNK
from tests.helpers_checkpoint import ROOT
from tests.helpers_engine import BRIEF, checkpoint, same_bits, session_with, some_tokens
from tests.helpers_saved import REPLY, A, B, decode, one_file, save_reply

zarr = pytest.importorskip("zarr")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", context=9000, sessions=8) as made:
        yield made


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    return save_reply(engine, tmp_path / "s")


# ---- what comes back ----

CONTINUE = """
import sys
import numpy as np
from k3offload.loading import load
model, out, *folders = sys.argv[1:]
with load(model, dtype="float32", context=9000, sessions=3) as engine:
    rows = []
    for folder in folders:
        with engine.load_session(folder) as session:
            before = session.position
            session.append([7, 8, 9])
            rows.append(session.logits())
            print(before, session.position)
            session.append_sampled(4)
            rows.append(session.logits())
np.save(out, np.stack(rows))
"""


def test_another_process_goes_on_with_the_same_bits_r29(engine: Engine, tmp_path: Path) -> None:
    """X, then Y, then X again; both are saved and go on elsewhere as they do here."""
    x, y = session_with(engine, A), session_with(engine, B)
    decode(x, REPLY)
    y.logits()
    decode(x, [1])
    x.append_sampled(2)  # not computed when it is saved
    wanted = []
    for name, session in (("x", x), ("y", y)):
        session.save(tmp_path / name)
        session.append([7, 8, 9])
        wanted.append(session.logits())
        session.append_sampled(4)
        wanted.append(session.logits())
        session.close()
    out = tmp_path / "rows.npy"
    arguments = [checkpoint(**BRIEF), out, tmp_path / "x", tmp_path / "y"]
    done = subprocess.run(
        [sys.executable, "-c", CONTINUE, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert same_bits(np.load(out), np.stack(wanted))
    # the reply's last token waited, so it is computed with what is new
    assert done.stdout.split("\n")[:2] == ["307 311", "75 78"]


def test_everything_comes_back(engine: Engine, saved: Path) -> None:
    with engine.load_session(saved) as session:
        assert session.tokens == (*A, *REPLY, 9) and session.waiting() == [9]
        assert session.decoding and not session.state.cold
        with session_with(engine, A) as other:
            known = decode(other, REPLY)[-1]
            assert session.known_logits is not None and same_bits(session.known_logits, known)
            other.append_sampled(9)
            assert same_bits(session.logits(), other.logits())


def test_nothing_computed_and_nothing_at_all(engine: Engine, tmp_path: Path) -> None:
    for name, tokens in (("none", []), ("waiting", A[:70])):
        with session_with(engine, tokens) as session:
            session.save(tmp_path / name)
        with engine.load_session(tmp_path / name) as session:
            assert session.tokens == tuple(tokens) and session.position == 0
            session.append(A[len(tokens) : 70])
            with session_with(engine, A[:70]) as other:
                assert same_bits(session.logits(), other.logits())


def test_latents_are_zarr(engine: Engine, tmp_path: Path) -> None:
    """A whole chunk and an open one; any zarr reader sees the whole ones."""
    tokens = some_tokens(CHUNK + 30, 4)
    with session_with(engine, tokens) as session:
        session.logits()
        session.save(tmp_path / "s")
        latents = session.state.latents[3]
        rows = torch.cat([latents.rows(i) for i in range(latents.blocks)])[: CHUNK + 30]
        wanted = session.logits()
    array = zarr.open_group(one_file(tmp_path / "s", "latents"), mode="r")["3"]
    assert array.attrs["dtype"] == "float32" and array.chunks == (CHUNK, latents.width)
    assert (array[:] == rows[:CHUNK].view(torch.uint32).numpy()).all()
    with engine.load_session(tmp_path / "s") as session:
        assert same_bits(session.logits(), wanted)
        session.append([1])
        with session_with(engine, [*tokens]) as other:
            other.logits()
            other.append([1])
            assert same_bits(session.logits(), other.logits())


# ---- what a save costs ----


def total(path: Path) -> int:
    """Bytes of all files below ``path``."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def test_twenty_saves_write_little_more_than_is_there_r32(engine: Engine, tmp_path: Path) -> None:
    """Also across two restarts, over whole chunks and within the open one."""
    path, written, session = tmp_path / "s", 0, engine.session()
    sizes = [700, 1, 90, 4000, 5, 300, 64, 1, 1, 50] * 2
    for turn, more in enumerate(sizes):
        session.append(some_tokens(more % 1000, turn))
        if turn % 3:
            decode(session, REPLY)
        written += session.save(path)
        if turn in (5, 12):
            session.close()
            session = engine.load_session(path)
    spec = engine.spec
    snapshot = spec.kda_state_bytes(4) + spec.vocab * 4
    final = total(path)
    assert final > 1_000_000
    assert written <= 1.3 * final + 20 * snapshot
    assert len(list(path.glob("save-*"))) == 1
    with engine.load_session(path) as again:
        session.append([1])
        again.append([1])
        assert same_bits(again.logits(), session.logits())
    session.close()


def test_a_rewound_session_keeps_what_it_shares(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with session_with(engine, some_tokens(600, 5)) as session:
        session.logits()
        point = session.snapshot()
        session.append(some_tokens(200, 6))
        session.logits()
        session.save(path)
        session.rewind(point)
        session.append(some_tokens(150, 7))
        wanted = session.logits()
        session.save(path)
        with engine.load_session(path) as again:
            assert again.tokens == session.tokens
            assert same_bits(again.logits(), wanted)
            again.append([1])
            session.append([1])
            assert same_bits(again.logits(), session.logits())


def test_forks_are_saved_apart_and_into_each_other(engine: Engine, tmp_path: Path) -> None:
    with session_with(engine, A) as session, session_with(engine, []) as _:
        session.logits()
        session.save(tmp_path / "a")
        with session.fork() as fork:
            assert fork.state.latents[3].serials[0] == session.state.latents[3].serials[0]
            rows = {}
            for one, token in ((session, 1), (fork, 2)):
                one.append([token])
                rows[token] = one.logits()
            fork.save(tmp_path / "b")
            session.save(tmp_path / "a")
            for name, token in (("a", 1), ("b", 2)):
                with engine.load_session(tmp_path / name) as again:
                    assert same_bits(again.logits(), rows[token])
            fork.save(tmp_path / "a")  # over the other's save
            with engine.load_session(tmp_path / "a") as again:
                assert again.tokens == (*A, 2)
                again.append([3])
                fork.append([3])
                assert same_bits(again.logits(), fork.logits())


def test_where_there_are_no_links(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refused)
    with session_with(engine, A) as session:
        for token in (1, 2, 3):
            session.append([token])
            wanted = session.logits()
            session.save(tmp_path / "s")
        with engine.load_session(tmp_path / "s") as again:
            assert same_bits(again.logits(), wanted) and again.tokens == session.tokens
