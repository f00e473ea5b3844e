"""Documents that a batch had under way: what a killed run leaves is found, or dropped; no more."""

from __future__ import annotations

import os
from pathlib import Path

from k3offload.batch_records import Records
from tests.helpers_batch import ABOUT, ODD, answer, batch, of

LOST, CUT, DONE, GOES_ON, CHANGES = (
    "plain",
    "x" * 5000,
    "name \udcff.txt",
    "NUL",
    "../../etc/passwd",
)


def left(out: Path) -> None:
    """What a run leaves that is killed: a document each without its note, with a damaged one, with
    its record on the drive already, and two that could go on."""
    home = out.with_name(f"{out.name}.state")
    with Records.open(out, ABOUT) as records:
        for id in ODD:
            assert not records.done(id, of(id))
            folder = records.state_folder(id)
            assert folder.parent == home and len(folder.name) == 32
            folder.mkdir()
            (folder / "state").write_bytes(b"x")
            if id != LOST:
                records.keep_state(id, of(id), {"tokens": [1, 2], "id": id})
        records.keep_state(GOES_ON, of(GOES_ON), {"tokens": [3]})
        records.drop_state("")
        assert not records.state_folder("").exists()
        cut = records.state_folder(CUT).name
        (home / f"{cut}.json").write_bytes(b'{"id": "y", "digest": "d", "extra": {}}')
        (home / f"{cut}.json.part").write_bytes(b'{"id"')
        records.add(answer(DONE, DONE))
        os.rename(home, home.with_name("kept"))
        home.mkdir()
        records.flush()
    os.rename(home.with_name("kept"), home)


def test_states_of_a_run_that_was_killed(tmp_path: Path) -> None:
    out, home, said = tmp_path / "out.jsonl", tmp_path / "out.jsonl.state", list[str]()
    left(out)
    (home / "mine").write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_bytes(b"x")
    os.symlink(tmp_path / "elsewhere", home / ("0" * 32))
    with Records.open(out, ABOUT, resume=True, warn=said.append) as records:
        assert [state.id for state in records.running()] == [CHANGES, GOES_ON]
        cut = records.state_folder(CUT)
        assert len(said) == 1 and f"{cut.name}.json is damaged" in said[0]
        assert not cut.exists() and not records.state_folder(LOST).exists()
        assert records.done(DONE, of(DONE))
        assert not records.done(GOES_ON, of(GOES_ON))
        state = records.state(GOES_ON)
        assert state is not None and state.extra == {"tokens": [3]}
        assert (state.folder / "state").read_bytes() == b"x"
        assert not records.done(CHANGES, of("changed"))
        assert records.state(CHANGES) is None and records.running() == [state]
    name = state.folder.name
    assert {path.name for path in home.iterdir()} == {name, f"{name}.json", "mine"}
    batch(out, {"a": "b"}, overwrite=True)
    assert {path.name for path in home.iterdir()} == {"mine"}
    assert (tmp_path / "elsewhere" / "mine").exists()


def test_a_document_to_try_again_keeps_its_state(tmp_path: Path) -> None:
    """Though a record with its digest is there: the state is newer."""
    out = tmp_path / "out.jsonl"
    for attempt in range(3):
        with Records.open(out, ABOUT, resume=True) as records:
            assert not records.done("a", of("a"))
            state = records.state("a")
            assert (None if state is None else state.extra) == (None, None, {"n": 1})[attempt]
            if attempt == 0:
                records.add({**answer("a", "a"), "error": "no room", "retry": True})
                records.flush()
            records.keep_state("a", of("a"), {"n": attempt}) if attempt == 1 else None
    assert batch(out, {"a": "a"}, resume=True)["stale"] == 1
    assert not (tmp_path / "out.jsonl.state").exists()


def test_states_of_documents_that_are_gone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    left(out)
    batch(out, {"another": "text"}, resume=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.run.json"}
