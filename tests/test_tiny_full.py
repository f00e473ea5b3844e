"""make-tiny --full --sparse: the released files' sizes to the byte, on hardly any disk."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload import tiny_full, tiny_write
from k3offload.errors import CheckpointError
from k3offload.make_tiny import make_tiny_full
from k3offload.spec import ModelSpec
from k3offload.tiny_full import RELEASED, full_parts, size_of
from k3offload.tiny_recipes import Recipes, Value
from k3offload.tiny_write import shard_header
from tests.oracle import Weights, oracle_logits

MOE = "language_model.model.layers.1.block_sparse_moe."


def small_config() -> dict[str, Any]:
    """The released configuration with fewer, narrower layers; everything else as released."""
    config: dict[str, Any] = json.loads(RELEASED.read_text())
    config["text_config"].update(
        num_hidden_layers=5, hidden_size=256, intermediate_size=512, num_experts=24,
        num_experts_per_token=4, moe_intermediate_size=64, routed_expert_hidden_size=128,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, attn_res_block_size=2,
    )  # fmt: skip
    config["text_config"]["linear_attn_config"].update(
        kda_layers=[1, 2, 3], full_attn_layers=[4, 5], num_heads=4, head_dim=32
    )
    config["vision_config"]["text_hidden_size"] = 256
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("full") / "model"
    make_tiny_full(out, 7, config=small_config())
    return out


def test_released_files_to_the_byte() -> None:
    """497,220 tensors; payload, headers and files as published, shard by shard where known."""
    spec = ModelSpec.from_config(json.loads(RELEASED.read_text()))
    payloads, headers, count = [], [], 0
    for tensors, order in full_parts(spec, Recipes(size_of(spec), 0)):
        payloads.append(sum(value.nbytes for value in tensors.values()))
        headers.append(len(shard_header(tensors, order, metadata=False)))
        count += len(order)
    assert count == 497_220
    assert sum(payloads) == 1_560_860_324_864
    assert sum(headers) == 75_766_584
    assert (payloads[0], headers[0]) == (2_341_213_184, 2_928)
    assert (payloads[1], payloads[3]) == (16_990_092_800, 16_566_684_160)
    assert (payloads[93], headers[93]) == (4_697_663_488, 584)
    assert payloads[94:] == [92_289_024, 802_428_928]


def test_files_have_full_size_and_take_little(folder: Path) -> None:
    spec = ModelSpec.load(folder)
    held = Weights(folder).where
    promised = {t.name: (t.dtype, list(t.shape)) for t in spec.tensors()}
    assert {name: (dtype, shape) for name, (_, dtype, shape, _) in held.items()} == promised
    files = sorted(folder.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05d}-of-000008.safetensors" for i in range(1, 9)]
    apparent = sum(f.stat().st_size for f in files)
    assert spec.total_bytes < apparent < spec.total_bytes + 200_000
    assert sum(f.stat().st_blocks * 512 for f in files) < 4_000_000 < apparent // 100
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == spec.total_bytes
    assert index["weight_map"] == {name: at[0].name for name, at in held.items()}
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 163586


def test_what_steers_is_real_and_the_rest_is_zero(folder: Path) -> None:
    weights = Weights(folder)
    vision = ("vision_tower.", "mm_projector.")
    for name, (_, dtype, shape, _) in weights.where.items():
        steers = (
            dtype == "F32" or len(shape) == 1 or name.endswith(("gate.weight", "res_proj.weight"))
        )
        if shape[0] > 4000:  # embedding (below), head and the large vision holes
            continue
        real = bool(weights.raw(name).any())
        assert real == (steers and not name.startswith(vision)), name
    rows = weights.raw("language_model.model.embed_tokens.weight")
    assert np.all(np.count_nonzero(rows[:1024], axis=1) > 200)
    assert not np.any(rows[1024:])
    a_log = weights.raw("language_model.model.layers.0.self_attn.A_log")
    assert a_log[:4].all()
    assert not a_log[4:].any()


def test_experts_are_whole_and_out_of_order(folder: Path) -> None:
    """One expert is one range of the file; ranges do not follow the experts' ids."""
    where = Weights(folder).where
    starts = []
    for e in range(24):
        keys = [f"{MOE}experts.{e}.w{i}.weight_{p}" for i in (1, 2, 3) for p in ("packed", "scale")]
        ends = [where[k][3] + int(np.prod(where[k][2])) for k in keys]
        assert [where[k][3] for k in keys[1:]] == ends[:-1]
        starts.append(where[keys[0]][3])
    follow = sum(b - a == starts[1] - starts[0] for a, b in pairwise(starts))
    assert follow < 12
    assert starts != sorted(starts)


def test_routing_depends_on_the_token(folder: Path) -> None:
    result = oracle_logits(folder, [5, 9, 700, 5])
    assert (result.experts[:, 0] == result.experts[:, 3]).all()  # zero projections: no memory
    assert (result.experts[:, 0] != result.experts[:, 1]).any(axis=-1).all()


def test_same_seed_same_values(folder: Path, tmp_path: Path) -> None:
    make_tiny_full(tmp_path, 7, config=small_config())
    name = "model-00003-of-000008.safetensors"
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    make_tiny_full(tmp_path, 8, config=small_config())
    assert (tmp_path / name).read_bytes() != (folder / name).read_bytes()


def test_refuses_a_file_system_without_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_full, "held_bytes", lambda path: path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"holes.*ext4"):
        make_tiny_full(tmp_path / "out", config=small_config())
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_sparse_writer_leaves_a_hole_behind_a_short_value(tmp_path: Path) -> None:
    short = Value("F32", (4,), lambda: iter([np.array([1.5, 2.5], np.float32)]))
    after = Value("U8", (3,), lambda: iter([np.array([7, 8, 9], np.uint8)]))
    tensors = {"a": short, "b": after}
    tiny_write.write_shard(tmp_path / "x.safetensors", tensors, sparse=True)
    weights = Weights(tmp_path)
    assert weights.raw("a").tolist() == [1.5, 2.5, 0, 0]
    assert weights.raw("b").tolist() == [7, 8, 9]
    with pytest.raises(AssertionError):
        tiny_write.write_shard(tmp_path / "y.safetensors", tensors, sparse=False)
