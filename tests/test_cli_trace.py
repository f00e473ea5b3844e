"""``--trace`` of every command that runs a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from k3offload.cli import app
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


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for part, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, f"{name}{part} ")
        else:
            yield name + part, one


def test_who_offers_to_record_does() -> None:
    """``open_model`` records; a command that opens engines otherwise would leave --trace out."""
    offered, named = set(), set()
    for name, command in commands(typer.main.get_command(app)):
        options = {option for param in command.params for option in param.opts}
        if "--trace" in options or "--trace-with" in options:
            offered.add(name)
            assert {"--trace", "--trace-with"} <= options, name
        if "open_model" in inspect.unwrap(command.callback).__code__.co_names:
            named.add(name)
    assert offered == named == {"generate", "chat", "batch", "logits", "serve"}
