"""Which files a checkpoint consists of, and where they are.

This file knows the index file, hub caches with links, and shards spread over several folders.  It
opens only the index; headers and tensors are unknown here.
"""

from __future__ import annotations

import errno
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import CheckpointError, UsageError
from .findings import Report, count_of, listing
from .inventory import VISION_PREFIXES
from .json_stream import pairs
from .paths import link_target, show_path

INDEX_NAME: Final = "model.safetensors.index.json"
INDEX_LIMIT: Final = 1_000_000_000  #: bytes; the released index has 59.8 million
FOLDERS_VARIABLE: Final = "K3_MODEL_FOLDERS"
_INDEX_REMEDY: Final = "Download or copy the index file again."
_FETCH: Final = "Download or copy the missing files, then run the check again."
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Index:
    """The index file, kept as hashes: 12 bytes a tensor instead of half a million strings."""

    path: Path
    names: list[str] = field(default_factory=list)  #: shard names in order of first mention
    hashes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    file_of: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    text: Counter[str] = field(default_factory=Counter)  #: tensors per shard that text needs
    vision: Counter[str] = field(default_factory=Counter)

    def tensors(self) -> Iterator[tuple[str, str]]:
        """(tensor, shard) from the file again."""
        return _stream(self.path, "weight_map")


def mix(hashes: npt.NDArray[np.int64], file_of: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """One number per (tensor, shard) pair; equal pairs give equal numbers."""
    files: npt.NDArray[np.uint64] = (file_of.astype(np.uint64) + np.uint64(1)) * _MIX
    return np.bitwise_xor(hashes.view(np.uint64), files)


def _stream(path: Path, prefix: str) -> Iterator[tuple[str, Any]]:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > INDEX_LIMIT:
                raise ValueError(f"it is larger than {INDEX_LIMIT} bytes")
            yield from pairs(file, prefix)
    except OSError as error:
        raise CheckpointError(
            f"{show_path(path)} cannot be read: {error.strerror}.", _INDEX_REMEDY
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{show_path(path)} is malformed: {str(error)[:200]}.", _INDEX_REMEDY
        ) from None


def total_size(path: Path) -> int | None:
    """``metadata.total_size`` of the index, when it gives one."""
    value = next((v for k, v in _stream(path, "metadata") if k == "total_size"), None)
    return int(value) if isinstance(value, (int, Decimal)) else None


def safe_shard_name(name: str) -> bool:
    """A relative path that stays inside the model folder and names a safetensors file."""
    parts = name.replace("\\", "/").split("/")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return (
        name.endswith(".safetensors")
        and "\0" not in name
        and not any(part in ("", ".", "..") for part in parts)
        and not re.match(r"[A-Za-z]:", name)
    )


def read_index(path: Path) -> Index:
    """Read the index as a stream; raises ``CheckpointError`` naming the file and the entry."""
    index, numbers = Index(path), dict[str, int]()
    hashes, file_of = array("q"), array("i")
    for tensor, shard in _stream(path, "weight_map"):
        number = numbers.get(shard) if isinstance(shard, str) else None
        if number is None:
            if not isinstance(shard, str) or not safe_shard_name(shard):
                raise CheckpointError(
                    f"{show_path(path)}: tensor {tensor!r} is said to lie in {str(shard)[:200]!r}, "
                    "which is no safetensors file inside the model folder.",
                    _INDEX_REMEDY,
                )
            number = numbers[shard] = len(numbers)
            index.names.append(shard)
        hashes.append(hash(tensor))
        file_of.append(number)
        kind = index.vision if tensor.startswith(VISION_PREFIXES) else index.text
        kind[shard] += 1
    if not numbers:
        raise CheckpointError(f"{show_path(path)} has no weight_map.", _INDEX_REMEDY)
    index.hashes = np.frombuffer(hashes, np.int64)
    index.file_of = np.frombuffer(file_of, np.int32)
    twice = np.sort(index.hashes)
    twice = twice[1:][twice[1:] == twice[:-1]]
    if len(twice):
        name = next(t for t, _ in index.tensors() if hash(t) == int(twice[0]))
        raise CheckpointError(f"{show_path(path)} names tensor {name!r} twice.", _INDEX_REMEDY)
    return index


def search_folders(folder: Path, extra: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The model folder, then ``extra``, then ``K3_MODEL_FOLDERS``; all must be folders."""
    variable = [p for p in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if p]
    folders = [folder, *(Path(p) for p in (*extra, *variable))]
    for path in folders[1:]:
        if not path.is_dir():
            raise UsageError(
                f"{show_path(path)} is not a folder.",
                f"Correct the extra model folder, or the variable {FOLDERS_VARIABLE}.",
            )
    return list(dict.fromkeys(folders))


def look_at(path: Path) -> tuple[Path | None, str | None]:
    """The real file behind ``path``, or what is wrong; (None, None) when nothing is there."""
    if not os.path.lexists(path):
        for ending in (".incomplete", ".part", ".tmp"):
            if os.path.lexists(str(path) + ending):
                return None, f"{show_path(path)} is missing; only {path.name}{ending} is there"
        return None, None
    target, shown = link_target(path), show_path(path)
    behind = f" -> {show_path(target)}" if target != path else ""
    try:
        real = Path(os.path.realpath(path, strict=True))
        size = os.stat(real).st_size
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None, f"{shown}{behind} is a link that leads back to itself"
        if not behind:
            return None, f"{shown} cannot be reached: {error.strerror}"
        partial = os.path.exists(str(target) + ".incomplete")
        also = f" (only {target.name}.incomplete is there)" if partial else ""
        return None, f"{shown}{behind}: the blob the link points at is missing{also}"
    if real.name.endswith(".incomplete"):
        return None, f"{shown}{behind}: the blob is a download that never finished"
    if not real.is_file():
        return None, f"{shown}{behind} is not a file"
    if size == 0:
        return None, f"{shown}{behind} is empty (0 bytes)"
    return real, None


@dataclass
class Shards:
    """Every shard: names as the index gives them, and real paths (None: not usable)."""

    names: list[str]
    paths: list[Path | None]
    index: Index | None


def find_shards(folders: list[Path], report: Report) -> Shards:
    """Find every shard; what is missing, dangling, empty or ambiguous becomes a finding."""
    index_path = folders[0] / INDEX_NAME
    index: Index | None = None
    if os.path.lexists(index_path):
        _, wrong = look_at(index_path)
        if wrong:
            raise CheckpointError(f"{wrong}.", _INDEX_REMEDY)
        index = read_index(index_path)
    names = sorted(index.names) if index else _names_without_index(folders)
    if not names:
        hint = _FETCH
        if (folders[0] / "snapshots").is_dir():
            hint = "This is a hub cache; point at the folder inside snapshots/ that you want."
        raise CheckpointError(f"{show_path(folders[0])} holds no safetensors file.", hint)
    paths: list[Path | None] = []
    gone: list[str] = []
    broken: list[str] = []
    for name in names:
        path, wrong = _find_one(folders, name, report)
        paths.append(path)
        if path is None:
            (broken if wrong else gone).append(wrong or name)
    needed = [n for n in gone if not index or index.text[n]]
    if needed:
        report.error(_missing_text(folders[0], needed, len(names), index), _FETCH)
    report.each("error", (f"{wrong}." for wrong in broken), "Download this file again.")
    for name in set(gone) - set(needed):
        report.warn(
            f"The shard {show_path(name)} is missing; it holds only vision tensors, "
            "which text never reads.",
            "Nothing to do for text.",
        )
    if index:
        stray = sorted({p.name for f in folders for p in f.glob("*.safetensors")} - set(names))
        if stray:
            report.note(f"Not named by the index, and ignored: {listing(map(show_path, stray))}.")
    return Shards(names, paths, index)


def _missing_text(folder: Path, gone: list[str], total: int, index: Index | None) -> str:
    counted = [
        f"{show_path(n)} ({count_of(index.text[n] + index.vision[n], 'tensor')})"
        if index
        else show_path(n)
        for n in gone
    ]
    verb = "is" if len(gone) == 1 else "are"
    return f"{len(gone)} of {total} shards {verb} missing from {show_path(folder)}: " + (
        listing(counted, 100) + "."
    )


def _find_one(folders: list[Path], name: str, report: Report) -> tuple[Path | None, str | None]:
    found: list[tuple[Path, Path]] = []
    wrong: str | None = None
    for folder in folders:
        real, problem = look_at(folder / name)
        wrong = wrong or problem
        if real is not None and all(real != other for _, other in found):
            found.append((folder / name, real))
    sizes = {os.stat(real).st_size for _, real in found}
    if len(sizes) > 1:
        report.error(
            f"The shard {show_path(name)} lies in several folders with different sizes: "
            + ", ".join(f"{show_path(p)} ({os.stat(r).st_size} bytes)" for p, r in found)
            + ".",
            "Keep the right one and remove or rename the others.",
        )
    return (found[0][1], None) if found else (None, wrong)


_NUMBERED: Final = re.compile(r"(.*-)(\d+)(-of-)(\d+)\.safetensors")


def _names_without_index(folders: list[Path]) -> list[str]:
    """All shards of the folders; numbered names also say which others must exist."""
    names = {p.name for folder in folders for p in folder.glob("*.safetensors")}
    if "model.safetensors" in names:
        return ["model.safetensors"]
    for name in list(names):
        match = _NUMBERED.fullmatch(name)
        if match and int(match[4]) <= 100_000:
            width = len(match[2])
            names |= {
                f"{match[1]}{i:0{width}d}{match[3]}{match[4]}.safetensors"
                for i in range(1, int(match[4]) + 1)
            }
    return sorted(names)
