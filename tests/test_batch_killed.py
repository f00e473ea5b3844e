"""Batches that are killed, run out of room or end in half a record: the file ends up the same."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload.batch_records import Records
from k3offload.errors import BatchError
from tests.helpers_batch import ABOUT, ODD, answer, batch, lines, many, names, of
from tests.helpers_checkpoint import ROOT, problem_of, run_python

#: A run that says when a sweep is on the drive; documents are done in no order.
SLOW = """
import json, random, sys
from pathlib import Path
from tests.helpers_batch import batch, many
def order(ids):
    random.Random(len(ids)).shuffle(ids)
    return ids
def swept():
    print("swept", flush=True)
batch(Path(sys.argv[1]), many(int(sys.argv[2])), arrange=order, swept=swept, resume=True)
"""


def test_twenty_kills_at_random_moments(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "a" / "out.jsonl"
    out.parent.mkdir()
    batch(whole, many(500), at_once=50)
    moments, kills, before = random.Random(8), 0, -1
    command = [sys.executable, "-c", SLOW, str(out), "500"]
    while True:
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            if kills < 20:
                for _ in range(moments.randrange(1, 12)):
                    assert child.stdout.readline() == b"swept\n"
                time.sleep(moments.random() / 200)
                child.send_signal(signal.SIGKILL)
                kills += 1
            else:
                child.stdout.read()
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        assert 2 * kills <= out.read_bytes().count(b"\n")  # each brought something
        assert before <= (before := out.read_bytes().count(b"\n"))
    assert kills == 20
    assert out.read_bytes() == whole.read_bytes()
    assert names(out) == {"", ".run.json"}
    said = json.loads((tmp_path / "a" / "out.jsonl.run.json").read_bytes())
    assert said["finished"] and said["resumes"] == 20 and said["counts"]["documents"] == 500


#: Forked children, each killed at one of the steps of a run that has everything to mend: records
#: to do again, of other documents, with half of one at the end.  Then a run to the end.
STEPS = """
import json, os, shutil, signal, sys
from pathlib import Path
from k3offload.batch_lines import encode
from tests.helpers_batch import answer, batch, many
folder, how = Path(sys.argv[1]), json.loads(sys.argv[2])
out, documents = folder / "o" / "out.jsonl", many(7)
real = {name: getattr(os, name) for name in ("pwrite", "rename", "unlink", "rmdir", "ftruncate")}

def child(at, how):
    ours, theirs = os.pipe()
    if pid := os.fork():
        os.close(theirs)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with os.fdopen(ours) as answer: return status, int(answer.read() or 0)
    steps = 0
    def wrap(name):
        def call(*args, **kw):
            nonlocal steps
            steps += 1
            if steps == at:
                if name == "pwrite": real[name](args[0], args[1][: len(args[1]) // 2], args[2])
                real["kill"](os.getpid(), signal.SIGKILL)
            return real[name](*args, **kw)
        setattr(os, name, call)
    real["kill"] = os.kill
    for name in ("pwrite", "rename", "unlink", "rmdir", "ftruncate"): wrap(name)
    os.fsync = os.fdatasync = lambda number: None  # a kill loses no cache
    try:
        batch(out, documents, arrange=lambda ids: ids[::-1], **how)
        os.write(theirs, str(steps).encode())
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(99)
    os._exit(0)

def begin():
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir()
    old = many(9)
    for id in list(old)[:2]: old[id] += "changed"
    records = [answer(id, text) for id, text in old.items() if id != "document 4"]
    records[2].update(error="no room", retry=True)
    if how: out.write_bytes(b"".join(map(encode, records)) + b'{"id": "docu')
    return out.read_bytes() if how else b""

batch(folder / "whole.jsonl", documents)
whole = (folder / "whole.jsonl").read_bytes()
begin()
status, total = child(0, how)
assert status == 0 and out.read_bytes() == whole
for at in range(1, total + 1):
    old = begin()
    assert child(at, how)[0] == -signal.SIGKILL, at
    now = out.read_bytes() if out.exists() else b""
    if "overwrite" in how:
        assert now == old or {*whole.split(b"\\n")}.issuperset(now.split(b"\\n")[:-1]), at
    again = how if now == old and how else {"resume": True}
    assert child(0, again)[0] == 0, at
    assert out.read_bytes() == whole, at
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.jsonl", "out.jsonl.run.json"], at
print(total)
"""


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_killed_at_every_step(tmp_path: Path, how: dict[str, bool]) -> None:
    run = run_python(STEPS, [str(tmp_path), json.dumps(how)])
    assert run.returncode == 0, run.stderr.decode()
    assert int(run.stdout) > 30


def text() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=()), max_size=20)


def unique(texts: dict[str, str]) -> bool:
    """Two surrogates that make a pair are one character in JSON."""
    return len({id.encode("utf-16", "surrogatepass") for id in texts}) == len(texts)


@settings(max_examples=300)
@given(st.dictionaries(text(), text(), min_size=1, max_size=6).filter(unique), st.data())
def test_cut_anywhere(documents: dict[str, str], data: st.DataObject) -> None:
    with TemporaryDirectory() as folder, patch("os.fsync"), patch("os.fdatasync"):
        out = Path(folder) / "out.jsonl"
        batch(out, documents)
        whole = out.read_bytes()
        cut = data.draw(st.integers(0, len(whole)), label="cut")
        os.truncate(out, cut)
        complete, said = (whole[:cut] + b"\n").count(b"}\n"), list[str]()
        with Records.open(out, ABOUT, resume=True, warn=said.append) as records:
            found = [records.done(id, of(text)) for id, text in documents.items()]
            assert found == [i < complete for i in range(len(documents))]
        assert out.read_bytes() == b"".join(whole.splitlines(keepends=True)[:complete])
        tail = whole[:cut].rpartition(b"\n")[2]
        assert bool(said) == (tail not in (b"", *whole.split(b"\n")))
        batch(out, documents, resume=True)
        assert out.read_bytes() == whole
        assert names(out) == {"", ".run.json"}


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file may become larger than so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_a_record(tmp_path: Path) -> None:
    """Half of it is written, none of it is kept, and it can be tried again at once or later."""
    out, documents = tmp_path / "out.jsonl", {str(i): "x" * 50_000 + str(i) for i in range(4)}
    with Records.open(out, ABOUT) as records:
        todo = {id for id, text in documents.items() if not records.done(id, of(text))}
        for id in ("0", "1"):
            records.add(answer(id, documents[id]))
            with room(75_000):
                if id == "0":
                    records.flush()
                    size = out.stat().st_size
                else:
                    with pytest.raises(BatchError) as caught:
                        records.flush()
        assert str(out) in caught.value.problem and "Make room" in caught.value.remedy
        assert out.stat().st_size == size and records.counts()["done"] == 1
        records.flush()
        assert len(lines(out)) == 2
        records.add(answer("2", documents["2"]))
        with room(120_000), pytest.raises(BatchError):
            records.close()
    with room(10_000):  # the copy in another order, and not even the newline has room
        raised = problem_of(lambda: batch(out, dict(reversed(documents.items())), resume=True))
    assert raised is not None and len(todo) == 4 and len(lines(out)) == 2
    batch(out, documents, resume=True)
    assert [one["id"] for one in lines(out)] == ["0", "1", "2", "3"]
    before = out.read_bytes()
    turned = dict(reversed(documents.items()))
    with room(100_000):
        raised = problem_of(lambda: batch(out, turned, resume=True))
    assert raised is not None and "out.jsonl cannot be written" in raised
    assert out.read_bytes() == before and ".part" not in names(out)
    batch(out, turned, resume=True)
    assert [one["id"] for one in lines(out)] == ["3", "2", "1", "0"]


@pytest.mark.parametrize("step", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("mend", [True, False])
def test_a_drive_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, mend: bool
) -> None:
    """Even if the half of a line cannot be cut off."""
    out, (first, second) = tmp_path / "out.jsonl", many(2).items()
    pwrite = os.pwrite

    def fails(number: int, *args: object) -> int:
        if step == "pwrite" and number == there:
            assert isinstance(args[0], bytes) and isinstance(args[1], int)
            pwrite(number, args[0][:9], args[1])
        raise OSError(errno.EIO, "Input/output error")

    with Records.open(out, ABOUT) as records:
        there = records._file._number
        assert not records.done(first[0], of(first[1]))
        assert not records.done(second[0], of(second[1]))
        records.add(answer(*first))
        records.flush()
        kept = out.read_bytes()
        records.add(answer(*second))
        with monkeypatch.context() as patched:
            patched.setattr(os, step, fails)
            if not mend:
                patched.setattr(os, "ftruncate", lambda number, size: None)
            with pytest.raises(BatchError, match="Input/output error"):
                records.flush()
            with pytest.raises(BatchError):
                records.close()
    assert out.read_bytes() == kept if mend else out.read_bytes().startswith(kept)
    with Records.open(out, ABOUT, resume=True) as records:
        assert records.done(first[0], of(first[1]))
        # what the drive would not promise and the system still has is as good as any other
        assert records.done(second[0], of(second[1])) == (step == "fdatasync" and not mend)


def interrupted(records: Records, by: BaseException) -> None:
    """A run that is left with a record that is not on the drive yet."""
    with records:
        (one,) = many(1).items()
        records.done(one[0], of(one[1]))
        records.add(answer(*one))
        raise by


def test_an_error_of_the_run_is_not_hidden(tmp_path: Path) -> None:
    out, (one,) = tmp_path / "out.jsonl", many(1).items()
    records = Records.open(out, ABOUT)
    with room(10), pytest.raises(ZeroDivisionError):
        interrupted(records, ZeroDivisionError())
    assert out.read_bytes() == b""
    with pytest.raises(KeyboardInterrupt):
        interrupted(Records.open(out, ABOUT, resume=True), KeyboardInterrupt())
    assert lines(out) == [answer(*one)]  # what is computed is kept


def test_any_locale(tmp_path: Path) -> None:
    code = (
        "import locale, sys\nfrom pathlib import Path\nfrom tests.helpers_batch import ODD, batch\n"
        "assert locale.getpreferredencoding(False) != 'UTF-8'\nbatch(Path(sys.argv[1]), ODD)\n"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = run_python(code, [str(tmp_path / "c.jsonl")], env={**os.environ, **plain})
    assert run.returncode == 0, run.stderr.decode()
    batch(tmp_path / "u.jsonl", ODD)
    assert (tmp_path / "c.jsonl").read_bytes() == (tmp_path / "u.jsonl").read_bytes()
