"""From the fields of ``config.json`` to a ``ModelSpec``.

This file knows what the fields mean together and refuses by name what contradicts itself or asks
for a computation that is not known.  Absent means off for every optional part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, cast, get_args

from .config_fields import ANY, INERT, REQUIRED, Fields, check_quantization, same, show
from .errors import ConfigError
from .inventory import MXFP4_GROUP, VisionSpec
from .spec import MLA_EPS, KdaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec, Precision

Attention = Literal["kda", "mla"]
Ffn = Literal["dense", "moe"]
Family = Literal["kimi_k3", "kimi_linear"]
PACK_KEY: Final = "k3offload_pack"  #: the field by which a pack says that it is one
PACK_VERSION: Final = 1


def read_spec(cfg: Mapping[str, Any], source: str) -> ModelSpec:
    """The spec of a parsed configuration; ``source`` names it in messages."""
    top = Fields(cfg, f"{source}: ")
    family = top.choice("model_type", ("kimi_k3", "kimi_linear"))
    _check_architectures(top)
    version, precision = _read_pack(top)
    if family == "kimi_linear":
        spec = _read_text(top, "kimi_linear")
        return replace(
            spec, inert=tuple(top.inert), pack_version=version, trunk_precision=precision
        )
    text = Fields(top.get("text_config"), f"{source}: text_config.")
    text.choice("model_type", ("kimi_linear",))
    _check_architectures(text)
    tie = _check_top(top, text)
    spec = _read_text(text, "kimi_k3")
    vision, vision_inert = _read_vision(top)
    names = {"bos_token_id", "eos_token_id", "pad_token_id"}
    ids = {name: top.token_ids(name) for name in names & set(top.raw)}
    top.finish({**INERT, **dict.fromkeys(text.raw, ANY)})
    return replace(
        spec,
        bos=next(iter(ids.get("bos_token_id", ())), spec.bos),
        pad=next(iter(ids.get("pad_token_id", ())), spec.pad),
        eos=tuple(dict.fromkeys((*ids.get("eos_token_id", ()), *spec.eos))),
        tie_embeddings=spec.tie_embeddings if tie is None else tie,
        vision=top.raw.get("vision_config") is not None,
        vision_spec=vision,
        inert=(*top.inert, *text.inert, *vision_inert),
        pack_version=version,
        trunk_precision=precision,
    )


def _read_pack(top: Fields) -> tuple[int, Precision]:
    """Version and trunk precision of a folder that ``k3offload pack`` wrote; (0, bfloat16) of any
    other.  ``source``, the identity of the model that was packed, changes nothing."""
    raw = top.get(PACK_KEY, None)
    if raw is None:
        return 0, "bfloat16"
    pack = Fields(raw, f"{top.where}{PACK_KEY}.")
    version = pack.integer("version", high=1 << 31)
    if version != PACK_VERSION:
        raise ConfigError(
            f"{pack.where}version = {version}: packs of version {PACK_VERSION} are known.",
            "Use a newer k3offload, or pack the model again with this one.",
        )
    trunk = pack.choice("trunk", get_args(Precision))
    pack.finish({"source": ANY})
    return version, cast(Precision, trunk)


def _check_architectures(fields: Fields) -> None:
    names = fields.get("architectures", [])
    if not isinstance(names, list) or any(not str(n).startswith("Kimi") for n in names):
        raise fields.bad("architectures", "contradicts model_type; a Kimi model is expected.")


def _check_top(top: Fields, text: Fields) -> bool | None:
    """Text fields repeated at the top level must agree; returns the top's tied-embeddings flag."""
    apart = {"architectures", "model_type", "auto_map", "bos_token_id", "eos_token_id"}
    for name in sorted((set(top.raw) & set(text.raw)) - apart - {"pad_token_id", "_name_or_path"}):
        mine, theirs = top.raw[name], text.raw[name]
        if name not in INERT and mine is not None and not same(mine, theirs):
            raise top.bad(name, f"contradicts text_config.{name} = {show(theirs)}.")
    if "quantization_config" in top.raw and "quantization_config" not in text.raw:
        text.raw = {**text.raw, "quantization_config": top.get("quantization_config", None)}
    return top.flag("tie_word_embeddings") if "tie_word_embeddings" in top.raw else None


def _read_text(text: Fields, family: Family) -> ModelSpec:
    """The text model's fields; every key of ``text`` ends up used, inert, or refused."""
    layers = text.integer("num_hidden_layers", high=10_000)
    hidden = text.integer("hidden_size")
    heads = text.integer("num_attention_heads", high=1 << 16)
    if text.integer("num_key_value_heads", heads, high=1 << 16) != heads:
        raise text.bad("num_key_value_heads", f"contradicts num_attention_heads = {heads}.")
    if not text.flag("mla_use_nope", True if family == "kimi_linear" else REQUIRED):
        raise text.bad("mla_use_nope", "attention with positions is not known.")
    nope = text.integer("qk_nope_head_dim", high=1 << 16)
    mla = MlaSpec(
        heads=heads,
        q_lora=text.integer("q_lora_rank", None),
        kv_lora=text.integer("kv_lora_rank"),
        nope=nope,
        rope=text.integer("qk_rope_head_dim", low=0, high=1 << 16),
        v=text.integer("v_head_dim", high=1 << 16),
        output_gate=text.flag("mla_use_output_gate", False),
    )
    if text.integer("qk_head_dim", nope + mla.rope) != nope + mla.rope:
        raise text.bad("qk_head_dim", "contradicts qk_nope_head_dim + qk_rope_head_dim.")
    kda, attention = _read_kda(text, layers, family)
    activation = text.choice("hidden_act", ("situ", "silu"))
    situ = activation == "situ"
    moe = _read_moe(text, hidden)
    spec = ModelSpec(
        family=family,
        prefix="language_model." if family == "kimi_k3" else "",
        hidden=hidden,
        vocab=text.integer("vocab_size"),
        dense_width=text.integer("intermediate_size"),
        eps=text.number("rms_norm_eps", high=1.0),
        mla_eps=MLA_EPS,
        activation="situ" if situ else "silu",
        situ_beta=text.number("activation_situ_beta", *(() if situ else (0.0,))),
        situ_linear_beta=text.number("activation_situ_linear_beta", None),
        attnres_block=text.integer("attn_res_block_size", None, high=10_000),
        kda=kda,
        mla=mla,
        moe=moe,
        layers=tuple(
            LayerSpec(i, attention[i], ffn)
            for i, ffn in enumerate(_read_ffn(text, layers, moe is not None))
        ),
        context=text.integer(
            "max_position_embeddings", high=1 << 32, aliases=("model_max_length",)
        ),
        bos=next(iter(text.token_ids("bos_token_id")), None),
        eos=text.token_ids("eos_token_id"),
        pad=next(iter(text.token_ids("pad_token_id")), None),
        tie_embeddings=text.flag("tie_word_embeddings", False),
        vision=False,
    )
    rope = text.get("rope_parameters", None)
    if rope is not None and (not isinstance(rope, dict) or rope.get("rope_type") != "default"):
        raise text.bad("rope_parameters", "scaled positions are not known.")
    text.finish(INERT)
    return spec


def _read_kda(text: Fields, layers: int, family: str) -> tuple[KdaSpec, list[Attention]]:
    """KDA sizes and the attention kind of every layer (the lists in the file are 1-based)."""
    raw = text.get("linear_attn_config", {})
    sub = Fields(raw, f"{text.where}linear_attn_config.")
    flat = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    sizes: dict[str, int] = {}
    for name, other in flat.items():
        # transformers writes these three beside the other fields instead of inside the object
        outer = text.integer(other, None, high=1 << 16)
        sizes[name] = sub.integer(name, *(() if outer is None else (outer,)), high=1 << 16)
        if outer is not None and sizes[name] != outer:
            raise text.bad(other, f"contradicts linear_attn_config.{name} = {sizes[name]}.")
    bound = sub.number("gate_lower_bound", None, low=-1e4, high=0.0)
    if bound == 0:
        raise sub.bad("gate_lower_bound", "must be negative.")
    kda = KdaSpec(
        heads=sizes["num_heads"],
        head_dim=sizes["head_dim"],
        conv=sizes["short_conv_kernel_size"],
        gate_lower_bound=bound,
        full_rank_gate=sub.flag("use_full_rank_gate", False),
        stored_heads=sizes["num_heads"]
        if family == "kimi_linear"
        else max(sizes["num_heads"], sizes["head_dim"]),
    )
    kinds = _read_schedule(text, sub, layers)
    sub.finish({})
    text.inert += sub.inert
    return kda, kinds


def _read_schedule(text: Fields, sub: Fields, layers: int) -> list[Attention]:
    kinds: dict[int, Attention] = {}
    types = text.get("layer_types", None)
    if types is None or "kda_layers" in sub.raw or "full_attn_layers" in sub.raw:
        for name, kind in (("kda_layers", "kda"), ("full_attn_layers", "mla")):
            numbers = sub.get(name)
            if not isinstance(numbers, list):
                raise sub.bad(name, "must be a list of layer numbers counted from 1.")
            for number in numbers:
                if isinstance(number, bool) or not isinstance(number, int):
                    raise sub.bad(name, f"{show(number)} is not a layer number.")
                if not 1 <= number <= layers:
                    raise sub.bad(name, f"layer {number} is outside 1 to {layers}.")
                if number - 1 in kinds:
                    raise sub.bad(name, f"layer {number} is listed twice.")
                kinds[number - 1] = "kda" if kind == "kda" else "mla"
        missing = [i + 1 for i in range(layers) if i not in kinds]
        if missing:
            raise sub.bad("kda_layers", f"layer {missing[0]} is in no list of layers.")
    if types is not None:
        names = {"linear_attention": "kda", "full_attention": "mla"}
        listed = [names.get(str(t)) for t in types] if isinstance(types, list) else []
        if len(listed) != layers or None in listed:
            raise text.bad(
                "layer_types", f"must name linear_attention or full_attention {layers} times."
            )
        if kinds and any(kinds[i] != kind for i, kind in enumerate(listed)):
            raise text.bad("layer_types", "contradicts linear_attn_config.")
        kinds = {i: "kda" if kind == "kda" else "mla" for i, kind in enumerate(listed)}
    return [kinds[i] for i in range(layers)]


def _read_ffn(text: Fields, layers: int, has_moe: bool) -> list[Ffn]:
    """Dense or MoE per layer: layer l is MoE iff l >= first_k_dense_replace and l % freq == 0."""
    types = text.get("mlp_layer_types", None)
    first = text.integer("first_k_dense_replace", *(() if types is None else (None,)), low=0)
    freq = text.integer("moe_layer_freq", 1, high=10_000)
    kinds: list[Ffn] | None = None
    if first is not None:
        kinds = [
            "moe" if has_moe and i >= first and i % freq == 0 else "dense" for i in range(layers)
        ]
    if types is not None:
        names: dict[str, Ffn] = {"dense": "dense", "sparse": "moe"}
        if not isinstance(types, list) or len(types) != layers or set(map(str, types)) - set(names):
            raise text.bad("mlp_layer_types", f"must name dense or sparse {layers} times.")
        listed = [names[t] for t in types]
        if kinds is not None and kinds != listed:
            raise text.bad("mlp_layer_types", "contradicts first_k_dense_replace.")
        if "moe" in listed and not has_moe:
            raise text.bad("mlp_layer_types", "contradicts num_experts, which is absent.")
        kinds = listed
    assert kinds is not None
    return kinds


def _read_moe(text: Fields, hidden: int) -> MoeSpec | None:
    aliases = ("num_local_experts", "n_routed_experts")
    experts = text.integer("num_experts", None, low=0, high=1 << 16, aliases=aliases)
    groups = text.integer("num_expert_group", 1, high=1 << 16, aliases=("n_group",))
    kept = text.integer("topk_group", groups, high=1 << 16)
    text.flag("use_grouped_topk", True)
    if kept != groups:
        raise text.bad(
            "topk_group", f"routing by groups (num_expert_group = {groups}) is not known."
        )
    top_k = text.integer("num_experts_per_token", None, aliases=("num_experts_per_tok",))
    shared = text.integer(
        "num_shared_experts", 0, low=0, high=1 << 16, aliases=("n_shared_experts",)
    )
    width = text.integer("moe_intermediate_size", None)
    latent = text.integer("routed_expert_hidden_size", None)
    norm = text.flag("latent_moe_use_norm", False)
    scale = text.number("routed_scaling_factor", None)
    renormalize = text.get("moe_renormalize", None, ("norm_topk_prob",))
    packed = text.get("quantization_config", None)
    if packed is not None:
        check_quantization(packed, f"{text.where}quantization_config.")
    if not experts:
        return None
    for name, value in (
        ("num_experts_per_token", top_k),
        ("moe_intermediate_size", width),
        ("routed_scaling_factor", scale),
        ("moe_renormalize", renormalize),
    ):
        if value is None:
            raise ConfigError(
                f"{text.where}{name} is missing.", "The config.json as released has it."
            )
    if not isinstance(renormalize, bool):
        raise text.bad("moe_renormalize", "must be true or false.")
    if top_k > experts:
        raise text.bad("num_experts_per_token", f"is more than num_experts = {experts}.")
    io = hidden if latent is None else latent
    if packed is not None:
        for name, size in (
            ("hidden_size" if latent is None else "routed_expert_hidden_size", io),
            ("moe_intermediate_size", width),
        ):
            if size % MXFP4_GROUP:
                raise text.bad(name, f"MXFP4 experts need a multiple of {MXFP4_GROUP}.")
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        width=width,
        io=io,
        latent=latent,
        latent_norm=norm and latent is not None,
        shared_width=shared * width,
        renormalize=renormalize,
        scale=scale,
        format="bf16" if packed is None else "mxfp4",
    )


def _read_vision(top: Fields) -> tuple[VisionSpec | None, list[str]]:
    """Sizes of the vision tower, or None when the config does not give all of them.

    No vision field touches the text path, so unknown ones are inert here.
    """
    raw = top.get("vision_config", None)
    if raw is None:
        return None, []
    vision = Fields(raw, f"{top.where}vision_config.")
    names = {
        "blocks": "vt_num_hidden_layers", "hidden": "vt_hidden_size",
        "width": "vt_intermediate_size",
        "qkv": "qkv_hidden_size", "patch": "patch_size", "projected": "mm_hidden_size",
        "text": "text_hidden_size",
    }  # fmt: skip
    sizes = {key: vision.integer(name, None) for key, name in names.items()}
    grid = [vision.integer(f"init_pos_emb_{side}", None) for side in ("height", "width")]
    merge = vision.get("merge_kernel_size", None)
    inert = [f"vision_config.{name}" for name in vision.raw if name not in vision.used]
    if merge is not None and not (
        isinstance(merge, list) and len(merge) == 2 and all(type(m) is int and m > 0 for m in merge)
    ):
        raise vision.bad("merge_kernel_size", "must be two positive whole numbers.")
    biased = any(vision.get(f"{n}_bias", False) for n in ("attn", "linear", "patch_embed_proj"))
    if biased or merge is None or None in grid or None in sizes.values():
        return None, inert
    spec = VisionSpec(**sizes, grid=(grid[0], grid[1]), merge=merge[0] * merge[1])
    return spec, inert
