"""Rows as documents: CSV, TSV, Parquet."""

from __future__ import annotations

import csv
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3offload.documents import Document, count_documents, read_documents
from k3offload.errors import DocumentError, UsageError


def rows(place: Path, **options: Any) -> list[Document]:
    documents = list(read_documents(place, **options))
    limit = options.get("limit", 64_000_000)
    assert count_documents(place, limit=limit) == len(documents)
    return documents


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_tables_in_utf16_are_refused_whole(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"x.{suffix}").write_text('{"prompt": "a"}', "utf-16")
    with pytest.raises(UsageError, match=r"is UTF-16 or UTF-32; tables are read as UTF-8. Convert"):
        read_documents(tmp_path / f"x.{suffix}")
    (document,) = rows(tmp_path)
    assert (document.id, document.error is None) == (f"x.{suffix}", False)


# CSV


def table(folder: Path, text: str, suffix: str = "csv", **options: Any) -> list[Document]:
    (folder / f"x.{suffix}").write_text(text, "utf-8", "surrogateescape", newline="")
    return rows(folder / f"x.{suffix}", **options)


def test_csv(tmp_path: Path) -> None:
    documents = table(
        tmp_path,
        '\ufeffid,"prompt",note\r\n'
        'a,"quoted, ""twice""\r\nand a line",x\r\n'
        "\r\n"
        "b,plain \N{GRINNING FACE},\r\n"
        f'c,"{"long " * 100_000}",\n'  # longer than csv allows by itself
        "d,no line end,y",
    )
    assert [(d.id, d.text[:30]) for d in documents] == [
        ("a", 'quoted, "twice"\r\nand a line'),
        ("b", "plain \N{GRINNING FACE}"),
        ("c", ("long " * 10)[:30]),
        ("d", "no line end"),
    ]
    assert len(documents[2].text) == 500_000
    assert [d.source.split(":")[-1] for d in documents] == ["2", "5", "6", "7"]


def test_tsv_and_rows_without_ids(tmp_path: Path) -> None:
    documents = table(tmp_path, "text\tn\na, b\t1\n\n\nc\t2\n", "tsv")
    assert [(d.id, d.text) for d in documents] == [("x.tsv:2", "a, b"), ("x.tsv:5", "c")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b", "has 1 cells, and the header names 2"),
        ("b,c,d", "has 3 cells, and the header names 2"),
        ("b,", "'prompt' is empty"),
        (",c", "the id in 'id' is empty"),
        ("b,\udce9t\udce9", "'prompt' is not UTF-8: byte 0 is 0xe9"),
        ("b\udce9,c", "'id' is not UTF-8: byte 1 is 0xe9"),
        ("b,c\0", "is no row: it holds a NUL"),
        ('b,"c"d', "is no row: ',' expected after '\"'"),
        (f"b,{'c' * 101}", "is no row: it is too large: the limit is 100 characters"),
        (f"b,{'c' * 3_000_000}", "is no row: it is too large: the limit is 100 characters"),
        (f'b,"{"c" * 101}"', "is no row: it is too large"),
        (f'b,"{"c" * 97}"""', "is no row: it is too large"),
        (f'b,"{"c" * 97}""c\n,"', "is no row: it is too large"),  # cut in a doubled quote
        (f"b,{'c' * 98}\r", "is no row: it is too large"),  # cut in a line end
        ('b,"' + 'c,""\n' * 99 + '"', "is no row: it is too large"),
    ],
)
def test_bad_rows(row: str, message: str, tmp_path: Path) -> None:
    first, bad, last = table(tmp_path, f"id,prompt\na,1\n{row}\nz,2\n", limit=100)
    assert (first.text, last.text) == ("1", "2")
    assert isinstance(bad.error, DocumentError)
    assert message in str(bad.error)
    assert bad.source.endswith("x.csv:3")
    assert last.source.endswith(f"x.csv:{4 + row.count(chr(10))}")


def test_a_quote_that_is_never_closed(tmp_path: Path) -> None:
    """It swallows the file, by the rules; that is said, and takes no memory."""
    text = 'id,prompt\na,1\nb,"open\n' + "c,3\n" * 100_000
    documents = table(tmp_path, text, limit=1000)
    assert [d.id for d in documents] == ["a", "x.csv:3"]
    assert "a quote is not closed up to the end of the file" in str(documents[1].error)
    tracemalloc.start()
    try:
        assert count_documents(tmp_path / "x.csv", limit=1000) == 2
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    for limit in range(190, 210):  # where the file ends right at the limit, too
        documents = table(tmp_path, 'prompt\n"' + "x\n" * 100, limit=limit)
        assert ["a quote is not closed" in str(d.error) for d in documents] == [True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv holds no document"),
        ("prompt\n", "x.csv holds no document"),
        ("\n\nid,id,prompt\n1,2,3", "x.csv has two columns 'id'"),
        ('prompt,"x"y\n1,2', "x.csv:1 is no header"),
        ("id;prompt\n1;2", "x.csv has no 'prompt': it has 'id;prompt'"),
    ],
)
def test_tables_that_are_refused_whole(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_documents(tmp_path / "x.csv")


# Parquet


def parquet(folder: Path, columns: dict[str, Any], **options: Any) -> list[Document]:
    pq.write_table(pa.table(columns), folder / "x.parquet", row_group_size=7)
    return rows(folder / "x.parquet", **options)


def test_parquet(tmp_path: Path) -> None:
    texts = [f"text {i} \N{GRINNING FACE}" for i in range(40)]
    documents = parquet(tmp_path, {"prompt": texts, "id": list(range(40)), "n": [[1]] * 40})
    assert [(d.id, d.text) for d in documents] == [(str(i), t) for i, t in enumerate(texts)]
    documents = parquet(tmp_path, {"prompt": texts, "a.b": texts}, text_field="a.b")
    assert documents[39].id == "x.parquet:40"
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        column = pa.array(["a", None, " "], kind)
        fine, null, white = parquet(tmp_path, {"text": column, "id": pa.array(["1", "2", "3"])})
        assert fine.text == "a"
        assert "x.parquet:2: 'text' is null" in str(null.error)
        assert "x.parquet:3: 'text' holds nothing but white space" in str(white.error)


def test_bad_parquet(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the column 'prompt' is int64 and no text. Choose"):
        parquet(tmp_path, {"prompt": [1]})
    with pytest.raises(UsageError, match=r"the column 'id' is double and no text"):
        parquet(tmp_path, {"prompt": ["a"], "id": [1.5]})
    with pytest.raises(UsageError, match="has no 'prompt': it has 'x', 'y'"):
        parquet(tmp_path, {"x": ["a"], "y": ["b"]})
    with pytest.raises(UsageError, match=r"x.parquet holds no document"):
        parquet(tmp_path, {"prompt": pa.array([], pa.string())})
    raw = pa.array([b"good", b"b\xe9d", b"good"]).view(pa.string())
    first, bad, last = parquet(tmp_path, {"prompt": raw})
    assert (first.text, last.text) == ("good", "good")
    assert "x.parquet:2: 'prompt' is not UTF-8: byte 1 is 0xe9" in str(bad.error)


def test_parquet_damaged_in_the_middle(tmp_path: Path) -> None:
    texts = [f"{i:050}" for i in range(40)]
    pq.write_table(
        pa.table({"prompt": texts}),
        tmp_path / "x.parquet",
        row_group_size=16,
        use_dictionary=False,
        write_statistics=False,
        compression="none",
    )
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    start = data.rindex(f"{15:050}".encode()) + 50  # the head of the next page
    data[start : start + 8] = bytes(b ^ 0xFF for b in data[start : start + 8])
    (tmp_path / "x.parquet").write_bytes(data)
    documents = list(read_documents(tmp_path))
    assert [d.text for d in documents[:16]] == texts[:16]
    assert len(documents) == 17
    assert documents[16].id == "x.parquet"
    assert "x.parquet cannot be read after row 16" in str(documents[16].error)


def test_parquet_checksums_are_verified(tmp_path: Path) -> None:
    place = tmp_path / "x.parquet"
    pq.write_table(
        pa.table({"prompt": ["honest text"]}),
        place,
        compression="none",
        write_statistics=False,
        write_page_checksum=True,
    )
    assert rows(place)[0].text == "honest text"
    place.write_bytes(place.read_bytes().replace(b"honest", b"forged"))
    with pytest.raises(UsageError, match=r"x.parquet cannot be read after row 0: .*CRC"):
        read_documents(place)


# Round trips

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")).filter(
    lambda text: bool(text.strip())
)
ROWS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=20, unique_by=lambda row: row[0])


@given(ROWS, st.booleans(), st.integers(0, 60), st.integers(60, 600))
def test_what_is_written_as_csv_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    written: list[tuple[str, str]],
    unix: bool,
    repeat: int,
    limit: int,
) -> None:
    """Rows of any length: those above the limit are refused, and the others are not disturbed."""
    place = tmp_path_factory.mktemp("rows") / "x.csv"
    written = [(i, p * (1 + repeat * (n % 2))) for n, (i, p) in enumerate(written)]
    # Of "minimal" quoting Python's writer leaves out what holds the other system's line ends.
    how: dict[str, Any] = {"lineterminator": "\n", "quoting": csv.QUOTE_ALL} if unix else {}
    sizes: list[int] = []
    with place.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, **how)
        writer.writerow(["id", "prompt"])
        sizes.extend(writer.writerow(row) for row in written)
    found = rows(place, limit=limit)
    assert len(found) == len(written)
    for document, (name, text), size in zip(found, written, sizes, strict=True):
        if size <= limit:
            assert (document.id, document.text, document.error) == (name, text, None)
        else:
            assert "too large" in str(document.error)
