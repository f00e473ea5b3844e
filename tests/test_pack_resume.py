"""R20, R21: kills, full disks, damage, rivals.  In the end the pack is the same, or not there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3offload import pack_write
from k3offload.checkpoint import Checkpoint
from k3offload.errors import CheckpointError, DoesNotFit, K3Error, UsageError
from k3offload.pack import pack
from tests.helpers_checkpoint import problem_of, run_python, shards, tiny
from tests.helpers_engine import BRIEF
from tests.helpers_pack import digests, stamp

JOURNAL = "k3offload_pack.journal"

#: Children are forked, so that the libraries are loaded once.  Each is killed at one of its steps:
#: a write (half of it done), a sync, a rename, a removal.  Prints what each second run kept.
KILLED = """
import gc, importlib, json, os, random, shutil, signal, sys
from pathlib import Path
from k3offload import pack_write
from k3offload.pack import pack
source, out, trunk, kills, late = sys.argv[1:]
out, kills, late = Path(out), int(kills), int(late)
if trunk != "bfloat16": importlib.import_module("k3offload.pack_quantise")
gc.freeze()
pack_write.BLOCK = 1 << 16
STEPS = ("pwrite", "fsync", "rename", "unlink")

def child(at):
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with os.fdopen(ours) as answer: said = answer.read()
        return status, json.loads(said or "null")
    steps = 0
    def wrap(name, real):
        def call(*args, **kw):
            nonlocal steps
            steps += 1
            if steps == at:
                if name == "pwrite": real(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return None if name == "fsync" else real(*args, **kw)  # a kill loses no cache
        setattr(os, name, call)
    for name in STEPS: wrap(name, getattr(os, name))
    try:
        done = pack(source, out, trunk, threads=1)
        os.write(theirs, json.dumps([steps, done.kept, done.already]).encode())
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(99)
    os._exit(0)

status, (total, _, _) = child(0)
assert status == 0
whole = {p.name: p.read_bytes() for p in out.iterdir()}
points = random.Random(21).sample(range(1, total - late + 1), kills - late)
points += range(total - late + 1, total + 1)
kept = []
for at in points:
    shutil.rmtree(out)
    assert child(at)[0] == -signal.SIGKILL, at
    assert not out.exists() or {**whole, JOURNAL: b""}.keys() >= {p.name for p in out.iterdir()}
    status, said = child(0)
    assert status == 0, at
    assert {p.name: p.read_bytes() for p in out.iterdir()} == whole, at
    assert [p.name for p in out.parent.iterdir()] == [out.name], at
    kept.append(said[1:])
print(json.dumps(kept))
""".replace("JOURNAL", repr(JOURNAL))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A model and the files of its pack."""
    root = tmp_path_factory.mktemp("resume")
    source = tiny(root / "m", **BRIEF)
    pack(source, root / "out")
    return source, digests(root / "out")


def partial(out: Path) -> Path:
    return out.with_name(out.name + ".k3pack-partial")


def stop_at(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """Let the shard file ``name`` fail with ``error`` when its first block is written."""
    real = pack_write._File.write

    def write(self: Any, data: Any) -> None:
        if self._path.name.startswith(name):
            raise error
        real(self, data)

    monkeypatch.setattr(pack_write._File, "write", write)


def begun(source: Path, out: Path, name: str = "model-00003") -> Path:
    """A pack that was interrupted at shard ``name``; returns its folder."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, name, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            pack(source, out)
    return partial(out)


@pytest.mark.parametrize(("trunk", "kills", "late"), [("bfloat16", 20, 5), ("int8", 3, 0)])
def test_killed(tmp_path: Path, trunk: str, kills: int, late: int) -> None:
    """R21: run again, it is the same, nothing else is left, and complete shards were kept.

    The kills come at seeded steps and at each of the last ``late``.
    """
    source, place = tiny(tmp_path / "m", layers=3, experts=6, vision=False), tmp_path / "place"
    place.mkdir()
    before = stamp(source)
    done = run_python(KILLED, [source, place / "out", trunk, str(kills), str(late)])
    assert done.returncode == 0, done.stderr.decode()
    kept = json.loads(done.stdout)
    assert len(kept) == kills
    if late:
        assert {0, len(shards(place / "out"))} < {count for count, _ in kept}
        assert kept[-1] == [0, True]  # killed after it was published
    assert stamp(source) == before


def test_an_interrupted_run_is_continued(made: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    source, whole = made
    out = tmp_path / "out"
    folder = begun(source, out)
    assert not out.exists()
    assert not (folder / "config.json").exists()  # nothing that would open as a model
    done = {path.name: path.stat().st_ino for path in shards(folder)}
    assert len(done) == 2
    (folder / "model-00003-of-000007.safetensors.part").write_bytes(b"half")
    (folder / "config.json.part").write_bytes(b"half")
    assert pack(source, out).kept == 2
    assert digests(out) == whole
    assert {n: (out / n).stat().st_ino for n in done} == done
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "remove", "unnoted", "torn"])
def test_a_shard_is_trusted_only_by_its_bytes(
    made: tuple[Path, dict[str, str]], tmp_path: Path, harm: str
) -> None:
    """R21: what does not have the size and checksum of the journal is written again."""
    source, whole = made
    folder = begun(source, tmp_path / "out")
    shard, journal = shards(folder)[1], folder / JOURNAL
    data = bytearray(shard.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
    elif harm == "cut":
        del data[-1]
    elif harm == "grow":
        data.append(0)
    shard.write_bytes(data)
    if harm == "remove":
        shard.unlink()
    lines = journal.read_bytes().splitlines(keepends=True)
    if harm == "unnoted":
        journal.write_bytes(b"".join(lines[:-1]))
    elif harm == "torn":
        journal.write_bytes(b"".join(lines)[:-3])
    if harm == "torn":  # the line is cut off before the next is written
        begun(source, tmp_path / "out", "model-00005")
        assert all(json.loads(line) for line in journal.read_bytes().splitlines())
    assert pack(source, tmp_path / "out").kept == (4 if harm == "torn" else 1)
    assert digests(tmp_path / "out") == whole


def test_only_the_same_pack_is_continued(made: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """What was begun from something else is refused by name and left alone."""
    source = tiny(tmp_path / "m", **BRIEF)
    out = tmp_path / "out"
    folder = begun(source, out)
    before = stamp(folder)
    other = tiny(tmp_path / "other", **BRIEF, experts=17)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: pack(source, out, "int8"), "with another --trunk"),
        (lambda: pack(source, out, shard_size=1 << 30), "with another --shard-size"),
        (lambda: pack(other, out), "of another model"),
    ]
    for call, says in cases:
        assert says in str(problem_of(call))
    os.utime(shards(source)[4], ns=(0, 0))
    assert "files have changed since" in str(problem_of(lambda: pack(source, out)))
    assert stamp(folder) == before
    (folder / JOURNAL).write_bytes(b"[]\n")
    with pytest.raises(CheckpointError, match="is damaged"):
        pack(source, out)
    (folder / JOURNAL).unlink()
    assert pack(source, out).kept == 0  # without a journal nothing is trusted
    assert digests(out) == made[1]


def test_a_full_disk(
    made: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R20: refused at once when it can be known; when it fills up midway, said, and continued."""
    source, whole = made
    out = tmp_path / "out"
    usage = (10**12, 10**12 - 10**6, 10**6)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": usage[2]}))
        with pytest.raises(DoesNotFit, match=r"needs ([\d,]+) bytes .* has 1,000,000 bytes") as no:
            pack(source, out)
    assert not partial(out).exists()
    size = sum(path.stat().st_size for path in shards(source))
    assert size < no.value.missing + 10**6 < 1.3 * size + (1 << 20)
    with monkeypatch.context() as patch:
        stop_at(patch, "model-00004", OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(DoesNotFit, match=r"is full; the pack is not finished\. Make room"):
            pack(source, out)
    assert not out.exists()
    with pytest.raises(K3Error):
        Checkpoint.open(partial(out))
    assert not list(partial(out).glob("*.part"))
    assert pack(source, out).kept == 3
    assert digests(out) == whole


def test_a_file_that_may_not_grow(made: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """The kernel itself refuses the write, through the command line: exit 1 and one line."""
    code = (
        "import resource, sys\n"
        "from k3offload import cli_pack\n"
        "import typer\n"
        "from k3offload import cli\n"
        "if 'pack' not in {c.name for c in cli.app.registered_commands}: cli_pack.add_to(cli.app)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "cli.main(['pack', *sys.argv[1:]])\n"
    )
    done = run_python(code, [made[0], tmp_path / "out"])
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.decode().splitlines() if "error" in line]
    assert "model-00001" in line
    assert "File too large" in line
    assert not (tmp_path / "out").exists()


def test_one_run_at_a_time(made: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    source, whole = made
    folder = begun(source, tmp_path / "out")
    before = digests(folder)
    with (folder / JOURNAL).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # enough to keep out whoever wants it alone
        with pytest.raises(UsageError, match="Another run is writing"):
            pack(source, tmp_path / "out")
        assert digests(folder) == before
    pack(source, tmp_path / "out")
    assert digests(tmp_path / "out") == whole


def test_a_source_that_changes_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny(tmp_path / "m", **BRIEF)
    real = pack_write._File.finish

    def finish(self: Any) -> None:
        os.utime(shards(source)[0], ns=(0, 0))
        real(self)

    monkeypatch.setattr(pack_write._File, "finish", finish)
    with pytest.raises(CheckpointError, match="was changed while it was packed"):
        pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_file_systems_without_direct_writes(
    made: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """The same bytes through the page cache, which is emptied behind the writer."""
    source, whole = made
    flushed: list[None] = []
    if refuses == "open":
        opened = os.open

        def no_open(path: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_DIRECT and flags & os.O_WRONLY:
                raise OSError(errno.EINVAL, "Invalid argument")
            return opened(path, flags, *rest)

        monkeypatch.setattr(os, "open", no_open)
    else:
        wrote = os.pwrite

        def no_write(fd: int, data: Any, at: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return wrote(fd, data[: 1 + len(data) // 2], at)  # and every write is short

        monkeypatch.setattr(os, "pwrite", no_write)
    monkeypatch.setattr(pack_write, "FLUSH", 100_000)
    synced = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(synced(fd)))
    pack(source, tmp_path / "out")
    assert digests(tmp_path / "out") == whole
    assert flushed
