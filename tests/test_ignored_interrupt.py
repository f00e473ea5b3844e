"""Long commands that were begun with SIGINT ignored, as by nohup or in the background of a script,
go on when one comes, to them and to whatever processes they have begun.  ``serve``: see
``test_serve_process.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from k3offload.trace_made import Size, pattern, trace_of, write_trace
from tests.helpers_checkpoint import ROOT

#: The command, whose replays are each in a process of their own.
MANY = """
import sys
from k3offload import bench_policies
from k3offload.cli import main
if __name__ == "__main__":
    bench_policies.LARGE, bench_policies.default_threads = 1, lambda: 2
    main(sys.argv[1:])
"""


def place_of(folder: Path) -> Path:
    place = folder / "many.py"
    place.write_text(MANY)
    return place


@pytest.mark.parametrize("what", ["batch", "policies"])
def test_a_command_goes_on(what: str, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    for name in "abc":
        (tmp_path / "given" / name).write_text(f"{name} and it came to pass")
    out, program = tmp_path / "out.jsonl", ["-m", "k3offload"]
    if what == "batch":
        given = ["batch", "nano", tmp_path / "given", "-o", out, "-n", 60, "--ignore-end"]
    else:
        write_trace(tmp_path / "t", trace_of(pattern("skewed", 400, Size(8, 64, 4)), 64))
        program = [str(place_of(tmp_path))]
        given = ["bench", "policies", tmp_path / "t", "--repeats", 1]
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, given)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    sent = 0
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        sent += 1
        time.sleep(0.05)
    told, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "interrupted" not in said and sent > 10, said
    assert "Traceback" not in said
    assert len(out.read_text().splitlines()) == 3 if what == "batch" else told
