"""Files are found by name, and a longer operator's name is not taken for a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3offload import registry


def test_names_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PACKAGE", tmp_path)
    (tmp_path / "kernels").mkdir()
    for name in ("kda_reference", "kda_triton", "kda_gate_reference", "kda_", "mxfp4", "xkda_a"):
        (tmp_path / "kernels" / f"{name}.py").touch()
    (tmp_path / "kernels" / "kda_notes.txt").touch()
    assert registry.names("kernels", "kda") == ["reference", "triton"]
    assert registry.names("kernels", "kda_gate") == ["reference"]
    assert registry.names("kernels", "nothing") == []


def test_implementations_are_the_modules() -> None:
    found = registry.implementations("kernels", "kda")
    assert found["reference"].__name__ == "k3offload.kernels.kda_reference"
    assert "gate_reference" not in found
    assert hasattr(registry.implementations("scheduler", "policy")["lru"], "Policy")
