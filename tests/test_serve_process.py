"""The server as a process: signals while answers are streamed or the model is loaded, and models
that cannot be loaded.  Nothing is left behind, and no traceback is seen."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.helpers_broken import Broken
from tests.helpers_checkpoint import ROOT
from tests.helpers_engine import call
from tests.helpers_serve import chunks
from tests.helpers_tokenizer import NANO

#: The command, whose reads of files take as many seconds more as the file says that is named first.
SLOW = """
import os, sys, time
from pathlib import Path
preadv, seconds = os.preadv, Path(sys.argv[1])
def slow(*given):
    time.sleep(float(seconds.read_text()) if seconds.exists() else 0)
    return preadv(*given)
os.preadv = slow
from k3offload.cli import main
main(sys.argv[2:])
"""


class Process:
    """``serve nano`` with scratch files in ``folder`` and most experts on disk; ``slow``: seconds
    of each read from the beginning on; ``deaf``: begun with SIGINT ignored, as by nohup."""

    def __init__(
        self, folder: Path, *arguments: object, slow: float = 0, deaf: bool = False
    ) -> None:
        self.folder, self._seconds = folder / "scratch", folder / "seconds"
        self.folder.mkdir()
        self.slow(slow)
        given = ["serve", "nano", "--port", "0", "--cache", "1M", "--latents", "2M",
                 "--scratch", self.folder, *arguments]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(self._seconds), *map(str, given)],
            stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            preexec_fn=partial(
                signal.signal, signal.SIGINT, signal.SIG_IGN if deaf else signal.SIG_DFL
            ),
        )  # fmt: skip
        self.said: list[str] = []

    def slow(self, seconds: float) -> None:
        whole = self._seconds.with_suffix(".new")  # a read may look at any moment
        whole.write_text(str(seconds))
        whole.replace(self._seconds)

    def until(self, line: str) -> str:
        """The line that begins so."""
        assert self.process.stderr is not None
        for said in self.process.stderr:
            self.said.append(said)
            if said.startswith(line):
                return said
        raise AssertionError("".join(self.said))

    def end(self, number: int) -> tuple[int, str]:
        """After that signal: the exit status, and all of stderr."""
        self.process.send_signal(number)
        out, rest = self.process.communicate(timeout=60)
        assert out == ""
        return self.process.returncode, "".join([*self.said, rest])

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Listener:
    """Somebody who takes an answer, whole or as a stream, in a thread of his own."""

    def __init__(self, url: str, stream: bool) -> None:
        self.lines: list[str] = []
        self.ended = 0.0
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(url, stream))
        self._thread.start()

    def _listen(self, url: str, stream: bool) -> None:
        body = {"prompt": "And it came to pass", "max_tokens": 3000, "ignore_eos": True}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{url}/completions", json={**body, "stream": stream}) as answer,
        ):
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.lines.append(line)
                self.begun.set()
        self.ended = time.monotonic()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive() and self.ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_open_streams_with_a_word(number: signal.Signals, tmp_path: Path) -> None:
    """At once, though a layer may take longer; the process follows when the layer has ended."""
    with Process(tmp_path, "--context", 4096) as server:
        url = server.until("serving ").split()[-1]
        streams = [Listener(url, True) for _ in range(2)]
        whole = Listener(url, False)
        for one in streams:
            assert one.begun.wait(20)
        while len([line for line in streams[0].lines if line.startswith("data")]) < 5:
            time.sleep(0.01)
        server.slow(3 if number == signal.SIGTERM else 0)
        time.sleep(0.2)
        server.slow(0)  # what is read now takes its time, and no more than that
        begin = time.monotonic()
        code, said = server.end(number)
        assert code == 128 + number and "Traceback" not in said, said
        for one in streams:
            one.join()
            assert one.ended - begin < 2
            told = chunks(iter(one.lines))
            assert told[0]["object"] == "text_completion"
            assert "server is ending" in told[-1]["error"]["message"]
        whole.join()
        assert whole.status == 503 and "server is ending" in whole.lines[0]
        assert list(server.folder.iterdir()) == []


def test_what_ignored_interrupts_before_it_served_still_does(tmp_path: Path) -> None:
    """As nohup and shells want of what they put into the background."""
    with Process(tmp_path, "--context", 4096, deaf=True) as server:
        url = server.until("serving ").split()[-1]
        for _ in range(3):
            server.process.send_signal(signal.SIGINT)
            body = {"prompt": "And it", "max_tokens": 2}
            assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 200
        code, said = server.end(signal.SIGTERM)
        assert code == 128 + signal.SIGTERM and "Traceback" not in said, said
        assert list(server.folder.iterdir()) == []


def test_a_signal_while_the_model_is_loaded(tmp_path: Path) -> None:
    with Process(tmp_path, slow=0.3) as server:
        server.until("memory plan")
        for _ in range(300):
            if list(server.folder.iterdir()):
                break
            time.sleep(0.02)
        assert list(server.folder.iterdir())
        code, said = server.end(signal.SIGTERM)
        assert code == 128 + signal.SIGTERM and "Traceback" not in said, said
        assert "serving" not in said and list(server.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--keep-alive", "0", "above 0"), ("--keep-alive", "-1", "above 0"),
        ("--keep-alive", "nan", "above 0"), ("--time-limit", "0", "above 0"),
        ("--body-limit", "0", "above 0"), ("--queue", "-1", "0 or more"),
        ("--places", "0", "at least 1"), ("--context", "0", "at least 1"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_by_its_option(
    option: str, value: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(["serve", "nano", option, value], capsys)
    assert code == 2 and f"error: {option} is {value}" in err and wanted in err, err


# ---- a model that cannot be loaded ----


def cut_short(folder: Path) -> None:
    shard(folder).write_bytes(shard(folder).read_bytes()[:-1000])


def overwritten(folder: Path) -> None:
    shard(folder).write_bytes(b"\xff" * 7 + b"\x7f" + shard(folder).read_bytes()[8:])


def shard(folder: Path) -> Path:
    return folder / "model-00003-of-000009.safetensors"


def unreadable(path: Path) -> None:
    """For the superuser, too."""
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("harm", "arguments", "told"),
    [
        (lambda folder: shard(folder).unlink(), [], "model-00003-of-000009.safetensors"),
        (cut_short, [], "truncated"),
        (overwritten, [], "declares a header"),
        (lambda folder: unreadable(shard(folder)), [], "leads back to itself"),
        (lambda folder: unreadable(folder / "config.json"), [], "config.json cannot be read"),
        (shutil.rmtree, [], "not a folder"),
        (lambda folder: None, ["--ram", "100M"], "Give --ram"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_a_line(
    harm: Callable[[Path], None],
    arguments: list[object],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(NANO, folder)
    harm(folder)
    refused([folder, *arguments], told, tmp_path, capsys)


def refused(
    arguments: list[object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why, nobody listens, and nothing is left."""
    scratch, threads = tmp_path / "scratch", threading.active_count()
    scratch.mkdir()
    before = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    more = ["--port", port, "--latents", "2M", "--context", 4096, "--scratch", scratch]
    code, out, err = call(["serve", *arguments, *more], capsys)
    assert code in (1, 2) and out == "" and "serving" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and told in errors[0] and "Traceback" not in err
    socket.create_server(("127.0.0.1", port)).close()  # it is free again
    assert list(scratch.iterdir()) == [] and threading.active_count() == threads
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_drive_that_goes_while_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the plan, when there are scratch files already."""
    Broken(monkeypatch).gone = 0
    refused(["nano"], "No such device", tmp_path, capsys)
