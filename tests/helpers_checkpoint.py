"""Small checkpoints for tests, and their shards taken apart and put together again by hand.

The writer here is not the package's: it lays tensors out in any order and writes any header.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from k3offload.errors import K3Error
from k3offload.make_tiny import make_tiny

INDEX = "model.safetensors.index.json"
BITS = {"BF16": 16, "F16": 16, "F32": 32, "U8": 8, "I8": 8, "I64": 64, "I32": 32}
_FOLDERS: list[TemporaryDirectory[str]] = []
ROOT = Path(__file__).resolve().parent.parent


class Raw(NamedTuple):
    """One tensor of a shard: dtype, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@cache
def _made(size: str, overrides: tuple[tuple[str, Any], ...]) -> Path:
    _FOLDERS.append(TemporaryDirectory(prefix="k3-test-"))  # removed when the process ends
    folder = Path(_FOLDERS[-1].name) / "m"
    make_tiny(folder, size=size, seed=0, **dict(overrides))
    return folder


def problem_of(call: Callable[[], object]) -> str | None:
    """What our error says when ``call`` is refused, None when it is not."""
    try:
        call()
    except K3Error as error:
        return error.problem
    return None


def tiny(out: Path, size: str = "nano", **overrides: Any) -> Path:
    """A copy of a small checkpoint in the folder ``out``; each kind is made once per process."""
    shutil.copytree(_made(size, tuple(sorted(overrides.items()))), out)
    return out


def shards(folder: Path) -> list[Path]:
    """Shards of ``folder`` by name."""
    return sorted(folder.glob("*.safetensors"))


def read_shard(path: Path) -> dict[str, Raw]:
    """Every tensor of a shard, in the order of its data."""
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    head = json.loads(blob[8 : 8 + length])
    head.pop("__metadata__", None)
    out = {}
    for name, entry in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        out[name] = Raw(entry["dtype"], tuple(entry["shape"]), blob[begin:end])
    return out


def write_raw(
    path: Path, header: str | bytes, data: bytes = b"", length: int | None = None
) -> Path:
    """A file with exactly this header text and data; ``length`` overrides the declared length."""
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def write_shard(path: Path, tensors: dict[str, Raw], metadata: Any = None) -> Path:
    """A well-formed shard that holds ``tensors`` in this order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, raw in tensors.items():
        assert len(raw.data) * 8 == math.prod(raw.shape) * BITS[raw.dtype], name
        header[name] = {
            "dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [at, at + len(raw.data)],
        }  # fmt: skip
        at += len(raw.data)
    return write_raw(path, json.dumps(header), b"".join(raw.data for raw in tensors.values()))


def change_shard(path: Path, change: Callable[[dict[str, Raw]], dict[str, Raw] | None]) -> None:
    """Rewrite one shard with what ``change`` makes of its tensors (or does to them)."""
    tensors = read_shard(path)
    write_shard(path, change(tensors) or tensors)


def reindex(folder: Path) -> None:
    """Write the index that fits the shards as they are."""
    where = {name: path.name for path in shards(folder) for name in read_shard(path)}
    size = sum(len(raw.data) for path in shards(folder) for raw in read_shard(path).values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": where})
    (folder / INDEX).write_text(text)


def config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change ``config.json`` in place."""
    value = json.loads((folder / "config.json").read_text())
    change(value)
    (folder / "config.json").write_text(json.dumps(value))


def split(folder: Path, count: int) -> None:
    """Spread all tensors over ``count`` shards, a run of tensors each, and write the index."""
    everything = {n: r for path in shards(folder) for n, r in read_shard(path).items()}
    for path in shards(folder):
        path.unlink()
    names = list(everything)
    cuts = [len(names) * i // count for i in range(count + 1)]
    runs = [names[begin:end] for begin, end in itertools.pairwise(cuts)]
    for number, run in enumerate(runs, 1):
        name = f"model-{number:05d}-of-{len(runs):06d}.safetensors"
        write_shard(folder / name, {n: everything[n] for n in run})
    reindex(folder)


def hub_cache(folder: Path, root: Path, relative: bool = True) -> Path:
    """Lay ``folder`` out as a hub cache under ``root``; returns the snapshot folder of links."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "abc123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        blob = blobs / f"sha-{path.name}"
        shutil.copyfile(path, blob)
        target = Path("../..") / "blobs" / blob.name if relative else blob.absolute()
        (snapshot / path.name).symlink_to(target)
    return snapshot


def run_python(code: str, args: Iterable[str | bytes | Path] = (), **kwargs: Any) -> Any:
    """Run ``code`` in a fresh interpreter at the repository root; returns the finished process."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, **kwargs)
