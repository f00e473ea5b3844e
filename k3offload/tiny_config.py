"""``config.json`` of a synthetic checkpoint: the released fields, with other sizes.

Knows the spelling of the configuration; knows nothing of tensors or files.
"""

from __future__ import annotations

from typing import Any

from .tiny_size import GROUP, TinySize

Json = dict[str, Any]
SPECIALS = 256  # ids at the end of the vocabulary
EOS_FROM_END = 254  # <|end_of_msg|>


def make_config(size: TinySize) -> Json:
    """The whole ``config.json``.  A part the model has not is a field that is not there."""
    vocab = size.vocab
    ids = {
        "bos_token_id": vocab - SPECIALS,
        "eos_token_id": vocab - EOS_FROM_END,
        "pad_token_id": vocab - 1,
    }
    text = {**_boilerplate(), **_attention(size), **_experts(size), **_text(size), **ids}
    if size.family == "kimi_linear":
        return text
    top: Json = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": vocab - SPECIALS + 21,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "moonvit", "patch_size": 14, "vt_hidden_size": 16},
    }
    return {**top, **ids}


def make_generation_config(size: TinySize) -> Json:
    """The whole ``generation_config.json``."""
    return {"eos_token_id": size.vocab - EOS_FROM_END, "max_length": 1048576}


def _text(size: TinySize) -> Json:
    text: Json = {
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": size.activation,
        "hidden_size": size.hidden,
        "intermediate_size": size.dense_inter,
        "max_position_embeddings": 1048576,
        "model_type": "kimi_linear",
        "num_hidden_layers": size.layers,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "vocab_size": size.vocab,
    }
    if size.activation == "situ":
        text |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    if size.attn_res:
        text["attn_res_block_size"] = size.attn_res
    return text


def _attention(size: TinySize) -> Json:
    linear: Json = {
        "full_attn_layers": [i + 1 for i in size.mla],
        "head_dim": size.kda_dim,
        "kda_layers": [i + 1 for i in range(size.layers) if i not in size.mla],
        "num_heads": size.kda_heads,
        "short_conv_kernel_size": size.conv,
        "use_full_rank_gate": size.full_rank_gate,
    }
    if size.bounded_decay:
        linear["gate_lower_bound"] = -5.0
    return {
        "kv_lora_rank": size.kv_lora,
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "mla_use_output_gate": size.mla_gate,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "q_lora_rank": size.q_lora or None,
        "qk_nope_head_dim": size.nope,
        "qk_rope_head_dim": size.rope,
        "v_head_dim": size.vdim,
    }


def _experts(size: TinySize) -> Json:
    experts: Json = {
        "moe_intermediate_size": size.moe_inter,
        "moe_layer_freq": 1,
        "moe_renormalize": size.renormalize,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": size.experts,
        "num_experts_per_token": size.topk,
        "num_shared_experts": size.shared,
        "routed_scaling_factor": size.scale,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
    }
    if size.latent:
        experts["latent_moe_use_norm"] = size.latent_norm
        experts["routed_expert_hidden_size"] = size.latent
    if size.expert_format == "mxfp4":
        experts["quantization_config"] = _quantization()
    return experts


def _quantization() -> Json:
    form = "mxfp4-pack-quantized"
    weights: Json = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": form,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    # The release's own list: it does not name the latent projections, which are BF16 all the same.
    ignore = [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ]
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _boilerplate() -> Json:
    """Generic fields the release also carries; ``top_k`` here is sampling, not experts."""
    return {
        "_name_or_path": "",
        "architectures": ["KimiLinearForCausalLM"],
        "do_sample": False,
        "initializer_range": 0.02,
        "is_decoder": False,
        "max_length": 20,
        "min_length": 0,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "tokenizer_class": None,
        "top_k": 50,
        "top_p": 1.0,
        "torchscript": False,
        "transformers_version": "4.56.2",
        "use_bfloat16": False,
        "use_cache": True,
    }
