"""Headers of safetensors files, read by hand because they may be hostile or huge.

This file knows the container: 8 bytes little-endian header length, a JSON object, then the data the
offsets count from.  It knows nothing of models.  No data is read and no file stays open.
"""

from __future__ import annotations

import io
import json
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

import numpy as np

from .config_fields import no_key_twice
from .errors import CheckpointError
from .inventory import DTYPE_BITS
from .json_stream import pairs
from .paths import show_path

HEADER_LIMIT: Final = 100_000_000  #: bytes; the format's own bound
STREAM_ABOVE: Final = 8_000_000  #: bytes; larger headers are parsed as a stream, in bounded memory
_AGAIN: Final = "Download or copy this file again."


class HeaderEntry(NamedTuple):
    """One tensor of a header; ``begin`` and ``end`` are absolute byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Window(io.RawIOBase):
    """``length`` bytes of an open file from where it stands, for the streaming parser."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file, self._left = file, length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


def _json_entries(file: BinaryIO, length: int) -> Iterator[tuple[str, Any]]:
    """Keys and values of the header object; raises ``ValueError`` on anything but one object."""
    if length <= STREAM_ABOVE:
        value = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=no_key_twice)
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
        yield from value.items()
        return
    yield from pairs(cast(BinaryIO, _Window(file, length)))


def _whole(value: Any, top: int) -> bool:
    return type(value) is int and 0 <= value <= top


def _entry(name: str, raw: Any, start: int, size: int, shown: str) -> HeaderEntry:
    """Check one header value against shape, dtype and file size."""

    def bad(problem: str) -> CheckpointError:
        return CheckpointError(f"{shown}: tensor {name!r}: {problem}.", _AGAIN)

    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise bad("its header entry must hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise bad(f"the dtype {str(dtype)[:40]!r} is not known")
    if not isinstance(shape, list) or not all(_whole(n, 1 << 62) for n in shape):
        raise bad("its shape is not a list of whole numbers")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_whole(n, 1 << 63) for n in offsets)
    ):
        raise bad("its data_offsets are not two whole numbers")
    begin, end = offsets
    if end < begin:
        raise bad(f"it ends at {end} before it begins at {begin}")
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise bad(
            f"{end - begin} bytes of data do not hold shape {shape} of {dtype} "
            f"({math.prod(shape) * bits // 8} bytes)"
        )
    return HeaderEntry(name, dtype, tuple(shape), start + begin, start + end)


def _header_length(file: BinaryIO, size: int, shown: str) -> int:
    raw = file.read(8)
    length = int.from_bytes(raw, "little")
    if len(raw) < 8 or size < 8:
        raise CheckpointError(f"{shown} is only {size} bytes long, too short for a header.", _AGAIN)
    if length > HEADER_LIMIT:
        raise CheckpointError(
            f"{shown} declares a header of {length} bytes; the format allows {HEADER_LIMIT}.",
            "This is not a safetensors file, or it is damaged: download or copy it again.",
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{shown} is truncated: its header alone needs {8 + length} bytes, "
            f"the file has {size}.",
            _AGAIN,
        )
    return length


def _check_layout(spans: array[int], start: int, size: int, shown: str, name_at: Any) -> None:
    """Data must lie without gap or overlap from ``start`` to the end of the file.

    ``spans`` holds begin, end of every tensor; ``name_at(i)`` finds the name of entry ``i`` again.
    """
    table = np.frombuffer(spans, np.int64).reshape(-1, 2) if spans else np.zeros((0, 2), np.int64)
    order = np.lexsort((table[:, 1], table[:, 0]))
    begins, ends = table[order, 0], table[order, 1]
    expected = np.concatenate(([start], ends[:-1])) if len(ends) else ends
    wrong = np.nonzero(begins != expected)[0]
    if len(wrong):
        at = int(wrong[0])
        name, prior = name_at(int(order[at])), name_at(int(order[at - 1])) if at else None
        if begins[at] < expected[at]:
            raise CheckpointError(f"{shown}: tensors {prior!r} and {name!r} overlap.", _AGAIN)
        gap = int(begins[at] - expected[at])
        raise CheckpointError(f"{shown}: a gap of {gap} bytes lies before tensor {name!r}.", _AGAIN)
    end = int(ends[-1]) if len(ends) else start
    if end > size:
        past = name_at(int(order[int(np.argmax(ends > size))]))
        raise CheckpointError(
            f"{shown} is truncated: it should be {end} bytes long and is {size} "
            f"({end - size} bytes missing, first in tensor {past!r}).",
            _AGAIN,
        )
    if end < size:
        raise CheckpointError(
            f"{shown} has {size - end} bytes after its last tensor: it should be {end} bytes long "
            f"and is {size}.",
            _AGAIN,
        )


def read_header(path: Path, shown: str | None = None) -> Iterator[HeaderEntry]:
    """The tensors of one safetensors file in header order, checked against each other and the file.

    Raises ``CheckpointError`` naming file and tensor on a malformed header, at the latest when the
    iterator ends: layout (gaps, overlaps, truncation, trailing bytes) is known only then, so use
    nothing before the end.  Memory stays below a few times the header, at most ``STREAM_ABOVE``.
    """
    shown = shown or show_path(path)
    try:
        with open(path, "rb", buffering=1 << 16) as file:
            size = os.fstat(file.fileno()).st_size
            yield from _read_open(file, size, shown)
    except OSError as error:
        raise CheckpointError(
            f"{shown} cannot be read: {error.strerror}.", "Check the file and its permissions."
        ) from None


def _read_open(file: BinaryIO, size: int, shown: str) -> Iterator[HeaderEntry]:
    length = _header_length(file, size, shown)
    start = 8 + length
    spans, hashes = array("q"), array("q")
    try:
        for name, raw in _json_entries(file, length):
            if name == "__metadata__":
                _check_metadata(raw, shown)
                continue
            entry = _entry(name, raw, start, size, shown)
            if entry.end > (1 << 62):
                raise CheckpointError(f"{shown}: tensor {name!r} ends past any file.", _AGAIN)
            spans.extend((entry.begin, entry.end))
            hashes.append(hash(name))
            yield entry
    except (ValueError, RecursionError) as error:
        detail = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{shown}: the header is malformed: {detail[:200]}.", _AGAIN
        ) from None

    def name_at(index: int) -> str:
        file.seek(8)
        entries = (n for n, _ in _json_entries(file, length) if n != "__metadata__")
        return next(n for i, n in enumerate(entries) if i == index)

    table = np.sort(np.frombuffer(hashes, np.int64)) if hashes else np.zeros(0, np.int64)
    if length > STREAM_ABOVE and (table[1:] == table[:-1]).any():
        raise CheckpointError(f"{shown}: the header is malformed: a name stands twice.", _AGAIN)
    _check_layout(spans, start, size, shown, name_at)


def _check_metadata(raw: Any, shown: str) -> None:
    """``__metadata__`` may be absent, null, empty, or map strings to strings."""
    if raw is None:
        return
    if not isinstance(raw, dict) or not all(isinstance(v, str) for v in raw.values()):
        raise CheckpointError(f"{shown}: __metadata__ must map names to strings.", _AGAIN)
