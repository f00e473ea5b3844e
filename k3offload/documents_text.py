"""The text of one file: plain text, HTML or PDF.

This file knows bytes, encodings and the two libraries that take text out of HTML and PDF, which
are optional and imported when first needed.  It knows nothing of batches, ids or rows.

Text is taken as it is, line ends included: nothing is replaced, and an encoding is believed only
where the file itself declares it.  HTML goes through beautifulsoup4: it brings no parser of its own
to build and gives every visible word.  trafilatura, which guesses what the main text of a page is,
was left aside: what it takes for boilerplate, perhaps a table, would be missing in silence.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import stat
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from .errors import DocumentError
from .findings import listing

LIMIT: Final = 64_000_000  #: bytes of a file that is one document, or of one row
HALF: Final = re.compile("[\ud800-\udfff]")  #: surrogates, which no UTF-8 can hold

_BOMS: Final = (  # UTF-32 first: its little-endian mark begins like that of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_SKIPPED: Final = frozenset(("script", "style", "template", "title", "noscript", "iframe", "svg"))
#: Elements that stand in lines of their own, and those with an empty line around them.
_LINES: Final = re.compile(
    "address|article|aside|body|dd|details|dialog|div|dt|fieldset|figcaption|figure|footer|form|"
    "header|hr|html|legend|li|main|nav|option|section|summary|tbody|tfoot|thead|tr"
)
_PARAGRAPHS: Final = re.compile("blockquote|caption|dl|h[1-6]|ol|p|pre|table|ul")


def printable(path: str | os.PathLike[str]) -> str:
    r"""``path`` as text that prints in one line, different for different paths.

    Line ends, control characters and bytes that are not UTF-8 become ``\xNN`` or ``\uNNNN``, a
    backslash is doubled, and all else stays as it is.
    """
    text = os.fspath(path)
    odd = ("Cc", "Cs", "Zl", "Zp")
    return "".join(_escaped(c) if c == "\\" or unicodedata.category(c) in odd else c for c in text)


def _escaped(char: str) -> str:
    number = ord(char)
    if char == "\\":
        return "\\\\"
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a name that is not UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}"


def open_file(path: Path, name: str) -> BinaryIO:
    """``path`` for reading bytes.  Raises ``DocumentError`` for what is no readable file."""
    try:
        # Without O_NONBLOCK a pipe among the files would wait for a writer for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unread(path, name, error) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DocumentError(f"{name} is no regular file.", "Leave it out, or copy it to a file.")
    return os.fdopen(handle, "rb")


def _unread(path: Path, name: str, error: OSError) -> DocumentError:
    if isinstance(error, FileNotFoundError):
        if os.path.islink(path):
            target = printable(os.readlink(path))
            return DocumentError(
                f"{name} is a link to {target}, which is not there.", "Mend or remove the link."
            )
        return DocumentError(
            f"{name} has vanished since the files were listed.", "Put it back and run it again."
        )
    remedy = "Make it readable (chmod u+r)." if isinstance(error, PermissionError) else ""
    return DocumentError(
        f"{name} cannot be read: {error.strerror or error}.", remedy or "Check the file."
    )


def read_text(path: Path, kind: str, name: str, limit: int = LIMIT) -> tuple[str, str]:
    """Text of the file ``path`` of kind ``text``, ``html`` or ``pdf``, and a note on the reading.

    The note is empty, or says what a reader of the report should know: what had to be repaired,
    which pages hold no text.  ``limit`` counts bytes of the file and characters of the text.
    Raises ``DocumentError``, naming the file as ``name``.
    """
    try:
        with open_file(path, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise too_large(name, limit, f"{size:,} bytes")
            data = file.read(limit + 1)
    except OSError as error:
        raise _unread(path, name, error) from error
    if len(data) > limit:  # it has grown
        raise too_large(name, limit, "more")
    note = ""
    if kind == "pdf":
        text, note = _pdf_text(data, name, limit)
    else:
        text = _html_text(data, name) if kind == "html" else decoded(data, name)
    if kind == "text" or text.strip():
        return checked(text, name, limit), note
    if kind == "html":
        remedy = "Open it in a browser and save what that shows."
        raise DocumentError(f"{name} holds no visible text.", remedy)
    remedy = "If its pages are pictures, run text recognition (OCR) on it first."
    raise DocumentError(f"{name} holds no text ({note or 'it has no pages'}).", remedy)


def too_large(name: str, limit: int, has: str, unit: str = "bytes") -> DocumentError:
    """``name`` has more than ``limit`` bytes, or another ``unit``."""
    return DocumentError(
        f"{name} is too large: {has}, and the limit is {limit:,} {unit}.",
        "Cut it into several documents.",
    )


def decoded(data: bytes, name: str, encoding: str = "utf-8") -> str:
    """``data`` as text: by its byte order mark, which is taken off, else ``encoding``, strictly."""
    mark, encoding = next(((b, e) for b, e in _BOMS if data.startswith(b)), (b"", encoding))
    try:
        if not mark and b"\0" in data:
            raise _holds_nul(name, data.index(0))
        return data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise _not_text(name, error.start + len(mark), data, encoding) from error
    except (LookupError, ValueError) as error:
        raise DocumentError(
            f"{name} declares the encoding {encoding!r}, which is not known.",
            "Convert it to UTF-8, and declare that.",
        ) from error


def utf8(data: bytes, name: str) -> str:
    """``data`` as text, strictly, without a look at its beginning.  Raises ``DocumentError``."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_text(name, error.start, data, "utf-8") from error


def _not_text(name: str, at: int, data: bytes, encoding: str) -> DocumentError:
    return DocumentError(
        f"{name} is not {encoding.upper()}: byte {at} is {data[at]:#04x}.",
        "Convert it to UTF-8 first; from Latin-1 that is: iconv -f LATIN1 -t UTF-8.",
    )


def _holds_nul(name: str, at: int) -> DocumentError:
    return DocumentError(
        f"{name} holds a NUL at {at}: it is no text.",
        "Leave it out; if it is UTF-16 without a byte order mark, convert it to UTF-8 (iconv).",
    )


def checked(text: str, name: str, limit: int = LIMIT) -> str:
    """``text`` if it can be a prompt.  Raises ``DocumentError`` for what is empty or no text."""
    if not text.strip():
        how = "holds nothing but white space" if text else "is empty"
        raise DocumentError(f"{name} {how}.", "Leave it out, or give it text.")
    if len(text) > limit:
        raise too_large(name, limit, f"{len(text):,} characters", "characters")
    if (at := text.find("\0")) >= 0:
        raise _holds_nul(name, at)
    if half := HALF.search(text):
        raise DocumentError(
            f"{name} holds {half[0]!r} at {half.start()}, which is no character by itself.",
            "Write the text as UTF-8.",
        )
    return text


def _html_text(data: bytes, name: str) -> str:
    """The visible text of a page, paragraphs apart by an empty line, cells of a table by a tab."""
    from bs4 import BeautifulSoup
    from bs4.dammit import EncodingDetector

    declared = EncodingDetector.find_declared_encoding(data, is_html=True) or "utf-8"
    # As browsers do: a page that can be searched for its declaration is no UTF-16, and pages in
    # the encoding of Windows call it Latin-1.
    declared = re.sub(r"(?i)^utf-?(16|32).*", "utf-8", declared)
    declared = re.sub(r"(?i)^(iso-?8859-?1|latin-?1|us-ascii|ascii)$", "windows-1252", declared)
    text = decoded(data, name, declared)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of XML, and of text without a single tag
            page = BeautifulSoup(text, "html.parser")
        return _laid_out(page)
    except Exception as error:  # a parser that rejects the markup raises errors of several kinds
        raise DocumentError(
            f"{name} cannot be read as HTML: {_told(error)}.", "Open and save it in a browser."
        ) from error


def _laid_out(page: Any) -> str:
    out: list[str] = []
    gap = 0  # line ends to write before the next text
    for piece in _pieces(page):
        if isinstance(piece, int):
            gap = max(gap, piece) if piece else min(gap + 1, 2)
            continue
        text, as_is = piece
        if as_is:
            text = text.lstrip("\r\n") if gap else text
        elif gap or not out or out[-1].endswith((" ", "\n", "\t")):
            text = text.lstrip(" ")
        if not text:
            continue
        if out and (gap or text == "\t"):
            out[-1] = out[-1].rstrip()
        if out and gap:
            out.append("\n" * gap)
        gap = 0
        out.append(text)
    return "".join(out).rstrip()


def _pieces(page: Any) -> Iterator[tuple[str, bool] | int]:
    """Texts of ``page`` in order and whether to keep their blanks; between them line ends.

    A number asks for 1 or 2 line ends at least, 0 for one more.  A stack of its own walks the
    tree: broken pages nest deeper than Python can call.
    """
    from bs4.element import CData, NavigableString, Tag

    todo: list[Any] = [(page, False)]
    while todo:
        node, as_is = todo.pop()
        if isinstance(node, int):
            yield node
        elif isinstance(node, NavigableString):
            if type(node) in (NavigableString, CData):  # others are comments and declarations
                yield (node if as_is else re.sub(r"[ \t\r\n\f]+", " ", node)), as_is
        elif node.name == "br":
            yield 0
        elif isinstance(node, Tag) and node.name not in _SKIPPED:
            one, two = _LINES.fullmatch(node.name), _PARAGRAPHS.fullmatch(node.name)
            lines = 1 if one else 2 if two else None
            if lines:
                yield lines
                todo.append((lines, False))
            elif node.name in ("td", "th") and node.find_previous_sibling(("td", "th")):
                yield "\t", False
            as_is = as_is or node.name in ("pre", "textarea")
            todo.extend((child, as_is) for child in reversed(node.contents))


def _pdf_text(data: bytes, name: str, limit: int) -> tuple[str, str]:
    """Text of the pages, an empty line between them, and a note."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    texts: list[str] = []
    place, length = "", 0
    with _said("pypdf") as said:
        try:
            for number, page in enumerate(PdfReader(io.BytesIO(data)).pages, 1):
                place = f" at page {number}"
                texts.append(page.extract_text())
                length += len(texts[-1])
                if length > limit:
                    raise too_large(name, limit, f"more up to page {number}", "characters")
        except DocumentError:
            raise
        except FileNotDecryptedError as error:
            raise DocumentError(
                f"{name} is encrypted and asks for a password.", "Save it without one."
            ) from error
        except DependencyError as error:
            raise DocumentError(
                f"{name} is encrypted, which needs the package cryptography.",
                "Install it: pip install 'k3offload[pdf]'.",
            ) from error
        except Exception as error:  # as pypdf says, damaged files may raise anything
            raise DocumentError(
                f"{name} is damaged{place}: {_told(error)}.", "Open and save it in a PDF reader."
            ) from error
    return "\n\n".join(t for t in texts if t.strip()), _note(texts, said)


def _note(texts: list[str], said: list[str]) -> str:
    bare = [str(i) for i, text in enumerate(texts, 1) if not text.strip()]
    notes = [f"no text on page {listing(bare)} of {len(texts)}"] if bare else []
    if said:
        notes.append(f"repaired while reading: {listing(dict.fromkeys(said), 3)}")
    return "; ".join(notes)


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())[:200].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _said(library: str) -> Iterator[list[str]]:
    """What ``library`` logs in this thread, kept from stderr, where it would name no file."""
    texts: list[str] = []
    logger, thread = logging.getLogger(library), threading.get_ident()
    handler = _Keep(lambda record: texts.append(record.getMessage()), thread)
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class _Keep(logging.Handler):
    def __init__(self, keep: Callable[[logging.LogRecord], None], thread: int) -> None:
        super().__init__(logging.WARNING)
        self._keep, self._thread = keep, thread

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._keep(record)
