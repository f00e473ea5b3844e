"""Recipes for synthetic K3 weights: which tensors a layer has, and the numbers in them.

Knows names, shapes, dtypes and how every value is drawn; knows nothing of files.  A value
depends only on the sizes, the seed and the tensor's name, so tensors can be made in any order,
a few rows at a time, and two runs give identical bytes.

The gains keep the stream of a random model at a size where every part matters: a wrong epsilon,
tap order, nibble order or gate moves the logits by far more than rounding does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tiny_size import DECAY_RANGE, GROUP, TinySize

Array = NDArray[Any]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

ITEMSIZE: Final = {"BF16": 2, "F32": 4, "U8": 1}
CHUNK: Final = 1 << 19  # elements drawn at once; any number gives the same bytes
E2M1_EDGES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbouring codes
UNIFORM_E2M1_RMS: Final = 2.926  # root mean square of a uniformly drawn E2M1 code


class Value(NamedTuple):
    """One tensor to write: ``chunks()`` yields its elements in order, in the storage type.

    ``chunks`` None is a hole (zeros that take no disk); chunks that end early leave a hole
    behind them.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[Array]] | None

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes in its file."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEMSIZE[self.dtype]


def rng_for(seed: int, name: str) -> np.random.Generator:
    """The generator of one tensor."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def to_bf16(x: Array) -> NDArray[np.uint16]:
    """float32 -> bfloat16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def quantize_mxfp4(w: Floats) -> tuple[Bytes, Bytes]:
    """float32 [rows, cols] -> (packed [rows, cols/2], scale [rows, cols/32]), OCP rule.

    Shared exponent floor(log2 of the group's largest) - 2; column 2j in the low nibble; the sign
    is kept on zeros; ties go to the smaller magnitude.
    """
    rows, cols = w.shape
    groups = np.abs(w).reshape(rows, cols // GROUP, GROUP)
    largest = np.maximum(groups.max(-1), np.float32(2.0**-100))
    exponent = np.floor(np.log2(largest)).astype(np.int32) - 2
    scaled = np.ldexp(groups, -exponent[..., None]).reshape(rows, cols)
    code: Bytes = np.where(np.signbit(w), np.uint8(8), np.uint8(0))
    for edge in E2M1_EDGES:
        code += scaled > np.float32(edge)
    packed: Bytes = code[:, 0::2] | (code[:, 1::2] << np.uint8(4))
    return packed, (exponent + 127).astype(np.uint8)


class Recipes:
    """The tensors of one synthetic checkpoint, as ``{full name: Value}`` per shard."""

    def __init__(self, size: TinySize, seed: int) -> None:
        self.size = size
        self.seed = seed

    # ---- kinds of value ----

    def _normal(
        self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0
    ) -> Iterator[Floats]:
        rng, left = rng_for(self.seed, name), int(np.prod(shape, dtype=np.int64))
        while left > 0:
            count = min(CHUNK, left)
            drawn = rng.standard_normal(count, np.float32)
            yield drawn * np.float32(std) + np.float32(mean)
            left -= count

    def _whole(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Floats:
        return np.concatenate(list(self._normal(name, shape, std, mean))).reshape(shape)

    def bf16(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Value:
        """BF16 normal numbers."""
        return Value("BF16", shape, lambda: map(to_bf16, self._normal(name, shape, std, mean)))

    def linear(self, name: str, out: int, inp: int, gain: float = 1.0) -> Value:
        """BF16 matrix [out, inp] that multiplies the size of its input by about ``gain``."""
        return self.bf16(name, (out, inp), gain / np.sqrt(inp))

    def norm(self, name: str, n: int) -> Value:
        """BF16 norm weight around 1."""
        return self.bf16(name, (n,), 0.2, 1.0)

    @staticmethod
    def _f32(shape: tuple[int, ...], make: Callable[[], Array]) -> Value:
        return Value("F32", shape, lambda: iter((make().astype(np.float32),)))

    # ---- one layer ----

    def layer(self, i: int, *, experts: bool = True) -> dict[str, Value]:
        """The tensors of layer ``i`` (0-based), routed experts only if wanted."""
        s, at = self.size, f"{self.size.prefix}model.layers.{i}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        out: dict[str, Value] = {}
        if s.attn_res:
            norms += ["self_attention_res_norm", "mlp_res_norm"]
            for n in ("self_attention_res_proj", "mlp_res_proj"):
                out[f"{at}{n}.weight"] = self.linear(at + n, 1, s.hidden, 1.5)
        for n in norms:
            out[f"{at}{n}.weight"] = self.norm(at + n, s.hidden)
        out.update(self._mla(at + "self_attn.") if i in s.mla else self._kda(at + "self_attn."))
        if i == 0:
            out.update(self._mlp(at + "mlp.", s.dense_inter))
        else:
            out.update(self._moe(at + "block_sparse_moe."))
            for e in range(s.experts if experts else 0):
                out.update(self.expert(f"{at}block_sparse_moe.experts.{e}."))
        return out

    def _kda(self, at: str) -> dict[str, Value]:
        s, nh, d = self.size, self.size.kda_heads, self.size.kda_dim
        wide, h = nh * d, self.size.hidden
        stored = max(d, nh)  # the release pads A_log with zeros up to the head dim
        low, high = DECAY_RANGE[s.decay]
        out = {at + f"{c}_proj.weight": self.linear(at + c, wide, h) for c in "qkv"}
        out.update({at + f"{c}_conv1d.weight": self._conv(at, c, wide) for c in "qkv"})
        out[at + "f_a_proj.weight"] = self.linear(at + "f_a", d, h)
        out[at + "f_b_proj.weight"] = self.linear(at + "f_b", wide, d, 1.5)
        out[at + "b_proj.weight"] = self.linear(at + "b", nh, h, 1.5)
        if s.full_rank_gate:
            out[at + "g_proj.weight"] = self.linear(at + "g", wide, h, 1.5)
        else:
            out[at + "g_a_proj.weight"] = self.linear(at + "g_a", d, h)
            out[at + "g_b_proj.weight"] = self.linear(at + "g_b", wide, d, 1.5)
        out[at + "o_proj.weight"] = self.linear(at + "o", h, wide, 1.6 * s.tame)
        out[at + "o_norm.weight"] = self._f32(
            (d,), lambda: self._whole(at + "o_norm", (d,), 0.2, 1.0)
        )

        def a_log() -> Array:
            padded = np.zeros(stored, np.float32)
            padded[:nh] = np.log(rng_for(self.seed, at + "A_log").uniform(0.5, 4.0, nh))
            return padded

        linear = s.family == "kimi_linear"
        shape = (1, 1, nh, 1) if linear else (stored,)
        out[at + "A_log"] = self._f32(shape, lambda: a_log()[:nh] if linear else a_log())
        out[at + "dt_bias"] = self._f32(
            (wide,), lambda: rng_for(self.seed, at + "dt_bias").uniform(low, high, wide)
        )
        return out

    def _conv(self, at: str, which: str, wide: int) -> Value:
        shape = (wide, 1, self.size.conv)

        def make() -> Array:
            w = self._whole(f"{at}{which}_conv1d", shape, 0.35)
            w[:, 0, -1] += np.float32(0.6)  # the last tap is the current token
            shrink = self.size.probe_eps and which in "qk"
            return w * np.float32(1e-3) if shrink else w

        return self._f32(shape, make)

    def _mla(self, at: str) -> dict[str, Value]:
        s, nh, h = self.size, self.size.heads, self.size.hidden
        out: dict[str, Value] = {}
        queries = nh * (s.nope + s.rope)
        if s.q_lora:
            gain = 2e-3 if s.probe_eps else 1.0
            out[at + "q_a_proj.weight"] = self.linear(at + "q_a", s.q_lora, h, gain)
            out[at + "q_a_layernorm.weight"] = self.norm(at + "q_a_ln", s.q_lora)
            out[at + "q_b_proj.weight"] = self.linear(at + "q_b", queries, s.q_lora, 1.6)
        else:
            out[at + "q_proj.weight"] = self.linear(at + "q", queries, h, 1.6)
        shape = (s.kv_lora + s.rope, h)

        def kv_a() -> Iterator[Array]:
            w = self._whole(at + "kv_a", shape, 1 / np.sqrt(h))
            if s.probe_eps:
                w[: s.kv_lora] *= np.float32(2e-3)
            yield to_bf16(w)

        out[at + "kv_a_proj_with_mqa.weight"] = Value("BF16", shape, kv_a)
        out[at + "kv_a_layernorm.weight"] = self.norm(at + "kv_a_ln", s.kv_lora)
        out[at + "kv_b_proj.weight"] = self.linear(at + "kv_b", nh * (s.nope + s.vdim), s.kv_lora)
        if s.mla_gate:
            out[at + "g_proj.weight"] = self.linear(at + "g", nh * s.vdim, h, 1.5)
        out[at + "o_proj.weight"] = self.linear(at + "o", h, nh * s.vdim, 2.5 * s.tame)
        return out

    def _mlp(self, at: str, inter: int) -> dict[str, Value]:
        h = self.size.hidden
        return {
            at + "gate_proj.weight": self.linear(at + "gate", inter, h, 2.0),
            at + "up_proj.weight": self.linear(at + "up", inter, h, 4.0),
            at + "down_proj.weight": self.linear(at + "down", h, inter, 0.3 * self.size.tame),
        }

    def _moe(self, at: str) -> dict[str, Value]:
        s, h, n = self.size, self.size.hidden, self.size.experts
        out = {
            at + "gate.weight": self.linear(at + "gate", n, h),
            at + "gate.e_score_correction_bias": self._f32(
                (n,), lambda: self._whole(at + "bias", (n,), 0.1)
            ),
        }
        if s.latent:
            out[at + "routed_expert_down_proj.weight"] = self.linear(at + "down", s.latent, h)
            if s.latent_norm:
                out[at + "routed_expert_norm.weight"] = self.norm(at + "rnorm", s.latent)
            out[at + "routed_expert_up_proj.weight"] = self.linear(at + "up", h, s.latent, s.tame)
        if s.shared:
            out.update(self._mlp(at + "shared_experts.", s.moe_inter * s.shared))
        return out

    # ---- one expert ----

    def expert(self, at: str) -> dict[str, Value]:
        """The tensors of one routed expert: six with MXFP4, three with BF16."""
        s, io = self.size, self.size.latent or self.size.hidden
        down_gain = 3e-4 if s.probe_eps else 0.3
        out: dict[str, Value] = {}
        for w, rows, cols, gain in (
            ("w1", s.moe_inter, io, 2.0),
            ("w2", io, s.moe_inter, down_gain),
            ("w3", s.moe_inter, io, 4.0),
        ):
            if s.expert_format == "bf16":
                out[f"{at}{w}.weight"] = self._expert_bf16(at + w, rows, cols, gain)
                continue
            packed, scale = self._expert_mxfp4(at + w, rows, cols, gain)
            out[f"{at}{w}.weight_packed"], out[f"{at}{w}.weight_scale"] = packed, scale
        return out

    def _expert_bf16(self, name: str, rows: int, cols: int, gain: float) -> Value:
        def chunks() -> Iterator[Array]:
            yield to_bf16(self._expert_floats(rng_for(self.seed, name), rows, cols, gain))

        return Value("BF16", (rows, cols), chunks)

    def _expert_mxfp4(self, name: str, rows: int, cols: int, gain: float) -> tuple[Value, Value]:
        # Codes and scales come from one generator.  They are neighbours in the file, so the
        # second is kept only until it is written, and drawn again if it is asked for alone.
        kept: dict[int, Bytes] = {}

        def part(which: int) -> Iterator[Array]:
            if which not in kept:
                kept[0], kept[1] = self._expert_codes(name, rows, cols, gain)
            yield kept.pop(which)

        return (
            Value("U8", (rows, cols // 2), lambda: part(0)),
            Value("U8", (rows, cols // GROUP), lambda: part(1)),
        )

    @staticmethod
    def _expert_floats(rng: np.random.Generator, rows: int, cols: int, gain: float) -> Floats:
        w = rng.standard_normal((rows, cols), np.float32)
        w *= np.float32(gain / np.sqrt(cols))
        # Uneven group scales, so that a scale used for the wrong group shows.
        uneven = rng.integers(-2, 2, (rows, cols // GROUP)).astype(np.int32)
        np.ldexp(w.reshape(rows, -1, GROUP), uneven[..., None], out=w.reshape(rows, -1, GROUP))
        return w

    def _expert_codes(self, name: str, rows: int, cols: int, gain: float) -> tuple[Bytes, Bytes]:
        rng, groups = rng_for(self.seed, name), (rows, cols // GROUP)
        if self.size.expert_mode == "bytes":
            packed = np.frombuffer(rng.bytes(rows * cols // 2), np.uint8).reshape(rows, -1)
            base = round(float(np.log2(gain / np.sqrt(cols) / UNIFORM_E2M1_RMS)))
            return packed, (127 + base + rng.integers(-1, 2, groups)).astype(np.uint8)
        w = self._expert_floats(rng, rows, cols, gain)
        packed, scale = np.empty((rows, cols // 2), np.uint8), np.empty(groups, np.uint8)
        step = max(1, CHUNK // cols)
        for r in range(0, rows, step):
            packed[r : r + step], scale[r : r + step] = quantize_mxfp4(w[r : r + step])
        if self.size.edge_scales:
            # One group in 8: scale byte 0 or 1 with live codes, or 254 with codes +0 and -0.
            kind = rng.integers(0, 24, groups)
            scale[kind == 0], scale[kind == 1], scale[kind == 2] = 0, 1, 254
            packed.reshape(*groups, GROUP // 2)[kind == 2] &= 0x88
        return packed, scale

    # ---- the shards after the layers ----

    def common(self) -> dict[str, Value]:
        """Embedding, final norm, output mix and head."""
        s, at = self.size, self.size.prefix + "model."
        out = {
            at + "embed_tokens.weight": self.bf16("embed", (s.vocab, s.hidden), 1.0),
            at + "norm.weight": self.norm("norm", s.hidden),
            self.size.prefix + "lm_head.weight": self.linear("head", s.vocab, s.hidden, 3.0),
        }
        if s.attn_res:
            out[at + "output_attn_res_norm.weight"] = self.norm("ores", s.hidden)
            out[at + "output_attn_res_proj.weight"] = self.linear("oresp", 1, s.hidden, 1.5)
        return out

    def projector(self) -> dict[str, Value]:
        """Vision projector: never read by the text path."""
        h = self.size.hidden
        return {
            "mm_projector.proj.0.weight": self.linear("mm0", 64, 64),
            "mm_projector.proj.2.weight": self.linear("mm2", h, 64),
            "mm_projector.post_norm.weight": self.norm("mmn", h),
        }

    def vision(self) -> dict[str, Value]:
        """A vision tower of one block: never read by the text path."""
        at, block = "vision_tower.", "vision_tower.encoder.blocks.0."
        return {
            at + "patch_embed.proj.weight": self.bf16("vp", (16, 3, 14, 14), 0.02),
            at + "patch_embed.pos_emb.weight": self.bf16("vpe", (4, 4, 16), 0.02),
            block + "wqkv.weight": self.linear("vq", 48, 16),
            block + "wo.weight": self.linear("vo", 16, 16),
            block + "mlp.fc0.weight": self.linear("v0", 64, 16),
            block + "mlp.fc1.weight": self.linear("v1", 16, 64),
            block + "norm0.weight": self.norm("vn0", 16),
            block + "norm1.weight": self.norm("vn1", 16),
            at + "encoder.final_layernorm.weight": self.norm("vnf", 16),
        }
