"""What the commands refuse, with which exit code and words; what they find in a model folder.

R01, R02, R06, R26, R54.  A refusal is one last line that names the thing and says what to do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.find import find_model
from k3offload.machine import default_threads
from k3offload.progress import Meter
from k3offload.tiers.tier_disk import DiskTier
from tests.helpers_checkpoint import INDEX, config, hub_cache, shards, tiny
from tests.helpers_engine import BRIEF, call, checkpoint

X = ["generate", "nano", "x"]
L = ["logits", "nano", "--tokens", "t.npy", "--out", "l.npy"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([*X, "--bogus"], "--bogus"),
        (["generate", "nano"], "prompt"),
        (["nonsense"], "nonsense"),
        (["generate", "/no/such folder", "x"], "/no/such folder is not a folder"),
        ([*X, "-n", "0"], "-n is 0"),
        ([*X, "-n", "many"], "'-n'"),
        ([*X, "--ram", "lots"], "'lots' is not a size"),
        ([*X, "--ram", "9" * 400], "is not a size"),
        ([*X, "--ram", "-5"], "'-5' is not a size"),
        ([*X, "--cache", "nan"], "'nan' is not a size"),
        ([*X, "--dtype", "float16"], "float16"),
        ([*X, "--threads", "0"], "threads is 0"),
        ([*X, "--threads", str(4 * default_threads() + 1)], f"{4 * default_threads()} at most"),
        ([*X, "--sweep", "0"], "--sweep is 0"),
        ([*X, "--temperature", "-1"], "temperature is -1"),
        ([*X, "--stop", ""], "stop is"),
        (["generate", "nano", ""], "prompt is empty"),
        (["generate", "nano", "caf\udce9"], "prompt is not UTF-8: byte 3 is 0xe9"),
        ([*X, "-n", "2000000"], "context of 1,048,576"),
        (["logits", "nano", "--tokens", "no.npy", "--out", "l.npy"], "no.npy"),
        ([*L, "--last", "0"], "--last is 0"),
        ([*L, "--threads", "100000"], "threads is 100000"),
        (["inspect", "no-model"], "no-model"),
        (["make-tiny", "out", "--size", "huge"], "huge"),
        (["make-tiny", "out", "--mla-layers", "a,b"], "'a,b'"),
        (["make-tiny", "out", "--mla-layers", "1,"], "'1,'"),
        (["make-tiny", "out", "--full"], "--sparse"),
        (["make-tiny", "/dev/null/x"], "/dev/null/x: /dev/null is not a folder"),
    ],
)
def test_wrong_usage_is_2(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One last line, before any weight is read and before anything is planned."""
    monkeypatch.chdir(tmp_path)
    _no_reads(monkeypatch)
    code, out, err = call(arguments, capsys)
    assert code == 2, err
    *before, last = err.splitlines()
    assert last.startswith("error: ") and names in last
    assert set(before) <= {"loading libraries"}
    assert "--sessions" not in last and len(last) < 300
    assert out == "" and list(tmp_path.iterdir()) == []


def _no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(DiskTier, "_read_window", refuse)


def test_a_prompt_that_is_no_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for data, words in ((b"caf\xe9 au lait", "byte 3 is 0xe9"), (b"", "empty")):
        (tmp_path / "p.txt").write_bytes(data)
        with (tmp_path / "p.txt").open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            code, out, err = call(["generate", "nano", "-"], capsys)
        assert code == 2 and out == ""
        assert words in err.splitlines()[-1]
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = call(["generate", "nano", "-"], capsys)
    assert code == 2 and "closed" in err


def test_more_than_the_model_s_context(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tiny(tmp_path / "m", **BRIEF)
    config(folder, lambda c: c["text_config"].update(max_position_embeddings=20))
    np.save(tmp_path / "t20.npy", np.arange(20))
    np.save(tmp_path / "t21.npy", np.arange(21))
    fine = ["generate", folder, "x" * 15, "-n", 5, "--ignore-end"]
    logits = ["logits", folder, "--out", tmp_path / "l.npy", "--tokens"]
    assert call(fine, capsys)[0] == 0
    assert call([*logits, tmp_path / "t20.npy"], capsys)[0] == 0
    _no_reads(monkeypatch)
    for command in (["generate", folder, "x" * 15, "-n", 6], [*logits, tmp_path / "t21.npy"]):
        code, _, err = call(command, capsys)
        assert code == 2 and "context of 20." in err.splitlines()[-1]
        assert "fewer tokens" in err and "memory plan" not in err and "--" not in err


def test_outputs_are_checked_before_loading_r66(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unwritable places, the model's folder, one file for two things: the libraries stay out."""
    folder = tiny(tmp_path / "m", **BRIEF)
    monkeypatch.chdir(tmp_path)
    np.save("t.npy", np.arange(5))
    Path("link").symlink_to(folder)
    before = sorted(tmp_path.rglob("*"))
    for out, routing, words in (
        ("none/l.npy", None, "none is not a folder"),
        ("m", None, "m is a folder"),
        ("l.npy", "none/r.npz", "none is not a folder"),
        ("l.npy", ".", "is a folder"),
        ("/dev/full", None, "no regular file"),
        ("m/l.npy", None, "into the model"),
        ("l.npy", "link/r.npz", "into the model"),
        ("t.npy", None, "one file twice"),
        ("l.npy", "./l.npy", "one file twice"),
    ):
        command = ["logits", "link", "--tokens", "t.npy", "--out", out]
        code, _, err = call([*command, *(["--routing", routing] if routing else [])], capsys)
        assert code == 2, (out, err)
        assert re.fullmatch(rf"error: [^\n]*{words}[^\n]*\n", err), err
    assert sorted(tmp_path.rglob("*")) == before


def test_routing_of_a_model_without_experts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _no_reads(monkeypatch)
    np.save("t.npy", np.arange(5))
    folder = checkpoint(layers=1, vision=False)
    command = ["logits", folder, "--tokens", "t.npy", "--out", "l.npy", "--routing", "r.npz"]
    code, _, err = call(command, capsys)
    assert code == 2 and "no routed experts" in err and "memory plan" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["t.npy"]


def test_make_tiny_does_not_write_into_a_model_r66(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "m")
    small = ["--layers", 2, "--no-vision"]
    for place in ("m/out", "link/a/b"):
        for kind in (small, ["--full", "--sparse"]):
            code, _, err = call(["make-tiny", tmp_path / place, *kind], capsys)
            assert code == 2 and "inside the model folder" in err
    assert call(["make-tiny", tmp_path / "m", *small], capsys)[0] == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "link", "m"]
    assert call(["make-tiny", tmp_path / "made", *small], capsys)[0] == 0
    assert call(["make-tiny", tmp_path / "made" / "inner", *small], capsys)[0] == 0


def test_make_tiny_leaves_files_alone_that_only_look_like_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ["make-tiny", tmp_path / "m", "--layers", 2, "--no-vision"]
    assert call(small, capsys)[0] == 0
    names = [f"{p.name}.part" for p in (tmp_path / "m").iterdir()]
    for name in names:
        (tmp_path / "m" / name).write_text("mine")
    assert call(small, capsys)[0] == 0
    assert {(tmp_path / "m" / name).read_text() for name in names} == {"mine"}
    assert len(list((tmp_path / "m").iterdir())) == 2 * len(names)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_read_that_fails_on_the_way_keeps_the_text(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The files are shortened while the text comes; experts have to be read again and again."""
    folder = Path(shutil.copytree(find_model("nano"), tmp_path / "m"))
    command = ["generate", folder, "And Jesus said unto him,", "-n", 9, "--cache", 25_000]
    whole = json.loads(call([*command, "--json"], capsys)[1])["text"]

    def shorten(meter: Meter, made: int) -> None:
        if made == 4:
            for shard in folder.glob("*.safetensors"):
                os.truncate(shard, 100)

    monkeypatch.setattr(Meter, "token", shorten)
    code, out, err = call([*command, *(["--json"] if as_json else [])], capsys)
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and "safetensors" in last
    text = json.loads(out)["text"] if as_json else out.removesuffix("\n")
    assert as_json or out.endswith("\n")
    assert 0 < len(text) < len(whole) and whole.startswith(text)
    if as_json:
        facts = json.loads(out)
        assert facts["finish_reason"] == "error" and facts["error"] in last
        assert len(facts["tokens"]) == 4


def _missing_shard(folder: Path) -> str:
    shards(folder)[2].rename(folder / "extra-00001.safetensors")
    return "model-00003-of-"


def _cut(count: int) -> Any:
    def cut(folder: Path) -> str:
        shard = shards(folder)[3]
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size - count)
        return shard.name

    return cut


def _no_tokenizer(folder: Path) -> str:
    (folder / "tiktoken.model").unlink()
    return "tiktoken.model"


def _no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def _unknown_field(folder: Path) -> str:
    config(folder, lambda c: c["text_config"].update(rope_of_a_kind={"factor": 4}))
    return "rope_of_a_kind"


def _contradiction(folder: Path) -> str:
    config(folder, lambda c: c["text_config"].update(num_key_value_heads=2))
    return "num_key_value_heads"


@pytest.mark.parametrize(
    "damage",
    [
        _missing_shard,
        _cut(1),
        _cut(4096),
        _no_tokenizer,
        _no_config,
        _unknown_field,
        _contradiction,
    ],
)
def test_a_damaged_model_is_1_and_named_r01_r06_r54(
    damage: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One last line that names the file or field and says what to do, before any weight is read."""
    folder = tiny(tmp_path / "m", **BRIEF)
    named = damage(folder)
    _no_reads(monkeypatch)
    code, out, err = call(["generate", folder, "x"], capsys)
    assert code == 1 and out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ") and named in last


def test_a_budget_too_small_names_the_missing_bytes_r02(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_reads(monkeypatch)
    code, _, err = call(["generate", checkpoint(**BRIEF), "x", "--ram", "10M"], capsys)
    assert code == 1
    need, missing = (
        int(re.findall(pattern, err)[0].replace(",", ""))
        for pattern in (r"needs ([\d,]+) bytes", r"([\d,]+) are missing")
    )
    assert need - 10_000_000 == missing
    monkeypatch.setenv("K3_RAM", "10M")
    assert call(["generate", checkpoint(**BRIEF), "x"], capsys)[0] == 1


def test_ram_above_what_is_free_is_lowered_and_said_r02(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = call(["generate", checkpoint(**BRIEF), "x", "-n", 1, "--ram", "900T"], capsys)
    assert code == 0
    assert "note: --ram 900,000,000,000,000 is more than" in err


def test_the_hub_cache_by_name_and_by_link_r26(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "hub" / "models--some--model"
    snapshot = hub_cache(checkpoint(**BRIEF), place)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc123")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "link").symlink_to(snapshot)
    texts = set()
    for model in ("some/model", snapshot, tmp_path / "link", checkpoint(**BRIEF)):
        code, out, err = call(["generate", model, "x", "-n", 4, "--json", "--ignore-end"], capsys)
        assert code == 0, err
        texts.add(json.loads(out)["text"])
    assert len(texts) == 1
    blob = next(p for p in (place / "blobs").iterdir() if "00002-of" in p.name)
    blob.rename(blob.with_name(blob.name + ".incomplete"))
    code, _, err = call(["generate", "some/model", "x"], capsys)
    assert code == 1
    assert "model-00002-of" in err and blob.name in err


def test_inspect_and_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", **BRIEF)
    code, out, _ = call(["inspect", folder, "--json"], capsys)
    facts = json.loads(out)
    assert code == 0
    real = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    assert facts["total_bytes"] == sum(facts["bytes_by_group"].values()) == real
    assert facts["constants"]["kda_chunk"] == 64
    code, out, _ = call(["check", folder, "--full", "--json"], capsys)
    assert code == 0 and all(finding["level"] != "error" for finding in json.loads(out))
    name = _cut(1)(folder)
    code, out, _ = call(["check", folder], capsys)
    assert code == 1
    assert name in out and "cannot be run" in out
