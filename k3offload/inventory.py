"""Which tensors a model of a given spec consists of: names, shapes, dtypes, groups.

This file knows the released layout (K3, and Kimi Linear, its older sibling) and nothing of files.
Names and shapes follow the checkpoint's own inventory, 497,220 tensors for the released config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from .spec import ModelSpec

#: bits of one element of every dtype a safetensors header may name
DTYPE_BITS: Final = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "BOOL": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64,
}  # fmt: skip
FLOATS: Final = ("BF16", "F16", "F32")  #: accepted for every tensor that is not packed
MXFP4_GROUP: Final = 32  #: input columns that share one scale byte

ROUTED, KDA, SHARED = "routed experts", "KDA attention", "shared experts"
MLA, LATENT, DENSE = "MLA attention", "latent projections", "dense MLP"
ROUTERS, NORMS = "routers", "layer norms and AttnRes"
EMBED, HEAD, FINAL = "embed_tokens", "lm_head", "final norm and output AttnRes"
TOWER, PROJECTOR = "vision tower", "projector"
#: in the order they are printed; the text groups come first
GROUPS: Final = (
    ROUTED, KDA, SHARED, MLA, LATENT, DENSE, ROUTERS, NORMS, EMBED, HEAD, FINAL, TOWER, PROJECTOR,
)  # fmt: skip
PADDING: Final = "k3offload.padding."  #: tensors of a pack that only align what follows them
VISION_PREFIXES: Final = ("vision_tower.", "mm_projector.")

MXFP4_KEYS: Final = (
    "w1.weight_packed", "w1.weight_scale", "w2.weight_packed",
    "w2.weight_scale", "w3.weight_packed", "w3.weight_scale",
)  # fmt: skip
BF16_KEYS: Final = ("w1.weight", "w2.weight", "w3.weight")


class TensorSpec(NamedTuple):
    """One predicted tensor.  ``name`` is the full name in the files; ``layer``/``expert`` are -1
    where the tensor belongs to none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: str
    layer: int = -1
    expert: int = -1

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as stored."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


_Row = tuple[str, str, tuple[int, ...]]  # local name, dtype, shape


def kda_rows(spec: ModelSpec) -> list[_Row]:
    """``self_attn.*`` of a KDA layer, P = heads x head_dim; ``A_log`` may be wider than used."""
    k, h, p = spec.kda, spec.hidden, spec.kda.width
    rows: list[_Row] = [(f"{c}_proj.weight", "BF16", (p, h)) for c in "qkv"]
    rows += [(f"{c}_conv1d.weight", "F32", (p, 1, k.conv)) for c in "qkv"]
    rows += [
        ("f_a_proj.weight", "BF16", (k.head_dim, h)),
        ("f_b_proj.weight", "BF16", (p, k.head_dim)),
        ("b_proj.weight", "BF16", (k.heads, h)),
        ("A_log", "F32", (1, 1, k.heads, 1) if spec.family == "kimi_linear" else (k.stored_heads,)),
        ("dt_bias", "F32", (p,)),
        ("o_norm.weight", "F32", (k.head_dim,)),
        ("o_proj.weight", "BF16", (h, p)),
    ]
    if k.full_rank_gate:
        rows.append(("g_proj.weight", "BF16", (p, h)))
    else:
        rows.append(("g_a_proj.weight", "BF16", (k.head_dim, h)))
        rows.append(("g_b_proj.weight", "BF16", (p, k.head_dim)))
    return rows


def mla_rows(spec: ModelSpec) -> list[_Row]:
    """``self_attn.*`` of an MLA layer."""
    m, h = spec.mla, spec.hidden
    query = m.heads * (m.nope + m.rope)
    rows: list[_Row] = []
    if m.q_lora is None:
        rows.append(("q_proj.weight", "BF16", (query, h)))
    else:
        rows.append(("q_a_proj.weight", "BF16", (m.q_lora, h)))
        rows.append(("q_a_layernorm.weight", "BF16", (m.q_lora,)))
        rows.append(("q_b_proj.weight", "BF16", (query, m.q_lora)))
    rows += [
        ("kv_a_proj_with_mqa.weight", "BF16", (m.latent, h)),
        ("kv_a_layernorm.weight", "BF16", (m.kv_lora,)),
        ("kv_b_proj.weight", "BF16", (m.heads * (m.nope + m.v), m.kv_lora)),
        ("o_proj.weight", "BF16", (h, m.heads * m.v)),
    ]
    if m.output_gate:
        rows.append(("g_proj.weight", "BF16", (m.heads * m.v, h)))
    return rows


def _glu_rows(prefix: str, hidden: int, width: int) -> list[_Row]:
    return [
        (prefix + "gate_proj.weight", "BF16", (width, hidden)),
        (prefix + "up_proj.weight", "BF16", (width, hidden)),
        (prefix + "down_proj.weight", "BF16", (hidden, width)),
    ]


def _moe_rows(spec: ModelSpec) -> Iterator[tuple[str, _Row]]:
    moe, h = spec.moe, spec.hidden
    assert moe is not None
    yield ROUTERS, ("gate.weight", "BF16", (moe.experts, h))
    yield ROUTERS, ("gate.e_score_correction_bias", "F32", (moe.experts,))
    if moe.latent is not None:
        yield LATENT, ("routed_expert_down_proj.weight", "BF16", (moe.latent, h))
        if moe.latent_norm:
            yield LATENT, ("routed_expert_norm.weight", "BF16", (moe.latent,))
        yield LATENT, ("routed_expert_up_proj.weight", "BF16", (h, moe.latent))
    if moe.shared_width:
        for row in _glu_rows("shared_experts.", h, moe.shared_width):
            yield SHARED, row


def layer_tensors(spec: ModelSpec, layer: int) -> list[TensorSpec]:
    """The trunk of layer ``layer`` (0-based): everything but its routed experts."""
    h, kind = spec.hidden, spec.layers[layer]
    prefix = f"{spec.prefix}model.layers.{layer}."
    rows: list[tuple[str, _Row]] = [
        (NORMS, (f"{name}.weight", "BF16", (h,)))
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    if spec.attnres_block is not None:
        for site in ("self_attention", "mlp"):
            rows.append((NORMS, (f"{site}_res_norm.weight", "BF16", (h,))))
            rows.append((NORMS, (f"{site}_res_proj.weight", "BF16", (1, h))))
    attention = kda_rows(spec) if kind.attention == "kda" else mla_rows(spec)
    group = KDA if kind.attention == "kda" else MLA
    rows += [(group, (f"self_attn.{n}", d, s)) for n, d, s in attention]
    if kind.ffn == "dense":
        rows += [(DENSE, row) for row in _glu_rows("mlp.", h, spec.dense_width)]
    else:
        rows += [(g, (f"block_sparse_moe.{n}", d, s)) for g, (n, d, s) in _moe_rows(spec)]
    return _stored(spec, [TensorSpec(prefix + n, d, s, g, layer) for g, (n, d, s) in rows])


def global_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Embedding, head, final norm and, with AttnRes, the output mix."""
    h, model = spec.hidden, spec.prefix + "model."
    out = [TensorSpec(model + "embed_tokens.weight", "BF16", (spec.vocab, h), EMBED)]
    out.append(TensorSpec(model + "norm.weight", "BF16", (h,), FINAL))
    if spec.attnres_block is not None:
        out.append(TensorSpec(model + "output_attn_res_norm.weight", "BF16", (h,), FINAL))
        out.append(TensorSpec(model + "output_attn_res_proj.weight", "BF16", (1, h), FINAL))
    if not spec.tie_embeddings:
        out.append(TensorSpec(spec.prefix + "lm_head.weight", "BF16", (spec.vocab, h), HEAD))
    return _stored(spec, out)


def _stored(spec: ModelSpec, tensors: list[TensorSpec]) -> list[TensorSpec]:
    """Matrices of a quantised trunk become codes and scales."""
    from .precision import parts  # it counts with DTYPE_BITS, so it must come second

    return [
        tensor._replace(name=part.name, dtype=part.dtype, shape=part.shape)
        for tensor in tensors
        for part in parts(tensor.name, tensor.dtype, tensor.shape, spec.trunk_precision)
    ]


def expert_rows(spec: ModelSpec) -> list[_Row]:
    """The tensors of one expert in the released order: w1 (gate), w2 (down), w3 (up)."""
    moe = spec.moe
    assert moe is not None
    sizes = {"w1": (moe.width, moe.io), "w2": (moe.io, moe.width), "w3": (moe.width, moe.io)}
    if moe.format == "bf16":
        return [(f"{w}.weight", "BF16", size) for w, size in sizes.items()]
    rows: list[_Row] = []
    for w, (out, inp) in sizes.items():
        rows.append((f"{w}.weight_packed", "U8", (out, inp // 2)))
        rows.append((f"{w}.weight_scale", "U8", (out, inp // MXFP4_GROUP)))
    return rows


def expert_tensors(spec: ModelSpec, layer: int, expert: int) -> list[TensorSpec]:
    """The six (MXFP4) or three (BF16) tensors of one routed expert."""
    prefix = f"{spec.prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}."
    return [TensorSpec(prefix + n, d, s, ROUTED, layer, expert) for n, d, s in expert_rows(spec)]


class VisionSpec(NamedTuple):
    """Sizes of the vision tower; only its inventory is predicted, it is never run."""

    blocks: int
    hidden: int
    width: int
    qkv: int
    patch: int
    grid: tuple[int, int]
    merge: int  #: patches merged into one token
    projected: int  #: columns of one patch at the projector
    text: int


def vision_tensors(vision: VisionSpec | None) -> list[TensorSpec]:
    """Tower and projector; empty when the config does not give their sizes."""
    if vision is None:
        return []
    v, out, merged = vision, [], vision.projected * vision.merge
    for block in range(v.blocks):
        rows = [
            ("wqkv", (3 * v.qkv, v.hidden)), ("wo", (v.hidden, v.qkv)),
            ("mlp.fc0", (v.width, v.hidden)), ("mlp.fc1", (v.hidden, v.width)),
            ("norm0", (v.hidden,)), ("norm1", (v.hidden,)),
        ]  # fmt: skip
        name = f"vision_tower.encoder.blocks.{block}."
        out += [TensorSpec(f"{name}{n}.weight", "BF16", s, TOWER) for n, s in rows]
    tower: list[tuple[str, tuple[int, ...]]] = [
        ("encoder.final_layernorm", (v.hidden,)),
        ("patch_embed.pos_emb", (*v.grid, v.hidden)),
        ("patch_embed.proj", (v.hidden, 3, v.patch, v.patch)),
    ]
    for name, shape in tower:
        out.append(TensorSpec(f"vision_tower.{name}.weight", "BF16", shape, TOWER))
    projector: list[tuple[str, tuple[int, ...]]] = [
        ("proj.0", (merged, merged)), ("proj.2", (v.text, merged)), ("post_norm", (v.text,)),
    ]  # fmt: skip
    for name, shape in projector:
        out.append(TensorSpec(f"mm_projector.{name}.weight", "BF16", shape, PROJECTOR))
    return out
