"""``make-tiny --full --sparse``: the released checkpoint's files at full size, mostly holes.

The released config, all shards with real headers and full apparent size, and the whole index;
real seeded numbers only where they steer the computation (norms, AttnRes queries, routers, biases,
every F32 tensor, the first embedding rows), so that full-size bookkeeping with token-dependent
routing runs on any disk that keeps holes.  Which tensors there are, ``ModelSpec`` says; this
file only decides what is real and where experts lie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from .config import READ_ALIGN
from .errors import CheckpointError
from .find import partial_path
from .spec import ModelSpec
from .tiny_config import make_generation_config
from .tiny_recipes import Array, Recipes, Value, rng_for
from .tiny_size import TinySize
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
    write_text,
)

RELEASED: Final = Path(__file__).parent / "released" / "config.json"
EMBEDDING_ROWS: Final = 1024  # real rows; the others are holes
INDEX_ENTRY: Final = 160  # bytes of one index line, at most
PROBE_BYTES: Final = 1 << 26  # size of the hole that tests the file system
_REAL: Final = ("norm.weight", "_res_proj.weight", "block_sparse_moe.gate.weight")

Part = tuple[dict[str, Value], list[str]]  # tensors of a shard and their order in the file


def make_tiny_full(
    out: Path | str,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the full-size sparse checkpoint into ``out`` and say what was written.

    ``config`` replaces the released configuration, to make the same thing smaller.  Returns
    ``out``, ``bytes`` (of tensors, holes included), ``tensors`` and ``real_bytes``.  Raises
    ``UsageError`` or ``CheckpointError`` (folder in use, no holes on this file system) or
    ``DoesNotFit`` (disk).
    """
    folder, text = Path(out), RELEASED.read_text() if config is None else json.dumps(config)
    check_folder(folder)
    spec = ModelSpec.from_config(json.loads(text), "config.json")
    recipes = Recipes(size_of(spec), seed)
    real = sum(_real_bytes(*part) for part in full_parts(spec, recipes))
    about = {"size": "full", "seed": seed, "sparse": True}
    prepare_folder(folder, about, real + spec.tensor_count * INDEX_ENTRY + METADATA_ROOM)
    _require_holes(folder)
    weight_map: dict[str, str] = {}
    count, total = sum(1 for _ in full_parts(spec, recipes)), 0
    for j, (tensors, order) in enumerate(full_parts(spec, recipes)):
        name = shard_name(j, count)
        total += write_shard(folder / name, tensors, order, sparse=True).payload
        weight_map.update(dict.fromkeys(order, name))
        if progress:
            progress(name, total, spec.total_bytes)
    write_text(folder / "config.json", text)
    write_json(folder / "generation_config.json", make_generation_config(recipes.size))
    write_byte_ranks(folder / "tiktoken.model")
    write_index(folder, total, weight_map)
    write_json(folder / MARKER, {**about, "complete": True, "numpy": np.__version__})
    return {"out": str(folder), "bytes": total, "tensors": len(weight_map), "real_bytes": real}


def size_of(spec: ModelSpec) -> TinySize:
    """The sizes of a configuration, as the recipes want them."""
    moe, mla, kda = spec.moe, spec.mla, spec.kda
    assert moe is not None
    return TinySize(
        hidden=spec.hidden,
        layers=len(spec.layers),
        heads=mla.heads,
        kda_heads=kda.heads,
        kda_dim=kda.head_dim,
        q_lora=mla.q_lora or 0,
        kv_lora=mla.kv_lora,
        nope=mla.nope,
        rope=mla.rope,
        vdim=mla.v,
        experts=moe.experts,
        topk=moe.top_k,
        latent=moe.latent or 0,
        moe_inter=moe.width,
        shared=moe.shared_width // moe.width,
        dense_inter=spec.dense_width,
        attn_res=spec.attnres_block or 0,
        vocab=spec.vocab,
        expert_format=moe.format,
        full_rank_gate=kda.full_rank_gate,
        bounded_decay=kda.gate_lower_bound is not None,
        mla_gate=mla.output_gate,
        latent_norm=moe.latent_norm,
        activation=spec.activation,
        conv=kda.conv,
        scale=moe.scale,
        renormalize=moe.renormalize,
        mla_layers=spec.mla_layers,
        family=spec.family,
    )


def full_parts(spec: ModelSpec, recipes: Recipes) -> Iterator[Part]:
    """Shard by shard, as the release cuts them."""
    for layer in range(len(spec.layers)):
        yield _layer(spec, recipes, layer)
    values, embedding = recipes.common(), spec.prefix + "model.embed_tokens.weight"
    tensors = {
        t.name: values[t.name] if _is_real(t.name, t.dtype) else Value(t.dtype, t.shape, None)
        for t in spec.global_tensors()
    }
    tensors[embedding] = _first_rows(values[embedding], EMBEDDING_ROWS)
    yield tensors, shard_order(tensors)
    for kind in ("mm_projector.", "vision_tower."):
        held = [t for t in spec.vision_tensors() if t.name.startswith(kind)]
        if held:
            tensors = {t.name: Value(t.dtype, t.shape, None) for t in held}
            yield tensors, shard_order(tensors)


def _layer(spec: ModelSpec, recipes: Recipes, layer: int) -> Part:
    values = recipes.layer(layer, experts=False)
    tensors: dict[str, Value] = {}
    for t in spec.layer_tensors(layer):
        value = values[t.name]
        assert (value.dtype, value.shape) == (t.dtype, t.shape), t.name
        real = _is_real(t.name, t.dtype)
        tensors[t.name] = value if real else Value(t.dtype, t.shape, None)
    order = shard_order(tensors)
    if spec.moe and layer in spec.moe_layers:
        # The release keeps an expert's tensors back to back, but not the experts in id order.
        for e in rng_for(recipes.seed, f"expert_order.{layer}").permutation(spec.moe.experts):
            for t in spec.expert_tensors(layer, int(e)):
                tensors[t.name] = Value(t.dtype, t.shape, None)
                order.append(t.name)
    return tensors, order


def _is_real(name: str, dtype: str) -> bool:
    return dtype == "F32" or name.endswith(_REAL)


def _first_rows(value: Value, rows: int) -> Value:
    """The same tensor with real numbers in its first ``rows`` rows only."""
    chunks: Callable[[], Iterator[Array]] | None = value.chunks
    assert chunks is not None
    left = min(rows, value.shape[0]) * value.shape[1]

    def first() -> Iterator[Array]:
        remaining = left
        for chunk in chunks():
            yield chunk[:remaining]
            remaining -= len(chunk)
            if remaining <= 0:
                return

    return Value(value.dtype, value.shape, first)


def _real_bytes(tensors: Mapping[str, Value], order: list[str]) -> int:
    """Disk a shard takes: its header and what is no hole, in whole blocks."""
    size = 0
    for name, value in tensors.items():
        if value.chunks is not None:
            rows = value.shape[0]
            real = min(rows, EMBEDDING_ROWS) if name.endswith("embed_tokens.weight") else rows
            size += value.nbytes // rows * real + READ_ALIGN
    return len(shard_header(tensors, order, metadata=False)) + size


def held_bytes(path: Path) -> int:
    """Disk a file really takes."""
    return path.stat().st_blocks * 512


def _require_holes(folder: Path) -> None:
    """Raise ``CheckpointError`` where a hole would be written out as zeros."""
    probe = partial_path(folder / "probe")
    try:
        with probe.open("xb") as file:
            file.truncate(PROBE_BYTES)
            os.fsync(file.fileno())
        held = held_bytes(probe)
    finally:
        probe.unlink(missing_ok=True)
    if held > PROBE_BYTES // 2:
        raise CheckpointError(
            f"The file system of {folder} keeps no holes: the full checkpoint would take 1.56 TB.",
            "Choose a folder on ext4, XFS, Btrfs or tmpfs.",
        )
