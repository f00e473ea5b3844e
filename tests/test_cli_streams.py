"""Where the words of a command go: closed and full streams, pipes, terminals.  R04."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from k3offload import __version__
from k3offload.generate import Done, Token
from k3offload.loading import load
from tests.helpers_checkpoint import ROOT
from tests.helpers_engine import call
from tests.helpers_terminal import Terminal

PROMPT = "And Jesus said unto him,"


def shell(line: str) -> subprocess.CompletedProcess[bytes]:
    """``line`` with ``k3offload`` standing for the command, run as a module; streams buffered."""
    line = line.replace("k3offload", f"{sys.executable} -m k3offload")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, cwd=ROOT, env=env)


def spoken(count: int) -> str:
    with load("nano") as engine, engine.session() as session:
        session.append(PROMPT)
        return "".join(e.text for e in session.generate(count) if isinstance(e, Token | Done))


def test_it_runs_as_a_module() -> None:
    done = shell("k3offload --version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n".encode(), b"")


def test_stdout_closed_is_one_clean_failure() -> None:
    for line in ("k3offload inspect nano >&-", "k3offload --help <&- >&-"):
        done = shell(line)
        assert (done.returncode, done.stdout) == (1, b"")
        assert re.fullmatch(rb"error: stdout is closed[^\n]*\n", done.stderr)


def test_stdout_full_is_one_clean_failure() -> None:
    for line in ("inspect nano", "check nano --json", "--version"):
        done = shell(f"k3offload {line} >/dev/full")
        assert done.returncode == 1
        assert re.fullmatch(rb"error: stdout: No space left on device[^\n]*\n", done.stderr)


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "k3offload", "inspect", "nano"],
        stdout=writing, stderr=subprocess.PIPE, timeout=60, cwd=ROOT,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_stderr_full_or_closed_ends_nothing() -> None:
    wanted = shell("k3offload inspect nano").stdout
    for line in ("2>/dev/full", "2>&-", "<&- 2>&-"):
        done = shell(f"k3offload inspect nano {line}")
        assert (done.returncode, done.stdout, done.stderr) == (0, wanted, b"")
        done = shell(f"k3offload inspect no-model {line}")
        assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


@pytest.mark.parametrize("as_json", [False, True])
def test_without_stderr_only_data_goes_to_stdout(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    command = ["generate", "nano", PROMPT, "-n", "4"] + (["--json"] if as_json else [])
    code, out, err = call(command, capsys)
    sys.stderr.close()  # what took its place
    assert (code, err) == (0, "")
    assert (json.loads(out)["text"] if as_json else out.removesuffix("\n")) == spoken(4)


def test_a_terminal_keeps_the_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and progress on one terminal: what is left on the screen holds the whole text."""
    with Terminal(monkeypatch) as terminal:
        call(["generate", "nano", PROMPT, "-n", "12"], capsys)
    assert "\x1b[2K" in terminal.written  # the changing line was there
    shown = "\n".join(line for line in terminal.screen if line)
    text = "\n".join(line.rstrip() for line in spoken(12).split("\n") if line)
    assert text in shown
    assert "layer" not in shown.replace("trunk of", "") and "finished: length" in shown


def test_a_terminal_that_wants_no_colour_gets_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Terminal(monkeypatch, NO_COLOR="1", FORCE_COLOR="1") as terminal:
        call(["generate", "nano", PROMPT, "-n", "2"], capsys)
        call(["generate", "nano", PROMPT, "--bogus"], capsys)
        call(["--help"], capsys)
    assert "\x1b" not in terminal.written
    assert "finished: length" in terminal.written and "error: No such" in terminal.written


def test_odd_letters_in_a_message_stay_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(["inspect", "no\nsuch\x1b[2Jmodel\x85\udcff"], capsys)
    assert code == 2
    assert err.count("\n") == 1 and "\x1b" not in err
    assert r"no\x0asuch\x1b[2Jmodel\x85\xff" in err
