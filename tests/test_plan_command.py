"""``k3offload plan``: the same bytes from config.json as from the files, advice that holds, flags
that count (R02, R03, R15)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from k3offload.budget import demand_of
from k3offload.checkpoint import Checkpoint
from k3offload.cli import app
from k3offload.config import parse_size
from k3offload.errors import DoesNotFit, UsageError
from k3offload.find import find_model
from k3offload.make_tiny import make_tiny
from k3offload.plan_report import RELEASED, Ask, SpecLayout, plan_of, report, spec_of
from k3offload.rates import assumed
from k3offload.scheduler.plan import Demand

ROOT = Path(__file__).resolve().parent.parent
K3 = SpecLayout(spec_of(Path(RELEASED)))
GB = 10**9
PAGE = 4096  #: what a large tensor adds where memory follows its place in the file


def ask(*options: str) -> Any:
    """What ``plan --json`` says."""
    done = CliRunner().invoke(app, ["plan", *options, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def k3(*options: str) -> Any:
    return ask("--config-only", RELEASED, *options)


# ---- the same from the config as from the files ----


def demand(layout: Any, trunk: str) -> Demand:
    return demand_of(
        layout, "bfloat16", trunk=trunk, base=1, threads=2, context=600, sessions=2, extra=3
    )


@pytest.mark.parametrize("trunk", ["bfloat16", "int8", "mxfp4"])
@pytest.mark.parametrize("size", ["nano", "odd", "kimi-linear", "embedded"])
def test_the_spec_alone_demands_what_the_checkpoint_does(
    size: str, trunk: str, tmp_path: Path
) -> None:
    if size == "embedded":
        folder = find_model("nano")
    else:
        make_tiny(folder := tmp_path / "model", size)
    checkpoint = Checkpoint.open(folder)
    layout = SpecLayout(checkpoint.spec)
    one, other = demand(checkpoint, trunk), demand(layout, trunk)
    assert one.working(512) == other.working(512) and one.asked(512) == other.asked(512)
    for layer, (there, here) in enumerate(zip(one.layers, other.layers, strict=True)):
        assert 0 <= there - here <= PAGE * len(layout.trunk(layer))
    for name in ("embed", "head", "small", "head_block", "staging"):
        assert 0 <= getattr(one, name) - getattr(other, name) <= PAGE, name
    rest: Any = dict.fromkeys(("embed", "head", "small", "head_block", "staging"), 0)
    rest |= {"working": None, "asked": None, "layers": ()}
    assert replace(one, **rest) == replace(other, **rest)
    vision = ("vision tower", "projector")  # never read, so never predicted exactly
    groups = [
        {k: v for k, v in x.bytes_by_group.items() if k not in vision} for x in (checkpoint, layout)
    ]
    assert groups[0] == groups[1]


def test_the_config_file_alone_is_enough(tmp_path: Path) -> None:
    source = find_model("nano")
    shutil.copy(source / "config.json", tmp_path / "some.json")
    alone = ask("--config-only", str(tmp_path / "some.json"), "--ram", "1G")
    (folder := tmp_path / "folder").mkdir()
    shutil.copy(source / "config.json", folder / "config.json")
    in_folder = ask("--config-only", str(folder), "--ram", "1G")
    whole = ask("nano", "--ram", "1G")
    assert alone["source"] == in_folder["source"] != whole["source"]
    purposes = [made["tiers"]["ram"].pop("purposes") for made in (alone, in_folder, whole)]
    for made in (alone, in_folder, whole):
        del made["model"], made["source"], made["tiers"]["ram"]["total"]
    assert alone == in_folder == whole
    assert purposes[0] == purposes[1]
    assert purposes[0] == pytest.approx(purposes[2], abs=2 * PAGE)


# ---- what it says ----


def test_the_released_model_in_numbers() -> None:
    made = k3("--ram", "128G", "--cache", "1G", "--disk-gbps", "7", "--sweep", "512")
    ram = made["tiers"]["ram"]
    assert sum(ram["purposes"].values()) == ram["total"] <= 128 * GB
    assert len(ram["resident_layers"]) == 93
    assert ram["purposes"]["trunk, resident"] == pytest.approx(113.5e9, rel=0.001)
    disk = made["tiers"]["disk"]
    assert disk["purposes"]["routed experts"] == 1_446_456_066_048
    assert disk["total"] == sum(disk["purposes"].values()) == K3.spec.total_bytes
    assert made["tiers"]["gpu"] is None and made["device"] is None
    assert made["decode"]["expert_bytes"] == pytest.approx(25.83e9, rel=0.01)
    assert made["decode"]["seconds"] > 3.65
    assert made["decode"]["limit"] == "disk"
    assert 200 < made["prefill"]["seconds"] < 400


def test_small_machines_are_told_what_is_missing() -> None:
    command = ["plan", "--config-only", RELEASED, "--ram", "2G"]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, DoesNotFit)
    assert error.missing > 0
    more = (2 * GB + error.missing + 10**6) // 10**6
    assert k3("--ram", f"{more}M")["tiers"]["ram"]["expert_slots"] >= 1


def test_more_memory_than_the_trunk_needs_goes_to_experts() -> None:
    """R03: slots follow the memory there is."""
    shares = []
    for ram in (300 * GB, 600 * GB, 1200 * GB):
        plan = plan_of(K3, Ask(ram))
        shares.append(plan.slots / plan.experts)
    assert shares == sorted(shares)
    assert shares[2] - shares[1] > shares[1] - shares[0] > 0.1


def test_text_names_every_part() -> None:
    done = CliRunner().invoke(app, ["plan", "nano", "--ram", "500M", "--sessions", "3"])
    assert done.exit_code == 0, done.output
    for words in ("memory plan", "disk:", "gpu:", "decode after", "3 sessions", "a prompt of"):
        assert words in done.stdout


# ---- advice ----


def test_advice_is_the_same_arithmetic_again() -> None:
    rates, now = assumed(), Ask(ram=64 * GB)
    made = report("x", K3, "config", now, rates)
    known = {one.what: one for one in made.help}
    resident = next(what for what in known if "makes the trunk resident" in what)
    grown = replace(now, ram=now.ram + 51 * GB)
    again = report("x", K3, "config", grown, rates)
    assert len(again.plan.resident_layers) == 93
    assert known[resident].decode_seconds == pytest.approx(again.decode.seconds, rel=0.01)
    assert known[resident].decode_saved == pytest.approx(
        made.decode.seconds - known[resident].decode_seconds
    )
    faster = report("x", K3, "config", now, assumed(disk=14e9))
    twice = known["a disk twice as fast"]
    assert twice.decode_seconds == pytest.approx(faster.decode.seconds)
    assert twice.prompt_seconds == pytest.approx(faster.prompt_seconds)


def test_advice_is_only_about_what_helps() -> None:
    """A small model that is all in memory gains nothing from a disk or from memory."""
    nano = SpecLayout(spec_of(find_model("nano")))
    made = report("x", nano, "config", Ask(ram=GB), assumed())
    assert made.plan.slots == made.plan.experts
    assert not [one for one in made.help if "RAM" in one.what or "disk" in one.what]


# ---- flags ----

FLAGS = {
    "--ram": ("200G", ("tiers", "ram", "limit")),
    "--cache": ("100M", ("tiers", "ram", "expert_slots")),
    "--context": ("9000", ("tiers", "ram", "purposes", "sequence state and latents")),
    "--sessions": ("3", ("decode_together", "seconds")),
    "--sweep": ("1024", ("prefill", "seconds")),
    "--dtype": ("float32", ("tiers", "ram", "purposes", "sequence state and latents")),
    "--trunk": ("int8", ("tiers", "ram", "purposes", "trunk, resident")),
    "--threads": ("1", ("tiers", "ram", "purposes", "decoding tables and weight tiles")),
    "--disk-gbps": ("3", ("decode", "seconds")),
    "--ram-gbps": ("20", ("decode", "memory_seconds")),
    "--gmacs": ("100", ("prefill", "seconds")),
    "--hit-rate": ("0.5", ("decode", "seconds")),
    "--latents": ("100M", ("tiers", "ram", "purposes", "latents, the newest, and buffers")),
}


def test_summaries_make_room_for_rows() -> None:
    """A sweep that does not fit as a whole is longer when its summaries need not stay in RAM."""
    options = ("--ram", "8G", "--sweep", "60000", "--threads", "2")
    before, after = k3(*options), k3(*options, "--summaries", "100M")
    name = "block summaries, a part of them"
    assert before["tiers"]["ram"]["purposes"][name] == 0
    assert after["tiers"]["ram"]["purposes"][name] == 100_000_000
    rows = [made["tiers"]["ram"]["sweep_tokens"] for made in (before, after)]
    assert rows[1] > 1.3 * rows[0]


@pytest.fixture(scope="module")
def usual() -> Any:
    return k3("--ram", "160G", "--threads", "2")


@pytest.mark.parametrize("flag", FLAGS)
def test_no_flag_is_inert(flag: str, usual: Any) -> None:
    value, path = FLAGS[flag]
    options = {"--ram": "160G", "--threads": "2"} | {flag: value}
    changed: Any = k3(*(word for pair in options.items() for word in pair))
    before: Any = usual
    for key in path:
        before, changed = before[key], changed[key]
    assert changed != before


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["nano", "--config-only", "released"],
        ["nano", "--sweep", "0"],
        ["nano", "--threads", "0"],
        ["nano", "--context", "99999999"],
        ["nano", "--dtype", "float16"],
        ["nano", "--trunk", "int4"],
        ["nano", "--hit-rate", "1.5"],
        ["nano", "--disk-gbps", "0"],
        ["nano", "--gmacs", "nan"],
        ["nano", "--ram", "much"],
    ],
)
def test_wrong_usage_is_refused(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["plan", *options])
    assert isinstance(done.exception, UsageError), (done.output, done.exception)


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys\nfrom k3offload.cli import app\n"
        "app(['plan', '--config-only', 'released', '--ram', '64G'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("vram", "ram", "slowest"), [("24G", "128G", 8.0), ("8G", "48G", 20.0)])
def test_the_released_model_with_a_gpu(vram: str, ram: str, slowest: float) -> None:
    made = k3("--vram", vram, "--ram", ram, "--disk-gbps", "7", "--ram-gbps", "70")
    gpu = made["tiers"]["gpu"]
    assert (
        0.9 * parse_size(vram) < gpu["total"] == sum(gpu["purposes"].values()) <= parse_size(vram)
    )
    assert 0 < gpu["expert_slots"] < made["tiers"]["ram"]["expert_slots"] + 100
    ways = {(w["trunk_on"], w["experts_on"]): w for w in made["device"]["ways"]}
    assert set(ways) == {("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")}
    for way in ways.values():
        step = way["decode"]
        tiers = [step[f"{name}_seconds"] for name in ("device", "bus", "disk")]
        assert max(tiers) <= step["seconds"] <= sum(tiers) + step["cpu_seconds"]
        assert 1.0 < step["seconds"] < slowest
    both = ways["gpu", "gpu"]["decode"]
    held = gpu["purposes"]["trunk, resident"]
    moved = both["bus_bytes"] - 1472 * 17_547_264 * (1 - both["vram_hit_rate"])
    assert moved + held == pytest.approx(111.3e9, rel=0.02)  # the trunk: held, or copied
