"""Read every byte of the text tensors once and check what the numbers can tell.

This file knows number formats and reads in bounded chunks.  It knows nothing of layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from .errors import CheckpointError
from .findings import Report
from .headers import HeaderEntry, read_header
from .inventory import VISION_PREFIXES
from .paths import show_path

CHUNK: Final = 8 << 20  #: bytes read at a time; a multiple of every element size
_AGAIN: Final = "Download or copy the shard again."
#: all exponent bits set means NaN or infinity: (element type, mask)
_EXPONENT: Final = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
}


def check_values(
    paths: list[Path],
    heads: int | None,
    report: Report,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Report scale bytes 255 (NaN), non-finite floats and a used ``A_log`` tail, by tensor name.

    ``heads`` is the number of KDA heads (None: unknown, the tails are not checked).  Files whose
    header cannot be read are skipped; that is reported elsewhere.
    """
    files: list[tuple[Path, list[HeaderEntry]]] = []
    for path in paths:
        try:
            entries = [e for e in read_header(path) if not e.name.startswith(VISION_PREFIXES)]
        except CheckpointError:
            continue
        files.append((path, sorted(entries, key=lambda e: e.begin)))
    total = sum(e.end - e.begin for _, entries in files for e in entries)
    done = 0
    for path, entries in files:
        try:
            with open(path, "rb", buffering=0) as file:
                for entry in entries:
                    _check_tensor(file, entry, heads, report)
                    done += entry.end - entry.begin
                    if progress is not None:
                        progress(done, total)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            report.error(f"{show_path(path)} cannot be read: {error.strerror}.", _AGAIN)


def _check_tensor(file: BinaryIO, entry: HeaderEntry, heads: int | None, report: Report) -> None:
    buffer = np.empty(min(CHUNK, entry.end - entry.begin), np.uint8)
    bad, at = 0, entry.begin
    while at < entry.end:
        chunk = buffer[: min(CHUNK, entry.end - at)]
        if not _fill(file, at, chunk):
            report.error(
                f"{show_path(file.name)} ended at byte {at} inside tensor {entry.name} while it "
                "was read.",
                "Something shortens the file; download or copy it again.",
            )
            return
        bad += _count_bad(entry, chunk)
        if heads is not None and entry.name.endswith("A_log") and entry.dtype in _EXPONENT:
            _check_tail(entry, chunk, at - entry.begin, heads, report)
        at += len(chunk)
    if bad and entry.dtype == "U8":
        report.error(f"The tensor {entry.name} holds {bad} scale bytes of 255 (NaN).", _AGAIN)
    elif bad:
        report.error(f"The tensor {entry.name} holds {bad} values that are not finite.", _AGAIN)


def _fill(file: BinaryIO, at: int, chunk: npt.NDArray[np.uint8]) -> bool:
    """Fill ``chunk`` from byte ``at``; False when the file ends first."""
    view, have = chunk.data, 0
    while have < len(chunk):
        got = os.preadv(file.fileno(), [view[have:]], at + have)
        if got == 0:
            return False
        have += got
    return True


def _count_bad(entry: HeaderEntry, chunk: npt.NDArray[np.uint8]) -> int:
    if entry.name.endswith(".weight_scale") and entry.dtype == "U8":
        return int((chunk == 255).sum())
    if entry.dtype not in _EXPONENT:
        return 0
    element, mask = _EXPONENT[entry.dtype]
    return int(((chunk.view(element) & element(mask)) == mask).sum())


def _check_tail(
    entry: HeaderEntry, chunk: npt.NDArray[Any], done: int, heads: int, report: Report
) -> None:
    """``A_log`` beyond its heads must be zero of either sign; ``done`` bytes came before."""
    element, _ = _EXPONENT[entry.dtype]
    values = chunk.view(element)
    magnitude = values[max(0, heads - done // values.itemsize) :] << element(1)
    if magnitude.any():
        report.error(
            f"The tensor {entry.name} is not zero beyond its {heads} heads.",
            "The config.json and the shards do not belong together, or the shard is damaged.",
        )
