"""``k3offload kernels``: every GPU kernel compiles everywhere, as the stored table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3offload.kernels.triton_run import ARCHITECTURES, installed
from k3offload.kernels_offline import BLOCK_SHARED, PROCESSORS, Row, _warps, render

STORED = Path(__file__).parent / "golden" / "kernels_offline.json"
FEW = 64  #: bytes that a thread of a kernel for prompts may spill
LARGEST_BLOCK = 99 << 10  #: shared memory that a block may have on the smallest of them


def command(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    env.pop("TRITON_INTERPRET", None)
    done = [sys.executable, "-m", "k3offload", "kernels", *options]
    return subprocess.run(done, capture_output=True, text=True, env=env)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_all_kernels_compile_as_the_stored_table_says(tmp_path: Path) -> None:
    """Each kernel for one architecture at least, and for all whose source is not the stored one."""
    stored, count = json.loads(STORED.read_text()), len(ARCHITECTURES)
    known = [{**row, "source": "x", "registers": 1} if i // count % count == i % count else row
             for i, row in enumerate(stored["rows"])]  # fmt: skip
    (tmp_path / "known.json").write_text(json.dumps({**stored, "rows": known}))
    done = command(tmp_path, "--json", "--known", str(tmp_path / "known.json"))
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    names = [(row["kernel"], row["arch"]) for row in made["rows"]]
    assert names == [(row["kernel"], row["arch"]) for row in stored["rows"]]
    assert {arch for _, arch in names} == set(ARCHITECTURES)
    for row in made["rows"]:
        assert row["shared"] <= LARGEST_BLOCK or row["arch"] in (80, 90), row
        assert row["spilled"] <= (0 if row["decode"] else FEW), row
    if made["triton"] == stored["triton"]:  # another compiler allots registers another way
        assert made == stored


SOURCES = """
from k3offload.kernels.triton_run import Sizes
from k3offload.kernels_offline import Row, compile_one, launches

class Known(dict):
    def get(self, key):
        return Row(key[0], 0, 0, 0, 0, 0.0, False, key[1])

one = next(one for one in launches(Sizes()) if one.constants)
name, value = next((n, v) for n, v in one.constants.items() if type(v) is int)
others = [(one, 80), (one, 80), (one, 90), (one._replace(warps=2 * one.warps), 80),
          (one._replace(aligned=()), 80), (one._replace(constants={**one.constants, name: 2 * value}), 80)]
print(*(compile_one(*other, Known()).source for other in others))
"""  # noqa: E501


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_a_source_is_all_that_the_compiler_is_given() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SOURCES], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    first, again, *others = done.stdout.split()
    assert first == again and len({first, *others}) == 5


def test_occupancy() -> None:
    assert _warps(80, 32, 0, 4) == 64  # as many warps as there can be
    assert _warps(89, 128, 0, 4) == 16  # 65,536 registers / (128 x 32) = 16 warps
    assert _warps(89, 16, (50 << 10) - BLOCK_SHARED, 4) == 8  # two blocks' shared memory
    assert set(PROCESSORS) == set(ARCHITECTURES)


def test_text() -> None:
    row = Row("some_kernel", 89, 128, 4096, 8, 0.33, True, "a")
    assert "some_kernel  sm_89     128     4,096        8       33%" in render([row])


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ({}, ["--arch", "75"], "--arch 75 is not known. Use 80, 86"),
        ({}, ["--known", __file__], "This is no table of kernels"),
        ({"TRITON_INTERPRET": "1"}, [], "Kernels are interpreted (TRITON_INTERPRET=1)."),
    ],
)
def test_wrong_usage(env: dict[str, str], options: list[str], message: str) -> None:
    given: dict[str, Any] = {**os.environ, **env}
    if not env:
        given.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "k3offload", "kernels", *options],
        capture_output=True, text=True, env=given,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
