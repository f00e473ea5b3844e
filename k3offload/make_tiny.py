"""``make-tiny``: seeded synthetic checkpoints in the released K3 layout, at any size.

Knows the sizes on offer and the order of the shards; how values are drawn is
``tiny_recipes.py``, how files are written ``tiny_write.py``, the full-size sparse checkpoint
``tiny_full.py``.  Needs numpy only.

One shard a decoder layer, then one for embedding, head and final norms, then the vision
projector, then the vision tower.  BF16 everywhere but: F32 for conv1d, A_log (zero padded),
dt_bias, o_norm and e_score_correction_bias; U8 for the experts' codes and scales.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from .errors import UsageError
from .tiny_config import make_config, make_generation_config
from .tiny_full import make_tiny_full
from .tiny_recipes import DECAY_RANGE, GROUP, Recipes, TinySize, Value
from .tiny_write import (
    MARKER,
    METADATA_ROOM,
    Progress,
    prepare_folder,
    shard_header,
    shard_name,
    shard_order,
    write_byte_ranks,
    write_index,
    write_json,
    write_shard,
)

__all__ = ["CHOICES", "SIZES", "make_tiny", "make_tiny_full", "tiny_size"]

CHOICES: Final = {
    "decay": tuple(DECAY_RANGE),
    "expert_mode": ("gauss", "bytes"),
    "expert_format": ("mxfp4", "bf16"),
    "activation": ("situ", "silu"),
}

_NANO: Final = TinySize(
    hidden=128, layers=9, heads=4, kda_heads=4, kda_dim=32, q_lora=96, kv_lora=64, nope=32,
    rope=16, vdim=32, experts=16, topk=4, latent=64, moe_inter=96, shared=2, dense_inter=320,
    attn_res=4, vocab=512,
)  # fmt: skip
_STREAM: Final = TinySize(
    hidden=1024, layers=9, heads=8, kda_heads=8, kda_dim=64, q_lora=256, kv_lora=128, nope=64,
    rope=32, vdim=64, experts=896, topk=16, latent=1024, moe_inter=1024, shared=2,
    dense_inter=2048, attn_res=4, vocab=4096, expert_mode="bytes",
)  # fmt: skip
SIZES: Final = {
    # Every equality of the release kept: KDA heads = MLA heads, nope = v = KDA head dim.
    "nano": _NANO,
    "small": TinySize(
        hidden=512, layers=17, heads=8, kda_heads=8, kda_dim=64, q_lora=192, kv_lora=128,
        nope=64, rope=32, vdim=64, experts=64, topk=8, latent=256, moe_inter=192, shared=2,
        dense_inter=1536, attn_res=6, vocab=4096,
    ),
    # Every accidental equality broken, to catch two sizes being mixed up.
    "odd": TinySize(
        hidden=160, layers=11, heads=6, kda_heads=3, kda_dim=40, q_lora=88, kv_lora=72, nope=24,
        rope=8, vdim=56, experts=24, topk=5, latent=96, moe_inter=64, shared=3, dense_inter=200,
        attn_res=3, vocab=640,
    ),
    # The released width of every matrix but the vocabulary, 4 layers, few experts: 6.7 GB.
    "wide": TinySize(
        hidden=7168, layers=4, heads=96, kda_heads=96, kda_dim=128, q_lora=1536, kv_lora=512,
        nope=128, rope=64, vdim=128, experts=24, topk=16, latent=3584, moe_inter=3072, shared=2,
        dense_inter=33792, attn_res=12, vocab=2048,
    ),
    # Streaming: 8 MoE layers of 896 experts of 1.67 MB = 12.0 GB beside a small trunk.
    "io": _STREAM,
    # Streaming with the released expert (17.55 MB): 6 x 112 experts = 11.8 GB.
    "io-real": dataclasses.replace(_STREAM, layers=7, experts=112, latent=3584, moe_inter=3072),
}  # fmt: skip


def tiny_size(size: str = "nano", **overrides: Any) -> TinySize:
    """A named size with single fields overridden (None: as named).

    Raises ``UsageError`` for a name, field or combination that cannot be made.
    """
    if size not in SIZES:
        raise UsageError(f"There is no size {size!r}.", f"Choose one of {', '.join(SIZES)}.")
    known = {field.name for field in dataclasses.fields(TinySize)}
    for name in overrides:
        if name not in known:
            raise UsageError(
                f"{name!r} is no size or option.", f"Known: {', '.join(sorted(known))}."
            )
    given = {name: value for name, value in overrides.items() if value is not None}
    made = dataclasses.replace(SIZES[size], **given)
    _check(made)
    return made


def _check(s: TinySize) -> None:
    none_allowed = {"q_lora", "latent", "shared", "attn_res"}
    for field in dataclasses.fields(TinySize):
        value = getattr(s, field.name)
        least = 0 if field.name in none_allowed else 1
        if field.type == "int" and (not isinstance(value, int) or value < least):
            raise UsageError(f"{field.name} = {value!r} is too small.", f"Use {least} or more.")
    for name, choices in CHOICES.items():
        if getattr(s, name) not in choices:
            raise UsageError(f"{name} = {getattr(s, name)!r}.", f"One of {', '.join(choices)}.")
    io = s.latent or s.hidden
    rules = (
        (s.vocab >= 512, f"vocab = {s.vocab} is too small.", "256 bytes and 256 specials: 512."),
        (s.topk <= s.experts, f"topk {s.topk} exceeds experts {s.experts}.", "Lower topk."),
        (
            all(0 <= i < s.layers for i in s.mla),
            f"mla_layers {s.mla} names a layer outside 0..{s.layers - 1}.",
            "Layers count from 0.",
        ),
        (
            io % GROUP == 0 and s.moe_inter % GROUP == 0,
            f"Expert widths {io} and {s.moe_inter} are not multiples of {GROUP}.",
            f"Scales cover {GROUP} columns each.",
        ),
    )
    for fine, problem, remedy in rules:
        if not fine:
            raise UsageError(problem, remedy)


def make_tiny(
    out: Path | str,
    size: str = "nano",
    seed: int = 0,
    *,
    progress: Progress | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Write a synthetic checkpoint into the folder ``out`` and say what was written.

    ``overrides`` are fields of ``TinySize``.  The same arguments give the same bytes.  Holds at
    most a few MB of a trunk tensor, or one expert matrix in float32 (44 MB at released width).
    Returns ``out``, ``bytes`` (of tensors), ``tensors`` and ``sha256`` per shard.  Raises
    ``UsageError``, ``CheckpointError`` (folder in use) or ``DoesNotFit`` (disk) before anything
    is written.
    """
    made, folder = tiny_size(size, **overrides), Path(out)
    recipes = Recipes(made, seed)
    parts = [partial(recipes.layer, i) for i in range(made.layers)]
    parts.append(partial(recipes.common))
    if made.vision:
        parts += [partial(recipes.projector), partial(recipes.vision)]
    planned = sum(_file_bytes(part()) for part in parts)
    about = {"size": size, "seed": seed, "params": dataclasses.asdict(made)}
    prepare_folder(folder, about, planned + METADATA_ROOM)
    weight_map: dict[str, str] = {}
    hashes: dict[str, str] = {}
    total = 0
    for j, part in enumerate(parts):
        name, tensors = shard_name(j, len(parts)), part()
        shard = write_shard(folder / name, tensors, sparse=False)
        total += shard.payload
        hashes[name] = shard.sha256
        weight_map.update(dict.fromkeys(tensors, name))
        if progress:
            progress(name, total, planned)
    write_json(folder / "config.json", make_config(made))
    write_json(folder / "generation_config.json", make_generation_config(made))
    write_byte_ranks(folder / "tiktoken.model")
    write_index(folder, total, weight_map)
    done = {"complete": True, "numpy": np.__version__, "sha256": hashes}
    write_json(folder / MARKER, {**about, **done})
    return {"out": str(folder), "bytes": total, "tensors": len(weight_map), "sha256": hashes}


def _file_bytes(tensors: dict[str, Value]) -> int:
    header = shard_header(tensors, shard_order(tensors))
    payload = sum(value.nbytes for value in tensors.values())
    return len(header) + payload
