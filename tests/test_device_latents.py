"""Latents that a device has no room for: the bits of a run that holds them all there, whatever the
budgets; forks, saves, prefixes, the plan (R16, R33, R61)."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.config import LATENT_BLOCK
from k3offload.device_latents import DeviceLatents
from k3offload.engine import Engine
from k3offload.errors import ScratchError, UsageError
from k3offload.kernels.triton_run import interpreted
from k3offload.latents import Latents, SpilledLatents
from k3offload.loading import load
from k3offload.options import Watch
from k3offload.scheduler.plan import Limits, make_plan
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_device_latents import (
    BLOCK,
    HOW,
    LENGTH,
    TOKENS,
    everything,
    least_ram,
    moved,
    resident,
    small,
    spill,
    tightly,
    window,
)
from tests.helpers_engine import (
    BRIEF,
    call,
    checkpoint,
    logits_of,
    same_bits,
    session_with,
)
from tests.helpers_spilled import fork_story
from tests.test_plan import GB, LONG

pytest.importorskip("zarr")


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Engine]:
    with tightly(tmp_path) as engine:
        yield engine


# ---- bits ----


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [0, 3])
def test_bits_do_not_depend_on_the_device_s_memory(tmp_path: Path, blocks: int, seed: int) -> None:
    """Prefill and decode through the device, RAM and disk, with other delays each time."""
    ram, sweep = least_ram(tmp_path) + blocks * 42_000, (64, 512, 128)[seed]
    how: dict[str, Any] = {"latents": ram, "scratch": tmp_path, "sweep": sweep}
    with small((2 - seed) * blocks * 42_000, seed, **how) as engine:
        assert same_bits(logits_of(engine, TOKENS, sweep), everything()[0])
        assert same_bits(logits_of(engine, TOKENS, sweep, LENGTH - 6, keep=6), everything()[1])
        assert moved(engine)


def test_ram_that_has_room_keeps_them_from_the_disk(tmp_path: Path) -> None:
    with small(scratch=tmp_path) as engine:
        assert same_bits(logits_of(engine, TOKENS, decode_from=LENGTH - 6, keep=6), everything()[1])
        assert moved(engine, disk=False)
        assert engine.plan.latents is not None and engine.plan.latents >= engine.plan.all_latents


@pytest.mark.parametrize("layers", [2, 4])
def test_layers_of_the_cpu_share_the_slots_of_ram(tmp_path: Path, layers: int) -> None:
    """One MLA layer here and one there; then none there, and RAM alone is capped."""
    how: dict[str, Any] = {"trunk_on": f"split:{layers}"}
    with small(latents=least_ram(tmp_path, **how), scratch=tmp_path, **how) as engine:
        assert same_bits(logits_of(engine, TOKENS, decode_from=LENGTH - 6, keep=6), everything()[1])
        kinds = {type(own) for own in engine.new_state().latents.values()}
        if layers == 4:
            assert kinds == {DeviceLatents, SpilledLatents} and moved(engine)
        else:
            assert kinds == {SpilledLatents} and spill(engine).counts.read_bytes > 0


@pytest.mark.parametrize(
    "how",
    [{"dtype": "float32"}, {"kernels": {"mla_decode": "reference", "mla_prefill": "reference"}}],
)
def test_bits_in_other_forms(tmp_path: Path, how: dict[str, Any]) -> None:
    with resident(**how) as engine:
        base = logits_of(engine, TOKENS, decode_from=LENGTH - 3, keep=6)
    with small(scratch=tmp_path, **how) as engine:
        assert same_bits(logits_of(engine, TOKENS, decode_from=LENGTH - 3, keep=6), base)
        assert moved(engine, disk=False)


@pytest.mark.skipif(not interpreted(), reason="Triton is not installed")
def test_bits_of_triton_s_attention(tmp_path: Path) -> None:
    """In the interpreter: a decode step over several pieces."""
    how: dict[str, Any] = {"kernels": {"mla_decode": "triton"}}
    tokens = TOKENS[: 4 * LATENT_BLOCK + 70]
    with resident(**how) as engine:
        base = logits_of(engine, tokens, decode_from=len(tokens) - 1, keep=2)
    with small(scratch=tmp_path, **how) as engine:
        assert same_bits(logits_of(engine, tokens, decode_from=len(tokens) - 1, keep=2), base)
        assert moved(engine, disk=False)


def test_a_decode_step_waits_for_nothing_more(tmp_path: Path) -> None:
    """Copies of pieces are waited for on the way; nothing else waits for the device."""
    with small(scratch=tmp_path) as engine, session_with(engine, TOKENS) as session:
        session.logits()
        assert engine.accelerator is not None
        kernels = engine.accelerator.kernels
        before, read = kernels.waits, window(engine).counts.read_bytes
        session.append_sampled(7)
        session.logits()
        assert kernels.waits - before == len(engine.spec.moe_layers) + 2
        assert window(engine).counts.read_bytes > read


# ---- sessions ----


def test_forks_snapshots_and_going_back(tight: Engine) -> None:
    """All as on a device that holds everything; shared blocks leave it once."""
    with resident() as roomy:
        want = fork_story(roomy, TOKENS)
    for a, b in zip(want, fork_story(tight, TOKENS), strict=True):
        assert same_bits(a, b)
    assert moved(tight)
    layers = len(tight.spec.mla_layers)
    ever = layers * (LENGTH + 600 + LENGTH - 900) // LATENT_BLOCK * BLOCK
    assert window(tight).counts.written_bytes <= ever


def test_the_ledgers_have_the_open_blocks_alone(tight: Engine) -> None:
    assert tight.accelerator is not None and tight.accelerator.device.free_bytes() >= 0
    ledger, each = tight.accelerator._ledger, len(tight.spec.mla_layers) * BLOCK
    with session_with(tight, TOKENS) as session:
        before = ledger.used
        session.logits()
        assert ledger.used == before and before > each
        other = session.fork()
        assert ledger.used == 2 * before
        other.close()
    del other, session
    gc.collect()
    assert ledger.used == 0 and tight._ledger.used == 0
    own = window(tight)
    own._tidy()
    while own._leaving:
        own._arrived(wait=True)
    assert sorted(own._free) == list(range(own.room.slots))


def test_a_session_is_saved_and_loaded(tight: Engine, tmp_path: Path) -> None:
    """From either kind of engine into the other; a later save adds what is new."""
    place = tmp_path / "saved"
    with session_with(tight, TOKENS[:900]) as first:
        first.logits()
        whole = first.save(place)
        first.append(TOKENS[900:1200])
        first.logits()
        assert first.save(place) < whole
        first.append(TOKENS[1200:])
        want = first.logits()
    with resident() as roomy:
        for engine in (roomy, tight):
            with engine.load_session(place) as again:
                again.append(TOKENS[1200:])
                assert again.position == 1200 and same_bits(again.logits()[None], want[None])


def test_prompts_share_their_beginning(tmp_path: Path) -> None:
    """A snapshot lies in RAM, but for full blocks: they stay where they are."""
    got, ram = [], least_ram(tmp_path)
    for latents in (None, ram):
        how: dict[str, Any] = {"prefix_cache": "4M", "prefix_dir": str(tmp_path / f"p{latents}")}
        if latents is not None:
            how |= {"latents": latents, "scratch": tmp_path}
        with (resident if latents is None else small)(**how) as engine:
            rows = []
            for length, more in ((900, ()), (900, (7, 8)), (700, (9,)), (LENGTH, ())):
                with session_with(engine, [*TOKENS[:length], *more]) as session:
                    rows.append(session.logits())
                    rows.append(np.array([session.reused], np.float32))
            assert engine.prefixes is not None
            engine.prefixes.clear()  # from the folder now
            with session_with(engine, [*TOKENS[:900], 5]) as session:
                rows.append(session.logits())
                rows.append(np.array([session.reused], np.float32))
            got.append(rows)
            assert latents is None or moved(engine)
    assert [[int(row[0]) for row in rows[1::2]] for rows in got] == 2 * [[0, 896, 0, 896, 896]]
    assert all(np.array_equal(a, b) for a, b in zip(*got, strict=True))


def test_memory_that_cannot_be_locked_r33(tmp_path: Path) -> None:
    """Copies come from memory that pages out, with one warning."""
    told: list[str] = []
    with small(scratch=tmp_path, pinnable=0, watch=Watch(warn=told.append)) as engine:
        assert same_bits(logits_of(engine, TOKENS, decode_from=LENGTH - 6, keep=6), everything()[1])
    assert len(told) == 1 and "refuses to lock" in told[0]


def test_a_closed_engine_keeps_nothing_of_the_device(tmp_path: Path) -> None:
    with small(scratch=tmp_path) as engine:
        with session_with(engine, TOKENS) as session:
            session.logits()
            state = session.state
            own = weakref.ref(window(engine))
    with pytest.raises(ScratchError, match="closed"):
        state.latents[3].rows(0)
    assert not list(tmp_path.iterdir())
    del session, state
    gc.collect()
    assert own() is None


# ---- the plan ----


def test_latents_stay_on_the_device_where_they_fit() -> None:
    with resident() as engine:
        plan = engine.plan.device
        assert plan is not None and plan.latents is None and engine.plan.latents is None
        assert {type(own) for own in engine.new_state().latents.values()} == {Latents}
    for option in ("latents", "summaries"):
        given: dict[str, Any] = {option: "1M"}
        with pytest.raises(UsageError, match=f"--{option} has nothing to act on"):
            load(checkpoint(**BRIEF), device=FakeDevice(400 << 20), vram="60M", **HOW, **given)


def k3(*options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    command = ["plan", "--config-only", "released", "--json", "--context", "1000000", *options]
    code, out, _ = call(command, capsys)
    assert code == 0
    facts: dict[str, Any] = json.loads(out)
    return facts


def test_a_million_tokens_of_k3_beside_a_modest_gpu_r16(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """28 GB of latents, of which the device holds the newest; RAM has room for all or is capped."""
    facts = k3("--vram", "24G", "--ram", "64G", capsys=capsys)
    there = facts["tiers"]["gpu"]
    assert there["latents"]["all"] > 27e9 > 24e9 > there["latents"]["device"] > 48 << 20
    assert there["total"] <= 24_000_000_000
    code, out, _ = call(
        ["plan", "--config-only", "released", "--context", "1000000", "--vram", "24G", "--ram",
         "64G", "--latents", "4G"],
        capsys,
    )  # fmt: skip
    assert code == 0 and "the newest stay on the device; the others go to RAM" in out
    assert "the newest stay in RAM; the others go to files in --scratch" in out


def test_latents_of_a_device_pass_through_slots_however_much_ram_there_is() -> None:
    """All of them have room before the trunk, as where they never leave RAM; then as they do."""
    assert LONG.latents is not None
    long = replace(LONG, latents=replace(LONG.latents, must=True))
    plan = make_plan(long, Limits(200 * GB))
    assert plan.latents == plan.all_latents == 28_100_000_000
    tight = make_plan(long, Limits(36 * GB))
    assert tight.latents == plan.latents and len(tight.resident_layers) < 10
    for limits in (Limits(16 * GB), Limits(200 * GB, latents=9 * GB)):
        some = make_plan(long, limits)
        assert some.latents is not None and 50_331_648 <= some.latents < 9 * GB
        assert some.total <= limits.total
