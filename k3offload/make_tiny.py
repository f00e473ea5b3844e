"""``make-tiny``: seeded synthetic checkpoints in the released K3 layout, at any size.

Knows the order of the shards; which sizes there are is ``tiny_size.py``, how values are drawn
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
from typing import Any

import numpy as np

from .tiny_config import make_config, make_generation_config
from .tiny_full import make_tiny_full
from .tiny_recipes import Recipes, Value
from .tiny_size import SIZES, TinySize, tiny_size
from .tiny_write import (
    MARKER,
    METADATA_ROOM,
    Progress,
    check_folder,
    prepare_folder,
    shard_header,
    shard_name,
    shard_order,
    write_byte_ranks,
    write_index,
    write_json,
    write_shard,
)

__all__ = ["SIZES", "TinySize", "make_tiny", "make_tiny_full", "tiny_size"]


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
    check_folder(folder)
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
