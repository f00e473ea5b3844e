"""What a checkpoint holds and what it needs, for a person or a program.

This file knows how to count and print.  It reads headers only and never imports torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .checkpoint import Checkpoint
from .config import CONSTANTS, show_size
from .inventory import EMBED, FINAL, HEAD, PROJECTOR, ROUTED, TOWER
from .paths import show_path
from .spec import ModelSpec

_ATTENTION = {"kda": "KDA", "mla": "MLA"}
_FFN = {"dense": "dense", "moe": "MoE"}


@dataclass(frozen=True)
class Inspection:
    """The facts ``k3offload inspect`` prints; all sizes in bytes."""

    folder: str
    family: str
    files: int
    tensors: int
    total_bytes: int
    bytes_by_group: dict[str, int]
    layers: dict[str, int]  #: how many layers of each kind, ``"KDA + MoE"``
    sizes: dict[str, int | float | str | None]
    experts: dict[str, int | str]
    state: dict[str, int]  #: what one sequence carries, for bfloat16 activations
    tiers: dict[str, int]  #: bytes each way of keeping the weights needs
    constants: dict[str, int]
    notes: tuple[str, ...]
    packed: bool = False  #: whether ``k3offload pack`` wrote the folder

    def to_dict(self) -> dict[str, Any]:
        """The form ``inspect --json`` prints."""
        return asdict(self)


def inspect(
    path: str | os.PathLike[str], *, extra_folders: Sequence[str | os.PathLike[str]] = ()
) -> Inspection:
    """Open the checkpoint in folder ``path`` and sum it up; raises as ``Checkpoint.open`` does."""
    checkpoint = Checkpoint.open(path, extra_folders=extra_folders)
    spec, groups = checkpoint.spec, checkpoint.bytes_by_group
    kinds = Counter(f"{_ATTENTION[la.attention]} + {_FFN[la.ffn]}" for la in spec.layers)
    return Inspection(
        folder=show_path(checkpoint.folder),
        family=spec.family,
        files=len(checkpoint.files),
        tensors=checkpoint.tensor_count,
        total_bytes=sum(groups.values()),
        bytes_by_group=groups,
        layers=dict(kinds),
        sizes=_sizes(spec),
        experts=_experts(checkpoint),
        state={
            "kda_bytes": spec.kda_state_bytes(),
            "latent_bytes_per_token": spec.latent_bytes_per_token(),
            "bytes_at_full_context": spec.kda_state_bytes()
            + spec.context * spec.latent_bytes_per_token(),
        },
        tiers=_tiers(checkpoint),
        constants=dict(CONSTANTS),
        notes=tuple(note.what for note in checkpoint.notes),
        packed=spec.pack_version > 0,
    )


def _sizes(spec: ModelSpec) -> dict[str, int | float | str | None]:
    return {
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "context": spec.context,
        "activation": spec.activation,
        "attnres_block": spec.attnres_block,
        "kda_heads": spec.kda.heads,
        "kda_head_dim": spec.kda.head_dim,
        "mla_heads": spec.mla.heads,
        "mla_latent": spec.mla.latent,
        "latent": spec.moe.latent if spec.moe else None,
        "trunk_precision": spec.trunk_precision,
    }


def _experts(checkpoint: Checkpoint) -> dict[str, int | str]:
    moe = checkpoint.spec.moe
    if moe is None:
        return {"count": 0}
    return {
        "count": checkpoint.spec.expert_count,
        "layers": len(checkpoint.spec.moe_layers),
        "per_layer": moe.experts,
        "top_k": moe.top_k,
        "format": moe.format,
        "bytes_each": checkpoint.expert_bytes,
        "in_one_read": checkpoint.one_read_experts,
    }


def _tiers(checkpoint: Checkpoint) -> dict[str, int]:
    spec, groups = checkpoint.spec, checkpoint.bytes_by_group
    apart = {ROUTED, EMBED, HEAD, FINAL, TOWER, PROJECTOR}
    trunk = sum(size for name, size in groups.items() if name not in apart)
    ends = sum(groups.get(name, 0) for name in (EMBED, HEAD, FINAL))
    layers = [sum(t.location.length for t in checkpoint.trunk(la.index)) for la in spec.layers]
    one = checkpoint.expert_bytes
    per_token = len(spec.moe_layers) * spec.moe.top_k * one if spec.moe else 0
    return {
        "trunk_bytes": trunk,
        "embedding_and_head_bytes": ends,
        "largest_layer_trunk_bytes": max(layers),
        "one_expert_bytes": one,
        "all_experts_bytes": groups.get(ROUTED, 0),
        "experts_per_token_bytes": per_token,
        "resident_trunk_and_one_expert_bytes": trunk + ends + one,
        "minimum_bytes": max(layers) + one,
    }


def render(facts: Inspection) -> str:
    """Text for a terminal, 80 columns wide where names allow."""
    lines = [
        f"{facts.folder}",
        f"  {facts.family}, {sum(facts.layers.values())} layers, {facts.tensors:,} tensors in "
        f"{facts.files} files, {facts.total_bytes:,} bytes ({show_size(facts.total_bytes)})",
        *([f"  a pack with a trunk of {facts.sizes['trunk_precision']}"] if facts.packed else []),
        "",
        "Layers",
    ]
    lines += [f"  {count:6,}  {kind}" for kind, count in facts.layers.items()]
    lines += ["", "Bytes per group"]
    lines += [f"  {size:21,}  {name}" for name, size in facts.bytes_by_group.items()]
    if facts.experts["count"]:
        lines += [
            "",
            "Routed experts",
            f"  {facts.experts['count']:,} of {facts.experts['bytes_each']:,} bytes "
            f"({facts.experts['format']}), {facts.experts['per_layer']} a layer, "
            f"{facts.experts['top_k']} chosen per token",
            f"  {facts.experts['in_one_read']:,} lie in one piece, so one read brings each",
        ]
    lines += ["", "One sequence carries (bfloat16)"]
    lines += [
        f"  {facts.state['kda_bytes']:21,}  KDA state, whatever its length",
        f"  {facts.state['latent_bytes_per_token']:21,}  MLA latents for each token",
        f"  {facts.state['bytes_at_full_context']:21,}  both at {facts.sizes['context']:,} tokens",
    ]
    named = {
        "trunk_bytes": "trunk of all layers",
        "embedding_and_head_bytes": "embedding, head and final norm",
        "largest_layer_trunk_bytes": "largest layer of it",
        "one_expert_bytes": "one routed expert",
        "all_experts_bytes": "all routed experts",
        "experts_per_token_bytes": "experts one token reads when none is cached",
        "resident_trunk_and_one_expert_bytes": "trunk resident, experts through one slot",
        "minimum_bytes": "least for weights: one layer's trunk and one expert, both streaming",
    }
    lines += ["", "Tiers"]
    lines += [f"  {facts.tiers[key]:21,}  {name}" for key, name in named.items()]
    pairs = ", ".join(f"{name} {value}" for name, value in facts.constants.items())
    lines += ["", f"Constants: {pairs}"]
    lines += [f"Note: {note}" for note in facts.notes]
    return "\n".join(lines)
