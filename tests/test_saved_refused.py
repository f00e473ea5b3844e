"""Saved sessions of something else, or damaged, are refused by name (R30)."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.engine import Engine
from k3offload.errors import DoesNotFit, K3Error, SessionError, UsageError
from k3offload.loading import load
from k3offload.options import Watch
from k3offload.session_manifest import MANIFEST
from tests.helpers_checkpoint import config
from tests.helpers_engine import BRIEF, checkpoint, same_bits, session_with, starve
from tests.helpers_saved import A, B, rewrite, save_reply

zarr = pytest.importorskip("zarr")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", context=9000, sessions=8) as made:
        yield made


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    return save_reply(engine, tmp_path / "s")


def _other_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")


def _other_config(folder: Path) -> None:
    config(folder, lambda top: top["text_config"].update(rms_norm_eps=2e-5))


REFUSED: list[tuple[str, int, Callable[[Path], None] | None, dict[str, Any]]] = [
    ("tensors", 1, None, {}),
    ("config", 0, _other_config, {}),
    ("tokenizer", 0, _other_tokenizer, {}),
    ("dtype", 0, None, {"dtype": "bfloat16"}),
    ("latents", 0, None, {"latent_dtype": "int8"}),
    ("trunk", 0, None, {"trunk": "int8"}),
]


@pytest.mark.parametrize(("field", "seed", "change", "options"), REFUSED)
def test_refused_by_name_r30(
    saved: Path,
    tmp_path: Path,
    field: str,
    seed: int,
    change: Callable[[Path], None] | None,
    options: dict[str, Any],
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(checkpoint(seed=seed, **BRIEF), folder)
    if change:
        change(folder)
    with load(folder, **{"dtype": "float32", "context": 600, **options}) as other:
        used = other._ledger.used
        with pytest.raises(SessionError, match=rf"another {field}: .* there, .* here"):
            other.load_session(saved)
        assert other._ledger.used == used
        with session_with(other, B) as session:  # it works as before
            assert np.isfinite(session.logits()).all()


def test_a_moved_model_is_the_same_r30(engine: Engine, saved: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "m"
    shutil.copytree(checkpoint(**BRIEF), moved)
    with load(moved, dtype="float32", context=400) as other:
        with other.load_session(saved) as there, engine.load_session(saved) as here:
            assert same_bits(there.logits(), here.logits())


def test_a_shorter_context_is_refused_r30(saved: Path) -> None:
    with load(checkpoint(**BRIEF), dtype="float32", context=306) as other:
        with pytest.raises(UsageError, match=r"307 tokens.*context of 306"):
            other.load_session(saved)


def test_other_kernels_are_told(saved: Path) -> None:
    said: list[str] = []
    reference = {"router": "reference"}
    made = load(
        checkpoint(**BRIEF), dtype="float32", context=400, kernels=reference,
        watch=Watch(warn=said.append),
    )  # fmt: skip
    with made as other, other.load_session(saved) as session:
        assert np.isfinite(session.logits()).all()
    assert any("another operators" in line for line in said)


def test_a_newer_format_is_refused_by_its_number_r30(engine: Engine, saved: Path) -> None:
    rewrite(saved, lambda content: content.update(format=7))
    with pytest.raises(SessionError, match=r"manifest\.json has format 7.*reads 1"):
        engine.load_session(saved)
    with session_with(engine, B) as session:  # and not replaced either
        with pytest.raises(SessionError, match="format 7"):
            session.save(saved)


def test_every_flipped_byte_is_found_r30(engine: Engine, saved: Path) -> None:
    """At the front, in the middle and at the end of every file."""
    gc.collect()
    used = engine._ledger.used
    files = [p for p in saved.rglob("*") if p.is_file()]
    assert len(files) == 8
    for place in files:
        whole = place.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            wrong = bytearray(whole)
            wrong[at] ^= 0x41
            place.write_bytes(wrong)
            with pytest.raises(SessionError, match=place.name):
                engine.load_session(saved)
        place.write_bytes(whole[:-1])
        with pytest.raises(SessionError, match=place.name):
            engine.load_session(saved)
        place.write_bytes(b"")
        with pytest.raises(SessionError, match=place.name):
            engine.load_session(saved)
        place.unlink()
        with pytest.raises(SessionError, match=place.name):
            engine.load_session(saved)
        place.write_bytes(whole)
    gc.collect()
    assert engine._ledger.used == used
    engine.load_session(saved).close()


HOSTILE: list[tuple[str, Any]] = [
    ("position", 5),
    ("position", -1),
    ("sampled", 5),
    ("tokens", 10**9),
    ("save", "../x"),
    ("save", 3),
    ("files", []),
    ("files", {}),
    ("more", 1),
    ("identity", {}),
    ("logits", False),
]


@pytest.mark.parametrize(("field", "value"), HOSTILE)
def test_a_manifest_that_lies_is_refused(
    engine: Engine, saved: Path, field: str, value: Any
) -> None:
    rewrite(saved, lambda content: content.update({field: value}))
    with pytest.raises(K3Error):
        engine.load_session(saved)


def test_what_is_no_manifest_is_refused(engine: Engine, saved: Path, tmp_path: Path) -> None:
    for text in (b"", b"[]", b"1", b"\xff\xfe", b"{" * 50_000, b'{"format":1}', b'{"format":"x"}'):
        (saved / MANIFEST).write_bytes(text)
        with pytest.raises(SessionError, match=r"manifest\.json is damaged"):
            engine.load_session(saved)
    with pytest.raises(SessionError, match=r"no saved session.*manifest\.json"):
        engine.load_session(tmp_path / "nowhere")


def test_no_room_for_one_more(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starve(monkeypatch)
    with load(checkpoint(**BRIEF), dtype="float32", context=400, sessions=1) as other:
        with session_with(other, A) as first:
            kept = first.logits()
            with pytest.raises(DoesNotFit, match="sequence state"):
                other.load_session(saved)
            assert same_bits(first.logits(), kept)
        with other.load_session(saved) as session:
            assert session.position == 306
