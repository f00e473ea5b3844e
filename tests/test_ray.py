"""``batch --ray`` on Ray clusters of this machine: the file of a run without Ray, whatever dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from k3offload import find, load
from tests.helpers_checkpoint import ROOT
from tests.helpers_engine import call
from tests.test_cli_batch import lines, records, texts

pytest.importorskip("ray.data", reason="needs Ray Data: pip install 'k3offload[ray]'")

#: A cluster of two nodes with a CPU each; ends with its stdin.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
how = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **how})
try:
    cluster.add_node(num_cpus=1, **how)
    print("address", cluster.address, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""
ENVIRONMENT: Final = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(
    [str(ROOT), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
HOW: Final = ("-n", 40, "--sessions", 4, "--context", 300, "--prompt", "{text} and", "--seed", 3,
              "--temperature", 0.7)  # fmt: skip
WORKER = re.compile(r"worker: process (\d+) on .*, 1 threads, 4 documents at a time")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of the cluster."""
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], cwd=ROOT, env=ENVIRONMENT, encoding="utf-8",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        said = next(line for line in child.stdout if line.startswith("address"))
        try:
            yield said.split()[1]
            child.stdin.close()
            child.wait(60)
        finally:
            child.kill()


class Run:
    """The command under way; ``said`` grows with each line of its stderr."""

    def __init__(self, *arguments: Any, **settings: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k3offload", "batch", *map(str, arguments)], cwd=ROOT,
            env={**ENVIRONMENT, **settings}, encoding="utf-8",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # these tests may have been begun with SIGINT ignored, as in the background
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        self.said: list[str] = []
        self._listens = threading.Thread(target=self._listen)
        self._listens.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(iter(self.process.stderr.readline, ""))

    def workers(self, count: int) -> list[int]:
        """Processes that were told of, once there are so many."""
        until = time.monotonic() + 180
        while len(found := WORKER.findall("".join(self.said))) < count:
            assert time.monotonic() < until and self.process.poll() is None, "".join(self.said)
            time.sleep(0.01)
        return [int(number) for number in found]

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        assert self.process.stdout is not None
        code = self.process.wait(120)
        self._listens.join()
        return code, self.process.stdout.read(), "".join(self.said)


def some(tmp_path: Path, count: int) -> Path:
    """A folder of ``count`` texts that can be answered, and two that cannot."""
    folder = texts(tmp_path / "in", count)
    (folder / "latin.txt").write_bytes(b"caf\xe9 and the king")
    (folder / "t00_long.txt").write_text("king " * 400)
    return folder


def test_two_workers_finish_a_set_when_one_is_killed(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, alone = some(tmp_path, 16), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    with Run("nano", folder, "-o", out, *HOW, "--ray", address, "--ray-block", 8) as run:
        workers = run.workers(2)
        assert lines(out) < 12  # the block that begins with its first answer is lost
        os.kill(workers[1], signal.SIGKILL)
        code, said, err = run.end()
    assert (code, said) == (3, ""), err
    assert "2 workers, 8 documents a block" in err  # one on each node
    assert len({*WORKER.findall(err)}) == 3, err  # another one took it
    assert "\x1b" not in err and "died" in err
    assert call(["batch", "nano", folder, "-o", alone, *HOW, "--threads", 1], capsys)[0] == 3
    assert len(records(out)) == 18  # none comes twice
    assert list(records(out).items()) == list(records(alone).items())
    assert sorted(p.name for p in tmp_path.iterdir() if "out" in p.name) == [
        "out.jsonl", "out.jsonl.run.json"
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "out.jsonl.run.json").read_bytes())
    assert manifest["finished"] and manifest["counts"]["failed"] == 2
    assert len(manifest["workers"]) == 3


def test_a_worker_says_what_is_wrong_there(tmp_path: Path, address: str) -> None:
    snapshot = tmp_path / "hub" / "models--a--nano" / "snapshots" / "x"
    shutil.copytree(find.find_model("nano"), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("x")
    folder, out = texts(tmp_path / "in", 3), tmp_path / "out.jsonl"
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub")}  # here, and on no node
    one = ("--ray", address, "--ray-workers", 1)
    with Run("a/nano", folder, "-o", out, *HOW, *one, **hub) as run:
        code, said, err = run.end()
    assert (code, said) == (2, "")
    assert re.search(r"error: process \d+ on .*: a/nano is neither a folder nor", err), err
    assert "1 workers, 3 documents a block" in err


def test_interrupted_it_leaves_no_process_and_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, alone = some(tmp_path, 12), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    local = ("--ray", "local", "--threads", 1, "--json-progress")
    long = (*HOW, "-n", 200)  # it is far from its end when it is interrupted
    with Run("nano", folder, "-o", out, *long, *local) as run:
        run.workers(1)
        started = psutil.Process(run.process.pid).children(recursive=True)
        assert any("raylet" in process.name() for process in started)
        run.process.send_signal(signal.SIGINT)
        code, said, err = run.end()
    assert code == 130 and "interrupted" in err
    assert all("documents" in json.loads(line) for line in said.splitlines())
    assert psutil.wait_procs(started, 10)[1] == []
    assert 1 <= lines(out) < 14
    assert call(["batch", "nano", folder, "-o", out, *long, "--resume"], capsys)[0] == 3
    assert call(["batch", "nano", folder, "-o", alone, *long], capsys)[0] == 3
    assert list(records(out).items()) == list(records(alone).items())


def test_the_example_answers_as_an_engine_alone(address: str) -> None:
    example = ROOT / "examples" / "batch_ray.py"
    ended = subprocess.run(
        [sys.executable, str(example)], env={**ENVIRONMENT, "RAY_ADDRESS": address},
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = {row["text"]: row for row in map(json.loads, ended.stdout.splitlines())}
    assert len(rows) == 4
    with load("nano", sessions=8, context=1024) as engine:
        prompt = "{text}, and the king said"
        for text, result in zip(
            rows, engine.batch(rows, prompt=prompt, max_new_tokens=16), strict=True
        ):
            assert rows[text] == {"text": text, "answer": result.text, "error": ""}
