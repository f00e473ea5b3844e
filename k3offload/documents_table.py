"""Documents that are rows of a file: JSONL, CSV, TSV, Parquet.

This file knows rows, columns and lines, and reads them one after another: memory holds one row,
or one small batch of a Parquet file, never the file.  A bad row is a row with an error; only a
file that cannot be read as a whole, or no further, raises ``DocumentError``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TextIO

from .documents_jsonl import json_lines, json_rows
from .documents_row import (
    CHOOSE,
    Content,
    Fields,
    Row,
    checked_id,
    columns,
    make_row,
    no_utf16,
)
from .documents_text import HALF, checked, open_file, utf8
from .errors import DocumentError

KINDS: Final = ("jsonl", "csv", "tsv", "parquet")
_SKIP: Final = 1 << 20  #: characters of a line that are passed over at a time
_BATCH: Final = 16  #: rows of a Parquet file that are built at a time


def read_rows(path: Path, kind: str, name: str, fields: Fields, limit: int) -> Iterator[Row]:
    """The rows of ``path``, each of ``limit`` bytes at most; ``name`` stands in messages.

    Raises ``DocumentError`` before the first row for a file that cannot be read so, has not the
    columns or is empty, and after some for one that cannot be read further.
    """
    empty = True
    try:
        with open_file(path, name) as file:
            for row in _READERS[kind](file, name, fields, limit):
                empty = False
                yield row
    except OSError as error:
        raise DocumentError(
            f"{name} cannot be read further: {error.strerror or error}.", "Check the disk."
        ) from error
    if empty:
        raise DocumentError(f"{name} holds no document.", "Leave it out, or give it rows.")


def count_rows(path: Path, kind: str, name: str, limit: int) -> int:
    """How many documents ``read_rows`` would give, at least 1, by a quicker look."""
    try:
        with open_file(path, name) as file:
            if kind == "jsonl":
                number = sum(
                    1 for _, line in json_lines(file, limit) if line is None or line.strip()
                )
            elif kind == "parquet":
                number = _parquet(file, name).metadata.num_rows
            else:
                number = sum(1 for _ in _records(_unicode(file, name), limit, _comma(kind))) - 1
    except (DocumentError, OSError):
        return 1  # the file is one document with an error
    return max(1, number)


# CSV


class _TooLong(Exception):
    """A record goes on behind ``limit`` characters, inside quotes."""


class _Lines:
    """Lines for ``csv.reader``, which asks for the next one while a quote is open.

    A record of more than ``limit`` characters raises ``_TooLong`` when one more line is asked
    for.  A new reader then goes on inside the quotes, so that what follows is read right and a
    quote that is never closed takes no memory.
    """

    def __init__(self, file: TextIO, limit: int) -> None:
        self._file, self._limit = file, limit
        self._ended = 0  # lines
        self._cut = False
        self.begin()

    def begin(self) -> None:
        """The next line begins a record."""
        while self._cut:  # what is left of a line that was too long
            self._cut = self._goes_on(self._file.readline(_SKIP))
        self._used, self._reopened = 0, False
        self.first, self.long, self.nul, self.unclosed = self._ended + 1, False, False, False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._used > self._limit:
            self._used, self._reopened = 1, True
            raise _TooLong
        line = self._file.readline(self._limit + 1)
        while len(line) > self._limit and line.endswith(('"', "\r")):
            more = self._file.read(1)  # of a doubled quote, or a line end, both halves are needed
            if not more:
                break
            line += more
        if not line:
            self.unclosed = self._used > 0
            raise StopIteration
        self._used += len(line)
        self.long = self.long or self._used > self._limit
        self._cut = self._goes_on(line)
        if "\0" in line:  # Python 3.10's reader would stop at it
            self.nul, line = True, line.replace("\0", "\ufffd")
        if self._reopened:
            self._reopened, line = False, '"' + line
        return line

    def _goes_on(self, line: str) -> bool:
        ends = line.endswith(("\n", "\r"))
        self._ended += ends
        return bool(line) and not ends


class _Record(NamedTuple):
    first: int  # line
    cells: list[str]
    fault: str = ""


def _records(file: TextIO, limit: int, comma: str) -> Iterator[_Record]:
    """Records of a CSV file that are not blank, the header too; ``fault`` for what is none."""
    csv.field_size_limit(max(csv.field_size_limit(), 2 * limit + 2))
    lines = _Lines(file, limit)
    cells: list[str] | None = None
    while True:
        lines.begin()
        reader = csv.reader(lines, delimiter=comma, strict=True)
        fault, cells = "", None
        while cells is None:
            try:
                cells = next(reader)
            except _TooLong:
                reader = csv.reader(lines, delimiter=comma, strict=True)
            except StopIteration:
                if not lines.unclosed:
                    return
                cells = []
            except csv.Error as error:
                fault, cells = str(error), []
        if lines.unclosed:
            fault = "a quote is not closed up to the end of the file"
        elif lines.long:
            fault = f"it is too large: the limit is {limit:,} characters"
        elif lines.nul:
            fault = "it holds a NUL, which is no text"
        if cells or fault:
            yield _Record(lines.first, cells, fault)


def _csv_rows(
    file: BinaryIO, name: str, fields: Fields, limit: int, comma: str = ","
) -> Iterator[Row]:
    records = _records(_unicode(file, name), limit, comma)
    header = next(records, None)
    if header is None:
        return
    if header.fault:
        raise DocumentError(
            f"{name}:{header.first} is no header: {header.fault}.", "Name the columns there."
        )
    names = header.cells
    id_name, text_name = columns(names, fields, name)
    assert text_name is not None
    which = None if id_name is None else names.index(id_name), names.index(text_name)
    for record in records:
        yield _csv_row(record, f"{name}:{record.first}", names, which, limit)


def _csv_row(
    record: _Record, place: str, names: list[str], which: tuple[int | None, int], limit: int
) -> Row:
    """The row of ``record``, whose id and text are the cells ``which``."""
    cells = record.cells
    id_cell, text_cell = which
    if record.fault:
        error = DocumentError(f"{place} is no row: {record.fault}.", "Mend its quotes, or cut it.")
        return Row(record.first, error=error)
    if len(cells) != len(names):
        error = DocumentError(
            f"{place} has {len(cells)} cells, and the header names {len(names)}.",
            "Quote texts that hold commas, quotes or line ends.",
        )
        return Row(record.first, error=error)

    def cell(index: int) -> str:
        text = cells[index]
        if HALF.search(text):
            utf8(text.encode("utf-8", "surrogateescape"), f"{place}: {names[index]!r}")
        return text

    def id_of() -> str | None:
        return None if id_cell is None else checked_id(cell(id_cell), names[id_cell], place)

    def content() -> Content:
        return Content(checked(cell(text_cell), f"{place}: {names[text_cell]!r}", limit))

    return make_row(record.first, id_of, content)


def _unicode(file: BinaryIO, name: str) -> TextIO:
    no_utf16(file, name)
    # A byte that is not UTF-8 is carried into its cell, and refused there by name.
    return io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")


def _comma(kind: str) -> str:
    return "\t" if kind == "tsv" else ","


# Parquet


def _parquet(file: BinaryIO, name: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # Read as it is asked for, not a whole row group ahead.
        return pyarrow.parquet.ParquetFile(
            file, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        )
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DocumentError(
            f"{name} cannot be read as Parquet: {str(error)[:200].rstrip('.')}.",
            "Write it again, or leave it out.",
        ) from error


def _parquet_rows(file: BinaryIO, name: str, fields: Fields, limit: int) -> Iterator[Row]:
    import pyarrow

    table = _parquet(file, name)
    schema = table.schema_arrow
    chosen = columns(schema.names, fields, name)
    for what, column in zip(("id", "text"), chosen, strict=True):
        if column is None:
            continue
        kind = schema.field(column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        fine = str(kind) in ("string", "large_string", "string_view")
        if not fine and not (what == "id" and pyarrow.types.is_integer(kind)):
            raise DocumentError(
                f"{name}: the column {column!r} is {kind} and no text.", CHOOSE.format(what)
            )
    number = 0
    batches = table.iter_batches(_BATCH, columns=[c for c in chosen if c is not None])
    while True:
        try:
            batch = next(batches, None)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DocumentError(
                f"{name} cannot be read after row {number}: {str(error)[:200].rstrip('.')}.",
                "Write it again.",
            ) from error
        if batch is None:
            return
        for index in range(batch.num_rows):
            number += 1
            yield _parquet_row(batch, index, number, f"{name}:{number}", chosen, limit)


def _parquet_row(
    batch: Any, index: int, number: int, place: str, chosen: Fields, limit: int
) -> Row:
    def cell(column: str) -> Any:
        try:
            return batch.column(column)[index].as_py()
        except UnicodeDecodeError as error:
            what = f"byte {error.start} is {error.object[error.start]:#04x}"
            raise DocumentError(
                f"{place}: {column!r} is not UTF-8: {what}.", "Write the file from UTF-8 texts."
            ) from error

    def id_of() -> str | None:
        return None if chosen.id is None else checked_id(cell(chosen.id), chosen.id, place)

    def content() -> Content:
        assert chosen.text is not None
        text = cell(chosen.text)
        if text is None:
            raise DocumentError(f"{place}: {chosen.text!r} is null.", "Leave it out, or fill it.")
        return Content(checked(text, f"{place}: {chosen.text!r}", limit))

    return make_row(number, id_of, content)


def _tsv_rows(file: BinaryIO, name: str, fields: Fields, limit: int) -> Iterator[Row]:
    return _csv_rows(file, name, fields, limit, "\t")


_READERS: Final = {
    "jsonl": json_rows,
    "csv": _csv_rows,
    "tsv": _tsv_rows,
    "parquet": _parquet_rows,
}
