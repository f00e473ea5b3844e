"""``latent_dtype``: other answers than without, and the same bits however they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.config import LATENT_BLOCK
from k3offload.engine import Engine
from k3offload.errors import DoesNotFit, SessionError, UsageError
from k3offload.kernels.latent_format import PRECISIONS
from k3offload.loading import load
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import (
    BRIEF,
    Logits,
    call,
    checkpoint,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
    with_companions,
)

LENGTH = 3 * LATENT_BLOCK + 70
TOKENS = some_tokens(LENGTH)
HOW: dict[str, Any] = {"context": LENGTH + 600, "sessions": 4, "sweep": 512, "threads": 2}


def small(precision: str | None, **how: Any) -> Engine:
    return load(checkpoint(**BRIEF), latent_dtype=precision, **{**HOW, **how})


def both(engine: Engine, sweep: int = 512) -> tuple[Logits, Logits]:
    """All rows of the prompt; then the last rows as decode runs."""
    return logits_of(engine, TOKENS, sweep), logits_of(engine, TOKENS, sweep, LENGTH - 6, keep=6)


@pytest.fixture(scope="module", params=PRECISIONS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with small(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def expected(engine: Engine) -> tuple[Logits, Logits]:
    return both(engine)


def precision_of(engine: Engine) -> str:
    assert engine.options.latent_dtype is not None
    return engine.options.latent_dtype


def test_it_changes_answers_a_little(expected: tuple[Logits, Logits]) -> None:
    with small(None) as plain:
        exact = logits_of(plain, TOKENS)
    off = np.abs(expected[0] - exact)
    assert off.max() > 0 and off.mean() < 0.05 * np.abs(exact).mean()


@pytest.mark.parametrize("how", [{"sweep": 64}, {"threads": 1}, {"ram": "2G"}])
def test_sweeps_threads_and_memory_change_no_bit(
    engine: Engine, expected: tuple[Logits, Logits], how: dict[str, Any]
) -> None:
    """Chunks of 64 see the packed rows of their own sweep, as one sweep for all does."""
    with small(precision_of(engine), **how) as other:
        found = both(other, how.get("sweep", 512))
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def test_companions_change_no_bit(engine: Engine, expected: tuple[Logits, Logits]) -> None:
    others = [some_tokens(100, seed=1), some_tokens(30, seed=2)]
    found = with_companions(engine, TOKENS[:300], others, 1)
    assert same_bits(found, expected[0][:300])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operators_of_torch_give_what_the_native_ones_do(engine: Engine, dtype: str) -> None:
    how = {"dtype": dtype, "kernels": {"latents": "reference"}}
    with small(precision_of(engine), **how) as other, small(precision_of(engine), dtype=dtype) as e:
        assert same_bits(logits_of(other, TOKENS[:300]), logits_of(e, TOKENS[:300]))


def test_latents_that_spill(
    engine: Engine, expected: tuple[Logits, Logits], tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    precision = precision_of(engine)
    with pytest.raises(DoesNotFit, match="Give --latents") as refusal:
        small(precision, latents=1)
    least = refusal.value.missing + 1
    with small(precision, latents=least, scratch=tmp_path) as other:
        found = both(other)
        assert other.spilling is not None and other.spilling.latents is not None
        spill = other.spilling.latents
        assert spill.layout == (engine.latent_form.row, 1, "packed")
        assert spill.layout.block % 4096 == 0
        assert spill.counts.written_bytes > 0 and spill.counts.read_bytes > 0
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def test_forks_and_snapshots(engine: Engine) -> None:
    with session_with(engine, TOKENS[:300]) as session:
        session.logits()
        snapshot = session.snapshot()
        with session.fork() as other:
            other.append(TOKENS[300:])
            session.append([7] * 40)
            session.logits()
            session.rewind(snapshot)
            session.append(TOKENS[300:])
            assert same_bits(session.logits(), other.logits())


def test_saved_and_loaded(engine: Engine, tmp_path: Path) -> None:
    """The bits of a session that was never saved; only new tokens are computed; another precision
    is refused by the field's name."""
    pytest.importorskip("zarr")
    with session_with(engine, TOKENS[:700]) as session:
        session.logits()
        session.save(tmp_path / "s")
        session.append(TOKENS[700:])
        want = session.logits()
    written = sum(p.stat().st_size for p in (tmp_path / "s").rglob("open/*.bin"))
    assert written == 700 * len(engine.spec.mla_layers) * engine.latent_form.row
    with small(precision_of(engine)) as again:
        session = again.load_session(tmp_path / "s")
        assert session.position == 700
        session.append(TOKENS[700:])
        assert same_bits(session.logits(), want)
    for other in {*PRECISIONS, None} - {precision_of(engine)}:
        refused = rf"another latents: {precision_of(engine)} there, {other or 'bfloat16'} here"
        with small(other) as elsewhere, pytest.raises(SessionError, match=refused):
            elsewhere.load_session(tmp_path / "s")


def test_shared_prefixes(engine: Engine) -> None:
    precision = precision_of(engine)
    with small(precision, prefix_cache="20M", sessions=2) as sharing:
        with session_with(sharing, TOKENS[:320]) as first:
            first.logits()
        with session_with(sharing, TOKENS[:320] + [3] * 50) as second:
            found = second.logits()
            assert second.reused == 320
    with session_with(engine, TOKENS[:320] + [3] * 50) as cold:
        assert same_bits(cold.logits(), found)


def test_a_device_has_the_bits_of_the_cpu(engine: Engine, expected: tuple[Logits, Logits]) -> None:
    precision = precision_of(engine)
    for how in ({}, {"trunk_on": "split:3"}):
        with small(precision, device=FakeDevice(1 << 30), vram="60M", **how) as other:
            found = both(other)
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


# ---- what is planned and said ----


def test_the_plan_has_the_bytes(engine: Engine) -> None:
    with small(None) as plain:
        saved = plain.plan.state_bytes - engine.plan.state_bytes
        rows = 1536 * HOW["sessions"] * len(engine.spec.mla_layers)  # whole blocks of each session
        assert saved == rows * (plain.latent_form.row - engine.latent_form.row) > 0
        purposes = dict(engine.plan.purposes), dict(plain.plan.purposes)
    more = {k: purposes[0][k] - purposes[1][k] for k in purposes[0] if k.startswith("decoding")}
    assert list(more.values()) == [1536 * engine.latent_form.width * 2]  # unpacked at a time
    assert any("kept in" in n and precision_of(engine) in n for n in engine.plan.notes)
    with session_with(engine, TOKENS[:300]) as session:
        session.logits()
        per_token = len(engine.spec.mla_layers) * engine.latent_form.row
        constant = engine.spec.kda_state_bytes(2)
        assert session.state.nbytes == constant + 300 * per_token


def test_plan_of_the_full_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A million tokens of K3: 16.5 GB instead of 29.0; the forecast reads as much less."""
    command = ["plan", "--config-only", "released", "--ram", "140G", "--context", "1048576"]
    code, plain, _ = call(command, capsys)
    assert code == 0
    code, packed, _ = call([*command, "--latent-dtype", "int8"], capsys)
    assert code == 0
    assert "latents are kept in int8 (--latent-dtype)" in packed and "kept in" not in plain

    def size(text: str) -> float:
        (line,) = [x for x in text.splitlines() if x.startswith("  sequence state and latents")]
        return float(line.split()[-2])

    assert size(plain) == pytest.approx(29.4, abs=0.1)
    assert size(packed) == pytest.approx(16.96, abs=0.1)


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_what_is_not_known_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"precision 'int4' is not known.*int8 or fp8"):
        load("nano", latent_dtype="int4")
    prompt = ["x"] if command == "generate" else []
    code, out, err = call([command, "nano", *prompt, "--latent-dtype", "int4"], capsys)
    assert code == 2 and "'int4' is not known" in err and not out
