"""A terminal of our own: a real pty that stdout and stderr go to, and what its screen shows."""

from __future__ import annotations

import os
import re
import sys
import threading
from types import TracebackType
from typing import TextIO

import pytest

_PIECE = re.compile(r"\x1b\[(\??\d*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    """While it is entered, ``sys.stdout`` and ``sys.stderr`` are one terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
        self._patch = monkeypatch
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm", **environment}.items():
            monkeypatch.setenv(name, value)
        self._parts: list[bytes] = []

    def __enter__(self) -> Terminal:
        self._main, side = os.openpty()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._files: list[TextIO] = []
        self._before = {"stdout": sys.stdout, "stderr": sys.stderr}
        for name in ("stdout", "stderr"):
            self._files.append(open(os.dup(side), "w", encoding="utf-8"))
            self._patch.setattr(sys, name, self._files[-1])
        os.close(side)
        return self

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._main, 1 << 16)
            except OSError:  # the other end has no opener any more
                return
            if not data:
                return
            self._parts.append(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, stream in self._before.items():
            self._patch.setattr(sys, name, stream)
        for file in self._files:
            file.close()
        self._reader.join(10)
        os.close(self._main)

    @property
    def written(self) -> str:
        """Everything that was sent to the terminal, control codes and all."""
        return b"".join(self._parts).decode()

    @property
    def screen(self) -> list[str]:
        """The lines as a person sees them in the end; wide enough that none wraps."""
        return screen(self.written)


def screen(written: str) -> list[str]:
    """What a terminal shows after ``written``: cursor up, line erased, return, newline."""
    lines, row, column = [""], 0, 0
    for match in _PIECE.finditer(written):
        number, code, move, text = match.groups()
        if code == "A":
            row = max(0, row - int(number or 1))
        elif code == "K":
            assert number == "2", "only whole lines are erased"
            lines[row] = ""
        elif move == "\r":
            column = 0
        elif move == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]
