"""The model folder: never written to, never run, whatever its name; and opening it stays cheap."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from k3offload.checkpoint import Checkpoint
from k3offload.errors import CheckpointError, ConfigError
from tests.helpers_checkpoint import run_python, split, tiny


def fingerprint(folder: Path) -> dict[str, tuple[str, int, int]]:
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns,
                    path.stat().st_mode)
        for path in folder.iterdir()
    }  # fmt: skip


def test_nothing_is_written_and_a_read_only_tree_is_fine(tmp_path: Path) -> None:
    """R66: every file and folder is left as it was."""
    folder = tiny(tmp_path / "m")
    for path in folder.iterdir():
        path.chmod(stat.S_IRUSR)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    before = fingerprint(folder)
    Checkpoint.open(folder)
    assert fingerprint(folder) == before
    folder.chmod(stat.S_IRWXU)


def test_files_are_only_ever_opened_for_reading(tmp_path: Path) -> None:
    """R66, R68: seen from the interpreter's own audit events; no socket, no import from there."""
    folder = tiny(tmp_path / "m")
    (folder / "modeling_kimi_k3.py").write_text("open('marker', 'w')")
    code = (
        "import os, sys\n"
        "from k3offload import check, checkpoint, inspect\n"
        "seen = []\n"
        "def hook(event, args):\n"
        "    if event == 'open' and not str(args[0]).endswith('.pyc'):\n"
        "        flags = args[2]\n"
        "        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT): seen.append(args)\n"
        "    if event.startswith(('socket', 'subprocess', 'os.system')): seen.append(event)\n"
        "    if event in ('compile', 'exec') and 'modeling' in str(args): seen.append(event)\n"
        "sys.addaudithook(hook)\n"
        "checkpoint.Checkpoint.open(sys.argv[1])\n"
        "inspect.inspect(sys.argv[1])\n"
        "check.check(sys.argv[1], full=True)\n"
        "print(seen)\n"
    )
    done = run_python(code, [folder])
    assert done.stdout == b"[]\n", done.stderr
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_odd_folder_names(tmp_path: Path, locale: str) -> None:
    """R67: blanks, other scripts, a leading dash, bytes that are not UTF-8."""
    for name in ("my models/Żółć 通义 #1 100%", "-m", "x" * 200):
        folder = tiny(tmp_path / name)
        assert Checkpoint.open(folder).folder == folder
    odd = os.fsencode(tmp_path) + b"/\xff\xfe m"
    os.rename(os.fsencode(tmp_path / "-m"), odd)
    code = (
        "import os, sys\n"
        "from k3offload.inspect import inspect, render\n"
        "print(render(inspect(sys.argv[1])).splitlines()[0])\n"
        "os.unlink(os.path.join(sys.argv[1], 'model-00003-of-000012.safetensors'))\n"
        "try: inspect(sys.argv[1])\n"
        "except Exception as error: print(error)\n"
    )
    done = run_python(code, [odd], env={**os.environ, "LC_ALL": locale})
    first, second = done.stdout.decode().splitlines()
    assert first.endswith("\\xff\\xfe m"), done.stderr
    assert "1 of 12 shards is missing" in second


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    """R05: never guess."""
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nothing")
    folder = tiny(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        Checkpoint.open(folder)


def test_memory_of_opening_is_small(tmp_path: Path) -> None:
    """A checkpoint with 12,000 expert tensors costs a few MB, not an object per tensor."""
    folder = tiny(tmp_path / "m", experts=256, moe_inter=32, latent=32, expert_mode="bytes")
    code = (
        "import sys, resource\n"
        "from k3offload.checkpoint import Checkpoint\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "c = Checkpoint.open(sys.argv[1])\n"
        "print(c.tensor_count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    count, kilobytes = map(int, run_python(code, [folder]).stdout.split())
    assert count > 12_000
    assert kilobytes < 30_000


def test_300_shards_with_128_handles(tmp_path: Path) -> None:
    """R65: handles stay few, also over 50 loads in one process."""
    folder = tiny(tmp_path / "m")
    split(folder, 300)
    code = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
        "from k3offload.checkpoint import Checkpoint\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for _ in range(50): c = Checkpoint.open(sys.argv[1])\n"
        "print(len(c.files), len(os.listdir('/proc/self/fd')) - before)\n"
    )
    done = run_python(code, [folder])
    assert done.stdout.split() == [b"300", b"0"], done.stderr
