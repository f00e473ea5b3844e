"""Where documents of a batch are found, what they are called, and which are refused: R36."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3offload.documents import Document, count_documents, read_documents
from k3offload.errors import DocumentError, UsageError


def read(inputs: str | Path, **options: Any) -> dict[str, Document]:
    """Documents by id; that no two have one, and that their number was foretold."""
    documents = list(read_documents(inputs, **options))
    found = {document.id: document for document in documents}
    assert len(found) == len(documents)
    for document in documents:
        assert bool(document.text) != bool(document.error)
        json.dumps(document.id, ensure_ascii=False).encode()
        document.text.encode()
        assert "\n" not in document.source
        assert document.error is None or document.error.remedy
    kind = options.get("kind")
    assert isinstance(kind, str | None)
    limit = options.get("limit", 64_000_000)
    assert isinstance(limit, int)
    assert count_documents(inputs, kind=kind, limit=limit) == len(documents)
    return found


def why(document: Document) -> str:
    assert isinstance(document.error, DocumentError)
    return str(document.error)


BAD_BYTES = os.fsdecode(b"caf\xe9.txt")


def twelve(folder: Path) -> Path:
    """The folder of R36."""
    for sub in ("one", "two"):
        (folder / sub).mkdir(parents=True)
        (folder / sub / "same.txt").write_text(f"same stem, {sub}")
    (folder / "01.txt").write_text("plain\r\ntext\n", newline="")
    (folder / "02-empty.txt").write_bytes(b"")
    (folder / "03-white.txt").write_text(" \n\t \u3000\n")
    (folder / "04-bom.txt").write_bytes("\ufeffBOM".encode())
    (folder / "05-utf16.txt").write_bytes("\ufeffÜber".encode("utf-16-be"))
    (folder / "06-latin1.txt").write_bytes("Olé!".encode("latin-1"))
    (folder / "07-binary.bin").write_bytes(b"\x7fELF\0\1\2")
    (folder / "08-long.txt").write_text("word " * 30)
    (folder / "09-unreadable.txt").mkdir()  # below: a file of this name, turned into a folder
    (folder / "10-dangling.txt").symlink_to("nowhere.txt")
    (folder / "11-emoji \N{GRINNING FACE}\nand line.txt").write_text("emoji")
    (folder / BAD_BYTES).write_text("name")
    (folder / ".hidden").write_text("hidden")
    return folder


def test_a_folder_of_everything_r36(tmp_path: Path) -> None:
    folder = twelve(tmp_path / "in")
    (folder / "09-unreadable.txt").rmdir()
    os.mkfifo(folder / "09-unreadable.txt")  # would wait for ever
    found = read(folder, limit=100)
    good = {name: d.text for name, d in found.items() if d.error is None}
    assert good == {
        "01.txt": "plain\r\ntext\n",
        "04-bom.txt": "BOM",
        "05-utf16.txt": "Über",
        "11-emoji \N{GRINNING FACE}\\x0aand line.txt": "emoji",
        r"caf\xe9.txt": "name",
        "one/same.txt": "same stem, one",
        "two/same.txt": "same stem, two",
    }
    bad = {name: why(d) for name, d in found.items() if d.error}
    reasons = {
        "02-empty.txt": "is empty. Leave it out",
        "03-white.txt": "nothing but white space",
        "06-latin1.txt": "is not UTF-8: byte 2 is 0xe9. Convert it .*iconv -f LATIN1",
        "07-binary.bin": "holds a NUL at 4",
        "08-long.txt": "is too large: 150 bytes, and the limit is 100 bytes",
        "09-unreadable.txt": "is no regular file",
        "10-dangling.txt": "is a link to nowhere.txt, which is not there",
    }
    assert bad.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert re.search(reason, bad[name])
        assert str(folder / name) in bad[name]
    assert list(found) == sorted(found)  # and ".hidden" is left out


def test_what_happens_between_listing_and_reading(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text(name)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "f").write_text("f")
    documents = read_documents(tmp_path)
    assert next(documents).text == "a"
    (tmp_path / "b").unlink()
    (tmp_path / "c").unlink()
    (tmp_path / "c").mkdir()
    (tmp_path / "e" / "f").unlink()
    (tmp_path / "e").rmdir()
    found = {d.id: d for d in documents}
    assert list(found) == ["b", "c", "d", "e/"]
    assert "b has vanished" in why(found["b"])
    assert "c is no regular file" in why(found["c"])
    assert found["d"].text == "d"
    assert "e/ cannot be listed: No such file" in why(found["e/"])


def test_unreadable_files_r36(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read files of mode 000, so the refusal comes from ``os.open`` itself here."""
    for name in ("a", "locked", "z"):
        (tmp_path / name).write_text(name)
    real = os.open

    def refuse(path: str, flags: int, *rest: object, **named: object) -> int:
        if os.fspath(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    found = read(tmp_path)
    assert "locked cannot be read: Permission denied. Make it readable" in why(found["locked"])
    assert [d.text for d in found.values()] == ["a", "", "z"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_mode_000_r36(tmp_path: Path) -> None:
    (tmp_path / "locked").write_text("x")
    (tmp_path / "locked").chmod(0)
    assert "Permission denied" in why(read(tmp_path)["locked"])


def test_names_never_collide(tmp_path: Path) -> None:
    names = [b"a\xff", b"a\\xff", "a\u00ff".encode(), b"a\n", b"a\\x0a", b"a\\\n", b"a#2", b"a"]
    names += ["\u0085".encode(), b"\\u0085", "\u2028".encode(), b"\x1b[2J"]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(name.hex().encode())
    found = read(tmp_path)
    assert {d.text for d in found.values()} == {name.hex() for name in names}
    assert all(name.isprintable() for name in found)


def test_links_to_folders_are_followed_but_not_round(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "a.txt").write_text("a")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.txt").write_text("b")
    (tmp_path / "in" / "linked").symlink_to("../out")
    (tmp_path / "in" / "sub" / "up").symlink_to("..")
    (tmp_path / "in" / "self").symlink_to("self")
    for inputs in (tmp_path / "in", tmp_path / "in" / "**"):
        found = read(inputs)
        assert list(found) == ["linked/b.txt", "self", "sub/a.txt"]
        assert "self cannot be read: Too many levels" in why(found["self"])


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x/1.md", "x/2.txt", "x/y/1.md", "x/.z.md", "[x]/1.md", "a*b"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(name)
    assert list(read("x/*.md")) == ["1.md"]
    assert list(read("**/*.md")) == ["[x]/1.md", "x/1.md", "x/y/1.md"]
    assert list(read(tmp_path / "x" / "*" / "1.md")) == ["y/1.md"]
    assert list(read("x/*")) == ["1.md", "2.txt"]
    assert list(read("[x]")) == ["1.md"]  # what is there by that name comes first
    assert list(read("a*b")) == ["a*b"]


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("text")
    (tmp_path / "none.txt").symlink_to("nowhere")
    document = read(tmp_path / "prompt")["prompt"]
    assert document == Document("prompt", "text", source=str(tmp_path / "prompt"))
    assert "link to nowhere" in why(read(tmp_path / "none.txt")["none.txt"])


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ("none", {}, "none is no file and no folder"),
        ("", {}, "The empty name is no file"),
        ("a\0b", {}, r"a\\x00b can be no file name"),
        ("\ud800", {}, "can be no file name"),
        ("none/*.txt", {}, r"none/\*.txt matches nothing"),
        ("sub/*", {}, "matches folders only"),
        ("sub", {}, "sub holds no files"),
        ("a.txt", {"kind": "docx"}, "'docx' is no kind of document. Choose of text, html"),
        ("a.txt", {"text_field": "x"}, "holds no table"),
        ("a.txt", {"limit": 0}, "The limit is 0 bytes"),
        ("a.csv", {}, r"a.csv has no 'prompt': it has 'x', 'y'. Choose .*--text-field"),
        ("a.csv", {"text_field": "x", "id_field": "z"}, "a.csv has no 'z'.*id_field"),
        ("a.txt", {"kind": "parquet"}, "cannot be read as Parquet"),
    ],
)
def test_what_makes_the_whole_input_useless(
    inputs: str,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said at the call, before anybody loads a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub" / "deeper").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(UsageError, match=message):
        read_documents(inputs, **options)


@pytest.mark.parametrize(("kind", "module"), [("html", "bs4"), ("pdf", "pypdf")])
def test_missing_extras(
    kind: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    (tmp_path / "a.txt").write_text("a")
    assert list(read(tmp_path)) == ["a.txt"]
    documents = read_documents(tmp_path)
    (tmp_path / f"b.{kind}").write_text("b")  # comes too late to stop the others
    assert [(d.id, d.error is None) for d in documents] == [("a.txt", True), (f"b.{kind}", False)]
    with pytest.raises(UsageError, match=rf"not installed. Install it: .*k3offload\[{kind}\]"):
        read_documents(tmp_path)


def test_missing_parquet_leaves_the_count_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert count_documents(tmp_path) is None
    with pytest.raises(UsageError, match=r"k3offload\[parquet\]"):
        read_documents(tmp_path)


def test_ids_that_stand_twice(tmp_path: Path) -> None:
    lines = ["a", "b", "a", "a#2", "a", 7, "7", "x.jsonl:9"]
    rows = [json.dumps({"id": name, "prompt": f"text {i}"}) for i, name in enumerate(lines)]
    (tmp_path / "x.jsonl").write_text("\n".join([*rows, '{"prompt": "no id"}']))
    documents = list(read_documents(tmp_path / "x.jsonl"))
    assert [d.id for d in documents] == [
        "a", "b", "a#2", "a#2#2", "a#3", "7", "7#2", "x.jsonl:9", "x.jsonl:9#2",
    ]  # fmt: skip
    assert [d.text for d in documents if d.error is None] == [
        "text 0", "text 1", "text 5", "text 7",
    ]  # fmt: skip
    assert "x.jsonl:3: the id 'a' was there before. Give" in why(documents[2])


def test_many_twins_take_no_longer_each(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": "a", "prompt": "b"}\n' * 5000)
    assert list(read(tmp_path / "x.jsonl"))[-1] == "a#5000"


def test_tables_in_folders(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"prompt": "one"}\n\n{"id": "b", "prompt": "two"}\n')
    (tmp_path / "2.csv").write_text("id,prompt\nb,three\nc,four\n")
    (tmp_path / "3.csv").write_text("x,y\n1,2\n")
    (tmp_path / "4.txt").write_text("five")
    (tmp_path / "5.JSONL").write_text("")
    found = read(tmp_path)
    assert {name: d.text for name, d in found.items()} == {
        "1.jsonl:1": "one",
        "b": "two",
        "b#2": "",
        "c": "four",
        "3.csv": "",
        "4.txt": "five",
        "5.JSONL": "",
    }
    assert found["1.jsonl:1"].source == f"{tmp_path}/1.jsonl:1"
    assert "3.csv has no 'prompt'" in why(found["3.csv"])
    assert "5.JSONL holds no document" in why(found["5.JSONL"])
    as_text = read(tmp_path, kind="text")
    assert as_text["3.csv"].text == "x,y\n1,2\n"
    assert len(as_text) == 5


def test_a_table_is_not_read_ahead(tmp_path: Path) -> None:
    """What is written behind the first document while it is at work is seen by the next ones."""
    place = tmp_path / "x.jsonl"
    place.write_text("".join(f'{{"prompt": "old {i:05}"}}\n' for i in range(50_000)))
    documents = read_documents(place)
    assert next(documents).text == "old 00000"
    place.write_text("".join(f'{{"prompt": "new {i:05}"}}\n' for i in range(50_000)))
    last = [d.text for d in documents][-1]
    assert last == "new 49999"


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_memory_holds_one_row(suffix: str, tmp_path: Path) -> None:
    place, number, text = tmp_path / f"x.{suffix}", 3000, "word " * 1000
    with place.open("w") as file:
        file.write("prompt\n" if suffix == "csv" else "")
        for _ in range(number):
            file.write(f"{text}\n" if suffix == "csv" else f'{{"prompt": "{text}"}}\n')
    next(read_documents(place))  # imports
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_documents(place)) == number
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert place.stat().st_size > 15_000_000
    assert peak < 2_000_000


def test_ids_print_under_any_locale_r36(tmp_path: Path) -> None:
    folder = twelve(tmp_path / "in")
    code = (
        "import json, sys; from k3offload.documents import read_documents\n"
        "for d in read_documents(sys.argv[1]): print(json.dumps([d.id, d.text, str(d.error)]))"
    )
    outputs = set()
    for locale in ("C", "C.UTF-8"):
        command = [sys.executable, "-c", code, str(folder)]
        environment = {**os.environ, "LC_ALL": locale}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


@given(st.binary(max_size=200), st.sampled_from(["txt", "html", "pdf", "md"]))
def test_any_bytes_are_one_document(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    place = tmp_path_factory.mktemp("any") / f"x.{suffix}"
    place.write_bytes(data)
    (document,) = read(place).values()
    if suffix == "txt" and document.error is None and data[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        assert document.text.encode() == data.removeprefix(b"\xef\xbb\xbf")


@given(st.binary(max_size=300), st.sampled_from(["jsonl", "csv", "tsv", "parquet"]))
def test_any_bytes_are_a_table_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    place = tmp_path_factory.mktemp("any")
    (place / f"x.{suffix}").write_bytes(b"prompt\n" * (suffix in ("csv", "tsv")) + data)
    (place / "y.txt").write_text("y")
    assert read(place, limit=100)["y.txt"].text == "y"
