"""``k3offload evaluate cost``: what is counted, by which counters, and what it comes to."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import k3offload.energy as energy
from k3offload.budget import state_bytes
from k3offload.config import LATENT_BLOCK
from k3offload.cost_table import (
    Phase,
    Prices,
    decode_flops,
    prefill_flops,
    request_memory,
    state_reads,
)
from k3offload.energy import CPU, Meter
from k3offload.find import find_model
from k3offload.loading import load
from k3offload.plan_report import RELEASED, spec_of
from k3offload.spec import ModelSpec
from tests.helpers_engine import call

K3 = spec_of(Path(RELEASED))
NANO = ModelSpec.load(find_model("nano"))


def rapl(root: Path, **zones: tuple[str, int, int]) -> Path:
    """A powercap folder: zone -> its name, microjoules now, and where it begins again."""
    for zone, (name, now, span) in zones.items():
        folder = root / zone.replace("__", ":")
        folder.mkdir(parents=True)
        (folder / "name").write_text(name + "\n")
        (folder / "energy_uj").write_text(f"{now}\n")
        (folder / "max_energy_range_uj").write_text(f"{span}\n")
    return root


# ---- joules ----


def test_packages_and_memory_are_counted_once(tmp_path: Path) -> None:
    root = rapl(
        tmp_path, **{"intel-rapl__0": ("package-0", 100, 10**9), "intel-rapl__1":
        ("package-1", 2_000_000, 2_000_000), "intel-rapl__0__0": ("core", 5, 10**9),
        "intel-rapl__0__1": ("dram", 50, 10**9), "intel-rapl__2": ("psys", 7, 10**9)},
    )  # fmt: skip
    meter = Meter(root=root)
    meter.close()
    for zone, now in (("0", 1_000_100), ("1", 499_999), ("0:0", 10**8), ("0:1", 250_050),
                      ("2", 10**8)):  # fmt: skip
        (root / f"intel-rapl:{zone}" / "energy_uj").write_text(str(now))
    found = meter.read()
    # a joule, one that went round, and a quarter; core is part of a package, psys holds all
    assert found.joules == {CPU: pytest.approx(1.0 + 0.5 + 0.25)} and not found.missing


def test_a_counter_that_goes_round_more_than_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "EVERY", 0.002)
    root = rapl(tmp_path, **{"intel-rapl__0": ("package-0", 0, 999_999)})
    counter = root / "intel-rapl:0" / "energy_uj"
    with Meter(root=root) as meter:
        for now in (600_000, 200_000, 800_000, 400_000):  # 0.6 J each time
            counter.with_name("next").write_text(str(now))
            counter.with_name("next").replace(counter)
            late = time.monotonic() + 10
            while meter._last != [now] and time.monotonic() < late:
                time.sleep(0.001)
        assert meter.read().joules == {CPU: pytest.approx(2.4)}
    for thread in threading.enumerate():
        if thread.name == "k3-energy" and thread is not threading.current_thread():
            thread.join(10)
            assert not thread.is_alive()


def test_what_cannot_be_read_has_a_reason(tmp_path: Path) -> None:
    found = Meter(root=tmp_path / "none").read()
    assert not found.joules and "no counter of a package" in found.missing[0]
    root = rapl(tmp_path / "bad", **{"intel-rapl__0": ("package-0", 1, 10)})
    (root / "intel-rapl:0" / "energy_uj").unlink()
    found = Meter(root=root).read()
    assert not found.joules and "energy_uj" in found.missing[0]


def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    found = Meter(gpu="00000000-0000-0000-0000-000000000000", root=tmp_path).read()
    assert not found.joules and [m.split(":")[0] for m in found.missing] == [
        "energy of the processor",
        "energy of the GPU",
    ]


# ---- sizes ----


def test_flops_of_weights_are_those_of_the_matrices() -> None:
    """Counted again over the tensors of a token: trunk, its experts, the head."""
    macs = NANO.vocab * NANO.hidden
    for layer in NANO.layers:
        for t in NANO.layer_tensors(layer.index):
            if len(t.shape) == 2 and min(t.shape) > 1 and "conv1d" not in t.name:
                macs += math.prod(t.shape)
    assert NANO.moe is not None
    one = sum(2 * t.nbytes for t in NANO.expert_tensors(1, 0) if "scale" not in t.name)
    macs += one * NANO.moe.top_k * len(NANO.moe_layers)
    assert decode_flops(NANO, 0)["weights"] == 2 * macs
    # a prompt computes the head once
    few, many = (prefill_flops(NANO, n)["weights"] for n in (1, 1000))
    assert few == 2 * macs
    assert few - many == pytest.approx(2 * NANO.vocab * NANO.hidden * 0.999)


def test_flops_of_attention_grow_with_the_context() -> None:
    m, layers = K3.mla, len(K3.mla_layers)
    one = decode_flops(K3, 0)["attention"]
    assert one == 2 * layers * m.heads * (2 * m.kv_lora + m.rope)
    assert decode_flops(K3, 999)["attention"] == 1000 * one
    pairs = sum(range(1, 501))  # each row sees itself and those before it
    whole = 2 * layers * m.heads * (m.nope + m.rope + m.v) * pairs
    assert 500 * prefill_flops(K3, 500)["attention"] == pytest.approx(whole)
    assert decode_flops(K3, 0)["recurrence"] == decode_flops(K3, 10**6)["recurrence"]


@pytest.mark.parametrize("packed", [None, "int8"])
def test_memory_of_a_request_is_what_a_session_is_charged(packed: str | None) -> None:
    with load("nano", context=600, latent_dtype=packed) as engine:
        spec, plan = engine.spec, engine.plan
        state = engine.new_state()
        charged = state.bytes_after(600)
    found = request_memory(spec, plan, 600, dtype="bfloat16", latent_dtype=packed)
    assert set(found) == {"ram"} and sum(found["ram"].values()) == charged
    assert charged == state_bytes(spec, "bfloat16", 600, packed)


def test_latents_that_have_no_room_are_on_disk_and_layers_of_a_gpu_there() -> None:
    whole = state_bytes(K3, "bfloat16", 4096)
    with load("nano", context=600) as engine:
        plan = engine.plan
    small = dataclasses.replace(plan, latents=30_000_000)
    found = request_memory(K3, small, 4096, dtype="bfloat16", sessions=3)
    assert found["ram"]["latents"] == 10_000_000
    assert sum(sum(kinds.values()) for kinds in found.values()) == whole
    half = request_memory(K3, plan, 4096, dtype="bfloat16", device_layers=len(K3.layers) // 2)
    assert sum(sum(kinds.values()) for kinds in half.values()) == whole
    assert 0.4 < half["gpu"]["KDA state"] / half["ram"]["KDA state"] < 1.6
    assert "latents" in half["gpu"] and "disk" not in half


def test_state_that_passes_in_a_step() -> None:
    none = state_reads(K3, 0, "bfloat16", None)
    row = K3.latent_bytes_per_token(2)
    assert state_reads(K3, LATENT_BLOCK, "bfloat16", None) - none == LATENT_BLOCK * row
    matrices = len(K3.kda_layers) * K3.kda.heads * K3.kda.head_dim**2 * 4
    assert none == 2 * matrices + row


# ---- money ----


def phase(joules: float | None) -> Phase:
    return Phase("decode", "", {}, {}, 2.0, joules, "")


def test_money() -> None:
    """A million tokens of 2 s and 720 J: 200 kWh, and 2e6 s of a machine."""
    all_known = phase(720.0).money(Prices(kwh=0.25, hardware=31_557.6, years=1))
    assert all_known == pytest.approx({"power": 50.0, "hardware": 2000.0, "sum": 2050.0})
    assert phase(None).money(Prices(kwh=0.25)) == {}
    assert set(phase(None).money(Prices(kwh=1, hardware=1))) == {"hardware"}
    assert set(phase(1.0).money(Prices(kwh=0.0))) == {"power"}


# ---- the command ----


def test_a_run(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    base = ["evaluate", "cost", "nano", "--context", 100, "--new", 6, "--cache", "200k", "--json"]
    base += ["--device", "cpu"]
    code, out, err = call([*base, "--watts", 50, "--price-kwh", 0.5], capsys)
    assert code == 0, err
    facts = json.loads(out)
    decode, prefill = facts["phases"]
    for one in (decode, prefill):
        assert one["joules"] == pytest.approx(50 * one["seconds"])
        assert one["tokens_per_second"] == pytest.approx(1 / one["seconds"])
        assert "50 W given" in one["energy"] and "no counter" in one["energy"]
        power = one["joules"] * 1e6 / 3.6e6 * 0.5
        assert one["money_per_million"] == {"power": pytest.approx(power)}
    # seven layers ask for four experts, and few of them are in so small a cache
    asked = NANO.active_expert_bytes
    assert 0.3 * asked < decode["bytes"]["disk"]["experts"] < 2 * asked
    assert 0 < prefill["bytes"]["disk"]["experts"] < decode["bytes"]["disk"]["experts"]
    assert facts["context"] == 100
    code, out, _ = call(base, capsys)
    assert code == 0 and json.loads(out)["phases"][0]["joules"] is None
    root = rapl(tmp_path / "rapl", **{"intel-rapl__0": ("package-0", 100, 10**9)})
    monkeypatch.setattr(energy, "POWERCAP", root)
    read = json.loads(call([*base, "--watts", 50], capsys)[1])["phases"][0]
    assert read["energy"] == "measured" and read["joules"] == 0  # nobody counts here


def test_a_forecast_has_the_figures_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--config-only", RELEASED, "--ram", "64G", "--threads", 2, "--disk-gbps", 3, "--json"]
    base += ["--context", 5000]
    plan = json.loads(call(["plan", *base], capsys)[1])
    facts = json.loads(call(["evaluate", "cost", *base, "--hardware-price", 3000], capsys)[1])
    decode, prefill = facts["phases"]
    assert decode["seconds"] == plan["decode"]["seconds"]
    assert prefill["seconds"] == plan["prefill"]["prompt_seconds"] / 5000
    assert decode["bytes"]["disk"]["experts"] == plan["decode"]["expert_bytes"]
    assert decode["bytes"]["disk"]["trunk"] == plan["decode"]["trunk_bytes"]
    assert decode["flops"]["weights"] == 2 * plan["decode"]["macs"]
    assert decode["joules"] is None and set(decode["money_per_million"]) == {"hardware"}
    both = json.loads(call(["evaluate", "cost", *base, "--sessions", 2], capsys)[1])["phases"][0]
    assert decode["seconds"] / 2 < both["seconds"] < decode["seconds"]
    gpu = ["--vram", "24G"]
    plan = json.loads(call(["plan", *base, *gpu], capsys)[1])
    facts = json.loads(call(["evaluate", "cost", *base, *gpu], capsys)[1])
    way = plan["device"]["ways"][0]["decode"]
    assert facts["phases"][0]["seconds"] == way["seconds"]
    assert facts["phases"][0]["bytes"]["bus"]["all"] == way["bus_bytes"]
    assert facts["memory"]["gpu"]["latents"] == 20 * 256 * K3.latent_bytes_per_token(2)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["evaluate", "cost", "--config-only", RELEASED, "--ram", "64G"]
    code, out, _ = call([*base, "--watts", 100, "--price-kwh", 1], capsys)
    assert code == 0
    for words in (
        "FLOPs, attention", "bytes from disk, experts", "a million tokens, power", "rates assumed",
        "joules: 100 W given", "a request of 4,096 tokens holds",
    ):  # fmt: skip
        assert words in out
    code, out, _ = call(base, capsys)
    assert code == 0 and "money: give --price-kwh" in out and "unreadable" in out


def test_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config-only", RELEASED, "--ram", "64G"]
    for arguments, words in (
        ([], "a model or --config-only"),
        (["nano", *config], "a model or --config-only"),
        (["nano", "--disk-gbps", 3], "--disk-gbps is about a forecast"),
        (["nano", "--new", 0], "--new is 0"),
        (["nano", "--context", 10**9], "exceed the model's context"),
        ([*config, "--new", 3], "--new is about a run"),
        ([*config, "--policy", "lru"], "--policy is about a run"),
        ([*config, "--pcie-gbps", 3], "Say how much memory it has"),
        ([*config, "--gmacs", 0], "--gmacs is 0"),
        ([*config, "--sessions", 0], "--sessions is 0"),
        ([*config, "--watts", "-1"], "--watts is -1"),
        ([*config, "--hardware-years", 0], "--hardware-years is 0"),
    ):
        code, _, err = call(["evaluate", "cost", *arguments], capsys)
        assert code == 2 and words in err, (arguments, err)
