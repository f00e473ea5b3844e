"""The command line as people meet it: what goes where, exit codes, odd names, interruptions.

R04, R25, R66 to R68.  Where nothing depends on the process the command is
called in this one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload import progress
from k3offload.config import show_size
from k3offload.loading import load
from k3offload.make_tiny import make_tiny
from k3offload.textstream import TextStream
from tests.helpers_engine import (
    BRIEF,
    call,
    checkpoint,
    expert_bytes,
    logits_of,
    same_bits,
    some_tokens,
    starve,
)

COMMAND = [sys.executable, "-c", "from k3offload.cli import main; main()"]
#: the same, in a process that has no network
OFFLINE = """
import socket, sys
def no(*a, **k): raise AssertionError("network")
socket.getaddrinfo = socket.socket.connect = no
from k3offload.cli import main
main(sys.argv[1:])
"""
PROMPT = "And Jesus said unto him,"


def contents(folder: Path) -> dict[str, str]:
    """Hash of every file under ``folder``."""
    return {
        os.fsdecode(p): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_generate_prints_text_and_nothing_else_r04() -> None:
    """The first line comes at once, the plan before anything is loaded; no colours in a pipe."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [*COMMAND, "generate", "nano", PROMPT, "-n", "8"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    assert process.stderr is not None
    first, seconds = process.stderr.readline(), time.monotonic() - begin
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 0, rest
    assert first == b"loading libraries\n"
    assert seconds < 5  # half a second on a machine that does nothing else
    said = rest.decode()
    assert said.index("memory plan") < said.index("expert slots") < said.index("new tokens")
    assert re.search(r"\d+ requests, \d+ hits .* \d+ misses, .* read", said)
    assert "finished: length" in said
    assert "\x1b" not in said and "\x1b" not in out.decode()
    with load("nano") as engine, engine.session() as session:
        session.append(PROMPT)
        events = list(session.generate(8))
    assert out.decode() == "".join(getattr(e, "text", "") for e in events) + "\n"


@pytest.fixture(scope="module")
def odd_place(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model in a folder with blanks, letters of several scripts, signs and a byte that is no
    UTF-8; read-only, and with code in it that must never run."""
    names = "my models/Żółć 通义 #1 100%/-dash ".encode() + b"\xff"
    folder = os.fsencode(tmp_path_factory.mktemp("odd")) + b"/" + names
    os.makedirs(os.path.dirname(folder))
    shutil.copytree(checkpoint(**BRIEF), os.fsdecode(folder))
    marker = f"open({str(Path(os.fsdecode(folder)).parent / 'ran')!r}, 'w')\n"
    for name in (b"modeling_kimi.py", b"tokenization_kimi.py", b"configuration_kimi.py"):
        with open(folder + b"/" + name, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(marker)
    for name in os.listdir(folder):
        os.chmod(folder + b"/" + name, 0o444)
    os.chmod(folder, 0o555)
    return folder


def test_odd_names_read_only_offline_r66_r67_r68(odd_place: bytes) -> None:
    place = Path(os.fsdecode(odd_place))
    before = contents(place.parent)
    tokens, out = place.parent.parent / "t \udcfe.npy", place.parent.parent / "l \udcfe.npy"
    np.save(open(tokens, "wb"), np.arange(9))  # noqa: SIM115
    env = {**os.environ, "LC_ALL": "C", "HOME": "/proc/nothing", "HF_HOME": "/proc/nothing"}
    commands: list[list[str | Path]] = [
        ["generate", place, "hé", "-n", "3", "--json", "--ignore-end"],
        ["logits", place, "--tokens", tokens, "--out", out],
        ["check", place, "--full", "--json"],
        ["inspect", place],
    ]
    for arguments in commands:
        run = subprocess.run(
            [sys.executable, "-c", OFFLINE, *arguments],
            capture_output=True, env=env, timeout=120, cwd=place.parent,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert b"Traceback" not in run.stderr
        run.stdout.decode(), run.stderr.decode()  # whole UTF-8 whatever the locale
        if "--json" in arguments:
            json.loads(run.stdout)
    assert np.load(open(out, "rb")).shape == (9, 512)  # noqa: SIM115
    assert contents(place.parent) == before  # nothing written, no marker


@pytest.mark.parametrize("moment", ["importing", "generating"])
def test_interrupt_r25(moment: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "nano", PROMPT, "-n", "3000", "--ignore-end"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # What runs in the background of a shell ignores the signal, and so would this.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None and process.stdout is not None
    assert process.stderr.readline() == b"loading libraries\n"
    if moment == "generating":
        process.stdout.read(12)
    else:
        time.sleep(0.2)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert process.returncode == 130, err
    assert err.decode().rstrip().endswith("interrupted")
    assert b"Traceback" not in err


def test_the_first_line_comes_before_torch_r04() -> None:
    """In a process where torch cannot be imported at all."""
    code = "import sys; sys.modules['torch'] = None; from k3offload.cli import main; main()"
    for arguments in (["generate", "nano", "x"], ["logits", "nano", "--tokens", "t", "--out", "l"]):
        run = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, timeout=60, text=True
        )
        assert run.stderr.startswith("loading libraries\n") and "torch" in run.stderr


def test_prompt_tokens_rate_and_time_left_r04(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Shown while the prompt is computed, layer by layer; without a terminal too."""
    monkeypatch.setattr(progress, "EVERY", 0.0)
    folder, count = checkpoint(**BRIEF), 150
    np.save(tmp_path / "t.npy", np.array(some_tokens(count, 1)))
    for command in (
        ["generate", folder, "x" * count, "-n", 2, "--ignore-end", "--sweep", 64],
        ["logits", folder, "--tokens", tmp_path / "t.npy", "--out", tmp_path / "l", "--sweep", 64],
    ):
        code, _, err = call(command, capsys)
        assert code == 0, err
        form = (
            rf"prompt: (\d+) of {count} tokens(?:, \S+ \S?B read)?"
            r"(?:, \S+ tokens/s, \d+ s left)?, layer (\d) of 5"
        )
        seen = [(int(done), int(layer)) for done, layer in re.findall(form, err)]
        assert seen == [(done, layer) for done in (0, 64, 128) for layer in range(1, 6)]
        assert err.count("tokens/s, ") >= 14  # all but the very first
        assert err.count("B read, ") >= 10  # there is nothing to read before the first experts


def test_a_drawn_seed_is_told_and_repeats_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", checkpoint(**BRIEF), "abc", "-n", "9", "--json", "--ignore-end"]
    code, out, err = call([*base, "--temperature", "1.5"], capsys)
    assert code == 0
    drawn = json.loads(out)
    again = ["--seed", drawn["seed"]]
    assert f"--seed {drawn['seed']} gives the same text" in err
    code, out, err = call([*base, "--temperature", "1.5", *again], capsys)
    assert json.loads(out)["tokens"] == drawn["tokens"] and "the same text" not in err
    assert json.loads(call([*base, "--temperature", "1.5"], capsys)[1])["seed"] != drawn["seed"]
    code, out, err = call(base, capsys)
    assert json.loads(out)["seed"] is None and "seed" not in err


def test_what_the_plan_lowers_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, tokens = checkpoint(**BRIEF), some_tokens(150, 1)
    code, out, err = call(["generate", folder, "x", "-n", 1, "--cache", "1T", "--json"], capsys)
    assert code == 0 and json.loads(out)["plan"]["notes"] == []  # all experts fit: nothing lowered
    starve(monkeypatch)
    command = ["generate", folder, "x" * 150, "-n", 1, "--cache", "1M", "--json", "--sweep", 100]
    code, out, err = call(command, capsys)
    assert code == 0, err
    notes = json.loads(out)["plan"]["notes"]
    assert "--cache 1,000,000 is lowered to" in notes[0]
    assert "--sweep is lowered to 64 tokens" in notes[1]
    assert all(f"note: {note}\n" in err for note in notes)
    np.save(tmp_path / "t.npy", np.array(tokens))
    arguments = ["--tokens", tmp_path / "t.npy", "--out", tmp_path / "l.npy", "--sweep", 100]
    code, _, err = call(["logits", folder, *arguments], capsys)
    assert code == 0 and "--sweep is lowered to 64 tokens" in err
    with load(folder) as engine:
        assert same_bits(np.load(tmp_path / "l.npy"), logits_of(engine, tokens, sweep=64))


def test_a_model_without_experts(capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(layers=1, vision=False)
    code, _, err = call(["generate", folder, "x", "-n", 1, "--cache", "1M"], capsys)
    assert code == 0 and "note: --cache has no effect" in err


def test_json_counts_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    folder, slot = checkpoint(**BRIEF), 16_384
    code, out, err = call(
        ["generate", folder, "abc", "-n", 6, "--json", "--ignore-end", "--cache", 5 * slot], capsys
    )
    assert code == 0, err
    facts = json.loads(out)
    assert facts["finish_reason"] == "length" and facts["error"] is None
    assert len(facts["tokens"]) == 6 and facts["prompt_tokens"] == 3
    with load(folder) as engine:
        stream = TextStream(engine.tokenizer)  # special tokens are not shown
        shown = [stream.push(token) for token in facts["tokens"]]
        assert facts["text"] == "".join(shown) + stream.flush()
    experts, trunk = facts["tiers"]["ram"]["experts"], facts["tiers"]["ram"]["trunk"]
    for tier in (experts, trunk):
        assert tier["hits"] + tier["late"] + tier["misses"] == tier["requests"]
        assert tier["wait_seconds"] >= 0
    assert facts["plan"]["expert_slots"] == 5
    demanded = experts["bytes"] - experts["prefetch_bytes"]
    assert demanded == experts["misses"] * expert_bytes(folder) > 0
    assert trunk["requests"] == 6 * 5  # one prefill and five decode sweeps over five layers
    disk = facts["tiers"]["disk"]
    assert disk["bytes"] >= experts["bytes"] and disk["reads"] > experts["misses"]
    assert sum(facts["plan"]["purposes"].values()) == facts["plan"]["total"]
    assert facts["plan"]["total"] <= facts["plan"]["limit"]
    assert facts["memory"]["planned"] == facts["plan"]["total"]


def test_generate_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Sampling, seeds and stop texts arrive at the sampler."""
    base = ["generate", "nano", PROMPT, "-n", "12", "--json"]
    greedy = json.loads(call(base, capsys)[1])["text"]
    hot = [*base, "--temperature", "1.2", "--top-p", "0.9", "--seed", "4"]
    sampled = [json.loads(call(hot, capsys)[1])["text"] for _ in range(2)]
    assert sampled[0] == sampled[1] != greedy
    stopped = json.loads(call([*base, "--stop", greedy[6:9]], capsys)[1])
    assert stopped["text"] == greedy[: greedy.index(greedy[6:9])]
    assert stopped["finish_reason"] == "stop"


def test_a_prompt_from_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text(PROMPT)
    with (tmp_path / "p.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        code, out, _ = call(["generate", "nano", "-", "-n", "3", "--json"], capsys)
    assert code == 0
    with load("nano") as engine:
        assert json.loads(out)["prompt_tokens"] == len(engine.encode(PROMPT))


def test_logits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every way to feed equals the same way in the library, bit for bit."""
    folder, tokens = checkpoint(**BRIEF), some_tokens(150, 1)
    np.save(tmp_path / "t.npy", np.array(tokens, np.int32))
    out = tmp_path / "l.npy"
    with load(folder) as half, load(folder, dtype="float32") as full:
        for options, engine, wanted in (
            ([], half, {}),
            (["--sweep", 13], half, {"sweep": 13}),
            (["--decode-from", 145, "--dtype", "float32"], full, {"decode_from": 145}),
            (["--sweep", 64, "--last", 2], half, {"sweep": 64, "keep": 2}),
            (["--last", 999, "--threads", 1, "--cache", "20k"], half, {}),
        ):
            command = ["logits", folder, "--tokens", tmp_path / "t.npy", "--out", out, *options]
            code, printed, err = call(command, capsys)
            assert code == 0, err
            assert printed == ""
            assert same_bits(np.load(out), logits_of(engine, tokens, **wanted)), options


def test_logits_routing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it keeps in memory is in the plan; older numpy stores every keyword as an array."""
    savez = np.savez

    def of_numpy_1(file: Any, **arrays: Any) -> None:
        assert set(arrays) == {"layers", "experts", "weights"}
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", of_numpy_1)
    np.save(tmp_path / "t.npy", np.array(some_tokens(70, 1)))
    found = []
    for sweep in (64, 512):
        code, _, err = call(
            ["logits", checkpoint(**BRIEF), "--tokens", tmp_path / "t.npy", "--out",
             tmp_path / "l.npy", "--routing", tmp_path / f"r{sweep}", "--sweep", sweep,
             "--last", 1], capsys,
        )  # fmt: skip
        assert code == 0, err
        with np.load(tmp_path / f"r{sweep}") as stored:
            found.append({name: stored[name] for name in stored.files})
        kept = found[-1]["experts"].nbytes + found[-1]["weights"].nbytes
        assert re.search(rf"kept for the caller +{show_size(kept)}\n", err)
    assert np.load(tmp_path / "l.npy").shape == (1, 512)
    assert found[0]["layers"].tolist() == [1, 2, 3, 4]
    assert found[0]["experts"].shape == found[0]["weights"].shape == (4, 70, 4)
    assert np.abs(found[0]["weights"].sum(-1) - 1).max() < 1e-5
    for name in found[0]:
        assert (found[0][name] == found[1][name]).all()


@pytest.mark.parametrize(
    "tokens", [np.array([], int), np.array([[1]]), np.array([1.5]), np.array([512]), np.array([-1])]
)
def test_logits_refuses_wrong_tokens(
    tokens: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "t.npy", tokens)
    command = [
        "logits",
        checkpoint(**BRIEF),
        "--tokens",
        tmp_path / "t.npy",
        "--out",
        tmp_path / "l",
    ]
    code, _, err = call(command, capsys)
    assert code == 2 and "t.npy" in err
    assert not (tmp_path / "l").exists()


def test_make_tiny(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every option arrives: the files are those of the library call."""
    options = ["--size", "odd", "--seed", 3, "--layers", 4, "--no-vision", "--mla-layers", "1,3",
               "--decay", "fast", "--edge-scales", "--scale", 2.5]  # fmt: skip
    code, out, err = call(["make-tiny", tmp_path / "a", *options], capsys)
    assert code == 0, err
    made = make_tiny(
        tmp_path / "b", "odd", 3, layers=4, vision=False, mla_layers=(1, 3), decay="fast",
        edge_scales=True, scale=2.5,
    )  # fmt: skip
    assert json.loads(out)["bytes"] == made["bytes"]
    hashes = [{Path(k).name: v for k, v in contents(tmp_path / n).items()} for n in "ab"]
    assert hashes[0] == hashes[1]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(["--version"], capsys)
    assert code == 0 and re.fullmatch(r"\d+\.\d+\.\d+\S*\n", out)
    code, out, _ = call(["--help"], capsys)
    assert code == 0
    assert all(name in out for name in ("generate", "logits", "inspect", "check", "make-tiny"))
