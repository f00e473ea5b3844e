"""What a pack takes from a model, under the very names and shapes that stand in its files.

This file reads a source's headers once more, for what ``Checkpoint`` does not keep, and knows how
to tell whether a source is still the same.  It decides no layout and writes nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from .checkpoint import Checkpoint, Tensor
from .errors import UsageError
from .headers import read_header
from .inventory import PADDING, TensorSpec
from .paths import show_path
from .survey import EXPERTS
from .tiers.base import Location

CONFIG: Final = "config.json"
JOURNAL: Final = "k3offload_pack.journal"
SIDE_LIMIT: Final = 1 << 27  #: bytes; a larger file beside the shards is no side file of a model
#: never copied: what a pack has of its own, and the marker by which make-tiny knows its folders
_OWN: Final = (CONFIG, JOURNAL, "make_tiny.json")
_NO_SIDE_FILE: Final = (".safetensors", ".index.json", ".incomplete", ".part", ".partial", ".tmp")


class Source(NamedTuple):
    """A tensor of the source; ``name`` and ``shape`` are those of its file.  ``known`` is what the
    spec calls it, None for what text never reads."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: Location
    known: TensorSpec | None


class Sources(NamedTuple):
    """Every tensor but the routed experts.  ``layers`` and ``top`` are in the order of the spec;
    ``rest`` is vision and tensors of no elements; ``dropped`` counts what no reader needs."""

    layers: tuple[tuple[Source, ...], ...]
    top: tuple[Source, ...]
    rest: tuple[Source, ...]
    dropped: int


def read_sources(checkpoint: Checkpoint) -> Sources:
    """All tensors but the experts, from headers that ``Checkpoint.open`` has found in order."""
    spec = checkpoint.spec
    known = {tensor.location: _spec_of(checkpoint, i, tensor) for i, tensor in _tensors(checkpoint)}
    experts = tuple(f"{spec.prefix}model.layers.{i}.{EXPERTS}" for i in spec.moe_layers)
    parts = checkpoint.expert(spec.moe_layers[0], 0).parts if spec.moe_layers else ()
    keys = tuple(f".{part.key}" for part in parts)
    found: dict[Location, Source] = {}
    rest: list[Source] = []
    dropped = 0
    for file, path in enumerate(checkpoint.files):
        for entry in read_header(path):
            if EXPERTS in entry.name and entry.name.startswith(experts):
                dropped += not entry.name.endswith(keys)
                continue
            if spec.pack_version and entry.name.startswith(PADDING):
                continue
            where = Location(file, entry.begin, entry.end - entry.begin)
            tensor = known.get(where) if where.length else None
            source = Source(entry.name, entry.dtype, entry.shape, where, tensor)
            if tensor is None:
                rest.append(source)
            else:
                found[where] = source
    layers = (checkpoint.trunk(layer.index) for layer in spec.layers)
    return Sources(
        layers=tuple(tuple(found[t.location] for t in trunk) for trunk in layers),
        top=tuple(found[t.location] for t in checkpoint.globals().values()),
        rest=tuple(sorted(rest)),
        dropped=dropped,
    )


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[int, Tensor]]:
    for layer in checkpoint.spec.layers:
        yield from ((layer.index, tensor) for tensor in checkpoint.trunk(layer.index))
    yield from ((-1, tensor) for tensor in checkpoint.globals().values())


def _spec_of(checkpoint: Checkpoint, layer: int, tensor: Tensor) -> TensorSpec:
    """``tensor`` with its full name and the shape the spec predicts."""
    inside = "" if tensor.name.startswith("lm_head.") else "model."
    inside += f"layers.{layer}." if layer >= 0 else ""
    name = checkpoint.spec.prefix + inside + tensor.name
    return TensorSpec(name, tensor.dtype, tensor.shape, "", layer)


def identity(checkpoint: Checkpoint) -> str:
    """SHA-256 over the configuration and, shard by shard, size and header.

    It names the model a pack was made from, wherever that model lies.
    """
    digest = hashlib.sha256((checkpoint.folder / CONFIG).read_bytes())
    for path in checkpoint.files:
        with open(path, "rb") as file:
            digest.update(os.fstat(file.fileno()).st_size.to_bytes(8, "little"))
            digest.update(file.read(int.from_bytes(file.read(8), "little")))
    return digest.hexdigest()


def stamps(checkpoint: Checkpoint) -> list[int]:
    """When each shard was last written, ns: how a source that changes under way is noticed."""
    return [path.stat().st_mtime_ns for path in checkpoint.files]


def side_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Tokenizer, chat template and the like: name -> real path; and the names of what stays behind:
    folders and large files that are no shards."""
    taken: dict[str, Path] = {}
    left: list[str] = []
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".")
        if hidden or path.name in _OWN or path.name.endswith(_NO_SIDE_FILE):
            continue
        real = Path(os.path.realpath(path))
        if real.is_file() and real.stat().st_size <= SIDE_LIMIT:
            taken[path.name] = real
        else:
            left.append(path.name)
    return taken, left


def check_outside(out: Path, checkpoint: Checkpoint) -> None:
    """Refuse ``out`` (links resolved) in the model folder or one that its shards lie in."""
    homes = {Path(os.path.realpath(checkpoint.folder))} | {p.parent for p in checkpoint.files}
    for home in sorted(homes):
        if out == home or home in out.parents:
            raise UsageError(
                f"{show_path(out)} lies inside the model {show_path(home)}, which is left as it "
                "is.",
                "Choose a folder outside of it.",
            )
