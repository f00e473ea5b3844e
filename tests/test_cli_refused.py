"""What the commands refuse, with which exit code and words; what they find in a model folder.

R01, R02, R06, R26, R54.  A refusal is one last line that names the thing and says what to do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from k3offload.tiers.tier_disk import DiskTier
from tests.helpers_checkpoint import INDEX, config, hub_cache, shards, tiny
from tests.helpers_engine import BRIEF, call, checkpoint


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["generate", "nano", "x", "--bogus"], "--bogus"),
        (["generate", "nano"], "PROMPT"),
        (["nonsense"], "nonsense"),
        (["generate", "/no/such folder", "x"], "/no/such folder"),
        (["generate", "nano", "x", "-n", "0"], "max_new_tokens"),
        (["generate", "nano", "x", "--ram", "lots"], "lots"),
        (["generate", "nano", "x", "--dtype", "float16"], "float16"),
        (["generate", "nano", "x", "--threads", "0"], "threads"),
        (["generate", "nano", "x", "--sweep", "0"], "sweep"),
        (["generate", "nano", "x", "--temperature", "-1"], "temperature"),
        (["generate", "nano", ""], "prompt"),
        (["logits", "nano", "--tokens", "no.npy", "--out", "l.npy"], "no.npy"),
        (["logits", "nano", "--tokens", "x", "--out", "l.npy", "--last", "0"], "--last"),
        (["inspect", "no-model"], "no-model"),
        (["make-tiny", "out", "--size", "huge"], "huge"),
    ],
)
def test_wrong_usage_is_2(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, out, err = call(arguments, capsys)
    assert code == 2, err
    assert names.lower() in err.lower()
    assert out == "" and list(tmp_path.iterdir()) == []


def _no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(DiskTier, "_read_window", refuse)


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
