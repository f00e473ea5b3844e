"""What measures the cost of recording sees what listening and writing take."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record_cost
from k3offload.trace import read_trace
from k3offload.trace_rows import Recorder


def busy(method: Any, seconds: float) -> Any:
    """``method``, which takes so much longer."""

    def slow(*given: Any) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        method(*given)

    return slow


@pytest.mark.parametrize(("case", "ms"), [("decode", 3), ("prompt", 15)])
def test_slow_hooks_and_slow_writing_are_seen(
    case: str, ms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_cost, "CHUNKS", 1)
    monkeypatch.setattr("k3offload.trace.CHUNKS", 1 << 14)  # less to write
    monkeypatch.setattr(Recorder, "on_route", busy(Recorder.on_route, ms / 1e3))
    found = record_cost.measure("nano", case, 6, [], tmp_path / "t")
    spent = found["busy"]["listening"] * found["busy"]["step_ms"]
    assert 0.7 < spent / (7 * ms) < 3, found  # of seven layers
    assert found["busy"]["between"][0] <= found["busy"]["listening"] <= found["busy"]["between"][1]
    assert 0 < found["busy"]["writing"] < 2 and found["wall"]["writing"] > 0
    assert found["busy"]["cost"] == found["busy"]["listening"] + found["busy"]["writing"]
    assert len(read_trace(tmp_path / "t").best) >= 90


def test_a_part_that_nothing_is_told_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="case prompt tells nothing of ahead"):
        record_cost.measure("nano", "prompt", 1, ["ahead"], tmp_path / "p")
    monkeypatch.setattr(record_cost, "CHUNKS", 1)
    monkeypatch.setattr("k3offload.trace.CHUNKS", 1 << 14)
    record_cost.measure("nano", "decode", 3, ["ahead", "latent"], tmp_path / "d")
    trace = read_trace(tmp_path / "d")
    assert len(trace.more) == 3
    for name, told in trace.more.items():
        rows = told[trace.decode]
        assert rows[:, 1:-1].any(axis=2).all() and len(rows) > 3, name
