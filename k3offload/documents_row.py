"""One row of a table of documents, whatever the table is written in.

This file knows ids, texts and chosen columns.  It opens nothing.  Names that people did not choose
are ``prompt``, else ``text``, for the text, and ``id``, where there is one, for the id.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple

from .documents_text import HALF
from .errors import DocumentError
from .findings import listing

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
CHOOSE: Final = "Choose the column or field of the {0} with {0}_field (--{0}-field)."


class Fields(NamedTuple):
    """Columns or fields that people chose; None where they did not."""

    id: str | None = None
    text: str | None = None


class Content(NamedTuple):
    """What is asked of a model: a text, or else messages with what belongs to them (``chat``)."""

    text: str
    settings: Mapping[str, Any] = NOTHING
    chat: Mapping[str, Any] | None = None


class Row(NamedTuple):
    """One document of a table.

    place: the line it begins in, for Parquet its number; both from 1.
    id: as it stands there, None where there is none that can be used.
    """

    place: int
    id: str | None = None
    text: str = ""
    error: DocumentError | None = None
    settings: Mapping[str, Any] = NOTHING
    chat: Mapping[str, Any] | None = None


def make_row(place: int, id_of: Callable[[], str | None], content: Callable[[], Content]) -> Row:
    """The row of an id and a ``content``, or with the first error of them.

    A good id stays with a text that is bad.
    """
    known = None
    try:
        known = id_of()
        text, settings, chat = content()
    except DocumentError as error:
        return Row(place, known, error=error)
    return Row(place, known, text, settings=settings, chat=chat)


def checked_id(value: object, field: str, place: str) -> str:
    """The id ``value`` as text.  Raises ``DocumentError`` unless it is a text or whole number."""
    if type(value) is int:
        return str(value)
    if not isinstance(value, str):
        problem = f"is {kind_of(value)}"
    elif not value.strip():
        problem = "is empty"
    elif HALF.search(value):
        problem = "is no UTF-8"
    else:
        return value
    raise DocumentError(f"{place}: the id in {field!r} {problem}.", "Give it a text or a number.")


def missing(
    what: str, field: str, names: Sequence[str] | Mapping[str, Any], place: str
) -> DocumentError:
    """``place`` has no column or field for ``what``, ``id`` or ``text``."""
    has = f"it has {listing(map(short, names))}" if names else "it has none"
    return DocumentError(f"{place} has no {field!r}: {has}.", CHOOSE.format(what))


def columns(names: Sequence[str], fields: Fields, place: str) -> Fields:
    """The columns to read, of those that there are.  Raises ``DocumentError``."""
    usual = "text" if "prompt" not in names and "text" in names else "prompt"
    chosen = Fields(fields.id or ("id" if "id" in names else None), fields.text or usual)
    for what, name in zip(("id", "text"), chosen, strict=True):
        if name is not None and name not in names:
            raise missing(what, name, names, place)
        if name is not None and names.count(name) > 1:
            raise DocumentError(f"{place} has two columns {name!r}.", "Rename one.")
    return chosen


def no_utf16(file: BinaryIO, name: str) -> None:
    """Raises ``DocumentError`` for a table that is not in UTF-8 by its byte order mark."""
    start = file.peek(4) if isinstance(file, io.BufferedReader) else b""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise DocumentError(
            f"{name} is UTF-16 or UTF-32; tables are read as UTF-8.",
            "Convert it (iconv -f UTF-16 -t UTF-8).",
        )


def short(value: object) -> str:
    """``value`` as it is written in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def kind_of(value: object) -> str:
    """What a JSON value is, for messages: ``a list``, ``null``."""
    names = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
    return "null" if value is None else names.get(type(value), "a number")
