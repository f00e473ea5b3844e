"""The baselines that others compare with: the torch model against the engine and the reference, the
ways its weights come, memory control groups, cold files, and what a line says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from benchmarks.baselines import __main__ as command
from benchmarks.baselines import cgroup, contender, ways
from benchmarks.baselines.cgroup import Group, make_group
from benchmarks.baselines.cold import cached, evict
from benchmarks.baselines.model import K3, Past, read_config
from benchmarks.baselines.mxfp4 import dequantised
from k3offload.find import find_model
from k3offload.loading import load
from tests.helpers_engine import BRIEF, checkpoint, expected, logits_of, some_tokens
from tests.judge import judge
from tests.oracle import mxfp4

WAYS = list(ways.WAYS)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that wait for one another spin, and test files run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


def logits(model: K3, tokens: list[int], dtype: torch.dtype, cut: int) -> Any:
    """[T, V]: the first ``cut`` tokens at once, the others one by one."""
    past = Past()
    parts = [tokens[:cut], *([t] for t in tokens[cut:])]
    with torch.inference_mode():
        rows = [model(torch.tensor(part), past, dtype) for part in parts]
    return torch.cat(rows).float().numpy()


def test_the_torch_model_is_the_engine_in_float32() -> None:
    folder, tokens = checkpoint(), some_tokens(48)
    model = ways.opened(folder, "resident", 0)
    got = logits(model, tokens, torch.float32, 30)
    said = expected(folder, tokens)
    assert judge(said.logits, got, said.margin, safe_router=1e-4), "not the reference"
    with load(folder, dtype="float32", device="cpu") as engine:
        ours = logits_of(engine, tokens, decode_from=30)
    found = judge(ours, got, said.margin, safe_router=1e-4)
    assert found and found.judged > 5
    model.get_parameter("model.layers.0.self_attn.A_log").mul_(1.01)  # a planted mistake
    assert not judge(ours, logits(model, tokens, torch.float32, 30), said.margin, safe_router=1e-4)


def test_the_torch_model_is_the_engine_in_bfloat16() -> None:
    """On the embedded model: made ones amplify rounding, ours as well as theirs."""
    folder = find_model("nano")
    model = ways.opened(folder, "mmap", 0)
    with load(folder, device="cpu") as engine:
        text = "And Jesus said unto him, Go and do likewise. Now it came to pass, as they went, "
        tokens = engine.tokenizer.encode(text + "that he entered into a certain village.")
        ours = logits_of(engine, tokens, decode_from=15)
    got = logits(model, tokens, torch.bfloat16, 15)
    assert len(tokens) >= 20 and judge(ours, got, bf16=True)
    assert judge(expected(folder, tokens).logits, got, bf16=True)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_bits(way: str) -> None:
    folder, tokens = checkpoint(**BRIEF), some_tokens(6)
    model = ways.opened(folder, way, 1 << 62)
    with torch.inference_mode():
        got = model(torch.tensor(tokens), Past())
        wanted = ways.opened(folder, "resident", 0)(torch.tensor(tokens), Past())
    assert torch.equal(got, wanted)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    trunk = [p for name, p in model.named_parameters() if ".experts." not in name]
    away = way in ("accelerate-disk", "accelerate-cpu")
    assert all(p.is_meta == away for p in experts)
    assert all(p.is_meta == (way == "accelerate-cpu") for p in trunk)


def test_auto_fills_memory_with_the_first_experts() -> None:
    folder = checkpoint(**BRIEF)
    with torch.device("meta"):
        model = K3(read_config(folder))
    one = model.get_submodule("model.layers.1.block_sparse_moe.experts.0")
    size = sum(p.nbytes for p in one.parameters())
    every = ways.on_disk(model, 0)
    assert len(every) == 4 * 16 and ways.on_disk(model, 1 << 40) == set()
    some = ways.on_disk(model, 20 * size)
    assert 4 * 16 - 20 <= len(some) < len(every)
    assert "model.layers.1.block_sparse_moe.experts.0" in every - some
    assert "model.layers.4.block_sparse_moe.experts.15" in some


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Kimi K3"):
        read_config(checkpoint("kimi-linear"))
    for file in checkpoint(**BRIEF).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"language_model.lm_head.weight": "x"}})
    )
    with pytest.raises(ValueError, match=r"differ in \d+"):
        ways.opened(tmp_path, "mmap", 0)


def test_dequantised_is_exact_for_every_code_and_scale() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (255, 64), np.uint8)
    packed[:, :16] = np.arange(256, dtype=np.uint8).reshape(16, 16)[np.arange(255) % 16]
    scale = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 4, 1)
    got = dequantised(torch.from_numpy(packed), torch.from_numpy(scale)).double().numpy()
    wanted = mxfp4(packed, scale)
    fine = (scale > 0) & (scale < 253)  # beyond, bfloat16 has no such numbers, or no exact ones
    wide = fine.repeat(32, 1)
    assert np.array_equal(got[wide], wanted[wide])
    assert np.array_equal(np.signbit(got[wide]), np.signbit(wanted[wide]))
    bad = np.full_like(scale, 255)
    assert dequantised(torch.from_numpy(packed), torch.from_numpy(bad)).isnan().all()


# ---- control groups ----


def own(folder: Path, lines: str) -> Path:
    (folder / "self").write_text(lines)
    return folder / "self"


def test_version_2(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (root / "user" / "me").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("memory")
    group = make_group("new", 5000, root, own(tmp_path, "0::/user/me\n"))
    assert group is not None and (group.version, group.folder) == (2, root / "user" / "new")
    assert (group.folder / "memory.max").read_text() == "5000"
    assert group.peak() is None and not group.killed()
    (group.folder / "memory.peak").write_text("4096\n")
    (group.folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n")
    assert group.peak() == 4096 and group.killed()


def test_version_1(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (root / "memory" / "box").mkdir(parents=True)
    lines = "5:cpu,memory:/box\n0::/\n"
    group = make_group("new", 5000, root, own(tmp_path, lines))
    assert group is not None and (group.version, group.folder) == (1, root / "memory/box/new")
    assert (group.folder / "memory.limit_in_bytes").read_text() == "5000"
    (group.folder / "memory.max_usage_in_bytes").write_text("4096\n")
    (group.folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0")
    assert group.peak() == 4096 and not group.killed()
    (group.folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    assert group.killed()


def test_where_no_group_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    assert make_group("new", 5000, tmp_path, tmp_path / "none") is None
    assert make_group("new", 5000, tmp_path, own(tmp_path, "3:cpu:/\n0::/\n")) is None
    assert make_group("new", 5000, tmp_path / "gone", own(tmp_path, "3:memory:/\n")) is None
    (tmp_path / "memory" / "new").mkdir()  # the name is taken
    assert make_group("new", 5000, tmp_path, own(tmp_path, "3:memory:/\n")) is None


def test_a_real_group_holds_a_process_to_its_limit() -> None:
    group = make_group(f"k3-test-{os.getpid()}", 60_000_000)
    if group is None:
        pytest.skip("no memory control group can be made here")
    try:
        held = "x = bytearray(20_000_000); x[::4096] = b'x' * len(x[::4096])"
        done = subprocess.run([*group.joining, sys.executable, "-c", held], capture_output=True)
        assert done.returncode == 0, done.stderr
        peak = group.peak()
        assert not group.killed() and peak is not None and 20_000_000 <= peak <= 60_000_000
        much = "x = bytearray(200_000_000); x[::4096] = b'x' * len(x[::4096])"
        done = subprocess.run([*group.joining, sys.executable, "-c", much], capture_output=True)
        assert done.returncode != 0 and group.killed()
    finally:
        group.remove()
    assert not group.folder.exists()


def test_evicted_files_are_cold(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(bytes(3_000_000))
    assert file.read_bytes() and cached([file]) >= 2_900_000
    if evict([file]):
        pytest.skip("the file system keeps its files in memory")
    assert cached([file]) == 0
    (tmp_path / "empty").touch()
    assert evict([tmp_path / "empty"]) == 0


# ---- the command ----


def line_of(name: str, **more: Any) -> dict[str, Any]:
    given = command.arguments(
        ["--model", str(checkpoint(**BRIEF)), "--budget", "900M", "--prompt", "5", "--new", "3",
         "--dtype", "float32"]
    )  # fmt: skip
    return command.contend(name, Namespace(**{**vars(given), **more}))


def test_contenders_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run in processes of their own, as the command runs them."""
    ours, mapped = line_of("ours"), line_of("mmap")
    line = command.judged(mapped, ours)
    assert line["greedy"]["equal"] == line["greedy"]["of"] == 3
    assert line["greedy"]["logits_error"] < 2e-4
    assert line["decode_seconds"] > 0 and line["peak_rss"] > 1 << 20
    text = command.row(line)
    assert text.startswith("mmap") and "3/3 equal" in text
    if line["comparable"]:
        assert line["read_bytes"] > 1_000_000 and line["peak_bytes"] > 1 << 20
    wrong = dict(ours, tokens=[ours["tokens"][0], -1, -1])
    assert command.judged(line_of("mmap"), wrong)["greedy"]["equal"] == 1


def test_what_is_not_comparable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    done = {"load_seconds": 1.0, "prefill_seconds": 1.0, "decode_seconds": 1.0, "decode_bytes": 9.0,
            "read_bytes": 9, "peak_rss": 9}  # fmt: skip
    monkeypatch.setattr(command, "_run", lambda *some: dict(done))
    monkeypatch.setattr(command, "make_group", lambda *some: None)
    line = line_of("mmap")
    assert not line["comparable"] and "no memory control group" in line["reasons"][0]
    assert "(not comparable: no memory control group" in command.row(line)
    line = line_of("resident-unlimited")
    assert line["reasons"] == ["not comparable: no limit of memory, on purpose"]
    monkeypatch.setattr(command, "evict", lambda files: 10_000_000)
    assert any("stayed in the page cache" in reason for reason in line_of("mmap")["reasons"])


def test_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert command._run([sys.executable, "-c", "raise ValueError('so')"], 60)["failed"].endswith(
        "so"
    )
    slow = command._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert slow == {"failed": "not done after 0 seconds"}
    dead = Group(tmp_path, 1, 5)
    (tmp_path / "memory.oom_control").write_text("oom_kill 1")
    (tmp_path / "cgroup.procs").touch()
    monkeypatch.setattr(command, "make_group", lambda *some: dead)
    monkeypatch.setattr(cgroup.Group, "remove", lambda self: None)
    monkeypatch.setattr(command, "_run", lambda *some: {"failed": "ended with -9"})
    line = line_of("resident")
    assert line["failed"] == "killed: it needs more than 900 MB"
    assert "killed" in command.row(line)


def test_all_of_it_needs_that_much_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Namespace(available=1_000_000))
    line = line_of("resident-unlimited")
    assert line["failed"].startswith("1 MB of memory are free") and "tokens" not in line


def test_read_ahead_is_known_of_drives(tmp_path: Path) -> None:
    found = command.read_ahead(tmp_path)
    assert found is None or (found >= 0 and found % 1024 == 0)


def test_a_run_that_is_ended_leaves_no_group() -> None:
    words = ["--model", str(checkpoint(**BRIEF)), "--budget", "900M", "--no-results"]
    words += ["--contender", "mmap", "--new", "9999"]
    run = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.baselines", *words],
        cwd=command.ROOT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (children := psutil.Process(run.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert children
        run.terminate()
        assert run.wait(60) == 143
        psutil.wait_procs(children, timeout=20)
        assert not any(child.is_running() for child in children)
        assert not list(cgroup.ROOT.glob(f"**/k3-baseline-{run.pid}"))
    finally:
        run.kill()


def test_arguments() -> None:
    for words in (["--new", "1"], ["--prompt", "0"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            command.arguments(["--model", "x", "--budget", "4G", *words])
    assert contender.prompt_of(5, 4096) == contender.prompt_of(5, 256)
