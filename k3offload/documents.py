"""The documents of a batch, one after another, from what a person has: files, folders, tables.

This file knows where documents are found and what they are called; the text of a file comes from
``documents_text.py``, rows of a table from ``documents_table.py``.  It knows nothing of models.

A document that cannot be read is a ``Document`` with an ``error``: the others go on.  Only what
makes the whole input useless raises, and does so before the first document.  Memory holds one
document, the names in one folder (or of all files that match a pattern), and a hash of each id.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from .documents_row import Fields
from .documents_table import KINDS as TABLES
from .documents_table import count_rows, read_rows
from .documents_text import LIMIT, printable, read_text
from .errors import DocumentError, K3Error, UsageError

KINDS: Final = ("text", "html", "pdf", *TABLES)
#: What a file is by the end of its name, in any case; every other file is tried as text.
SUFFIXES: Final = {
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".pdf": "pdf",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
#: Modules that a kind needs and the base install does not bring; the extra is named as the kind.
_NEEDS: Final = {"html": "bs4", "pdf": "pypdf", "parquet": "pyarrow.parquet"}


@dataclass(frozen=True)
class Document:
    """One document of a batch.

    id: unique in the batch, and UTF-8.  Of a file it is the path below the folder or pattern, of
        a row its id, or ``FILE:LINE`` where it has none.
    text: what fills the prompt; empty where there is an ``error`` or a ``chat``.
    error: why it cannot be read.
    source: the file, or ``FILE:LINE``, for messages; in one line.
    settings: what a batch request sets for itself, as ``documents_jsonl.SETTINGS`` and ``model``.
    note: what the report should say of a document that could be read, such as a damage mended.
    chat: messages to answer in the model's chat format: the arguments of ``chat.Encoder.encode`` by
        name, but ``reasoning_effort`` for the effort, as in OpenAI's requests.
    """

    id: str
    text: str = ""
    error: K3Error | None = None
    source: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    chat: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """Characters of what is asked."""
        return len(self.text) if self.chat is None else len(repr(self.chat))


class _Found(NamedTuple):
    """A file of the input, or a folder that cannot be listed; ``inside`` is its name there."""

    path: str
    inside: str
    error: DocumentError | None = None


def read_documents(
    inputs: str | os.PathLike[str],
    *,
    id_field: str | None = None,
    text_field: str | None = None,
    kind: str | None = None,
    limit: int = LIMIT,
    but: Path | None = None,
) -> Iterator[Document]:
    """The documents of ``inputs``: a file, a pattern such as ``notes/**/*.md``, or a folder.

    Of a folder all files below it are read, sorted, hidden ones left out; of a
    pattern the files that match, sorted.  What a file is says its suffix (``SUFFIXES``), or
    ``kind`` for all of them.  Tables give a document for each row, also where they lie in a
    folder; ``id_field`` and ``text_field`` choose their columns.  ``limit`` is in bytes, of a file
    that is one document or of one row.  ``but``: a file, by its real path, that is no part of the
    input, nor is what lies beside it under its name: where the answers go.

    Raises ``UsageError`` at the call for an input that is not there or has no files, a missing
    extra, and a table given by itself that cannot be read or has not the columns.
    """
    fields, kinds, first = Fields(id_field, text_field), set(), None
    if limit < 1:
        raise UsageError(f"The limit is {limit} bytes.", "Give at least 1.")
    for found in _without(but, _found(inputs, kind)):
        first = first or found
        kinds.add(_kind(found, kind))
    if first is None:
        raise UsageError(f"{printable(inputs)} holds no files.", "Hidden ones do not count.")
    for needed in sorted(kinds & _NEEDS.keys()):
        _import(needed, f"{printable(inputs)} holds {needed.upper()}")
    if (id_field or text_field) and not kinds & set(TABLES):
        raise UsageError(
            f"{printable(inputs)} holds no table, so there is no field to choose.",
            f"Leave out id_field and text_field, or say its kind: {', '.join(TABLES)}.",
        )
    if first.path == os.fspath(inputs) and (table := _kind(first, kind)) in TABLES:
        try:
            next(read_rows(Path(first.path), table, printable(first.path), fields, limit), None)
        except DocumentError as error:
            raise UsageError(error.problem, error.remedy) from error
    return _documents(inputs, kind, fields, limit, but)


def count_documents(
    inputs: str | os.PathLike[str],
    *,
    kind: str | None = None,
    limit: int = LIMIT,
    but: Path | None = None,
) -> int | None:
    """How many documents ``read_documents`` will give, as it stands now.

    Files are counted without opening them, rows by streaming through their table.  None where an
    extra is missing.  Raises ``UsageError`` for an input that is not there.
    """
    number = 0
    for found in _without(but, _found(inputs, kind)):
        table = _kind(found, kind)
        if found.error or table not in TABLES:
            number += 1
            continue
        try:
            if table in _NEEDS:
                _import(table, printable(found.path))
        except UsageError:
            return None
        number += count_rows(Path(found.path), table, printable(found.path), limit)
    return number


def _import(kind: str, what: str) -> None:
    try:
        importlib.import_module(_NEEDS[kind])
    except ImportError as error:
        raise UsageError(
            f"{what}, and the package for it is not installed.",
            f"Install it: pip install 'k3offload[{kind}]'.",
        ) from error


def _kind(found: _Found, chosen: str | None) -> str:
    return chosen or SUFFIXES.get(os.path.splitext(found.path)[1].lower(), "text")


def _without(out: Path | None, files: Iterator[_Found]) -> Iterator[_Found]:
    """``files`` without the output of a batch and what it keeps beside it."""
    ours = {f"{out}{ending}" for ending in ("", ".run.json", ".part")}
    for found in files:
        real = "" if out is None else os.path.realpath(found.path)
        if real not in ours and not real.startswith(f"{out}.state{os.sep}"):
            yield found


def _found(inputs: str | os.PathLike[str], kind: str | None) -> Iterator[_Found]:
    """Files of ``inputs`` in order.  Raises ``UsageError`` for what is not there."""
    text, shown = os.fspath(inputs), printable(inputs)
    if kind is not None and kind not in KINDS:
        raise UsageError(f"{kind!r} is no kind of document.", f"Choose of {', '.join(KINDS)}.")
    if "\0" in text or any("\ud800" <= c <= "\udc7f" or "\udd00" <= c <= "\udfff" for c in text):
        raise UsageError(f"{shown} can be no file name.", "Name a file, a folder or a pattern.")
    if os.path.isdir(text):
        yield from _below(text)
    elif os.path.lexists(text):  # also a name with the characters of a pattern
        yield _Found(text, printable(os.path.basename(text)))
    elif glob.has_magic(text):
        yield from _matches(text)
    else:
        raise UsageError(
            f"{shown or 'The empty name'} is no file and no folder.",
            "Name a file, a folder, or a pattern in quotes.",
        )


def _matches(pattern: str) -> Iterator[_Found]:
    every = sorted(set(glob.iglob(pattern, recursive=True)))
    if not every:
        raise UsageError(f"{printable(pattern)} matches nothing.", "Mend the pattern.")
    base = pattern
    while glob.has_magic(base):
        base = os.path.dirname(base)
    files = [match for match in every if not os.path.isdir(match)]
    if not files:
        raise UsageError(
            f"{printable(pattern)} matches folders only.", "For what is in them, end it in /**."
        )
    rounds: dict[str, bool] = {}
    for file in files:
        folder = os.path.dirname(file)
        if folder not in rounds:
            rounds[folder] = _goes_round(folder, base)
        if not rounds[folder]:
            yield _Found(file, printable(os.path.relpath(file, base or ".")))


def _goes_round(folder: str, base: str) -> bool:
    """Whether ``folder`` lies below itself, by a link that ``**`` has followed."""
    keys = []
    while len(folder) >= len(base):
        with contextlib.suppress(OSError):
            keys.append(_key(folder or "."))
        if not folder or folder == os.path.dirname(folder):
            break
        folder = os.path.dirname(folder)
    return len(set(keys)) < len(keys)


def _key(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _below(root: str) -> Iterator[_Found]:
    """Files below ``root``, by their path; links to folders are followed, but not back up."""
    trail: list[tuple[str, Iterator[str], tuple[int, int]]] = []

    def enter(inside: str) -> None:
        place = os.path.join(root, inside)
        if all(above != _key(place) for *_, above in trail):
            trail.append((inside, iter(_names(place)), _key(place)))

    def unlisted(path: str, error: OSError) -> tuple[str, str]:
        what = f"{printable(path)} cannot be listed: {error.strerror or error}."
        return what, "Make it readable (chmod u+rx)."

    try:
        enter("")
    except OSError as error:
        raise UsageError(*unlisted(root, error)) from error
    while trail:
        inside, names, _ = trail[-1]
        name = next(names, None)
        if name is None:
            trail.pop()
            continue
        inside += name
        path, fault = os.path.join(root, inside), None
        if name.endswith("/"):
            try:
                enter(inside)
                continue
            except OSError as error:
                fault = DocumentError(*unlisted(path, error))
        yield _Found(path, printable(inside), fault)


def _names(folder: str) -> list[str]:
    """Names in ``folder``, sorted, those of folders with a slash behind; hidden ones left out."""
    with os.scandir(folder) as entries:
        return sorted(e.name + "/" * _is_folder(e) for e in entries if e.name[0] != ".")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that cannot be followed; opening it will say why
        return False


def _documents(
    inputs: str | os.PathLike[str],
    kind: str | None,
    fields: Fields,
    limit: int,
    but: Path | None,
) -> Iterator[Document]:
    ids = _Ids()
    for found in _without(but, _found(inputs, kind)):
        for document in _of_file(found, _kind(found, kind), fields, limit):
            yield ids.unique(document)


def _of_file(found: _Found, kind: str, fields: Fields, limit: int) -> Iterator[Document]:
    name, path = printable(found.path), Path(found.path)
    try:
        if found.error:
            raise found.error
        if kind in _NEEDS:
            _import(kind, name)
        if kind not in TABLES:
            text, note = read_text(path, kind, name, limit)
            yield Document(found.inside, text, source=name, note=note)
            return
        for row in read_rows(path, kind, name, fields, limit):
            place = f":{row.place}"
            document_id = found.inside + place if row.id is None else row.id
            yield Document(
                document_id, row.text, row.error, name + place, row.settings, chat=row.chat
            )
    except K3Error as error:
        yield Document(found.inside, error=error, source=name)


class _Ids:
    """Ids that were given, as hashes of 16 bytes."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._twins: dict[bytes, int] = {}

    def unique(self, document: Document) -> Document:
        """``document``, or where its id is taken, one with an error and an id of its own."""
        if self._new(document.id):
            return document
        key = _hash(document.id)
        number = self._twins.get(key, 1) + 1
        while not self._new(f"{document.id}#{number}"):
            number += 1
        self._twins[key] = number
        error = document.error or DocumentError(
            f"{document.source}: the id {document.id!r} was there before.",
            "Give every document an id of its own.",
        )
        return replace(document, id=f"{document.id}#{number}", text="", chat=None, error=error)

    def _new(self, name: str) -> bool:
        before = len(self._known)
        self._known.add(_hash(name))
        return len(self._known) > before


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
