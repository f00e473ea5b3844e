"""Writing a synthetic checkpoint: shards, index, free space, and which folders may be written.

Knows the safetensors layout and the disk; knows nothing of models.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .config import show_size
from .errors import CheckpointError, DoesNotFit, UsageError
from .find import published
from .tiny_recipes import ITEMSIZE, Value

MARKER: Final = "make_tiny.json"  # its presence says: this folder is ours to overwrite
INDEX: Final = "model.safetensors.index.json"
METADATA_ROOM: Final = 1 << 20  # bytes kept free for config, tokenizer and the like
_OURS: Final = re.compile(  # what a run writes, and what one that was killed leaves
    r"model-\d{5}-of-\d{6}\.safetensors|config\.json|generation_config\.json|tiktoken\.model"
    r"|model\.safetensors\.index\.json|make_tiny\.json|\.k3offload-[0-9a-f]{16}\.partial"
)


Progress = Callable[[str, int, int], None]  # file name, bytes so far, bytes in all


class Shard(NamedTuple):
    """What one written shard holds."""

    payload: int  # bytes of tensors, holes included
    sha256: str  # of the whole file; "" when hashing was not asked for


def shard_name(index: int, count: int) -> str:
    """File name of shard ``index`` (0-based) of ``count``, as the release spells it."""
    return f"model-{index + 1:05d}-of-{count:06d}.safetensors"


def shard_order(tensors: Mapping[str, Value]) -> list[str]:
    """Names by dtype size descending, then by name, as the safetensors library orders them."""
    return sorted(tensors, key=lambda name: (-ITEMSIZE[tensors[name].dtype], name))


def shard_header(
    tensors: Mapping[str, Value], order: Sequence[str], *, metadata: bool = True
) -> bytes:
    """Length and JSON of a safetensors file, padded with spaces to 8 bytes.

    The released headers have no ``__metadata__``; most other writers' have.
    """
    head: dict[str, object] = {"__metadata__": {"format": "pt"}} if metadata else {}
    offset = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        end = offset + tensors[name].nbytes
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: Path, tensors: Mapping[str, Value], order: Sequence[str] | None = None, *, sparse: bool
) -> Shard:
    """Write one shard; it appears when it is complete.

    ``sparse`` leaves holes where a value has no (more) chunks, does not hash, and writes the
    header as the release does; otherwise a value that is short is a bug of its recipe.
    """
    order = shard_order(tensors) if order is None else order
    header = shard_header(tensors, order, metadata=not sparse)
    sha, position = hashlib.sha256(header), len(header)
    with published(path) as file:
        file.write(header)
        for name in order:
            value, end = tensors[name], position + tensors[name].nbytes
            if sparse:
                file.seek(position)
            for chunk in value.chunks() if value.chunks else ():
                assert chunk.itemsize == ITEMSIZE[value.dtype], (name, chunk.dtype)
                data = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
                file.write(data)
                position += len(data)
                if not sparse:
                    sha.update(data)
            assert position <= end if sparse else position == end, (name, position, end)
            position = end
        file.truncate(position)
    return Shard(position - len(header), "" if sparse else sha.hexdigest())


def write_json(path: Path, content: object) -> None:
    """Indented, sorted JSON, published whole."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True))


def write_text(path: Path, text: str) -> None:
    """UTF-8, published whole."""
    with published(path) as file:
        file.write(text.encode())


def write_index(folder: Path, total: int, weight_map: Mapping[str, str]) -> None:
    """``model.safetensors.index.json``, line by line: K3 has half a million of them."""
    with published(folder / INDEX) as raw, io.TextIOWrapper(raw, "utf-8") as file:
        file.write(f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{')
        for n, name in enumerate(sorted(weight_map)):
            comma = "," if n else ""
            file.write(f"{comma}\n    {json.dumps(name)}: {json.dumps(weight_map[name])}")
        file.write("\n  }\n}")


def write_byte_ranks(path: Path) -> None:
    """A rank file of the 256 single bytes: a tokenizer that knows no merges."""
    lines = (f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256))
    write_text(path, "".join(lines))


def check_folder(folder: Path) -> None:
    """Raise if a checkpoint must not be written into ``folder``; touches nothing.

    ``CheckpointError`` for a file, or a folder with files that are not from a former run;
    ``UsageError`` for one inside another model's folder, or where no folder can be.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder.", "Choose another folder.")
    there = sorted(folder.iterdir()) if folder.exists() else []
    if there and not (folder / MARKER).is_file():
        raise CheckpointError(
            f"{folder} is not empty and was not made by make-tiny (it holds {there[0].name}).",
            "Choose an empty folder.",
        )
    for place in Path(os.path.realpath(folder)).parents:
        if (place / "config.json").is_file() and not (place / MARKER).is_file():
            raise UsageError(
                f"{folder} lies inside the model folder {place}, which is left as it is.",
                "Choose a folder outside of it.",
            )
    base = _existing(folder)
    if not base.is_dir():
        raise UsageError(f"{folder}: {base} is not a folder.", "Choose another folder.")


def _existing(folder: Path) -> Path:
    return next(p for p in (folder, *folder.absolute().parents) if p.exists())


def prepare_folder(folder: Path, about: Mapping[str, Any], needed: int) -> None:
    """Make ``folder`` (see ``check_folder``) ready to be written.

    ``needed`` is in bytes of real disk.  Raises ``DoesNotFit``, before anything is touched, when
    the disk has too little room.
    """
    there = folder.iterdir() if folder.exists() else ()
    ours = [p for p in there if _OURS.fullmatch(p.name) and (p.is_file() or p.is_symlink())]
    reclaimed = sum(p.lstat().st_blocks * 512 for p in ours)
    free = shutil.disk_usage(_existing(folder)).free + reclaimed
    if needed > free:
        raise DoesNotFit(
            f"The checkpoint needs {needed} bytes ({show_size(needed)}) but the disk of {folder} "
            f"has {free} bytes ({show_size(free)}) free.",
            f"Free {show_size(needed - free)}, choose another disk, or a smaller --size.",
            missing=needed - free,
        )
    folder.mkdir(parents=True, exist_ok=True)
    # The marker comes first, so that an interrupted run can be repeated in the same folder; the
    # old index goes before its shards, so that a half-written folder cannot be opened.
    write_json(folder / MARKER, {**about, "complete": False})
    for path in sorted(ours, key=lambda p: p.name != INDEX):
        if path.name != MARKER:
            path.unlink()
