"""``bench decode``, ``prefill``, ``batch`` and ``kernels``: figures that follow from their parts,
accounts that are checked, options that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3offload import bench_engine, bench_kernels, bench_prefill, contention, measure
from k3offload.batch_results import Result
from k3offload.bench_batch import same_answers
from k3offload.bench_compare import FEW, SAME, compare
from k3offload.bench_engine import cache_bytes, check, must_have_room, share_of
from k3offload.budget import slot_size
from k3offload.checkpoint import Checkpoint
from k3offload.errors import K3Error, UsageError
from k3offload.loading import load
from k3offload.scheduler.counts import Counts
from tests.helpers_engine import BRIEF, call, checkpoint

Line = dict[str, Any]
QUICK = {
    contention: {"LOOK": 0.005, "OTHERS": 99.0, "STOLEN": 99.0},
    bench_engine: {"LINE": 0.01},
    measure: {"ARENA": 16 << 20, "CHUNK": 2 << 20, "SECONDS": 0.005, "DEEP": 128},
    bench_kernels: {"TURNS": 0.005, "CHUNK": 2 << 20, "DEEP": 128},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that mean nothing, soon, on a machine that counts as idle."""
    for module, values in QUICK.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def lines_of(arguments: list[Any], capsys: pytest.CaptureFixture[str], code: int = 0) -> list[Line]:
    found, out, err = call(["bench", *arguments, "--json"], capsys)
    assert found == code, err
    return [json.loads(line) for line in out.splitlines()]


def brief() -> Checkpoint:
    return Checkpoint.open(checkpoint(**BRIEF))


DECODE = ["-n", 4, "--context", 8, "--share", "25%", "--repeats", 2]
TWICE = ["--share", "25.0%"]  # that is one case


def test_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = brief(), tmp_path / "out.jsonl"
    moe = model.spec.moe
    assert moe is not None
    lines = lines_of(
        ["decode", model.folder, *DECODE, *TWICE, "--warmup", 0, "-o", out, "--predictor", "none",
         "--predictor", "router", "--predictor", "none"], capsys,
    )  # fmt: skip
    assert [json.loads(text) for text in out.read_text().splitlines()] == lines
    cases = [(line["cache"], line["predictor"], line["seed"]) for line in lines]
    assert cases == [
        (cache, name, seed)
        for cache, name in (("all", "none"), ("25%", "none"), ("25%", "router"))
        for seed in (0, 1)
    ]
    asked = 4 * len(model.spec.moe_layers) * moe.top_k
    for line in lines:
        assert line["clean"] and line["requests"] == asked
        assert line["hits"] + line["late"] + line["misses"] == asked
        assert line["expert_bytes"] == (
            line["misses"] * model.expert_bytes + line["prefetch_bytes"]
        )
    for line in lines[:2]:
        assert line["hits"] == asked and line["bytes"] == 0 and line["share_of_memory"] > 0
    alone = sorted(line["seconds"] for line in lines[:2])
    for line in lines[2:]:
        assert line["bytes"] == line["expert_bytes"] > 0
        assert line["slots"] == round(0.25 * model.spec.expert_count)
        assert line["alone_seconds"] == pytest.approx(sum(alone) / 2)
        assert line["read_seconds"] == pytest.approx(line["bytes"] / 4 / line["line_rate"])
        bound = max(line["alone_seconds"], line["read_seconds"])
        assert line["of_bound"] == pytest.approx(line["seconds"] / bound)
        useful = (line["bytes"] - line["wasted_bytes"]) / line["line_rate"]
        assert line["line_used"] == pytest.approx(useful / (4 * line["seconds"]))
    for line in lines[2:4]:
        assert line["prefetches"] == 0 and line["bytes"] == line["misses"] * model.expert_bytes
    found = compare(out, out)
    assert len(found.kinds) == 3 and not found.only_a
    assert {f.verdict for kind in found.kinds for f in kind.figures} <= {SAME, FEW}


def test_a_contended_run_is_not_clean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "OTHERS", -1.0)
    command = ["bench", "decode", brief().folder, *DECODE[:-2], "--repeats", 1, "--warmup", 0]
    code, out, err = call([*command, "--json"], capsys)
    assert code == 4 and "CONTENDED in 3 of 3 repeats" in err
    assert [json.loads(line)["clean"] for line in out.splitlines()] == [False] * 3
    code, out, _ = call(command, capsys)
    assert code == 4 and "CONTENDED in 3 of 3" in out and "clean" not in out


def test_the_kernel_must_say_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["decode", brief().folder, *DECODE[:-2], "--repeats", 1, "--warmup", 0]
    lines = lines_of([*command, "--predictor", "none"], capsys)
    if lines[-1]["mode"] != "direct":
        pytest.skip("the file system of the models has no direct reads")
    assert lines[-1]["kernel_bytes"] == pytest.approx(
        lines[-1]["bytes"] + lines[-1]["alignment_bytes"], abs=bench_engine.SLACK
    )
    told = iter(range(0, 1 << 40, 2 * bench_engine.SLACK))
    monkeypatch.setattr(bench_engine, "kernel_read_bytes", lambda: next(told))
    code, _, err = call(["bench", *command], capsys)
    assert code == 1 and "what the kernel says was read is 2,097,152 and must be" in err


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (Counts(requests=5, hits=2, late=1, misses=1, bytes=10), "hits"),
        (Counts(requests=4, hits=2, late=1, misses=1, bytes=20), "bytes of experts"),
        (Counts(requests=1, misses=1, bytes=15, prefetch_bytes=5), "without reading ahead"),
    ],
)
def test_wrong_counts_are_found(counts: Counts, said: str) -> None:
    check(Counts(requests=4, hits=2, late=1, misses=1, bytes=10), 10)
    with pytest.raises(K3Error, match=said):
        check(counts, 10)


class Miscounted(bench_prefill.Touched):
    @property
    def count(self) -> int:
        return super().count + 1


def test_prefill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = brief()
    command = ["prefill", model.folder, "-n", 96, "--share", "25%", "--repeats", 1, "--warmup", 0]
    whole, cold = lines_of(command, capsys)
    assert (whole["cache"], whole["bytes"]) != ("25%", 0) and cold["sweeps"] == 1
    assert whole["distinct_experts"] == cold["distinct_experts"] == cold["requests"]
    assert cold["expert_bytes"] == cold["distinct_experts"] * model.expert_bytes
    for line in (whole, cold):
        assert line["of_torch"] == pytest.approx(line["macs_per_second"] / line["torch_rate"])
        assert line["tokens_per_second"] == pytest.approx(96 / line["seconds"])
    bound = max(cold["alone_seconds"], cold["read_seconds"])
    assert cold["alone_seconds"] == whole["seconds"]
    assert cold["of_bound"] == pytest.approx(cold["seconds"] / bound)
    _, cut = lines_of([*command, "--chunk", 32], capsys)
    assert cut["sweeps"] == 3 and cut["expert_bytes"] > cold["expert_bytes"]
    monkeypatch.setattr(bench_prefill, "Touched", Miscounted)
    code, _, err = call(["bench", *command], capsys)
    assert code == 1 and "experts asked for is" in err


def test_batch(capsys: pytest.CaptureFixture[str]) -> None:
    model = brief()
    (line,) = lines_of(
        ["batch", model.folder, "--documents", 6, "--solo", 2, "--sessions", 6, "--shortest", 4,
         "--longest", 12, "-n", 4, "--repeats", 1, "--warmup", 0], capsys,
    )  # fmt: skip
    assert line["at_a_time"] == 6 and line["cache"] == "25%" and line["lengths"] == "4 to 12"
    assert line["expert_bytes"] == line["misses"] * model.expert_bytes + line["prefetch_bytes"]
    assert line["times_quicker"] == pytest.approx(line["seconds_alone"] / line["seconds"])
    assert line["times_fewer_bytes"] == pytest.approx(
        line["expert_bytes_alone"] / line["expert_bytes"]
    )
    assert line["times_fewer_bytes"] > 1 and line["experts_a_layer"] >= 1


def test_other_answers_in_company_are_found() -> None:
    def result(*tokens: int) -> Result:
        return Result("7", 0, "text", tokens, "length")

    same_answers([result(1, 2), result(5)], [result(1, 2)])
    with pytest.raises(K3Error, match="Document 7 has another answer alone"):
        same_answers([result(1, 2)], [result(1, 3)])


def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(["kernels", "nano", "--repeats", 1, "--warmup", 0], capsys)
    assert {line["operator"] for line in lines} == {
        "linear", "experts", "mla_prefill", "kda", "a call"
    }  # fmt: skip
    for line in lines:
        if line["of"] == "prompts":
            assert line["of_torch"] == pytest.approx(line["macs_per_second"] / line["torch_rate"])
        elif line["operator"] != "a call":
            assert line["of_scan"] == pytest.approx(line["bytes_per_second"] / line["scan_rate"])
    kind, n, _, k = lines[0]["weight"].split()
    assert kind == "bfloat16" and lines[0]["rows"] == 1
    assert lines[0]["bytes_per_second"] * lines[0]["seconds"] == pytest.approx(2 * int(n) * int(k))
    many = next(line for line in lines if line["operator"] == "linear" and line["rows"] == 512)
    assert many["macs_per_second"] * many["seconds"] == pytest.approx(512 * int(n) * int(k))


def test_shares(tmp_path: Path) -> None:
    assert share_of("25%") == 0.25 and share_of(" 100%") == 1.0
    for text in ("25", "0%", "101%", "x%", "nan%"):
        with pytest.raises(UsageError, match="is no share of the experts"):
            share_of(text)
    model = brief()
    assert cache_bytes(model, 1e-9) == slot_size(model)
    assert cache_bytes(model, 0.5) == round(0.5 * model.spec.expert_count) * slot_size(model)


def test_a_share_that_has_no_room_is_refused() -> None:
    model = brief()
    with load(model.folder, context=64, cache=cache_bytes(model, 0.25)) as engine:
        must_have_room(engine, 0.25)
        must_have_room(engine, None)
        with pytest.raises(UsageError, match=r"50% of the experts are .* and the plan"):
            must_have_room(engine, 0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["decode", "--repeats", 0], "--repeats is 0"),
        (["decode", "--warmup", -1], "--warmup is -1"),
        (["decode", "--seed", -1], "--seed is -1"),
        (["decode", "--wait", "nan"], "--wait is nan"),
        (["decode", "--share", "2"], "'2' is no share"),
        (["decode", "-n", 0], "--tokens is 0"),
        (["decode", "--predictor", "oracle"], "There is no predictor 'oracle'"),
        (["prefill", "--chunk", 0], "--chunk is 0"),
        (["batch", "--solo", 99], "--solo 99 is more than the 16 documents"),
        (["batch", "--longest", 3], "--longest 3 is less than --shortest 40"),
        (["kernels", "--threads", 0], "threads is 0"),
        (["kernels", "nowhere"], "nowhere"),
    ],
)
def test_refused(given: list[Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(["bench", *given], capsys)
    assert code == 2 and said in err and not out


def test_results_are_not_written_into_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = brief().folder / "out.jsonl"
    code, _, err = call(["bench", "decode", place.parent, "-o", place], capsys)
    assert code == 2 and "written into the model" in err and not place.exists()
