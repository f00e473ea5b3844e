"""The doctor: facts of made-up systems, verdicts, remedies, a run on this one (R33, R64, R76)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from k3offload import doctor_system as system
from k3offload.cli import app
from k3offload.doctor import fine, kernel_fact, model_facts, render, speed_facts, to_dict
from k3offload.doctor_system import Fact
from k3offload.errors import DoesNotFit, UsageError
from k3offload.rates import assumed

GB = 10**9


def make(root: Path, files: Mapping[str, str]) -> Path:
    """A made-up ``/`` with ``files``."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(total: int, free: int) -> str:
    return f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n"


LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max locked memory         {}             8388608              bytes     \n"
    "Max open files            {}                 20000                files     \n"
)


# ---- memory ----


@pytest.mark.parametrize(
    ("total", "free", "verdict"),
    [(64 * GB, 50 * GB, "good"), (64 * GB, 20 * GB, "slow"), (64 * GB, GB // 2, "problem")],
)
def test_memory_of_the_machine(total: int, free: int, verdict: str, tmp_path: Path) -> None:
    fact = system.memory(make(tmp_path, {"proc/meminfo": meminfo(total, free)}), held=0)
    assert fact.verdict == verdict
    assert bool(fact.remedy) == (verdict != "good")
    assert fact.data["physical"] == pytest.approx(total, abs=1024)
    assert fact.data["cgroup"] is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "verdict"), [(60 * GB, "good"), (8 * GB, "slow"), (300_000_000, "problem")]
)
def test_control_groups(version: int, limit: int, verdict: str, tmp_path: Path) -> None:
    files = {"proc/meminfo": meminfo(64 * GB, 60 * GB)}
    if version == 1:
        files["proc/self/cgroup"] = "4:memory:/box\n"
        files["sys/fs/cgroup/memory/box/memory.limit_in_bytes"] = str(limit)
    else:
        files["proc/self/cgroup"] = "0::/box\n"
        files["sys/fs/cgroup/box/memory.max"] = str(limit)
    fact = system.memory(make(tmp_path, files), held=0)
    assert fact.verdict == verdict
    assert fact.data["cgroup"] == limit
    if verdict != "good":
        assert "control group" in fact.remedy or "container" in fact.remedy


# ---- limits ----


def test_locked_memory_is_shown_and_not_needed(tmp_path: Path) -> None:
    """R33: nothing is locked, so a small limit changes nothing, and that is said."""
    make(tmp_path, {"proc/self/limits": LIMITS.format(65536, 1024)})
    locked, files = system.limits(tmp_path)
    assert (locked.verdict, locked.data["bytes"]) == ("good", 65536)
    assert "locks none" in locked.text
    assert (files.verdict, files.data["limit"]) == ("good", 1024)
    make(tmp_path, {"proc/self/limits": LIMITS.format("unlimited", "unlimited")})
    assert [fact.verdict for fact in system.limits(tmp_path)] == ["good", "good"]
    assert system.limits(tmp_path)[0].data["bytes"] is None


def test_too_few_open_files(tmp_path: Path) -> None:
    make(tmp_path, {"proc/self/limits": LIMITS.format(65536, 32)})
    fact = system.limits(tmp_path)[1]
    assert fact.verdict == "problem"
    assert "ulimit -n" in fact.remedy


# ---- NUMA ----


def nodes(root: Path, *sizes: int) -> Path:
    for number, size in enumerate(sizes):
        folder = f"sys/devices/system/node/node{number}"
        text = f"Node {number} MemTotal:  {size // 1024} kB\nNode {number} MemFree: 1 kB\n"
        make(root, {f"{folder}/meminfo": text, f"{folder}/cpulist": f"{number}\n"})
    return root


def test_numa_topologies(tmp_path: Path) -> None:
    """R64: one node, two, one of them without memory, and no answer about the policy."""
    one = system.numa(nodes(tmp_path / "one", 64 * GB))
    assert (one.verdict, one.data["bound"]) == ("good", False)
    with_empty = system.numa(nodes(tmp_path / "empty", 64 * GB, 0))
    assert with_empty.verdict == "good"
    assert "1 without" in with_empty.text
    two = system.numa(nodes(tmp_path / "two", 64 * GB, 64 * GB))
    assert (two.verdict, two.data["policy"]) == ("slow", "unknown")
    assert "numactl" in two.remedy
    assert two.data["nodes"][1] == {"bytes": 64 * GB // 1024 * 1024, "cpus": "1"}
    maps = {"proc/self/numa_maps": "55ae4c4af000 interleave:0-1 file=/usr/bin/x mapped=2 N0=2\n"}
    spread = system.numa(make(tmp_path / "two", maps))
    assert (spread.verdict, spread.data["policy"]) == ("good", "interleave:0-1")
    assert system.numa(tmp_path / "nothing").verdict == "good"


# ---- device and settings ----


def test_a_gpu_is_never_passed_over_in_silence(tmp_path: Path) -> None:
    """R76: what computes is said plainly, whether or not there is a GPU."""
    without = system.gpu(tmp_path)
    driver = make(tmp_path, {"proc/driver/nvidia/version": "1"})
    with_one, used = system.gpu(driver), system.gpu(driver, "")
    assert without.text.startswith("device: cpu") and with_one.text.startswith("device: cpu")
    assert (without.data["gpu_present"], with_one.data["gpu_present"]) == (False, True)
    assert (without.verdict, with_one.verdict, used.verdict) == ("good", "slow", "good")
    assert "although there is a GPU: this torch is not built for CUDA" in with_one.text
    assert "CUDA" in with_one.remedy
    assert used.data["device"] == "cuda" and "a GPU computes" in used.text


# ---- kernels and speeds ----


def test_kernels_without_the_native_library_are_slow() -> None:
    fact = kernel_fact([], None, "it was not built", {"linear": "reference"})
    assert fact.verdict == "slow"
    assert "it was not built" in fact.text
    assert "compiler" in fact.remedy
    native = kernel_fact(["avx512", "avx2"], "avx2", "", {"linear": "native", "kda": "reference"})
    assert native.verdict == "good"
    assert "avx2" in native.text and "torch for kda" in native.text


def test_speeds_are_judged_by_what_the_machine_reaches() -> None:
    rates = assumed(ram=30 * GB, macs=200e9)
    products = {"bfloat16": 200e9, "float32": 40e9}
    assert all(f.verdict == "good" for f in speed_facts(2, 9 * GB, products, rates, True))
    slower = speed_facts(2, 9 * GB, {"bfloat16": 400e9, "float32": 40e9}, rates, True)
    prompts = [fact for fact in slower if fact.name.startswith("prompt")]
    assert prompts and all(f.verdict == "slow" and f.remedy for f in prompts)


def test_a_model_that_does_not_fit_is_a_problem() -> None:
    def never() -> Any:
        raise DoesNotFit("Too large.", "Give more.", missing=7)

    plan, reads = model_facts(never, 2e9, "buffered")
    assert (plan.verdict, plan.data["missing"], plan.remedy) == ("problem", 7, "Give more.")
    assert reads.verdict == "slow"
    assert not fine([plan, reads])
    assert fine([reads])
    assert "cannot run" in render([plan])


# ---- the command ----


@pytest.fixture(scope="module")
def examined() -> Any:
    runner = CliRunner(env={"K3_THREADS": "2", "K3_DTYPE": None})
    with pytest.MonkeyPatch.context() as patch:  # figures for the test, not for a person
        patch.setattr("k3offload.measure.SECONDS", 0.01)
        patch.setattr("k3offload.measure.ARENA", 64 << 20)
        done = runner.invoke(app, ["doctor", "nano", "--ram", "800M", "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_the_command_on_this_machine(examined: Any) -> None:
    assert examined["device"] == "cpu"
    assert examined["fine"] is True
    facts = {fact["name"]: fact for fact in examined["facts"]}
    for name in (
        "memory", "locked memory", "open files", "numa", "device", "settings", "kernels",
        "memory bandwidth", "large products", "decode, experts", "prompt, bfloat16 trunk", "plan",
        "reads",
    ):  # fmt: skip
        assert facts[name]["verdict"] in ("good", "slow")
        assert bool(facts[name]["remedy"]) == (facts[name]["verdict"] == "slow")
    assert facts["memory bandwidth"]["data"]["read"] > 1e8
    assert facts["plan"]["data"]["limit"] == 800_000_000


def test_settings_say_where_they_come_from(examined: Any) -> None:
    (settings,) = [fact["data"] for fact in examined["facts"] if fact["name"] == "settings"]
    assert settings["ram"] == {"value": 800_000_000, "origin": "flag"}
    assert settings["threads"] == {"value": 2, "origin": "variable"}
    assert settings["dtype"]["origin"] == "default"


def test_a_problem_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not enough memory for the model: said, with the missing bytes, and exit 1."""
    monkeypatch.setattr("k3offload.cli_plan._measured_facts", lambda *_: [])
    done = CliRunner().invoke(app, ["doctor", "nano", "--ram", "100M"])
    assert done.exit_code == 1
    assert "problem" in done.stdout and "are missing" in done.stdout


@pytest.mark.parametrize("flag", ["--ram", "--cache", "--trunk"])
def test_flags_about_a_model_need_one(flag: str) -> None:
    value = "int8" if flag == "--trunk" else "2G"
    done = CliRunner().invoke(app, ["doctor", flag, value])
    assert isinstance(done.exception, UsageError), done.output


def test_json_holds_every_fact() -> None:
    facts = [Fact("a", "good", "x"), Fact("b", "problem", "y", "do", {"n": 1})]
    made = to_dict(facts)
    assert made["fine"] is False
    assert made["facts"][1] == {
        "name": "b", "verdict": "problem", "text": "y", "remedy": "do", "data": {"n": 1},
    }  # fmt: skip
    assert json.loads(json.dumps(made)) == made
