"""``check`` and ``inspect``: every finding at once, values with ``--full``, and no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from k3offload.check import Finding, check, has_errors
from k3offload.config import CONSTANTS
from k3offload.errors import CheckpointError
from k3offload.inspect import inspect, render
from tests.helpers_checkpoint import (
    INDEX,
    Raw,
    change_shard,
    config,
    hub_cache,
    read_shard,
    run_python,
    shards,
    tiny,
    write_shard,
)

LAYER1 = "language_model.model.layers.1."
EXPERT = LAYER1 + "block_sparse_moe.experts."
SHARD2 = "model-00002-of-000012.safetensors"


def errors(folder: Path, full: bool = False) -> list[Finding]:
    return [f for f in check(folder, full) if f.level == "error"]


def poke(folder: Path, name: str, at: int, value: bytes) -> None:
    """Overwrite bytes of one tensor of layer 1."""

    def change(have: dict[str, Raw]) -> dict[str, Raw]:
        data = bytearray(have[name].data)
        data[at : at + len(value)] = value
        return {**have, name: have[name]._replace(data=bytes(data))}

    change_shard(folder / SHARD2, change)


@pytest.mark.parametrize("size", ["nano", "odd"])
def test_sound_checkpoint_has_no_findings(tmp_path: Path, size: str) -> None:
    folder = tiny(tmp_path / "m", size=size)
    assert check(folder) == []
    assert check(folder, full=True) == []
    assert check(hub_cache(folder, tmp_path / "c"), full=True) == []


def test_all_findings_are_listed_at_once(tmp_path: Path) -> None:
    """R05, R06, R51: a missing shard, a short one, a bad header, a bad shape, no vocabulary."""
    folder = tiny(tmp_path / "m")
    every = shards(folder)
    every[2].unlink()
    os.truncate(every[3], every[3].stat().st_size - 1)
    every[4].write_bytes(b"\xff" * 100)
    gone = f"{EXPERT}3.w1.weight_scale"
    change_shard(folder / SHARD2, lambda have: {n: r for n, r in have.items() if n != gone})
    (folder / "tiktoken.model").unlink()
    (folder / "generation_config.json").write_text("{")
    found = check(folder)
    texts = [finding.what for finding in found if finding.level == "error"]
    for word in (
        f"1 of 12 shards is missing from {folder}: {every[2].name}",
        f"{every[3].name} is truncated", f"{every[4].name} declares a header", gone,
        "tiktoken.model", "generation_config.json",
    ):  # fmt: skip
        assert sum(word in text for text in texts) == 1, (word, texts)
    assert len(texts) == 6
    assert all(finding.remedy for finding in found if finding.level != "note")
    assert has_errors(found)
    with pytest.raises(CheckpointError) as error:
        inspect(folder)
    assert error.value.problem in texts


def test_errors_come_first(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    write_shard(folder / "stray.safetensors", {})
    (folder / "tiktoken.model").unlink()
    shards(folder)[-2].unlink()
    levels = [finding.level for finding in check(folder)]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    assert set(levels) == {"error", "warning", "note"}


def test_refused_config_does_not_hide_the_rest(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    config(folder, lambda c: c["text_config"].update(attn_logit_softcap=30.0))
    path = shards(folder)[3]
    os.truncate(path, path.stat().st_size - 1)
    texts = " ".join(finding.what for finding in errors(folder))
    assert "attn_logit_softcap = 30.0" in texts
    assert f"{path.name} is truncated" in texts
    (folder / "config.json").unlink()
    assert "config.json" in errors(folder)[0].what


def test_many_of_a_kind_are_counted(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    change_shard(folder / SHARD2, lambda have: {n: r for n, r in have.items() if EXPERT not in n})
    texts = [finding.what for finding in errors(folder)]
    assert len(texts) == 21
    assert texts[-1] == f"... and {16 * 6 - 20} more of this kind."


def test_vocabulary(tmp_path: Path) -> None:
    """R01: tiktoken.model alone is enough, tokenizer.json alone too, an empty one is not."""
    folder = tiny(tmp_path / "m")
    (folder / "tiktoken.model").rename(folder / "tokenizer.json")
    assert errors(folder) == []
    os.truncate(folder / "tokenizer.json", 0)
    assert "tokenizer.json is empty" in " ".join(f.what for f in errors(folder))


@pytest.mark.parametrize("ids", ['"end"', "-1", "[258, true]", "512"])
def test_end_ids_of_generation_config(tmp_path: Path, ids: str) -> None:
    folder = tiny(tmp_path / "m")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    (finding,) = errors(folder)
    assert "eos_token_id" in finding.what
    (folder / "generation_config.json").unlink()
    assert [finding.level for finding in check(folder)] == ["note"]


def test_total_of_the_index(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    (finding,) = check(folder)
    assert finding.level == "warning"
    assert str(index["metadata"]["total_size"]) in finding.what


# ---- full ----
BF16_NAN, F32_INF = b"\xc0\x7f", b"\x00\x00\x80\xff"
VALUES = {
    "scale-of-255": (f"{EXPERT}3.w2.weight_scale", 7, b"\xff", "1 scale bytes of 255"),
    "nan-in-bf16": (LAYER1 + "input_layernorm.weight", 4, BF16_NAN, "1 values that are not finite"),
    "infinity-in-f32": (LAYER1 + "self_attn.dt_bias", 8, F32_INF, "1 values that are not finite"),
    "used-A_log-tail": (LAYER1 + "self_attn.A_log", 16, b"\1\0\0\0", "not zero beyond its 4 heads"),
    "nan-in-the-tail": (LAYER1 + "self_attn.A_log", 124, F32_INF, "not zero beyond its 4 heads"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_full_finds_bad_values_by_name(tmp_path: Path, kind: str) -> None:
    """R55 and what a flipped bit can do; without ``full`` no value is read."""
    name, at, value, words = VALUES[kind]
    folder = tiny(tmp_path / "m")
    poke(folder, name, at, value)
    assert errors(folder) == []
    texts = [finding.what for finding in errors(folder, full=True)]
    assert any(name in text and words in text for text in texts)
    assert all(name in text for text in texts)


def test_negative_zero_in_the_tail_is_zero(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    poke(folder, LAYER1 + "self_attn.A_log", 16, np.float32(-0.0).tobytes())
    assert errors(folder, full=True) == []


def test_values_in_later_chunks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3offload.check_values.CHUNK", 512)
    folder = tiny(tmp_path / "m")
    name = LAYER1 + "self_attn.q_proj.weight"
    poke(folder, name, len(read_shard(folder / SHARD2)[name].data) - 2, BF16_NAN)
    (finding,) = errors(folder, full=True)
    assert name in finding.what


def test_full_reads_every_text_byte_once(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    calls: list[tuple[int, int]] = []
    check(folder, full=True, progress=lambda done, total: calls.append((done, total)))
    groups = inspect(folder).bytes_by_group
    text = sum(n for name, n in groups.items() if name not in ("vision tower", "projector"))
    assert calls[-1] == (text, text)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_vision_values_are_never_read(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    path = shards(folder)[-1]
    change_shard(
        path, lambda have: {n: r._replace(data=b"\xff" * len(r.data)) for n, r in have.items()}
    )
    assert check(folder, full=True) == []


# ---- inspect ----
def test_inspect_says_what_is_there(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    facts = inspect(folder)
    have = {n: r for path in shards(folder) for n, r in read_shard(path).items()}
    assert facts.tensors == len(have)
    assert facts.total_bytes == sum(len(raw.data) for raw in have.values())
    assert facts.total_bytes == sum(facts.bytes_by_group.values())
    experts = sum(len(raw.data) for name, raw in have.items() if ".experts." in name)
    assert facts.tiers["all_experts_bytes"] == facts.bytes_by_group["routed experts"] == experts
    assert facts.tiers["one_expert_bytes"] * facts.experts["count"] == experts
    assert facts.layers == {"KDA + dense": 1, "KDA + MoE": 5, "MLA + MoE": 3}
    assert facts.constants == CONSTANTS
    assert json.loads(json.dumps(facts.to_dict()))["experts"]["in_one_read"] == 16 * 8
    text = render(facts)
    for number in (facts.total_bytes, *facts.bytes_by_group.values(), *facts.tiers.values()):
        assert f"{number:,}" in text
    assert "kda_chunk 64" in text


def test_inspect_of_the_other_family(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", expert_format="bf16", attn_res=0, latent=0, vision=False)
    facts = inspect(folder)
    assert facts.experts["format"] == "bf16"
    assert facts.sizes["latent"] is None
    assert "vision tower" not in facts.bytes_by_group
    assert render(facts)


@pytest.mark.parametrize("module", ["inspect", "check", "spec", "checkpoint", "make_tiny"])
def test_torch_is_not_imported(module: str) -> None:
    code = f"import sys, k3offload.{module}; print(sorted(m for m in sys.modules if m == 'torch'))"
    done = run_python(code)
    assert done.stdout == b"[]\n", done.stderr
