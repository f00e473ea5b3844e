"""Text of single files: encodings, HTML, PDF."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfReader, PdfWriter

from k3offload.documents import Document, read_documents
from k3offload.errors import DocumentError


def read(folder: Path, name: str, data: bytes | str, **options: Any) -> Document:
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    (document,) = read_documents(folder / name, **options)
    return document


def refused(folder: Path, name: str, data: bytes | str, **options: Any) -> str:
    document = read(folder, name, data, **options)
    assert isinstance(document.error, DocumentError)
    assert not document.text
    assert document.error.problem.startswith(str(folder / name))
    assert document.error.remedy
    return str(document.error).removeprefix(f"{folder}/")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_byte_order_marks(encoding: str, tmp_path: Path) -> None:
    text = "Grüße \N{GRINNING FACE}\r\n\ufeffinside\n"
    assert read(tmp_path, "a.txt", ("\ufeff" + text).encode(encoding)).text == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a.txt is empty"),
        (b"\xef\xbb\xbf", "a.txt is empty"),
        (b"\xff\xfe", "a.txt is empty"),
        (" \n\u2003".encode(), "a.txt holds nothing but white space"),
        (b"abc\xe9f", "a.txt is not UTF-8: byte 3 is 0xe9"),
        (b"\xef\xbb\xbfab\xe9", "a.txt is not UTF-8: byte 5 is 0xe9"),
        (b"ab\xc3", "a.txt is not UTF-8: byte 2 is 0xc3"),
        (b"ab\xed\xa0\x80", "a.txt is not UTF-8: byte 2 is 0xed"),  # half of a pair, as CESU-8
        (b"\xff\xfea\0b", "a.txt is not UTF-16-LE: byte 4 is 0x62"),
        (b"\xfe\xff\xd8\x00\0a", "a.txt is not UTF-16-BE: byte 2 is 0xd8"),
        (b"\xff\xfea\0\0\0b\0", "a.txt holds a NUL at 1"),
        ("abc".encode("utf-16-le"), "a.txt holds a NUL at 1: it is no text. .*UTF-16 without"),
        (b"PK\x03\x04\0\0", "a.txt holds a NUL at 4"),
    ],
)
def test_what_is_no_text(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=message):
        _raise(read(tmp_path, "a.txt", data))


def _raise(document: Document) -> None:
    assert document.error is not None
    raise document.error


def test_the_limit(tmp_path: Path) -> None:
    assert read(tmp_path, "a.txt", "x" * 100, limit=100).text == "x" * 100
    assert "101 bytes, and the limit is 100" in refused(tmp_path, "a.txt", "x" * 101, limit=100)
    # A file of many gigabytes is refused by its size, unread.
    with (tmp_path / "sparse.txt").open("wb") as file:
        file.truncate(1 << 40)
    (document,) = read_documents(tmp_path / "sparse.txt")
    assert "1,099,511,627,776 bytes, and the limit is 64,000,000" in str(document.error)


# HTML

PAGE = """<!DOCTYPE html><html><head><meta charset=utf-8><title>Title</title>
<style>p { color: red }</style><script>var x = "<p>script</p>"</script>
<body><!-- comment --><h1>One &amp;
 only</h1><p>A <b>bo</b>ld&nbsp;word,<br>a line.<p>Next<div><div>In</div>
side</div>
<ul><li>first</li><li>second <i> it </i></li></ul>
<pre>
def f():
    return 1
</pre><table><tr><td>a</td><td>b</td></tr><tr><td>c</td> <td>d</td></table>
<noscript>none</noscript><svg><text>none</text></svg>Last</body></html>
"""


def test_html_is_laid_out(tmp_path: Path) -> None:
    assert read(tmp_path, "a.html", PAGE).text == (
        "One & only\n\nA bold\u00a0word,\na line.\n\nNext\nIn\nside\n\nfirst\nsecond it\n\n"
        "def f():\n    return 1\n\na\tb\nc\td\n\nLast"
    )


def test_html_encodings(tmp_path: Path) -> None:
    body = "<p>Grüße - “x”</p>"
    for declared in ("windows-1252", "ISO-8859-1", "latin1"):
        page = f'<meta http-equiv=Content-Type content="text/html; charset={declared}">{body}'
        assert read(tmp_path, "a.htm", page.encode("cp1252")).text == "Grüße - “x”"
    japanese = "<meta charset='shift_jis'><p>日本</p>".encode("shift_jis")
    assert read(tmp_path, "a.html", japanese).text == "日本"
    assert read(tmp_path, "a.html", ("\ufeff" + body).encode("utf-16-le")).text == "Grüße - “x”"
    utf16 = f"<meta charset=utf-16>{body}"
    assert read(tmp_path, "a.html", utf16).text == "Grüße - “x”"
    message = refused(tmp_path, "a.html", body.encode("cp1252"))
    assert message.startswith("a.html is not UTF-8: byte 5 is 0xfc.")
    for unknown in ("koi99", "rot13"):
        message = refused(tmp_path, "a.html", f"<meta charset={unknown}>{body}")
        assert f"declares the encoding {unknown!r}, which is not known" in message
    assert "is not SHIFT_JIS: byte 27" in refused(
        tmp_path, "a.html", b"<meta charset=shift_jis><p>\xff"
    )


def test_odd_html(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert read(tmp_path, "a.html", "no tags at all.txt").text == "no tags at all.txt"
    assert read(tmp_path, "a.html", "<b>open").text == "open"
    assert read(tmp_path, "a.xhtml", "<?xml version='1.0'?><html><p>x</p></html>").text == "x"
    depth = 20_000  # deeper than Python can call
    assert read(tmp_path, "a.html", "<div>" * depth + "deep" + "</div>" * depth).text == "deep"
    for empty in ("", "<p> </p>", "<title>only</title><script>app()</script><div id=app></div>"):
        message = refused(tmp_path, "a.html", empty)
        assert message.startswith("a.html holds no visible text. Open it in a browser")
    assert "cannot be read as HTML" in refused(tmp_path, "a.html", "<![x[>y")
    assert not recwarn.list


# PDF


def pdf(pages: Sequence[str], packed: bool = False) -> bytes:
    """A PDF with one line of text on each page, none on a page of ''."""
    packing = b"/Filter/FlateDecode" if packed else b""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    bodies = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("cp1252") if text else b""
        stream = zlib.compress(stream) if packed else stream
        page = "<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>"
        bodies.append(f"{page}/Contents {5 + 2 * i} 0 R>>".encode())
        bodies.append(b"<</Length %d%s>>stream\n%s\nendstream" % (len(stream), packing, stream))
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(bodies) + 1)
    tail = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(bodies) + 1, len(data))
    return data + head + table + tail


def encrypted(folder: Path, password: str, algorithm: str) -> bytes:
    (folder / "plain.pdf").write_bytes(pdf(["secret"]))
    writer = PdfWriter(clone_from=PdfReader(folder / "plain.pdf"))
    writer.encrypt(password, "owner", algorithm=algorithm)
    writer.write(folder / "locked.pdf")
    return (folder / "locked.pdf").read_bytes()


def test_pdf(tmp_path: Path) -> None:
    document = read(tmp_path, "a.PDF", pdf(["Grüße", "Page two"]))
    assert (document.text, document.note) == ("Grüße\n\nPage two", "")


def test_pages_without_text(tmp_path: Path) -> None:
    document = read(tmp_path, "a.pdf", pdf(["one", "", "three"]))
    assert (document.text, document.note) == ("one\n\nthree", "no text on page 2 of 3")
    message = refused(tmp_path, "a.pdf", pdf(["", ""]))
    assert message.startswith("a.pdf holds no text (no text on page 1, 2 of 2). If its pages are")
    assert "a.pdf holds no text (it has no pages)" in refused(tmp_path, "a.pdf", pdf([]))


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_encrypted_pdf(algorithm: str, tmp_path: Path) -> None:
    message = refused(tmp_path, "a.pdf", encrypted(tmp_path, "password", algorithm))
    assert message.startswith("a.pdf is encrypted and asks for a password.")
    # Many are locked against changes only; anybody may read them.
    assert read(tmp_path, "a.pdf", encrypted(tmp_path, "", algorithm)).text == "secret"


def test_damaged_pdf(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole = pdf(["one", "two"])
    for data in (b"", b"no PDF", whole[:60], whole.replace(b"/Kids", b"/Cats")):
        assert re.match(
            "a.pdf (is damaged: |holds no text .it has no pages)", refused(tmp_path, "a.pdf", data)
        )
    mended = read(tmp_path, "a.pdf", whole.replace(b"startxref\n", b"startxref\n1"))
    assert mended.text == "one\n\ntwo"
    assert mended.note.startswith("repaired while reading: ")
    assert capfd.readouterr().err == ""
    assert not caplog.records  # what a library logs names no file
    logging.getLogger("pypdf").warning("afterwards")
    assert len(caplog.records) == 1


def test_the_limit_counts_text_of_a_pdf(tmp_path: Path) -> None:
    data = pdf(["x" * 5000] * 9, packed=True)
    assert len(data) < 5000
    message = refused(tmp_path, "a.pdf", data, limit=12_000)
    assert "is too large: more up to page 3, and the limit is 12,000 characters" in message
