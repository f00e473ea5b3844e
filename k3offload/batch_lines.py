"""Records as lines of JSON: written the same everywhere, read back with the number of a bad line.

Lines are UTF-8 whatever the locale.  A lone surrogate (of a file name that is no UTF-8, say) is
escaped, and so are the characters besides the newline at which some readers end a line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from .errors import BatchError, UsageError
from .paths import show_path

BEGIN: Final = b'{"id"'  #: how each of our lines begins, so that half of one is known as ours
LONGEST: Final = 1 << 30  #: bytes of a line; a file of something else is not read into memory
_ENDS: Final = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_REMEDY: Final = (
    "Remove that line, and its document is computed again; or start anew with --overwrite."
)


def digest(*parts: str | bytes | Mapping[str, Any]) -> str:
    """SHA-256, in hex, over all that decides an answer: texts, bytes, and options as canonical
    JSON, each with its kind and length before it.

    Raises ``UsageError`` for a number that JSON does not have.
    """
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            kind, data = b"s", part.encode("utf-8", "surrogatepass")
        elif isinstance(part, bytes):
            kind, data = b"b", part
        else:
            kind, data = b"j", _canonical(part)
        whole.update(kind + len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()


def _canonical(part: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(dict(part), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise UsageError(
            f"An option has no form in JSON: {error}.", "Give finite numbers only."
        ) from error
    return text.encode()


def encode(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """``content`` as JSON with a newline.  Raises ``ValueError`` for NaN and infinity."""
    text = json.dumps(dict(content), ensure_ascii=False, allow_nan=False, indent=indent)
    for end, escaped in _ENDS.items():
        text = text.replace(end, escaped)
    # What UTF-8 cannot hold is a surrogate inside a string, and there this is JSON's own escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def record_line(record: Mapping[str, Any]) -> tuple[bytes, str]:
    """The line of ``record``, id and digest first; and what was wrong with it, '' if nothing.

    A record that JSON cannot hold becomes one that says so: one answer must not end the batch.
    """
    head = {"id": record["id"], "digest": record["digest"]}
    try:
        return encode({**head, **record}), ""
    except (ValueError, RecursionError) as error:
        wrong = f"The answer cannot be written as JSON: {error}."
        return encode({**head, "error": wrong}), wrong


class Line(NamedTuple):
    """A record in the file: where its line is (bytes), and what a later run must know of it."""

    begin: int
    length: int  #: with its newline, which the last one may lack
    id: str
    digest: str
    failed: bool
    retry: bool


def read_lines(file: BinaryIO, path: Path) -> Iterator[Line | int]:
    """Every record of ``file``, and at the end the bytes of a last line that was half written.

    Raises ``BatchError`` naming the line for any other damage.
    """
    at, number = 0, 0
    while data := file.readline(LONGEST + 1):
        number += 1
        found = _parse(data)
        if isinstance(found, Line):
            yield found._replace(begin=at)
        elif found:
            whole = data.endswith(b"\n") or len(data) > LONGEST
            ours = data.startswith(BEGIN) or BEGIN.startswith(data) or not data.strip(b"\0")
            if whole or not ours:
                raise BatchError(f"{show_path(path)}, line {number}, is damaged: {found}.", _REMEDY)
            yield len(data)
        at += len(data)


def _parse(data: bytes) -> Line | str:
    """The record in ``data``, or what is wrong with it; '' for an empty line."""
    if len(data) > LONGEST:
        return "it is longer than any record"
    try:
        record = json.loads(data.decode())
    except (ValueError, RecursionError):
        return "it is not a line of JSON" if data.strip() else ""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    for field in ("id", "digest"):
        if not isinstance(record.get(field), str):
            return f'it has no text "{field}"'
    failed, retry = record.get("error") is not None, record.get("retry") is True
    return Line(0, len(data), record["id"], record["digest"], failed, retry)
