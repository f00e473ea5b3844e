"""``--trace`` of every command that runs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.trace import read_trace
from tests.helpers_engine import call


@pytest.mark.parametrize("command", ["generate", "logits", "batch"])
def test_trace(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, tokens = tmp_path / "t", tmp_path / "tokens.npy"
    np.save(tokens, np.arange(1, 40))
    (tmp_path / "docs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "docs" / f"{name}.txt").write_text(f"And {name} said")
    given: dict[str, list[Any]] = {
        "generate": ["nano", "In the", "-n", 5, "--ignore-end"],
        "logits": ["nano", "--tokens", tokens, "--out", tmp_path / "l.npy",
                   "--routing", tmp_path / "r.npz", "--decode-from", 30],
        "batch": ["nano", tmp_path / "docs", "-o", tmp_path / "o.jsonl", "-n", 3],
    }  # fmt: skip
    arguments = [command, *given[command], "--cache", "1M", "--trace", out]
    assert call([*arguments, "--trace-with", "margin", "--trace-with", "tiers"], capsys)[0] == 0
    trace = read_trace(out)
    assert {"margin"} == set(trace.more) and len(trace.events["event_kind"])
    assert trace.about["model"] == "nano" and trace.decode.any() and not trace.decode.all()
    assert len(set(trace.sequence.tolist())) == (2 if command == "batch" else 1)
    if command == "logits":  # --routing watches too
        seen = np.load(tmp_path / "r.npz")["experts"]
        assert (np.sort(seen.transpose(1, 0, 2)) == trace.chosen).all()
    if command == "batch":
        arguments.insert(1, "--overwrite")
    code, _, err = call(arguments, capsys)
    assert code == 2 and "not an empty folder" in err
    code, _, err = call([*arguments[:-2], "--trace-with", "margin"], capsys)
    assert code == 2 and "names no folder" in err
    code, _, err = call([*arguments[:-1], tmp_path / "u", "--trace-with", "all"], capsys)
    assert code == 2 and "no part 'all'" in err
