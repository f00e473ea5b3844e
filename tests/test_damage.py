"""``k3offload damage``: the figures are those of an independent calculation on the same logits."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import k3offload.damage
from k3offload.damage import LOSSY, LOSSY_LATENTS, Damage, damage, held_out_text
from k3offload.errors import DoesNotFit, UsageError
from k3offload.loading import load
from tests.helpers_engine import call, logits_of

TOKENS = 140
F64 = NDArray[np.float64]


@pytest.fixture(scope="module")
def measured() -> list[Damage]:
    patch = pytest.MonkeyPatch()
    patch.setattr(k3offload.damage, "WINDOW", 64)  # three sequences, the last one short
    try:
        return damage("nano", LOSSY, tokens=TOKENS)
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def of_latents() -> list[Damage]:
    return damage("nano", (), LOSSY_LATENTS, tokens=64)


@cache
def _log_probabilities(trunk: str, latents: str | None = None) -> tuple[list[int], F64]:
    with load("nano", trunk=trunk, latent_dtype=latents, sessions=3) as engine:
        ids = engine.encode(held_out_text())[:TOKENS]
        logits = np.concatenate([logits_of(engine, ids[i : i + 64]) for i in (0, 64, 128)])
    wide = logits.astype(np.float64)
    odds: F64 = np.exp(wide - wide.max(1, keepdims=True))
    return ids, np.log(odds / odds.sum(1, keepdims=True))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_figures(measured: list[Damage], number: int) -> None:
    found = measured[number]
    ids, p = _log_probabilities("bfloat16")
    _, q = _log_probabilities(found.precision)
    kl = np.array([(np.exp(a) * (a - b)).sum() for a, b in zip(p, q, strict=True)])
    assert found.precision == ("bfloat16", *LOSSY)[number] and found.tokens == TOKENS
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-6, abs=1e-12)
    assert found.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-6, abs=1e-12)
    assert found.top1 == (p.argmax(1) == q.argmax(1)).mean()
    known = [-q[i, ids[i + 1]] for i in range(TOKENS - 1) if (i + 1) % 64]
    assert found.nats == pytest.approx(np.mean(known), rel=1e-6)


def test_less_bits_do_more_damage(measured: list[Damage]) -> None:
    none, int8, mxfp4 = measured
    assert (none.kl_mean, none.kl_p99, none.top1) == (0, 0, 1)
    assert 0 < 5 * int8.kl_mean < mxfp4.kl_mean < 0.3
    assert 1 > int8.top1 > mxfp4.top1 > 0.6
    assert none.trunk_bytes > 1.7 * int8.trunk_bytes > 1.7 * 1.7 * mxfp4.trunk_bytes
    assert abs(int8.nats - none.nats) < 0.05 and 2 < none.nats < 5


@pytest.mark.parametrize("number", [1, 2])
def test_figures_of_latents(of_latents: list[Damage], number: int) -> None:
    """The trunk is as shipped in all of them."""
    found, name = of_latents[number], LOSSY_LATENTS[number - 1]
    p, q = (_log_probabilities("bfloat16", way)[1][:64] for way in (None, name))
    kl = np.array([(np.exp(a) * (a - b)).sum() for a, b in zip(p, q, strict=True)])
    assert (found.precision, found.latents, found.latent_bytes) == ("bfloat16", name, 2 * 112)
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-6) and 0 < kl.mean() < 0.02
    assert found.top1 == (p.argmax(1) == q.argmax(1)).mean() > 0.95
    none = of_latents[0]
    assert (none.latents, none.latent_bytes, none.kl_mean) == ("bfloat16", 2 * 160, 0)
    assert found.trunk_bytes == none.trunk_bytes


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("And he went forth unto the sea side, and all the multitude resorted.")
    arguments = ["damage", "nano", "--text", text, "--trunk", "int8", "--tokens", 20]
    code, out, _ = call([*arguments, "--json"], capsys)
    found = json.loads(out)
    assert code == 0 and [one["precision"] for one in found] == ["bfloat16", "int8"]
    assert found[0]["kl_mean"] == 0 < found[1]["kl_mean"] and found[1]["tokens"] <= 20
    code, out, _ = call(arguments, capsys)
    assert code == 0 and out.splitlines()[3].split()[0] == "int8"
    code, out, _ = call([*arguments[:4], "--latent-dtype", "fp8", "--tokens", 20, "--json"], capsys)
    ways = [(one["precision"], one["latents"]) for one in json.loads(out)]
    assert code == 0 and ways == [("bfloat16", "bfloat16"), ("bfloat16", "fp8")]


def test_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"'int4' is no precision.*int8 or mxfp4"):
        damage("nano", ["int4"])
    with pytest.raises(UsageError, match=r"'mxfp4' is no precision.*int8 or fp8"):
        damage("nano", (), ["mxfp4"])
    with pytest.raises(UsageError, match="fewer than two tokens"):
        damage("nano", text="")
    latin = tmp_path / "latin"
    latin.write_bytes("Käse".encode("latin-1"))
    for options in (["--text", latin], ["--trunk", "bfloat16"], ["--tokens", 0]):
        assert call(["damage", "nano", *options], capsys)[0] == 2
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    with pytest.raises(DoesNotFit, match=r"has 0 B free.*TMPDIR") as refusal:
        damage("nano", ["int8"], tokens=10)
    assert refusal.value.missing > 0
