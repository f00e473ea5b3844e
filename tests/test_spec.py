"""ModelSpec: the released config to the byte, its variants, and every refusal by name."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3offload import config_fields
from k3offload.errors import ConfigError
from k3offload.spec import ModelSpec

RELEASED = Path(config_fields.__file__).parent / "released"
CONFIG: dict[str, Any] = json.loads((RELEASED / "config.json").read_text())

Change = Callable[[dict[str, Any]], object]


def changed(change: Change, base: dict[str, Any] = CONFIG) -> dict[str, Any]:
    cfg = copy.deepcopy(base)
    change(cfg)
    return cfg


def text(**values: Any) -> Change:
    return lambda c: c["text_config"].update(values)


def linear(**values: Any) -> Change:
    return lambda c: c["text_config"]["linear_attn_config"].update(values)


#: hub original of Kimi Linear, the older sibling: flat, no AttnRes, no latent, BF16 experts
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840,
    "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
    "routed_scaling_factor": 2.446, "moe_renormalize": True, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
    "topk_group": 1, "use_grouped_topk": True, "hidden_act": "silu", "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
    "head_dim": 72, "model_max_length": 1048576, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 163584,
    "eos_token_id": 163586, "pad_token_id": 163839, "initializer_range": 0.02, "use_cache": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4], "head_dim": 128, "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip


# ---- the released model ----
def test_released_totals() -> None:
    spec = ModelSpec.load(RELEASED)
    assert spec.tensor_count == 497_220
    assert spec.total_bytes == 1_560_860_324_864


def test_released_bytes_by_group() -> None:
    assert ModelSpec.load(RELEASED).bytes_by_group() == {
        "routed experts": 1_446_456_066_048,
        "KDA attention": 61_258_257_408,
        "shared experts": 24_310_185_984,
        "MLA attention": 11_145_412_608,
        "latent projections": 9_454_620_672,
        "dense MLP": 1_453_326_336,
        "routers": 1_182_074_880,
        "layer norms and AttnRes": 7_999_488,
        "embed_tokens": 2_348_810_240,
        "lm_head": 2_348_810_240,
        "final norm and output AttnRes": 43_008,
        "vision tower": 802_428_928,
        "projector": 92_289_024,
    }


def test_released_inventory_one_by_one() -> None:
    """The iterator gives what the arithmetic counts, with no name twice."""
    spec = ModelSpec.load(RELEASED)
    count, size, names, dtypes = 0, 0, set[int](), dict[str, int]()
    for tensor in spec.tensors():
        count, size = count + 1, size + tensor.nbytes
        names.add(hash(tensor.name))
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
    assert (count, size, len(names)) == (497_220, 1_560_860_324_864, 497_220)
    assert dtypes == {"U8": 494_592, "BF16": 2_122, "F32": 506}


def test_released_layers_and_sizes() -> None:
    spec = ModelSpec.load(RELEASED)
    assert len(spec.layers) == 93
    assert spec.mla_layers == (*range(3, 92, 4), 92)
    assert spec.moe_layers == tuple(range(1, 93))
    assert [spec.layer_trunk_bytes(i) for i in (0, 1, 3)] == [
        2_341_213_184, 1_267_744_256, 844_335_616,
    ]  # fmt: skip
    assert len(spec.layer_tensors(0)) == 23
    assert spec.expert_bytes == 17_547_264
    assert spec.active_expert_bytes == 25_829_572_608
    assert spec.kda_state_bytes() == 449_372_160
    assert spec.latent_bytes_per_token() == 27_648
    assert (spec.bos, spec.eos, spec.pad) == (163584, (163586,), 163839)
    assert spec.kda.stored_heads == 128
    assert spec.mla_eps == 1e-6


@pytest.mark.parametrize(
    "path",
    [
        (), ("text_config",), ("text_config", "linear_attn_config"),
        ("text_config", "quantization_config"),
        ("text_config", "quantization_config", "config_groups", "group_0"),
        ("text_config", "quantization_config", "config_groups", "group_0", "weights"),
    ],
    ids=lambda path: path[-1] if path else "top",
)  # fmt: skip
def test_every_object_refuses_a_key_it_does_not_know(path: tuple[str, ...]) -> None:
    def add(cfg: dict[str, Any]) -> None:
        for step in path:
            cfg = cfg[step]
        cfg["one_more_gate"] = 1.25

    with pytest.raises(ConfigError, match=r"one_more_gate = 1\.25"):
        ModelSpec.from_config(changed(add))


def test_inert_fields_are_listed() -> None:
    """What was neither used nor refused is named, so that nothing is dropped in silence."""
    inert = set(ModelSpec.from_config(CONFIG).inert)
    assert {"auto_map", "text_config.temperature", "vision_config.pos_emb_type"} <= inert
    assert not {"text_config.hidden_size", "text_config.quantization_config"} & inert


# ---- variants ----
VARIANTS: dict[str, tuple[Change, Callable[[ModelSpec], bool], set[str], set[str]]] = {
    "no-attnres": (
        lambda c: c["text_config"].pop("attn_res_block_size"),
        lambda s: s.attnres_block is None, set(),
        {"mlp_res_norm.weight", "self_attention_res_proj.weight"},
    ),
    "no-latent": (
        text(routed_expert_hidden_size=None, latent_moe_use_norm=False),
        lambda s: s.moe is not None and s.moe.io == 7168, set(),
        {"block_sparse_moe.routed_expert_norm.weight"},
    ),
    "no-latent-norm": (
        text(latent_moe_use_norm=False), lambda s: s.moe is not None and not s.moe.latent_norm,
        {"block_sparse_moe.routed_expert_up_proj.weight"},
        {"block_sparse_moe.routed_expert_norm.weight"},
    ),
    "low-rank-gate": (
        linear(use_full_rank_gate=False), lambda s: not s.kda.full_rank_gate,
        {"self_attn.g_a_proj.weight", "self_attn.g_b_proj.weight"}, {"self_attn.g_proj.weight"},
    ),
    "softplus": (
        lambda c: c["text_config"]["linear_attn_config"].pop("gate_lower_bound"),
        lambda s: s.kda.gate_lower_bound is None, set(), set(),
    ),
    "no-shared-expert": (
        text(num_shared_experts=0), lambda s: s.moe is not None and s.moe.shared_width == 0, set(),
        {"block_sparse_moe.shared_experts.up_proj.weight"},
    ),
    "bf16-experts": (
        lambda c: c["text_config"].pop("quantization_config"),
        lambda s: s.expert_bytes == 3 * 3072 * 3584 * 2, set(), set(),
    ),
    "silu": (text(hidden_act="silu"), lambda s: s.activation == "silu", set(), set()),
    "no-cap-on-up": (
        text(activation_situ_linear_beta=None), lambda s: s.situ_linear_beta is None, set(), set()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    change, holds, has, lacks = VARIANTS[name]
    spec = ModelSpec.from_config(changed(change))
    assert holds(spec)
    names = {t.name.split(".layers.1.")[1] for t in spec.layer_tensors(1)}
    assert has <= names
    assert not lacks & names


def test_mla_variants() -> None:
    spec = ModelSpec.from_config(changed(text(q_lora_rank=None, mla_use_output_gate=False)))
    shapes = {t.name.split("self_attn.")[-1]: t.shape for t in spec.layer_tensors(3)}
    assert shapes["q_proj.weight"] == (96 * 192, 7168)
    assert "q_a_proj.weight" not in shapes
    assert "g_proj.weight" not in shapes


def test_moe_frequency_and_dense_layers() -> None:
    spec = ModelSpec.from_config(changed(text(moe_layer_freq=3, first_k_dense_replace=2)))
    assert spec.moe_layers == tuple(range(3, 93, 3))
    none = ModelSpec.from_config(changed(text(first_k_dense_replace=93)))
    assert none.moe_layers == ()
    assert none.expert_count == 0
    assert "routed experts" not in none.bytes_by_group()


def test_end_ids_of_both_levels_are_united() -> None:
    """R07: the config's two levels may name different end ids; both count."""
    cfg = changed(lambda c: c.update(eos_token_id=[163586, 163593]))
    assert ModelSpec.from_config(cfg).eos == (163586, 163593)


def test_stub_vision_config_predicts_nothing() -> None:
    stub = {"model_type": "moonvit", "patch_size": 14, "vt_hidden_size": 16}
    spec = ModelSpec.from_config(changed(lambda c: c.update(vision_config=stub)))
    assert spec.vision
    assert spec.vision_tensors() == []
    gone = ModelSpec.from_config(changed(lambda c: c.pop("vision_config")))
    assert not gone.vision


def test_kimi_linear_of_the_hub() -> None:
    spec = ModelSpec.from_config(KIMI_LINEAR)
    assert (spec.family, spec.prefix, spec.activation) == ("kimi_linear", "", "silu")
    assert (spec.attnres_block, spec.kda.gate_lower_bound, spec.mla.q_lora) == (None, None, None)
    assert spec.context == 1048576
    shapes = {t.name: t.shape for t in (*spec.layer_tensors(1), *spec.expert_tensors(1, 255))}
    assert shapes["model.layers.1.self_attn.A_log"] == (1, 1, 32, 1)
    assert shapes["model.layers.1.self_attn.g_b_proj.weight"] == (4096, 128)
    assert shapes["model.layers.1.block_sparse_moe.experts.255.w2.weight"] == (2304, 1024)
    assert "lm_head.weight" in {t.name for t in spec.global_tensors()}
    assert 48e9 < sum(math.prod(t.shape) for t in spec.tensors()) < 50e9  # "48B"


def test_kimi_linear_as_transformers_writes_it() -> None:
    """``layer_types`` and ``linear_*`` instead of ``linear_attn_config``, 0-based and flat."""
    hub = ModelSpec.from_config(KIMI_LINEAR)

    def native(c: dict[str, Any]) -> None:
        c.pop("linear_attn_config")
        c.pop("first_k_dense_replace")
        c.update(linear_conv_kernel_dim=4, linear_head_dim=128, linear_num_heads=32)
        kinds = {"kda": "linear_attention", "mla": "full_attention"}
        c["layer_types"] = [kinds[layer.attention] for layer in hub.layers]
        c["mlp_layer_types"] = ["dense"] + ["sparse"] * 26

    spec = ModelSpec.from_config(changed(native, KIMI_LINEAR))
    assert (spec.layers, spec.kda, spec.moe, spec.mla) == (hub.layers, hub.kda, hub.moe, hub.mla)
