"""Every field of a config that contradicts itself or is not known is refused by name."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3offload import config_fields, inventory
from k3offload.errors import ConfigError
from k3offload.spec import ModelSpec
from tests.helpers_checkpoint import problem_of

RELEASED = Path(config_fields.__file__).parent / "released"
CONFIG: dict[str, Any] = json.loads((RELEASED / "config.json").read_text())

Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> dict[str, Any]:
    cfg = copy.deepcopy(CONFIG)
    change(cfg)
    return cfg


def text(**values: Any) -> Change:
    return lambda c: c["text_config"].update(values)


def linear(**values: Any) -> Change:
    return lambda c: c["text_config"]["linear_attn_config"].update(values)


_WEIGHTS = "config_groups.group_0.weights"


def quant(path: str, value: Any) -> Change:
    def change(c: dict[str, Any]) -> None:
        place = c["text_config"]["quantization_config"]
        *steps, last = path.split(".")
        for step in steps:
            place = place[step]
        place[last] = value

    return change


REFUSED: list[tuple[str, Change]] = [
    ("model_type", lambda c: c.update(model_type="llama")),
    ("model_type", lambda c: c.pop("model_type")),
    ("text_config", lambda c: c.pop("text_config")),
    ("text_config", lambda c: c.update(text_config=[1])),
    ("text_config.model_type", text(model_type="deepseek_v3")),
    ("architectures", lambda c: c.update(architectures=["LlamaForCausalLM"])),
    ("tie_word_embeddings", lambda c: c.update(tie_word_embeddings=True)),
    ("tie_word_embeddings", lambda c: c.update(tie_word_embeddings="no")),
    ("vocab_size", lambda c: c.update(vocab_size=1000)),
    ("hidden_size", text(hidden_size="7168")),
    ("hidden_size", text(hidden_size=-1)),
    ("hidden_size", text(hidden_size=0)),
    ("hidden_size", text(hidden_size=True)),
    ("hidden_size", text(hidden_size=7168.0)),
    ("hidden_size", text(hidden_size=10**30)),
    ("hidden_size", text(hidden_size=None)),
    ("hidden_size", lambda c: c["text_config"].pop("hidden_size")),
    ("hidden_size", text(hidden_size=[7168])),
    ("rms_norm_eps", text(rms_norm_eps=float("nan"))),
    ("rms_norm_eps", text(rms_norm_eps=-1e-5)),
    ("rms_norm_eps", text(rms_norm_eps="1e-5")),
    ("num_key_value_heads", text(num_key_value_heads=8)),
    ("mla_use_nope", text(mla_use_nope=False)),
    ("mla_use_nope", text(mla_use_nope=1)),
    ("qk_head_dim", text(qk_head_dim=100)),
    ("hidden_act", text(hidden_act="gelu")),
    ("hidden_act", text(hidden_act=None)),
    ("activation_situ_beta", text(activation_situ_beta=None)),
    ("activation_situ_beta", text(activation_situ_beta=0)),
    ("activation_situ_linear_beta", text(activation_situ_linear_beta=float("inf"))),
    ("attn_res_block_size", text(attn_res_block_size=0)),
    ("attn_bias", text(attn_bias=True)),
    ("attention_bias", text(attention_bias=True)),
    ("rope_scaling", text(rope_scaling={"type": "yarn", "factor": 4})),
    ("rope_parameters", text(rope_parameters={"rope_type": "yarn"})),
    ("num_nextn_predict_layers", text(num_nextn_predict_layers=1)),
    ("moe_router_activation_func", text(moe_router_activation_func="softmax")),
    ("topk_method", text(topk_method="greedy")),
    ("topk_group", text(num_expert_group=8, topk_group=4)),
    ("moe_renormalize", text(moe_renormalize="yes")),
    ("moe_layer_freq", text(moe_layer_freq=0)),
    ("num_experts_per_token", text(num_experts_per_token=897)),
    ("num_experts_per_tok", text(num_experts_per_tok=8)),
    ("moe_intermediate_size", text(moe_intermediate_size=None)),
    ("moe_intermediate_size", text(moe_intermediate_size=3080)),
    ("routed_expert_hidden_size", text(routed_expert_hidden_size=3600)),
    ("routed_scaling_factor", text(routed_scaling_factor=float("nan"))),
    ("eos_token_id", text(eos_token_id="end")),
    ("eos_token_id", lambda c: c.update(eos_token_id=-1)),
    ("max_position_embeddings", text(max_position_embeddings=0)),
    ("attn_logit_softcap", text(attn_logit_softcap=30.0)),
    ("sliding_window", text(sliding_window=4096)),
    ("repetition_penalty", text(repetition_penalty=1.2)),
    ("pruned_heads", text(pruned_heads={"1": [0]})),
    ("is_encoder_decoder", text(is_encoder_decoder=True)),
    ("dtype", text(dtype="float8_e4m3fn")),
    ("linear_attn_config", text(linear_attn_config=7)),
    ("num_heads", linear(num_heads=0)),
    ("gate_lower_bound", linear(gate_lower_bound=5.0)),
    ("gate_lower_bound", linear(gate_lower_bound=0)),
    ("use_full_rank_gate", linear(use_full_rank_gate="yes")),
    ("allow_neg_eigval", linear(allow_neg_eigval=True)),
    ("full_attn_layers", linear(full_attn_layers=[4, 4])),
    ("full_attn_layers", linear(full_attn_layers=list(range(1, 94)))),
    ("full_attn_layers", linear(full_attn_layers=[94])),
    ("full_attn_layers", linear(full_attn_layers=["4"])),
    ("full_attn_layers", linear(full_attn_layers=None)),
    ("kda_layers", linear(kda_layers=[0])),
    ("kda_layers", linear(kda_layers=[1, 2])),
    ("layer_types", text(layer_types=["linear_attention"] * 93)),
    ("mlp_layer_types", text(mlp_layer_types=["dense"] * 93)),
    ("quant_method", quant("quant_method", "gptq")),
    ("format", quant("format", "pack-quantized")),
    ("format", quant("config_groups.group_0.format", "nvfp4-pack-quantized")),
    ("kv_cache_scheme", quant("kv_cache_scheme", {"num_bits": 8})),
    ("input_activations", quant("config_groups.group_0.input_activations", {"num_bits": 8})),
    ("output_activations", quant("config_groups.group_0.output_activations", {"num_bits": 8})),
    ("num_bits", quant(f"{_WEIGHTS}.num_bits", 8)),
    ("group_size", quant(f"{_WEIGHTS}.group_size", 16)),
    ("strategy", quant(f"{_WEIGHTS}.strategy", "channel")),
    ("symmetric", quant(f"{_WEIGHTS}.symmetric", False)),
    ("type", quant(f"{_WEIGHTS}.type", "int")),
    ("dynamic", quant(f"{_WEIGHTS}.dynamic", True)),
    ("actorder", quant(f"{_WEIGHTS}.actorder", "group")),
    ("config_groups", quant("config_groups", {})),
    ("weights", quant("config_groups.group_0.weights", None)),
    ("merge_kernel_size", lambda c: c["vision_config"].update(merge_kernel_size=[2])),
    ("vt_hidden_size", lambda c: c["vision_config"].update(vt_hidden_size="big")),
]


@pytest.mark.parametrize(
    ("field", "change"), REFUSED, ids=[f"{i}-{f}" for i, (f, _) in enumerate(REFUSED)]
)
def test_refused_by_name(field: str, change: Change) -> None:
    with pytest.raises(ConfigError) as error:
        ModelSpec.from_config(changed(change))
    assert field in error.value.problem
    assert error.value.remedy


def test_the_value_is_quoted() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: text_config\.attn_logit_softcap = 30\.0"):
        ModelSpec.from_config(changed(text(attn_logit_softcap=30.0)))


def test_unknown_field_that_asks_for_nothing() -> None:
    """null asks for nothing, so later defaults of transformers do not lock a checkpoint out."""
    spec = ModelSpec.from_config(changed(text(some_later_default=None)))
    assert "text_config.some_later_default" in spec.inert


FILES: dict[str, bytes] = {
    "duplicate": b'{"model_type": "kimi_k3", "model_type": "kimi_k3"}',
    "nan": b'{"model_type": NaN}',
    "not-json": b"{model_type",
    "list": b"[]",
    "empty": b"",
    "not-utf-8": b'{"model_type": "\xff"}',
    "deep": b"[" * 100_000,
    "digits": b'{"model_type": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("kind", FILES)
def test_damaged_config_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_bytes(FILES[kind])
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelSpec.load(tmp_path)


def test_missing_and_huge_config_file(tmp_path: Path) -> None:
    """R05: without config.json no architecture is guessed."""
    with pytest.raises(ConfigError, match=r"config\.json.*never guessed"):
        ModelSpec.load(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="it is not a file"):
        ModelSpec.load(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("../blobs/abc")
    with pytest.raises(ConfigError, match=r"config\.json -> .*blobs/abc cannot be read: No such"):
        ModelSpec.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(config_fields.CONFIG_LIMIT + 1)
    with pytest.raises(ConfigError, match="larger than"):
        ModelSpec.load(tmp_path)


_PATHS = [("text_config", key) for key in CONFIG["text_config"]]
_PATHS += [("linear_attn_config", key) for key in CONFIG["text_config"]["linear_attn_config"]]
_VALUES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        10**40,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        [],
        [1],
        {},
        {"a": 1},
    ]
)


@given(path=st.sampled_from(_PATHS), value=_VALUES)
def test_any_value_in_any_field_gives_a_spec_or_our_error(
    path: tuple[str, str], value: Any
) -> None:
    """No other exception, whatever stands in a field; and the error names the field."""
    cfg = copy.deepcopy(CONFIG)
    place = cfg["text_config"]
    if path[0] == "linear_attn_config":
        place = place["linear_attn_config"]
    place[path[1]] = value
    made: list[ModelSpec] = []
    problem = problem_of(lambda: made.append(ModelSpec.from_config(cfg)))
    if problem is not None:
        assert any(word in problem for word in (path[1], "contradicts", "layer"))
    else:
        assert made[0].total_bytes > 0
        assert set(made[0].bytes_by_group()) <= set(inventory.GROUPS)
