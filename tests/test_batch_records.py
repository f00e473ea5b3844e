"""The output of a batch: what counts as done, which records stay, what is refused and needed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from k3offload import batch_records
from k3offload.batch_lines import digest
from k3offload.batch_records import Records
from k3offload.errors import BatchError, K3Error, UsageError
from tests.helpers_batch import ABOUT, ODD, answer, batch, lines, manifest, many, names, of
from tests.helpers_checkpoint import ROOT, problem_of, run_python


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_whole_run(tmp_path: Path, order: str) -> None:
    out, documents = tmp_path / "out.jsonl", {**ODD, **many(9)}
    counts = batch(out, documents, arrange=lambda ids: ids[::-1], order=order)
    wanted = [answer(*one) for one in documents.items()]
    assert lines(out) == (wanted if order == "input" else wanted[::-1])
    assert names(out) == {"", ".run.json"}
    assert all(len(line.splitlines()) == 1 for line in out.read_bytes().decode().split("\n")[:-1])
    assert counts == {
        "documents": 15, "done": 15, "failed": 0, "retry": 0, "reused": 0, "stale": 0, "dropped": 0,
    }  # fmt: skip
    said = manifest(out)
    assert said["finished"] and said["counts"] == counts and said["model"] == {"name": "m"}
    assert (said["resumes"], said["order"], said["format"]) == (0, order, 1)
    assert said["began"] <= said["updated"] == said["ended"]


def test_digests() -> None:
    parts: list[tuple[Any, ...]] = [
        (), ("",), (b"",), ({},), ("ab",), (b"ab",), ("a", "b"), ("", "ab"), ("{}",),
        ({"a": 1},), ({"a": 1.0},), ({"a": True},), ({"a": None},), ({"a": "\udcff"},), ("\udcff",),
    ]  # fmt: skip
    assert len({digest(*one) for one in parts}) == len(parts)
    assert digest({"a": 1, "b": {"d": 2, "c": 3}}) == digest({"b": {"c": 3, "d": 2}, "a": 1})
    known = "b27b3e808bba884da0b702a73689ff116b044b7b0249bf93060d4504d6c37e86"
    assert digest("text", b"x", {"a": 1}) == known  # files that are there already stay good
    with pytest.raises(UsageError, match="finite"):
        digest({"temperature": float("nan")})


def test_an_existing_file_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    batch(out, many(3))
    before = out.read_bytes()
    with pytest.raises(UsageError, match=r"out\.jsonl is there already.*--resume.*--overwrite"):
        Records.open(out, ABOUT)
    with pytest.raises(UsageError, match="exclude"):
        Records.open(out, ABOUT, resume=True, overwrite=True)
    assert out.read_bytes() == before and names(out) == {"", ".run.json"}
    for place in (tmp_path, Path("/dev/null"), out / "x", tmp_path / "no" / "x"):
        for resume, overwrite in ((False, False), (True, False), (False, True)):
            with pytest.raises(UsageError):
                Records.open(place, ABOUT, resume=resume, overwrite=overwrite)
    (tmp_path / "b.jsonl.state").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"b\.jsonl\.state is no folder"):
        Records.open(tmp_path / "b.jsonl", ABOUT)


def test_overwrite_keeps_the_old_file_until_there_is_a_record(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    batch(out, many(3))
    os.chmod(out, 0o640)
    before, said = out.read_bytes(), manifest(out)
    for _ in range(2):
        with Records.open(out, ABOUT, overwrite=True) as records:
            assert not records.done("document 1", of("new"))
            records.flush()
            assert out.read_bytes() == before and manifest(out) == said
            records.flush(force=True)
    assert out.read_bytes() == before and names(out) == {"", ".run.json"}
    with Records.open(out, ABOUT, overwrite=True) as records:
        assert not records.done("document 1", of("new"))
        records.add(answer("document 1", "new"))
        records.flush()
        assert lines(out) == [answer("document 1", "new")]
        assert manifest(out)["began"] and not manifest(out)["finished"]
    batch(out, {"document 1": "new"}, resume=True)
    assert lines(out) == [answer("document 1", "new")]
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    batch(out, {}, overwrite=True)  # of no documents
    assert out.read_bytes() == b"" and manifest(out)["finished"]


def test_changed_and_failed_documents_are_done_again(tmp_path: Path) -> None:
    """And those that the input has no more are gone; the file is that of one run."""
    out, documents, said = tmp_path / "out.jsonl", many(8), list[str]()
    failures: dict[int, dict[str, Any]]
    failures = {3: {"error": "busy", "retry": True}, 4: {"error": "bad"}}
    with Records.open(out, ABOUT) as records:
        for i, (id, text) in enumerate(documents.items()):
            assert not records.done(id, of(text))
            more = failures.get(i, {})
            records.add({**answer(id, text), **more})
        records.flush()
        assert records.counts()["failed"] == 2 and records.counts()["retry"] == 1
    now = {id: text for id, text in documents.items() if id != "document 5"}
    now["document 1"], now["new"] = "changed", "new"
    now = dict(sorted(now.items(), reverse=True))
    with open(out, "rb") as reader:  # whoever reads it sees the old one or the new one
        old = out.read_bytes()
        for _ in range(2):  # the second time nothing is to do, and the file stays
            counts = batch(out, now, resume=True, warn=said.append)
        assert reader.read().startswith(old)
    wanted = [answer(*one) for one in now.items()]
    wanted[list(now).index("document 4")]["error"] = "bad"
    assert lines(out) == wanted
    assert counts["reused"] == 8 and counts["failed"] == 1
    assert said == [f"1 records of documents that the input has no more are dropped from {out}"]
    changed = out.stat().st_ino
    batch(out, now, resume=True)
    assert out.stat().st_ino == changed
    batch(out, now, resume=True, prompt="q", warn=said.append)
    assert "another prompt" in said[-1] and lines(out) == [
        answer(*one, prompt="q") for one in now.items()
    ]


def test_counts_of_what_is_replaced(tmp_path: Path) -> None:
    out, documents = tmp_path / "out.jsonl", many(6)
    batch(out, documents)
    out.write_bytes(out.read_bytes() * 2)  # each twice
    documents["document 0"] = "changed"
    del documents["document 1"]
    counts = batch(out, documents, resume=True)
    assert (counts["stale"], counts["dropped"], counts["reused"]) == (7, 1, 4)
    assert lines(out) == [answer(*one) for one in documents.items()]


def test_an_id_that_stands_twice(tmp_path: Path) -> None:
    with Records.open(tmp_path / "out.jsonl", ABOUT) as records:
        assert not records.done("ü" * 500, of("a"))
        with pytest.raises(UsageError, match=r"xfc.*twice in the input"):
            records.done("ü" * 500, of("b"))
        records.add(answer("ü" * 500, "a"))
        with pytest.raises(AssertionError):
            records.add(answer("ü" * 500, "a"))
        with pytest.raises(AssertionError):
            records.add(answer("never asked for", "a"))
        assert not records.done("\U0001f600", of("c"))
        with pytest.raises(UsageError, match="twice"):  # the same text as soon as it is JSON
            records.done("\ud83d\ude00", of("c"))
        with pytest.raises(AssertionError, match="1 documents have no record"):
            records.finish()


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    out, said = tmp_path / "out.jsonl", list[str]()
    with Records.open(out, ABOUT, warn=said.append) as records:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for id, value in (("nan", float("nan")), ("inf", [float("-inf")]), ("deep", deep)):
            records.done(id, of(id))
            records.add({"id": id, "digest": of(id), "score": value, "retry": True})
        records.finish()
    while deep:  # or freeing it would be as deep
        deep = deep.pop()
    found = lines(out)
    assert [set(one) for one in found] == [{"id", "digest", "error"}] * 3
    assert "JSON" in found[0]["error"] and len(said) == 3
    with Records.open(out, ABOUT, resume=True) as records:
        assert records.done("nan", of("nan"))
        with pytest.raises(ValueError, match="JSON"):
            records.note({"rate": float("nan")})


def test_a_rival(tmp_path: Path) -> None:
    """Of the same file by another name, too; the lock goes with its process, the files stay."""
    out = tmp_path / "out.jsonl"
    os.symlink(out, tmp_path / "other.jsonl")
    code = (
        "import sys, time\nfrom k3offload.batch_records import Records\n"
        "with Records.open(sys.argv[1], {}) as r:\n  print('locked', flush=True)\n  time.sleep(60)"
    )
    with Popen([sys.executable, "-c", code, str(out)], cwd=ROOT, stdout=PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"locked\n"
        for place in (out, tmp_path / "other.jsonl"):
            with pytest.raises(UsageError, match=rf"Another run.*process {child.pid} on .*Wait"):
                Records.open(place, ABOUT, resume=True)
        child.kill()
    batch(tmp_path / "other.jsonl", many(2), resume=True)
    assert (tmp_path / "other.jsonl").is_symlink()
    assert lines(out) == [answer(*one) for one in many(2).items()]
    with Records.open(out, ABOUT, resume=True):
        raised = problem_of(lambda: Records.open(out, ABOUT, overwrite=True))
        assert raised is not None and f"process {os.getpid()}" in raised
    assert not (tmp_path / "out.jsonl.state").exists()


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(number: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    batch(tmp_path / "out.jsonl", many(2), warn=said.append)
    assert len(said) == 1 and "without locks" in said[0]


DAMAGED = [
    (b"no json\n", "not a line of JSON"),
    (b'{"id": "a", "dig\n', "not a line of JSON"),
    (b'{"id": "a"}\n', 'no text "digest"'),
    (b'{"id": 1, "digest": "d"}\n', 'no text "id"'),
    (b"[]\n", "not a JSON object"),
    (b"\0" * 9 + b"\n", "not a line of JSON"),
    (b"\xff\n", "not a line of JSON"),
    (b"[" * 100_000 + b"\n", "not a line of JSON"),
]


@pytest.mark.parametrize(("line", "what"), DAMAGED)
@pytest.mark.parametrize("last", [False, True])
def test_a_damaged_line(tmp_path: Path, line: bytes, what: str, last: bool) -> None:
    out = tmp_path / "out.jsonl"
    batch(out, many(4))
    good = out.read_bytes().splitlines(keepends=True)
    data = b"".join([*good[:2], b"\n", line, *([] if last else good[2:])])
    out.write_bytes(data)
    with pytest.raises(BatchError) as caught:
        Records.open(out, ABOUT, resume=True)
    assert f"{out}, line 4, is damaged: it" in caught.value.problem
    assert what in caught.value.problem and "Remove that line" in caught.value.remedy
    assert out.read_bytes() == data and names(out) == {"", ".run.json"}
    out.write_bytes(data.replace(line, b""))
    batch(out, many(4), resume=True)
    assert out.read_bytes() == b"".join(good)


def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    for data in (b"hello", b'{"name": "x"', b"\x93NUMPY", b"x" * 3_000_000):
        out = tmp_path / "notes.txt"
        out.write_bytes(data)
        with pytest.raises(BatchError, match="line 1, is damaged"):
            Records.open(out, ABOUT, resume=True)
        assert out.read_bytes() == data and names(out) == {""}
    for data in (b"", b"\n \n", b" ", b"\0" * 5000, b'{"id": "docu\0\0'):
        out = tmp_path / "out.jsonl"
        out.write_bytes(data)
        batch(out, many(2), resume=True)
        assert lines(out) == [answer(*one) for one in many(2).items()]


def test_the_last_record_without_its_newline(tmp_path: Path) -> None:
    out, said = tmp_path / "out.jsonl", list[str]()
    batch(out, many(3))
    whole = out.read_bytes()
    for end in (b"", b"\n  ", b"\r\n"):
        out.write_bytes(whole[:-1] + end)
        with Records.open(out, ABOUT, resume=True, warn=said.append) as records:
            assert all(records.done(id, of(text)) for id, text in many(3).items())
            assert not records.done("more", of("more"))
            records.add(answer("more", "more"))
            records.finish()
        *found, more = out.read_bytes().splitlines(keepends=True)
        assert b"".join(found).replace(b"\r", b"") == whole
        assert json.loads(more) == answer("more", "more") and not said


def test_the_manifest_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, documents, seen = tmp_path / "out.jsonl", many(6), list[int]()
    monkeypatch.setattr(batch_records, "EVERY", 0.0)
    batch(out, documents, swept=lambda: seen.append(manifest(out)["counts"]["done"]))
    assert seen == [2, 4, 6]
    monkeypatch.setattr(batch_records, "EVERY", 1000.0)
    seen.clear()
    batch(
        out, documents, overwrite=True, swept=lambda: seen.append(manifest(out)["counts"]["done"])
    )
    assert seen == [2, 2, 2]  # the first record replaces the old manifest at once
    place, said = out.with_name("out.jsonl.run.json"), list[str]()
    for content in (None, b"", b"[]", b'{"began": 1}', b'{"began":"x","resumes":1,"seconds":1}'):
        place.unlink() if content is None else place.write_bytes(content)
        with Records.open(out, ABOUT, resume=True, warn=said.append) as records:
            records.note({"machine": {"name": "\udcff"}})
        assert "missing or damaged" in said.pop() and not said
        assert manifest(out)["resumes"] == 1 and manifest(out)["machine"] == {"name": "\udcff"}
        assert not manifest(out)["finished"]
    with pytest.raises(AssertionError):
        Records.open(out, {"counts": 1}, resume=True)
    with pytest.raises(ValueError, match="JSON"):
        Records.open(out, {"rate": float("nan")}, resume=True)
    assert not (tmp_path / "out.jsonl.state").exists()


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real = tmp_path / "out.jsonl", os.open
    out.write_bytes(b"")

    def refuses(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(out):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuses)
        with pytest.raises(BatchError, match=r"out\.jsonl cannot be written: Permission denied"):
            Records.open(out, ABOUT, resume=True)
    assert names(out) == {""}
    with pytest.raises(BatchError, match=r"/proc/out\.jsonl cannot be written"):
        Records.open("/proc/out.jsonl", ABOUT)
    raised = problem_of(lambda: Records.open(tmp_path / ("x" * 250), ABOUT))
    assert raised is not None and "too long" in raised
    monkeypatch.setattr(batch_records, "write_file", refuses_to_write)
    with pytest.raises(BatchError, match=r"new\.jsonl\.run\.json cannot be written"):
        Records.open(tmp_path / "new.jsonl", ABOUT)
    assert names(out) == {""}  # nothing is left of what was not begun


def refuses_to_write(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_folders_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EINVAL:
        batch(tmp_path / "out.jsonl", many(3))
        assert len(lines(tmp_path / "out.jsonl")) == 3
    else:
        with pytest.raises(K3Error, match="Input/output error"):
            batch(tmp_path / "out.jsonl", many(3))


#: Bytes a process grows by that finds, asks for and turns round so many records.
GROWN = """
import sys
from k3offload.batch_records import Records
from k3offload.machine import peak_rss, rss
out, count = sys.argv[1], int(sys.argv[2])
before = rss()
with Records.open(out, {}, resume=True) as records:
    for i in reversed(range(count)):
        assert records.done(f"document {i}", str(i))
    records.finish()
print(peak_rss() - before)
"""


def test_memory_of_many_records(tmp_path: Path) -> None:
    """At most 110 bytes for each, so 110 MB for a million, and some MB for the copy."""
    out, count, size = tmp_path / "out.jsonl", 200_000, 0
    with open(out, "w") as file:
        for i in range(count):
            size += file.write(f'{{"id": "document {i}", "digest": "{i}", "text": "{"x" * 90}"}}\n')
    run = run_python(GROWN, [str(out), str(count)])
    assert run.returncode == 0, run.stderr.decode()
    assert int(run.stdout) < 110 * count + 4_000_000
    assert out.stat().st_size == size
    with open(out) as file:
        assert json.loads(next(file))["digest"] == str(count - 1)
