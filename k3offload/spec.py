"""``ModelSpec``: what ``config.json`` alone says about a model: layers, sizes, bytes per group.

This file knows what a model consists of and how many bytes that is.  ``config_read.py`` fills it
from the fields; files, torch and how anything is run are unknown here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from . import inventory
from .config_fields import read_json
from .errors import UsageError
from .inventory import TensorSpec, VisionSpec

Precision = Literal["bfloat16", "int8", "mxfp4"]

__all__ = [
    "KdaSpec",
    "LayerSpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "Precision",
    "TensorSpec",
    "VisionSpec",
]

MLA_EPS: Final = 1e-6  #: of the two low-rank norms of MLA; no field of the config says it


@dataclass(frozen=True)
class KdaSpec:
    """A KDA layer.  ``gate_lower_bound`` None means the softplus form of the decay;
    ``stored_heads`` is the predicted width of ``A_log``, of which the first ``heads`` are used."""

    heads: int
    head_dim: int
    conv: int
    gate_lower_bound: float | None
    full_rank_gate: bool
    stored_heads: int

    @property
    def width(self) -> int:
        """Channels of q, k and v: heads x head_dim."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class MlaSpec:
    """An MLA layer without positions: sizes per head, low ranks, and whether it has a gate."""

    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v: int
    output_gate: bool

    @property
    def latent(self) -> int:
        """Numbers cached per token."""
        return self.kv_lora + self.rope


@dataclass(frozen=True)
class MoeSpec:
    """The routed experts.  ``io`` is the width an expert reads and writes (latent or hidden);
    ``shared_width`` 0 means no shared expert."""

    experts: int
    top_k: int
    width: int
    io: int
    latent: int | None
    latent_norm: bool
    shared_width: int
    renormalize: bool
    scale: float
    format: Literal["mxfp4", "bf16"]


@dataclass(frozen=True)
class LayerSpec:
    """What layer ``index`` (0-based) mixes tokens and channels with."""

    index: int
    attention: Literal["kda", "mla"]
    ffn: Literal["dense", "moe"]


@dataclass(frozen=True)
class ModelSpec:
    """Everything the forward pass and the inventory need to know, from the configuration alone."""

    family: Literal["kimi_k3", "kimi_linear"]
    prefix: Literal["language_model.", ""]
    hidden: int
    vocab: int
    dense_width: int
    eps: float
    mla_eps: float
    activation: Literal["situ", "silu"]
    situ_beta: float
    situ_linear_beta: float | None
    attnres_block: int | None
    kda: KdaSpec
    mla: MlaSpec
    moe: MoeSpec | None
    layers: tuple[LayerSpec, ...]
    context: int
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    tie_embeddings: bool
    vision: bool
    vision_spec: VisionSpec | None = None
    inert: tuple[str, ...] = ()
    pack_version: int = 0  #: of the folder's layout; 0 is a model as released
    trunk_precision: Precision = "bfloat16"  #: bfloat16 means as released

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
        """The spec of a parsed ``config.json``; raises ``ConfigError`` naming field and value."""
        from .config_read import read_spec  # it builds this class, so it must come second

        return read_spec(cfg, source)

    @classmethod
    def load(cls, folder: str | Path) -> ModelSpec:
        """The spec of ``folder/config.json``; raises ``ConfigError`` also when it is missing."""
        return cls.from_config(read_json(Path(folder) / "config.json"))

    # ---- inventory: names, shapes, bytes as the released files hold them ----
    def layer_tensors(self, layer: int) -> list[TensorSpec]:
        """The trunk tensors of layer ``layer`` (0-based), without its routed experts."""
        return inventory.layer_tensors(self, layer)

    def global_tensors(self) -> list[TensorSpec]:
        """Embedding, final norm, output mix and head."""
        return inventory.global_tensors(self)

    def expert_tensors(self, layer: int, expert: int) -> list[TensorSpec]:
        """The tensors of one routed expert: w1, w2, w3, each packed before scale when MXFP4."""
        return inventory.expert_tensors(self, layer, expert)

    def vision_tensors(self) -> list[TensorSpec]:
        """Vision tower and projector; empty when the config does not give their sizes."""
        return inventory.vision_tensors(self.vision_spec)

    def tensors(self) -> Iterator[TensorSpec]:
        """Every predicted tensor, layer by layer, then the global ones, then vision."""
        for layer in self.layers:
            yield from self.layer_tensors(layer.index)
            for expert in range(self.moe.experts if self.moe and layer.ffn == "moe" else 0):
                yield from self.expert_tensors(layer.index, expert)
        yield from self.global_tensors()
        yield from self.vision_tensors()

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(layer.index for layer in self.layers if layer.ffn == "moe")

    @cached_property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the KDA layers."""
        return tuple(layer.index for layer in self.layers if layer.attention == "kda")

    @cached_property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of the MLA layers."""
        return tuple(layer.index for layer in self.layers if layer.attention == "mla")

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert as predicted; 0 without experts."""
        return sum(t.nbytes for t in self.expert_tensors(0, 0)) if self.moe else 0

    @cached_property
    def expert_count(self) -> int:
        """Routed experts of all layers."""
        return len(self.moe_layers) * self.moe.experts if self.moe else 0

    def layer_trunk_bytes(self, layer: int) -> int:
        """Bytes of one layer without its routed experts."""
        return sum(t.nbytes for t in self.layer_tensors(layer))

    @cached_property
    def _count_and_bytes(self) -> tuple[int, dict[str, int]]:
        groups: Counter[str] = Counter()
        count = 0
        for kind, layers in Counter((la.attention, la.ffn) for la in self.layers).items():
            like = next(la.index for la in self.layers if (la.attention, la.ffn) == kind)
            for tensor in self.layer_tensors(like):
                groups[tensor.group] += layers * tensor.nbytes
                count += layers
        if self.moe:
            groups[inventory.ROUTED] = self.expert_count * self.expert_bytes
            count += self.expert_count * len(self.expert_tensors(0, 0))
        for tensor in (*self.global_tensors(), *self.vision_tensors()):
            groups[tensor.group] += tensor.nbytes
            count += 1
        return count, {name: groups[name] for name in inventory.GROUPS if groups[name]}

    def bytes_by_group(self) -> dict[str, int]:
        """Bytes of every group of tensors the model has, in a fixed order."""
        return dict(self._count_and_bytes[1])

    @property
    def tensor_count(self) -> int:
        """Predicted number of tensors."""
        return self._count_and_bytes[0]

    @property
    def total_bytes(self) -> int:
        """Predicted bytes of all tensors."""
        return sum(self._count_and_bytes[1].values())

    # ---- what a sequence carries ----
    def kda_state_bytes(self, conv_itemsize: int = 2) -> int:
        """Bytes of KDA state per sequence, all layers: float32 [heads, d, d] and the conv tails
        (3 streams x width x (conv - 1) inputs of ``conv_itemsize`` bytes)."""
        kda = self.kda
        matrix = kda.heads * kda.head_dim * kda.head_dim * 4
        tails = 3 * kda.width * (kda.conv - 1) * conv_itemsize
        return len(self.kda_layers) * (matrix + tails)

    def check_context(self, prompt: int, more: int = 0) -> None:
        """Raise ``UsageError`` if ``prompt`` tokens and ``more`` behind them are too many."""
        if prompt + more > self.context:
            wanted = f"{prompt:,} tokens" + (f" of prompt and {more:,} more" if more else "")
            raise UsageError(
                f"{wanted} exceed the model's context of {self.context:,}.",
                "Shorten the prompt or ask for fewer tokens." if more else "Give fewer tokens.",
            )

    def latent_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of MLA latents per token, all layers."""
        return len(self.mla_layers) * self.mla.latent * itemsize

    @property
    def active_expert_bytes(self) -> int:
        """Bytes of routed experts one token touches when every expert is read."""
        return len(self.moe_layers) * self.moe.top_k * self.expert_bytes if self.moe else 0
