"""What ``bench read`` says, with and without fio, of models with and without experts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from k3offload import bench_read, cli_bench
from k3offload.bench_read import Comparison, compare, read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.errors import K3Error, ReadError, UsageError
from tests.helpers_checkpoint import tiny
from tests.helpers_engine import BRIEF, checkpoint


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
    assert json.loads(json.dumps(found.to_dict()))["reads"] == found.reads


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
    found = compare(model, seconds=0.05)
    assert (found.ratio, found.fio, found.verdict) == (None, None, "not compared")
    assert "not installed" in found.why_not and found.ours.reads > 1


def test_a_small_model_is_not_compared(model: Checkpoint, tmp_path: Path) -> None:
    """Whatever fio would say of a few megabytes again and again."""
    with pytest.MonkeyPatch.context() as patch:
        _program(tmp_path, "exit 1", patch)
        found = compare(model, seconds=0.05)
    assert found.ratio is None
    if found.ours.mode == "direct":
        assert "so little" in found.why_not


def _program(folder: Path, script: str, patch: pytest.MonkeyPatch) -> None:
    """A program of fio's name that comes first."""
    (folder / "fio").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "fio").chmod(0o755)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_fio_takes_turns_with_ours(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    monkeypatch.setattr(bench_read, "SMALL", 0)
    monkeypatch.setattr(bench_read, "ROUNDS", 2)
    before = {file: file.stat().st_mtime_ns for file in model.folder.iterdir()}
    said: list[str] = []
    found = compare(model, seconds=1.2, watch=said.append)
    if found.ours.mode != "direct":
        assert found.why_not == "the file system refuses direct reads"
        return
    assert found.fio and found.engine in bench_read.ENGINES
    assert len(found.ratios) == 2 and found.ratio
    assert min(found.ratios) <= found.ratio <= max(found.ratios)
    assert found.verdict == ("good" if found.ratio >= 0.95 else "slow")
    assert said[-1] == "round 2 of 2"
    assert before == {file: file.stat().st_mtime_ns for file in model.folder.iterdir()}


@pytest.mark.parametrize("script", ["echo broken >&2; exit 1", "echo '{}'"])
def test_fio_that_does_not_run_is_said(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(bench_read, "SMALL", 0)
    _program(tmp_path, script, monkeypatch)
    if read_rate(model, seconds=0).mode != "direct":
        pytest.skip("the file system of the models has no direct reads")
    with pytest.raises(K3Error, match=r"fio did not run: (broken|\{\})"):
        compare(model, seconds=0.1)


# ---- the command ----


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    cli_bench.add_to(made)
    return made


def test_command_prints_lines_or_json(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    folder = str(checkpoint(**BRIEF))
    done = CliRunner().invoke(app, ["bench", "read", folder, "--seconds", "0.05"])
    assert done.exit_code == 0, done.output
    assert "routed experts of" in done.stdout and "not compared: fio" in done.stdout
    done = CliRunner().invoke(app, ["bench", "read", folder, "--seconds", "0.05", "--json"])
    found = json.loads(done.stdout)
    assert found["verdict"] == "not compared" and found["ours"]["bytes"] > 0


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_seconds_must_be_some(app: typer.Typer, seconds: str) -> None:
    done = CliRunner().invoke(app, ["bench", "read", "nano", "--seconds", seconds])
    assert isinstance(done.exception, UsageError)


def test_verdicts(model: Checkpoint) -> None:
    ours = read_rate(model, seconds=0)
    slow = Comparison(ours, "psync", 2e9, 0.94, (0.94,), "")
    good = Comparison(ours, "psync", 2e9, 0.95, (0.95,), "")
    assert "slow: the median of 1 rounds" in cli_bench.render(slow)
    assert "psync, 8 reads at once" in cli_bench.render(good) and "good" in cli_bench.render(good)
