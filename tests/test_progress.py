"""Progress on stderr: on a terminal, elsewhere, and where stderr is not to be had.  R04, R21."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3offload import progress
from k3offload.progress import Meter, Progress, may_redraw, show_seconds, write_out
from tests.helpers_terminal import Terminal, screen


def test_the_changing_line_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(monkeypatch) as terminal, Progress() as told:
        told.say("stays")
        for i in range(3):
            told.show(f"step {i}")
        told.say("stays too")
        told.clear()
        write_out("data")
    assert "step 2" in terminal.written and "\x1b" in terminal.written
    assert [line for line in terminal.screen if line] == ["stays", "stays too", "data"]


def test_text_on_the_same_terminal_is_never_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the changing line, not by a warning: text goes on below it."""
    with Terminal(monkeypatch) as terminal, Progress() as told:
        told.show("prompt")
        for i, word in enumerate(("In the ", "beginning ", "God ")):
            told.text_begins()
            write_out(word, end="")
            told.show(f"layer {i}")
        told.say("warning: slow")
        write_out("created\nthe heaven")
        told.text_ends()
        told.show("figures")
    shown = [line for line in terminal.screen if line]
    assert shown == ["In the beginning God", "warning: slow", "created", "the heaven"]


@pytest.mark.parametrize("variable", ["NO_COLOR=1", "TERM=dumb", "TERM=unknown"])
def test_no_control_codes_on_a_terminal_that_wants_none(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with Terminal(monkeypatch, **{name: value}) as terminal, Progress() as told:
        told.say("[bold]a[/] :smile: 12")
        told.show("b")
        told.text_begins()
        write_out("c", end="")
        told.show("in the middle of the text")
        write_out("d")
    assert terminal.written == "[bold]a[/] :smile: 12\r\nb\r\ncd\r\n"


def test_no_control_codes_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FORCE_COLOR makes no terminal of a pipe; lines come at most every five seconds."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert not may_redraw()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress() as told:
        told.say("12 'a' https://x.y")
        for now[0] in (1.0, 4.9, 5.0, 5.1, 9.9, 10.0):
            told.show(f"at {now[0]}")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "12 'a' https://x.y\nat 5.0\nat 10.0\n")


def test_a_long_line_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as told:
        told.say("word " * 100)
    assert capsys.readouterr().err.count("\n") == 1


def test_without_stderr_nothing_goes_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(sys, "stderr", None)
    with Progress() as told:
        told.say("a")
        told.show("b")
        told.text_begins()
        told.text_ends()
    assert capsys.readouterr().out == ""


class _Broken(io.StringIO):
    def __init__(self, error: type[OSError], terminal: bool = False) -> None:
        super().__init__()
        self.error, self.terminal, self.tries = error, terminal, 0

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.tries += 1
        raise self.error(32, "cannot be written")


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("error", [OSError, BrokenPipeError])
def test_a_stderr_that_cannot_be_written_ends_nothing(
    error: type[OSError], terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a terminal that was closed under a long run."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for first in ("say", "show"):
        broken = _Broken(error, terminal)
        monkeypatch.setattr(sys, "stderr", broken)
        monkeypatch.setattr(progress, "EVERY", 0.0)
        with Progress() as told:
            getattr(told, first)("a")
            tries = broken.tries
            told.say("b")
            told.show("c")
            assert tries == broken.tries > 0


def test_a_stdout_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _Broken(OSError))
    with pytest.raises(OSError, match="cannot be written") as caught:
        write_out("x")
    assert caught.value.filename == "stdout"


def test_numbers_of_closed_streams_are_not_given_to_files(tmp_path: Path) -> None:
    """Or whoever writes to stderr (number 2) would write into a model's or an output file."""
    code = """
import os
from k3offload.progress import steady_streams
steady_streams()
print(os.open("file", os.O_CREAT | os.O_RDWR))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", code],
        stdout=subprocess.PIPE, timeout=60, cwd=tmp_path, env=env,
    )  # fmt: skip
    assert run.returncode == 0 and int(run.stdout) > 2


def test_the_meter_tells_tokens_rate_and_time_left_r04() -> None:
    said: list[str] = []
    now = [100.0]
    meter = Meter(said.append, lambda: now[0])
    meter.prompt(0, 1000, 512)
    meter.layer(0, 8)
    now[0] += 64
    meter.layer(4, 8)  # 256 tokens' worth in 64 s: 4 tokens/s
    now[0] += 64
    meter.prompt(512, 1000, 488)
    meter.layer(0, 8)
    now[0] += 61
    meter.layer(4, 8)
    meter.token(1)
    meter.layer(7, 8)
    assert said == [
        "prompt: 0 of 1,000 tokens, layer 1 of 8",
        "prompt: 0 of 1,000 tokens, 4 tokens/s, 3 min 6 s left, layer 5 of 8",
        "prompt: 512 of 1,000 tokens, 4 tokens/s, 2 min 2 s left, layer 1 of 8",
        "prompt: 512 of 1,000 tokens, 4 tokens/s, 1 min 1 s left, layer 5 of 8",
        "token 2: layer 8 of 8",
    ]


def test_seconds() -> None:
    shown = [show_seconds(s) for s in (0.2, 59.4, 59.6, 3599, 3600, 7 * 3600 + 125)]
    assert shown == ["0 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "7 h 2 min"]


def test_the_screen_of_these_tests_can_lose_text() -> None:
    assert screen("text\r\x1b[2Kgone\r\n\x1b[1Aup") == ["upne", ""]
