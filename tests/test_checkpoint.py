"""Checkpoint: every byte of every page is found, and what cannot be trusted is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.checkpoint import Checkpoint, ExpertPage, check_trunk_values
from k3offload.errors import CheckpointError
from tests.helpers_checkpoint import (
    INDEX,
    Raw,
    change_shard,
    config,
    read_shard,
    reindex,
    shards,
    split,
    tiny,
    write_shard,
)

LAYER1 = "language_model.model.layers.1."
EXPERT = LAYER1 + "block_sparse_moe.experts."
SHARD2 = "model-00002-of-000012.safetensors"


def page_bytes(checkpoint: Checkpoint, page: ExpertPage) -> dict[str, bytes]:
    """Parts of a page by key, read from the files its extents name."""
    data = []
    for where in page.extents:
        with open(checkpoint.files[where.file], "rb") as file:
            file.seek(where.offset)
            data.append(file.read(where.length))
    return {p.key: data[p.extent][p.delta : p.delta + p.nbytes] for p in page.parts}


def stored(folder: Path) -> dict[str, Raw]:
    return {name: raw for path in shards(folder) for name, raw in read_shard(path).items()}


def assert_every_byte_is_found(folder: Path) -> Checkpoint:
    """All tensors through the checkpoint equal the tensors read by an independent reader."""
    checkpoint, have = Checkpoint.open(folder), stored(folder)
    spec, seen = checkpoint.spec, set()
    files = [path.read_bytes() for path in checkpoint.files]
    for layer in range(len(spec.layers)):
        prefix = f"{spec.prefix}model.layers.{layer}."
        for tensor in checkpoint.trunk(layer):
            file, offset, length = tensor.location
            name = prefix + tensor.name
            if name not in have:  # how transformers spells a dense layer's MLP
                name = name.replace(".mlp.", ".block_sparse_moe.")
            assert files[file][offset : offset + length] == have[name].data
            seen.add(name)
        if spec.moe is None or layer not in spec.moe_layers:
            continue
        for expert in range(spec.moe.experts):
            name = f"{prefix}block_sparse_moe.experts.{expert}."
            for key, data in page_bytes(checkpoint, checkpoint.expert(layer, expert)).items():
                assert data == have[name + key].data
                seen.add(name + key)
    for local, tensor in checkpoint.globals().items():
        name = spec.prefix + ("" if local.startswith("lm_head") else "model.") + local
        file, offset, length = tensor.location
        assert files[file][offset : offset + length] == have[name].data
        seen.add(name)
    ignored = ("vision_tower.", "mm_projector.")
    left = {
        name for name, raw in have.items()
        if raw.data and not name.startswith(ignored) and not name.endswith("weight_shape")
    }  # fmt: skip
    assert seen == left
    return checkpoint


# ---- what is found ----
@pytest.mark.parametrize(
    "kwargs",
    [
        {}, {"size": "odd"}, {"attn_res": 0}, {"latent": 0}, {"q_lora": 0},
        {"full_rank_gate": False}, {"bounded_decay": False}, {"expert_format": "bf16"},
        {"shared": 0}, {"vision": False}, {"mla_layers": (0, 1)},
    ],
    ids=str,
)  # fmt: skip
def test_every_tensor_is_found_once(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    """R51: exactly the K3 set loads, and every tensor is consumed once."""
    checkpoint = assert_every_byte_is_found(tiny(tmp_path / "m", **kwargs))
    assert checkpoint.one_read_experts == checkpoint.spec.expert_count
    assert not checkpoint.notes


def test_experts_in_any_order_are_still_one_read(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    rng = np.random.default_rng(0)

    def shuffle(tensors: dict[str, Raw]) -> dict[str, Raw]:
        experts: dict[str, list[str]] = {}
        for name in tensors:
            if name.startswith(EXPERT):
                experts.setdefault(name.split(".")[6], []).append(name)
        rest = [name for name in tensors if not name.startswith(EXPERT)]
        groups = [[str(n) for n in rng.permutation(names)] for names in experts.values()]
        order = [groups[i] for i in rng.permutation(len(groups))]
        return {n: tensors[n] for n in [*rest, *(n for group in order for n in group)]}

    change_shard(folder / SHARD2, shuffle)
    checkpoint = assert_every_byte_is_found(folder)
    assert checkpoint.one_read_experts == checkpoint.spec.expert_count


def test_scattered_expert_takes_several_reads(tmp_path: Path) -> None:
    """One matrix of expert 3 at the end of the shard, one tensor of expert 5 in another shard."""
    folder = tiny(tmp_path / "m")
    tensors = read_shard(folder / SHARD2)
    for key in ("weight_packed", "weight_scale"):
        tensors[f"{EXPERT}3.w2.{key}"] = tensors.pop(f"{EXPERT}3.w2.{key}")
    moved = {f"{EXPERT}5.w1.weight_scale": tensors.pop(f"{EXPERT}5.w1.weight_scale")}
    write_shard(folder / SHARD2, tensors)
    change_shard(shards(folder)[0], lambda have: {**have, **moved})
    reindex(folder)
    checkpoint = assert_every_byte_is_found(folder)
    assert len(checkpoint.expert(1, 3).extents) == 2  # w1 with w3; w2 at the end
    assert len({where.file for where in checkpoint.expert(1, 5).extents}) == 2
    assert len(checkpoint.expert(1, 4).extents) == 1
    assert checkpoint.one_read_experts == checkpoint.spec.expert_count - 2
    assert sum(e.length for e in checkpoint.expert(1, 3).extents) == checkpoint.expert_bytes


def test_expert_out_of_range(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny(tmp_path / "m"))
    with pytest.raises(IndexError):
        checkpoint.expert(1, 16)
    with pytest.raises(KeyError):
        checkpoint.expert(0, 0)


@pytest.mark.parametrize("single", [True, False])
def test_without_an_index(tmp_path: Path, single: bool) -> None:
    folder = tiny(tmp_path / "m")
    if single:
        split(folder, 1)
        shards(folder)[0].rename(folder / "model.safetensors")
    (folder / INDEX).unlink()
    assert_every_byte_is_found(folder)


# ---- R51: small and unusual tensors ----
def test_missing_scale_is_named(tmp_path: Path) -> None:
    folder, name = tiny(tmp_path / "m"), f"{EXPERT}7.w2.weight_scale"
    change_shard(folder / SHARD2, lambda have: {n: r for n, r in have.items() if n != name})
    with pytest.raises(CheckpointError) as error:  # the index still lists it
        Checkpoint.open(folder)
    assert name in error.value.problem
    assert SHARD2 in error.value.problem
    reindex(folder)
    with pytest.raises(CheckpointError, match="is missing from the shards") as error:
        Checkpoint.open(folder)
    assert name in error.value.problem


def reshape(raw: Raw, *shape: int) -> Raw:
    return raw._replace(shape=shape)


def test_dimensions_of_size_one_do_not_matter(tmp_path: Path) -> None:
    """R51, R55: conv weights [d,1,4] and [d,4], rows [1,h] and [h], scalars () and (1,)."""
    folder = tiny(tmp_path / "m")
    before = {t.name: t for t in Checkpoint.open(folder).trunk(1)}

    def squeeze(have: dict[str, Raw]) -> dict[str, Raw]:
        return {
            name: reshape(raw, *(n for n in raw.shape if n != 1))
            if "conv1d" in name or "res_proj" in name
            else raw
            for name, raw in have.items()
        }

    change_shard(folder / SHARD2, squeeze)
    after = {t.name: t for t in assert_every_byte_is_found(folder).trunk(1)}
    for name, tensor in before.items():
        assert after[name].shape == tensor.shape
    assert after["self_attn.q_conv1d.weight"].shape == (128, 1, 4)


def test_weight_shape_tensors_are_accepted(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    shape = Raw("I64", (2,), np.array([96, 64], np.int64).tobytes())
    change_shard(folder / SHARD2, lambda have: {**have, f"{EXPERT}0.w1.weight_shape": shape})
    assert "not in the index: 1 tensor." in str(Checkpoint.open(folder).notes)
    reindex(folder)
    assert "weight_shape" in str(assert_every_byte_is_found(folder).notes)


@pytest.mark.parametrize(
    "name",
    [
        LAYER1 + "self_attn.q_proj.bias", f"{EXPERT}16.w1.weight_packed",
        f"{EXPERT}01.w1.weight_packed", f"{EXPERT}1.w4.weight_packed",
        f"{EXPERT}1.w1.weight_global_scale", "language_model.model.layers.9.input_layernorm.weight",
        "language_model.model.layers.99999999999.x", "model.norm.weight", "extra", "norm.weight",
        "language_model.model.layers.0.block_sparse_moe.gate.weight",
    ],
)  # fmt: skip
def test_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = tiny(tmp_path / "m")
    change_shard(shards(folder)[0], lambda have: {**have, name: Raw("F32", (1,), b"\0" * 4)})
    reindex(folder)
    with pytest.raises(CheckpointError, match="is not part of this model") as error:
        Checkpoint.open(folder)
    assert repr(name) in error.value.problem


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    name = LAYER1 + "input_layernorm.weight"
    change_shard(shards(folder)[2], lambda have: {**have, name: read_shard(folder / SHARD2)[name]})
    with pytest.raises(CheckpointError, match="lies in two shards") as error:
        Checkpoint.open(folder)
    assert name in error.value.problem


# ---- shapes and dtypes ----
WRONG: dict[str, tuple[str, Callable[[Raw], Raw], str]] = {
    "transposed": (f"{EXPERT}0.w1.weight_packed", lambda r: reshape(r, 32, 96), "shape"),
    "scales-as-floats": (
        f"{EXPERT}0.w1.weight_scale", lambda r: Raw("F32", (96, 2), b"\0" * 768), "F32"
    ),
    "norm-as-integers": (
        LAYER1 + "input_layernorm.weight", lambda r: Raw("I32", (128,), b"\0" * 512), "I32"
    ),
    "conv-of-width-3": (
        LAYER1 + "self_attn.q_conv1d.weight",
        lambda r: Raw("F32", (128, 1, 3), b"\0" * 1536), "shape",
    ),
    "A_log-narrower-than-heads": (
        LAYER1 + "self_attn.A_log", lambda r: Raw("F32", (3,), b"\0" * 12), "at least 4"
    ),
    "A_log-in-two-dimensions": (
        LAYER1 + "self_attn.A_log", lambda r: Raw("F32", (4, 8), b"\0" * 128), "at least 4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_shape_or_dtype_is_named(tmp_path: Path, kind: str) -> None:
    """R51, R55: a tensor of another shape or number format is refused by name."""
    name, change, word = WRONG[kind]
    folder = tiny(tmp_path / "m")
    change_shard(folder / SHARD2, lambda have: {**have, name: change(have[name])})
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    assert name in error.value.problem
    assert word in error.value.problem


@pytest.mark.parametrize("width", [4, 5, 32, 200])
def test_A_log_of_any_width_from_the_heads_on(tmp_path: Path, width: int) -> None:
    """R55: stored wider than used; the stored width is what the tensor's shape says."""
    folder, name = tiny(tmp_path / "m"), LAYER1 + "self_attn.A_log"
    raw = Raw("F32", (width,), np.zeros(width, np.float32).tobytes())
    change_shard(folder / SHARD2, lambda have: {**have, name: raw})
    tensor = {t.name: t for t in Checkpoint.open(folder).trunk(1)}["self_attn.A_log"]
    assert tensor.shape == (width,)
    assert tensor.location.length == 4 * width


def test_used_A_log_tail_is_refused() -> None:
    """R55: the tail beyond the heads must be exactly zero; NaN is refused anywhere."""
    values = np.zeros(128, np.float32)
    values[:96] = 1.5
    values[100] = -0.0
    check_trunk_values("layers.1.self_attn.A_log", values, heads=96)
    for wrong in (1e-30, np.nan, -1.0):
        tail = values.copy()
        tail[127] = wrong
        with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.A_log"):
            check_trunk_values("layers.1.self_attn.A_log", tail, heads=96)
    with pytest.raises(CheckpointError, match=r"o_norm\.weight.*element 3"):
        check_trunk_values("self_attn.o_norm.weight", np.array([1, 1, 1, np.inf]), heads=96)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_float_formats_are_used_as_stored(tmp_path: Path, dtype: str) -> None:
    folder, name = tiny(tmp_path / "m"), LAYER1 + "input_layernorm.weight"
    size = 2 if dtype == "F16" else 4
    raw = Raw(dtype, (128,), b"\0" * (128 * size))
    change_shard(folder / SHARD2, lambda have: {**have, name: raw})
    checkpoint = assert_every_byte_is_found(folder)
    assert f"{dtype} instead of BF16" in checkpoint.notes[0].what


def test_bf16_experts_must_agree_on_their_format(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", expert_format="bf16")
    assert Checkpoint.open(folder).expert_dtype == "BF16"

    def widen(have: dict[str, Raw]) -> dict[str, Raw]:
        name = f"{EXPERT}0.w1.weight"
        return {**have, name: Raw("F32", have[name].shape, b"\0" * (2 * len(have[name].data)))}

    change_shard(folder / SHARD2, widen)
    with pytest.raises(CheckpointError, match=r"experts\.\d+\.w\d\.weight is stored as"):
        Checkpoint.open(folder)


def test_tied_head_needs_no_tensor(tmp_path: Path) -> None:
    """A head that is stored all the same is used, as transformers does."""
    folder = tiny(tmp_path / "m")
    config(folder, lambda c: (c.update(tie_word_embeddings=True),
                              c["text_config"].update(tie_word_embeddings=True)))  # fmt: skip
    checkpoint = assert_every_byte_is_found(folder)
    assert "the stored head is used" in checkpoint.notes[0].what
    name = "language_model.lm_head.weight"
    change_shard(shards(folder)[9], lambda have: {n: r for n, r in have.items() if n != name})
    reindex(folder)
    assert "lm_head.weight" not in assert_every_byte_is_found(folder).globals()


# ---- the other family ----
def kimi_linear(**changes: Any) -> Any:
    """transformers' own small Kimi Linear with random weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "linear_head_dim": 16, "linear_num_heads": 4, "bos_token_id": 1, "eos_token_id": [2, 4],
        "pad_token_id": 3,
    }  # fmt: skip
    torch.manual_seed(0)
    settings = transformers.KimiLinearConfig(**{**sizes, **changes})
    return transformers.KimiLinearForCausalLM(settings)


def test_checkpoint_that_transformers_saves(tmp_path: Path) -> None:
    """Kimi Linear as ``save_pretrained`` writes it: every tensor is found."""
    import torch

    model = kimi_linear().to(torch.bfloat16)
    for size in ("50GB", "200KB"):  # one file; several with an index
        folder = tmp_path / size
        model.save_pretrained(folder, max_shard_size=size)
        checkpoint = assert_every_byte_is_found(folder)
        assert (len(checkpoint.files) > 1) == (size == "200KB")
        assert [layer.attention for layer in checkpoint.spec.layers] == ["kda"] * 4 + ["mla"]
        assert checkpoint.spec.eos == (2, 4)
        names = {tensor.name for tensor in checkpoint.trunk(0)}
        assert {"mlp.gate_proj.weight", "self_attn.g_a_proj.weight"} <= names
        parts = page_bytes(checkpoint, checkpoint.expert(2, 5))
        gate = model.state_dict()["model.layers.2.mlp.experts.gate_up_proj"][5, :32]
        assert parts["w1.weight"] == gate.contiguous().view(torch.uint8).numpy().tobytes()
        assert {t.name: t.shape for t in checkpoint.trunk(1)}["self_attn.A_log"] == (4,)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True}, {"q_lora_rank": 24}, {"n_shared_experts": 2},
        {"n_shared_experts": 0}, {"layer_types": ["full_attention"] * 5},
        {"layer_types": ["linear_attention"] * 5}, {"mlp_layer_types": ["dense"] * 5},
        {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"]},
        {"eos_token_id": None}, {"norm_topk_prob": False},
    ],
    ids=str,
)  # fmt: skip
def test_variants_that_transformers_saves(tmp_path: Path, changes: dict[str, Any]) -> None:
    """In float32, so that pages of another width are met too."""
    kimi_linear(**changes).save_pretrained(tmp_path / "m")
    checkpoint = assert_every_byte_is_found(tmp_path / "m")
    if checkpoint.spec.moe_layers:
        assert checkpoint.expert_dtype == "F32"
        assert checkpoint.expert_bytes == 3 * 32 * 64 * 4
    assert checkpoint.spec.tie_embeddings == changes.get("tie_word_embeddings", False)


def test_index_that_disagrees_with_the_headers(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    name = LAYER1 + "input_layernorm.weight"
    index["weight_map"][name] = shards(folder)[2].name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="does not hold it") as error:
        Checkpoint.open(folder)
    assert name in error.value.problem
    assert shards(folder)[2].name in error.value.problem
