"""Kept prefixes on disk: they outlive the engine, are bounded, and only their model uses them."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from k3offload.budget import state_bytes
from k3offload.engine import Engine
from k3offload.errors import UsageError
from k3offload.loading import load
from k3offload.options import Watch
from k3offload.session_manifest import MANIFEST, locked
from tests.helpers_engine import (
    BRIEF,
    Logits,
    checkpoint,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
)

pytest.importorskip("zarr")
LONG = some_tokens(700, 1)


def loaded(folder: Path | str, seed: int = 0, **options: Any) -> tuple[Engine, list[str]]:
    """An engine that keeps prefixes in ``folder``, and what it warned of."""
    said: list[str] = []
    how = {"dtype": "float32", "context": 800, "sessions": 2, "prefix_dir": str(folder), **options}
    return load(checkpoint(seed=seed, **BRIEF), watch=Watch(warn=said.append), **how), said


def ask(engine: Engine, tokens: list[int]) -> tuple[Logits, int]:
    """The last logits of a session of its own, and how many tokens it did not compute."""
    with session_with(engine, tokens) as session:
        return session.logits(), session.reused


@pytest.fixture(scope="module")
def cold() -> dict[int, Logits]:
    """The last logits of the first so many tokens."""
    with load(checkpoint(**BRIEF), dtype="float32", context=800) as engine:
        return {n: logits_of(engine, LONG[:n], keep=1)[0] for n in (300, 301, 700)}


def test_another_engine_goes_on_from_there(tmp_path: Path, cold: dict[int, Logits]) -> None:
    for wanted in (0, 256):
        engine, said = loaded(tmp_path / "a" / "b")
        with engine:
            row, reused = ask(engine, LONG[:300])
            assert reused == wanted and same_bits(row, cold[300])
    engine, said = loaded(tmp_path / "a" / "b", prefix_cache="1M")
    with engine:
        requests = engine.counts()["experts"].requests
        row, reused = ask(engine, LONG)
        assert reused == 256 and same_bits(row, cold[700])
        assert engine.counts()["experts"].requests > requests
        assert ask(engine, LONG)[1] == 640
    assert not said
    assert len(list((tmp_path / "a" / "b").iterdir())) == 2


def test_of_another_model_or_other_kernels(tmp_path: Path) -> None:
    with loaded(tmp_path)[0] as engine:
        ask(engine, LONG[:300])
    for other in ({"seed": 1}, {"dtype": "bfloat16"}, {"kernels": {"router": "reference"}}):
        engine, said = loaded(tmp_path, **other)
        with engine:
            assert ask(engine, LONG[:300])[1] == 0
        assert not said
    assert len(list(tmp_path.iterdir())) == 4  # each has its own
    with loaded(tmp_path)[0] as engine:
        assert ask(engine, LONG[:300])[1] == 256


def test_damaged_ones_are_told_and_passed_over(tmp_path: Path, cold: dict[int, Logits]) -> None:
    with loaded(tmp_path)[0] as engine:
        ask(engine, LONG[:300])
    engine, said = loaded(tmp_path)
    (state,) = tmp_path.glob("*/save-*/state.bin")
    data = bytearray(state.read_bytes())
    data[5] ^= 1
    state.write_bytes(data)
    with engine:
        row, reused = ask(engine, LONG[:300])
        assert reused == 0 and same_bits(row, cold[300])
        assert len(said) == 1 and "state.bin is damaged" in said[0]
        row, reused = ask(engine, LONG[:301])  # from RAM
        assert reused == 256 and same_bits(row, cold[301])


def test_deleted_meanwhile(tmp_path: Path, cold: dict[int, Logits]) -> None:
    with loaded(tmp_path)[0] as engine:
        ask(engine, LONG[:300])
    engine, said = loaded(tmp_path)
    next(tmp_path.glob(f"*/{MANIFEST}")).unlink()
    with engine:
        row, reused = ask(engine, LONG[:300])
    assert reused == 0 and same_bits(row, cold[300])
    assert len(said) == 1 and "no saved session" in said[0]


def total(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    """The least recently used gives way, whichever engine used it."""
    prompts = [some_tokens(100, 30 + i) for i in range(4)]
    with loaded(tmp_path)[0] as engine:
        ask(engine, prompts[0])
    one = total(tmp_path) + 4096 * len([p for p in tmp_path.rglob("*") if p.is_file()])
    for prompt in (prompts[1], prompts[2], prompts[1], prompts[3]):
        engine, said = loaded(tmp_path, prefix_disk=int(2.5 * one))
        with engine:
            ask(engine, prompt)
        assert total(tmp_path) <= 2.5 * one and not said
        for manifest in tmp_path.glob(f"*/{MANIFEST}"):  # times of a coarse clock move apart
            before = manifest.stat().st_mtime
            os.utime(manifest, (before - 10, before - 10))
    with loaded(tmp_path, prefix_disk=int(2.5 * one))[0] as engine:
        assert [ask(engine, p)[1] for p in (prompts[1], prompts[3])] == [64, 64]
    engine, said = loaded(tmp_path / "small", prefix_disk=1000)
    with engine:
        ask(engine, prompts[0])
    assert len(said) == 1 and "all of" in said[0]
    assert not list((tmp_path / "small").iterdir())


def test_a_full_disk_is_told(tmp_path: Path, cold: dict[int, Logits]) -> None:
    engine, said = loaded(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            row, reused = ask(engine, LONG[:300])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert same_bits(row, cold[300]) and reused == 0
        assert len(said) == 1 and "could not be kept on disk" in said[0]
        assert ask(engine, LONG[:301])[1] == 256
    assert not list(tmp_path.iterdir())


def test_a_folder_needs_room_in_ram(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds not one"):
        loaded(tmp_path, prefix_cache=0)
    with loaded(tmp_path)[0] as engine:
        purposes = dict(engine.plan.purposes)
        one = purposes["sequence state and latents"] // 2  # of two sessions
        assert purposes["shared prefixes"] == one + state_bytes(engine.spec, "float32", 64)


def test_a_folder_that_goes_away_costs_a_warning_r32(
    tmp_path: Path, cold: dict[int, Logits]
) -> None:
    place = tmp_path / "kept"
    engine, said = loaded(place)
    with engine:
        shutil.rmtree(place)
        assert same_bits(ask(engine, LONG[:300])[0], cold[300])
        assert len(said) == 1 and "could not be kept on disk" in said[0]
        place.write_text("a file")
        assert same_bits(ask(engine, LONG)[0], cold[700])
        assert len(said) > 1


@pytest.mark.parametrize("name", ["", "kept/file", "model"])
def test_places_that_cannot_hold_prefixes(tmp_path: Path, name: str) -> None:
    (tmp_path / "kept").write_text("")
    place = checkpoint(**BRIEF) / "kept" if name == "model" else tmp_path / name if name else ""
    with pytest.raises(UsageError):
        loaded(place)
    assert not (checkpoint(**BRIEF) / "kept").exists()


def test_what_a_killed_store_left_is_deleted(tmp_path: Path) -> None:
    """But nothing that is in use, or not ours."""
    for name in ("0" * 32, "1" * 32, "2" * 32):
        (tmp_path / name / "save-000001").mkdir(parents=True)
        (tmp_path / name / "save-000001" / "state.bin").write_bytes(b"x")
    (tmp_path / ("2" * 32) / "letter").write_text("x")
    with locked(tmp_path / ("1" * 32)):
        engine, _ = loaded(tmp_path)
        with engine:
            assert ask(engine, LONG[:100])[1] == 0
    left = {p.name for p in tmp_path.iterdir()}
    assert "0" * 32 not in left and {"1" * 32, "2" * 32} <= left and len(left) == 3
