"""Files that are on the drive, whole or as before, and a lock whose file comes and goes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from k3offload.durable import LockFile, sync, write_file


def test_a_file_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a"
    write_file(place, [b"one", b"two"])
    sync(place)
    sync(tmp_path)

    def fails(*args: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    for step in ("fsync", "rename"):
        with monkeypatch.context() as patched:
            patched.setattr(os, step, fails)
            with pytest.raises(OSError, match="Invalid"):
                write_file(place, [b"three"])
        assert place.read_bytes() == b"onetwo" and os.listdir(tmp_path) == ["a"]
    monkeypatch.setattr(os, "fsync", fails)
    sync(tmp_path)  # a folder of a file system that has no such promise
    with pytest.raises(OSError, match="Invalid"):
        sync(place)


@pytest.mark.parametrize("again", [False, True])
def test_a_lock_on_a_file_that_is_gone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Its holder removes it between another's opening and locking it."""
    place, real, calls = tmp_path / "home" / "lock", fcntl.flock, list[int]()

    def flock(number: int, how: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            shutil.rmtree(place.parent)
            if again:  # a third one was quicker
                place.parent.mkdir()
                place.write_bytes(b"")
        real(number, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    one = LockFile(place)
    assert len(calls) == 2 and not one.who
    assert LockFile(place).who.startswith(f"process {os.getpid()} on ")
    one.release()
    assert not place.parent.exists()
    place.parent.mkdir()
    (place.parent / "mine").write_bytes(b"x")
    LockFile(place).release()
    assert os.listdir(place.parent) == ["mine"]
