"""What ``bench read`` says, with and without fio, of models with and without experts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from k3offload import bench_read, contention
from k3offload.bench_read import Turns, faster_engine, read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.cli_bench import verdict
from k3offload.errors import K3Error, ReadError
from tests.helpers_checkpoint import tiny
from tests.helpers_engine import BRIEF, call, checkpoint


@pytest.fixture
def model() -> Checkpoint:
    return Checkpoint.open(checkpoint(**BRIEF))


def test_pages_are_experts_and_counts_add_up(model: Checkpoint) -> None:
    found = read_rate(model, seconds=0.1)
    moe = model.spec.moe
    assert moe is not None and found.what == "routed experts"
    assert found.pages == moe.experts * len(model.spec.moe_layers)
    assert found.page_bytes == model.expert_bytes <= found.window_bytes
    assert found.drawn_bytes == found.pages * model.expert_bytes
    assert found.bytes == found.reads * model.expert_bytes
    assert found.seconds >= 0.1 and found.rate == found.bytes / found.seconds
    assert found.mode in ("direct", "buffered")
    assert "no figure for a large model" in found.notes[0]


def test_bytes_are_bounded(model: Checkpoint) -> None:
    size = model.expert_bytes
    found = read_rate(model, seconds=30, most_bytes=10 * size)
    assert found.reads == 10 and found.seconds < 30
    assert read_rate(model, seconds=0).reads == 1


def test_a_model_without_experts_is_read_in_parts_of_its_trunk() -> None:
    opened = Checkpoint.open(checkpoint(layers=1, vision=False))
    assert opened.spec.moe is None or not opened.spec.moe_layers
    found = read_rate(opened, seconds=0, most_bytes=1)
    assert "trunk" in found.what
    every = sum(size for group, size in opened.bytes_by_group.items() if group != "vision")
    assert found.drawn_bytes == every


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    opened = Checkpoint.open(tiny(tmp_path / "m", **BRIEF))
    for file in opened.files:
        file.unlink()
    with pytest.raises(ReadError, match=r"offset [\d,]+ of .*safetensors failed"):
        read_rate(opened, seconds=0.1)


def test_without_fio_ours_stands_alone(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with Turns(model) as turns:
        before = turns.ours
        found = turns.turn(0.05, 0)
        after = turns.ours
    assert "not installed" in turns.why_not and faster_engine([found]) is None
    assert found["reads"] == after.reads - before.reads > 0
    assert found["bytes"] == found["reads"] * model.expert_bytes
    assert not any(name.startswith("fio") for name in found)


def test_a_small_model_is_not_compared(model: Checkpoint, tmp_path: Path) -> None:
    """Whatever fio would say of a few megabytes again and again."""
    with pytest.MonkeyPatch.context() as patch:
        _program(tmp_path, "exit 1", patch)
        with Turns(model) as turns:
            found = turns.turn(0.05, 0)
    assert faster_engine([found]) is None
    if found["mode"] == "direct":
        assert "so little" in turns.why_not


def _program(folder: Path, script: str, patch: pytest.MonkeyPatch) -> None:
    """A program of fio's name that comes first."""
    (folder / "fio").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "fio").chmod(0o755)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


SAYS = """case "$*" in
*ioengine=psync*) rate=100 ;;
*) rate=400 ;;
esac
echo "{\\"jobs\\": [{\\"read\\": {\\"bw_bytes\\": $rate}}]}"
"""


def test_ours_by_the_faster_engine(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_read, "SMALL", 0)
    _program(tmp_path, SAYS, monkeypatch)
    if read_rate(model, seconds=0).mode != "direct":
        pytest.skip("the file system of the models has no direct reads")
    with Turns(model) as turns:
        lines = [turns.turn(0.1, seed) for seed in range(3)]
    assert turns.why_not == "" and faster_engine(lines) == "libaio"
    for line in lines:
        assert (line["fio_psync"], line["fio_libaio"]) == (100, 400)
        assert line["of_fio_libaio"] == line["rate"] / 400


def test_fio_takes_turns_with_ours(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    monkeypatch.setattr(bench_read, "SMALL", 0)
    before = {file: file.stat().st_mtime_ns for file in model.folder.iterdir()}
    with Turns(model) as turns:
        if turns.why_not:
            assert turns.why_not == "the file system refuses direct reads"
            return
        found = turns.turn(0.6, 0)
    assert faster_engine([found]) in bench_read.ENGINES and found["of_fio_psync"] > 0
    assert before == {file: file.stat().st_mtime_ns for file in model.folder.iterdir()}


@pytest.mark.parametrize("script", ["echo broken >&2; exit 1", "echo '{}'"])
def test_fio_that_does_not_run_is_said(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(bench_read, "SMALL", 0)
    _program(tmp_path, script, monkeypatch)
    if read_rate(model, seconds=0).mode != "direct":
        pytest.skip("the file system of the models has no direct reads")
    with Turns(model) as turns, pytest.raises(K3Error, match=r"fio did not run: (broken|\{\})"):
        turns.turn(0.1, 0)


# ---- the command ----


def test_command_prints_a_table_or_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(contention, "LOOK", 0.01)
    monkeypatch.setattr(contention, "OTHERS", 9.0)
    monkeypatch.setattr(contention, "STOLEN", 9.0)
    command = ["bench", "read", checkpoint(**BRIEF), "--seconds", "0.1", "--repeats", 2]
    code, out, _ = call(command, capsys)
    assert code == 0 and "routed experts of" in out and "not compared: fio" in out
    code, out, _ = call([*command, "--json"], capsys)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["repeat"] for line in lines] == [0, 1]
    assert all(line["bytes"] == line["reads"] * line["page_bytes"] > 0 for line in lines)
    assert [line["seed"] for line in lines] == [0, 1] and lines[0]["beside"].startswith("fio is")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_seconds_must_be_some(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(["bench", "read", "nano", "--seconds", seconds], capsys)
    assert code == 2 and "--seconds is" in err


def test_verdicts() -> None:
    def line(rate: float) -> dict[str, Any]:
        return {"rate": rate, "fio_psync": 2e9, "of_fio_psync": rate / 2e9, "fio_libaio": 1e9,
                "of_fio_libaio": rate / 1e9}  # fmt: skip

    slow = verdict([line(1.88e9)])
    assert "slow: 0.940 of the rate of fio with psync and 8 reads at once" in slow
    assert "good: 0.950" in verdict([line(1.9e9), line(1.2e9), line(1.95e9)])
    assert verdict([{"rate": 1.0, "beside": "fio is not installed"}]).endswith("not installed")
