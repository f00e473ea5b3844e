"""Of which model, tokenizer and precision a saved state is: named fields that must be equal.

The weights of a large model cannot be read in seconds, so their content is sampled: 4 KiB from the
middle of every trunk tensor, and of one matrix of one expert in each layer, together with all
names, types and shapes.  A folder that was moved, or packed anew in the same precision, has the
same fields; another checkpoint of the same shapes has not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .config import CONSTANTS
from .tiers.base import Location
from .tokenizer import RANK_FILE

if TYPE_CHECKING:
    from .engine import Engine

SAMPLE = 4096  #: bytes of a tensor that are hashed
_TOKENIZER = (RANK_FILE, "tokenizer.json", "tokenizer_config.json")
_OF_THE_FOLDER = ("pack_version", "trunk_precision", "vision", "vision_spec", "inert")


def identity(engine: Engine) -> dict[str, Any]:
    """What a state of ``engine`` depends on and another engine must share to go on with it.

    Reads some MB of the model's files.  Raises ``OSError`` if one of them is gone.
    """
    options = engine.options
    return identity_of(engine.checkpoint, options.dtype, options.latent_dtype, engine.trunk)


def identity_of(
    checkpoint: Checkpoint, dtype: str, latent_dtype: str | None, trunk: str
) -> dict[str, Any]:
    """The same of an engine that is not loaded here."""
    spec = checkpoint.spec
    config = {k: v for k, v in asdict(spec).items() if k not in _OF_THE_FOLDER}
    return {
        "layers": "".join("k" if la.attention == "kda" else "m" for la in spec.layers),
        "config": _hash(json.dumps(config, sort_keys=True).encode()),
        "tensors": _tensors(checkpoint),
        "tokenizer": _files(checkpoint),
        "dtype": dtype,
        "latents": latent_dtype or dtype,
        "trunk": trunk,
        "constants": _hash(json.dumps(CONSTANTS, sort_keys=True).encode()),
    }


def weights_of(checkpoint: Checkpoint) -> str:
    """Names the weights of a model in results of benchmarks."""
    return _tensors(checkpoint)[:12]


def computed_by(engine: Engine) -> dict[str, Any]:
    """What else bits depend on: a state goes on elsewhere, but rounds differently from there."""
    there = engine.accelerator
    return {
        "isa": engine.kernels.isa or "",
        "operators": dict(engine.kernels.chosen),
        "device": {} if there is None else dict(there.kernels.chosen),
        "placed": [] if there is None else list(there.placed),
    }


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _files(checkpoint: Checkpoint) -> str:
    """Of the files that decide which text a token is."""
    paths = [checkpoint.folder / name for name in _TOKENIZER]
    return _hash(*(p.name.encode() + b"\0" + p.read_bytes() for p in paths if p.is_file()))


def _tensors(checkpoint: Checkpoint) -> str:
    """Of the names, types and shapes of all tensors, and samples of their bytes."""
    names, places = [], []
    for name, where in _sampled(checkpoint):
        names.append(name)
        length = min(SAMPLE, where.length)
        middle = where.offset + (where.length - length) // 2
        places.append(Location(where.file, middle, length))
    pieces = [b""] * len(places)
    order = sorted(range(len(places)), key=lambda i: places[i])  # each file is opened once
    number, file = -1, -1
    try:
        for i in order:
            if places[i].file != number:
                if file >= 0:
                    os.close(file)
                number, file = places[i].file, -1
                file = os.open(checkpoint.files[number], os.O_RDONLY | os.O_CLOEXEC)
            pieces[i] = os.pread(file, places[i].length, places[i].offset)
    finally:
        if file >= 0:
            os.close(file)
    shape = json.dumps([names, checkpoint.expert_dtype, checkpoint.part_bytes]).encode()
    return _hash(shape, *pieces)


def _sampled(checkpoint: Checkpoint) -> Iterator[tuple[str, Location]]:
    """Every trunk tensor and one matrix of one expert a layer, in a fixed order."""
    for name, tensor in sorted(checkpoint.globals().items()):
        yield f"{name} {tensor.dtype} {tensor.shape}", tensor.location
    for layer in checkpoint.spec.layers:
        for tensor in sorted(checkpoint.trunk(layer.index)):
            yield f"{layer.index} {tensor.name} {tensor.dtype} {tensor.shape}", tensor.location
        if layer.ffn == "moe" and checkpoint.spec.moe:
            page = checkpoint.expert(layer.index, layer.index % checkpoint.spec.moe.experts)
            part = max(page.parts, key=lambda part: (part.nbytes, part.key))
            extent = page.extents[part.extent]
            place = Location(extent.file, extent.offset + part.delta, part.nbytes)
            yield f"{layer.index} {part.key}", place
