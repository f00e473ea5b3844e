"""``k3offload chat``: pipes, commands, terminals, Ctrl-C (R25)."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3offload.chat_parse import Content, Finish, Reasoning, ToolCall
from k3offload.conversation import Hold
from k3offload.progress import Progress
from k3offload.run_chat import Interrupted, Interrupts, _Printer
from tests.helpers_chat import WORDING
from tests.helpers_checkpoint import ROOT
from tests.helpers_engine import call
from tests.helpers_terminal import Terminal
from tests.helpers_tokenizer import NANO

FIRST, SECOND = "What is the seal of Ammiel?", "Go on: In the beginning God"


@pytest.fixture(autouse=True)
def usual_interrupt() -> Iterator[None]:
    """As in a process of its own: what other tests' libraries made of Ctrl-C is out of the way."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def typed(
    lines: str | bytes,
    arguments: list[object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, str, str]:
    """The command with ``lines`` on its stdin."""
    data = lines.encode() if isinstance(lines, str) else lines
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    return call(["chat", *arguments], capsys)


def test_lines_become_answers_and_commands_are_obeyed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "c"
    lines = f"{FIRST}\n\n/stats\n{SECOND}\n/undo\n{SECOND}\n/save {place}\n/quit\nnever asked\n"
    code, out, err = typed(lines, ["nano", "-n", 40], capsys, monkeypatch)
    assert code == 0, err
    first, second, again = out.splitlines()
    assert first.startswith("The seal of ") and second == again
    assert "2 messages" in err and f"taken back: {SECOND}" in err and "\x1b" not in err
    kept = json.loads((place / "chat.json").read_bytes())["messages"]
    assert [m["content"] for m in kept] == [FIRST, first, SECOND, second]
    lines = f"/load {place}\n/undo\n{SECOND}\n"
    code, out, err = typed(lines, ["nano", "-n", 40], capsys, monkeypatch)
    assert (code, out) == (0, f"{second}\n"), err
    code, out, err = typed(
        "/undo\n/system Be brief.\n", ["nano", "--session", place], capsys, monkeypatch
    )
    assert (code, out) == (0, "") and "going on after 4 messages" in err
    kept = json.loads((place / "chat.json").read_bytes())["messages"]
    assert [m["role"] for m in kept] == ["system", "user", "assistant"]


def test_what_is_wrong_with_a_line_is_told_and_the_next_is_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = (
        b"/nope\n/load\n/save\n/undo\na\xff\n/system a\xff\n/load /dev/null/x\n" + FIRST.encode()
    )
    code, out, err = typed(lines, ["nano", "-n", 40], capsys, monkeypatch)
    assert code == 1 and out.startswith("The seal of ")
    wrong = [line for line in err.splitlines() if line.startswith("error: ")]
    told = ["/nope is no", "/load has no", "/save has no", "no message"]
    told += ["messages[0].content", "messages[0].content", "x"]
    assert len(wrong) == len(told)
    assert all(part in line for part, line in zip(told, wrong, strict=True))


def contents(place: Path) -> list[str]:
    return [m["content"] for m in json.loads((place / "chat.json").read_bytes())["messages"]]


def test_load_moves_to_another_folder_and_saves_what_it_leaves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for place in (a, b):
        code, _, err = typed(
            f"/system Of {place.name}.\n", ["nano", "--session", place], capsys, monkeypatch
        )
        assert code == 0, err
    lines = f"/system Given up.\n/load {a}\n/save {b}\n/system A now.\n/load {b}\n/save {a}\n"
    code, _, err = typed(
        f"{lines}/system B now.\n/quit\n", ["nano", "--session", a], capsys, monkeypatch
    )
    assert code == 1 and err.count("holds another conversation") == 2
    assert (contents(a), contents(b)) == (["A now."], ["B now."])
    code, _, err = typed(f"/load {b}\n/system Lost.\n", ["nano"], capsys, monkeypatch)
    assert code == 0 and contents(b) == ["B now."]  # without --session nothing is saved unasked
    assert sorted(os.listdir(a)) == sorted(os.listdir(b)) == ["chat.json"]


def test_a_conversation_is_one_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place, hold = tmp_path / "c", Hold()
    hold.move(place)
    code, out, err = typed("", ["nano", "--session", place], capsys, monkeypatch)
    assert (code, out) == (2, "") and f"process {os.getpid()}" in err and "memory plan" not in err
    hold.close()
    assert not place.exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["nano", "--effort", "low"], "effort cannot be told"),
        (["nano", "--effort", "low", "--no-thinking"], "--no-thinking not to"),
        (["nano", "--effort", "medium"], "--effort is 'medium'"),
        (["nano", "--session", NANO / "c"], "in the model's folder"),
        (["nano", "--session", Path(__file__)], "is no folder"),
        (["nano", "-n", 0], "-n is 0"),
    ],
)
def test_refused_before_anything_is_loaded(
    arguments: list[object],
    what: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, out, err = typed("", arguments, capsys, monkeypatch)
    assert (code, out) == (2, "") and what in err and "memory plan" not in err


def test_the_effort_is_what_the_release_asks_for_unless_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tmp_path / "m"
    model.mkdir()
    for file in NANO.iterdir():
        (model / file.name).symlink_to(file)
    (model / "encoding_k3.py").write_text(WORDING)
    counts = {}
    for effort in ("max", None, "none"):
        more = [] if effort is None else ["--effort", effort]
        code, _, err = typed("x\n/stats\n", [model, "-n", 1, *more], capsys, monkeypatch)
        assert code == 0, err
        counts[effort] = next(line for line in err.splitlines() if " messages; " in line)
    assert counts[None] == counts["max"] != counts["none"]
    assert not (model / "ran").exists()


def test_reasoning_is_dim_on_a_terminal_that_may_be_coloured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for environment, dim in (({}, "\x1b[2m"), ({"NO_COLOR": "1"}, "")):
        with Terminal(monkeypatch, **environment) as terminal, Progress() as progress:
            printer = _Printer(progress)
            for event in (
                Reasoning("Hm"), Reasoning(" so."), Content("Yes"), Content("."),
                ToolCall(0, "f"), Finish("length"),
            ):  # fmt: skip
                printer.show(event)
            printer.ends()
        assert ("\x1b[2m" in terminal.written) == bool(dim)
        lines = [line.strip() for line in terminal.written.replace("\x1b[2m", "").splitlines()]
        lines = [line.replace("\x1b[0m", "") for line in lines if line]
        assert lines[:2] == ["Hm so.", "Yes."]
        assert "calls f" in lines[2] and "cut off" in lines[3]


def test_two_interrupts_leave_if_they_come_within_a_second() -> None:
    now = [0.0]
    for gap, left in ((0.9, True), (1.1, False)):
        interrupts = Interrupts(lambda: now[0])
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(Interrupted):
                interrupts.check()
            interrupts.check()
            now[0] += gap
            signal.raise_signal(signal.SIGINT)
        assert bool(interrupts.left) == left
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_of_two_answers_are_two_however_soon() -> None:
    def interrupted() -> str:
        signal.raise_signal(signal.SIGINT)
        return "x"

    interrupts = Interrupts(lambda: 0.0)
    with interrupts.held():
        for _ in range(3):
            assert interrupts.read(lambda: "x") == "x"
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(Interrupted):
                interrupts.check()
        assert not interrupts.left
        with pytest.raises(Interrupted):
            interrupts.read(interrupted)
        assert interrupts.left


def _usual() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Process:
    """The command with pipes, read as it writes."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k3offload", "chat", "nano", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
            # What runs in the background of a shell ignores signals, and so would this.
            preexec_fn=_usual,
        )  # fmt: skip
        self.read = {"stdout": "", "stderr": ""}

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def wait_for(self, stream: str, text: str) -> None:
        """Until ``text`` stands in what was written since the last call; forgets it."""
        pipe = getattr(self.process, stream)
        while text not in self.read[stream]:
            assert select.select([pipe], [], [], 60)[0], self.read
            data = os.read(pipe.fileno(), 1 << 16)
            assert data, self.read
            self.read[stream] += data.decode(errors="replace")
        self.read[stream] = self.read[stream].partition(text)[2]

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


def test_ctrl_c_in_a_real_process_r25(tmp_path: Path) -> None:
    """Once: the answer is dropped, the next one is that of a fresh run.  Twice: it leaves, and
    the conversation is on disk."""
    long, place = "x", tmp_path / "c"  # 150 tokens, most of a second or more
    chat = Process("--session", str(place))
    chat.wait_for("stderr", "memory plan")
    chat.type(long)
    chat.wait_for("stdout", " ")
    chat.interrupt()
    chat.wait_for("stderr", "interrupted: the answer is dropped")
    chat.wait_for("stdout", "\n")
    chat.type(FIRST)
    chat.wait_for("stdout", "\n")
    chat.type("/undo")
    chat.type("/undo")
    chat.type(long)
    chat.wait_for("stdout", " ")
    chat.interrupt()
    chat.wait_for("stderr", "interrupted: the answer is dropped")
    chat.interrupt()
    chat.wait_for("stderr", "saved to")
    _, err = chat.process.communicate(timeout=60)
    assert chat.process.returncode == 130 and b"Traceback" not in err
    kept = json.loads((place / "chat.json").read_bytes())["messages"]
    assert kept == [{"role": "user", "content": long}]


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGHUP, None])
def test_however_it_ends_it_is_saved(way: signal.Signals | None, tmp_path: Path) -> None:
    """By a signal during an answer or while it waits for a line, or by a pipe that is closed."""
    place = tmp_path / "c"
    chat = Process("--session", str(place))
    chat.wait_for("stderr", "memory plan")
    if way == signal.SIGTERM:
        chat.type("x")
        chat.wait_for("stdout", " ")
    elif way == signal.SIGHUP:
        chat.type("/system x")
        chat.wait_for("stderr", "the model is told it")
    if way is None:
        assert chat.process.stdout is not None
        chat.process.stdout.close()
        chat.process.stdout = None
        chat.type("x")
    else:
        chat.process.send_signal(way)
    _, err = chat.process.communicate(timeout=60)
    assert chat.process.returncode == (1 if way is None else 128 + way)
    assert b"Traceback" not in err and contents(place) == ["x"]
