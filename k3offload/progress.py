"""The two streams of a command: data on stdout; what happens, from the first second, on stderr.

On a terminal one line of stderr changes and is redrawn; elsewhere it is printed at most every five
seconds, without colours or control codes.  A stderr that is closed or full goes silent and ends
nothing; a stdout that cannot be written is an error.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.status import Status

from .config import show_size
from .find import named

INTERRUPTED = 130  #: exit code
EVERY = 5.0  #: seconds between lines where nothing can be redrawn


def steady_streams() -> None:
    """Standard streams that are there, and UTF-8 in any locale.

    Numbers 0 to 2 are taken by something, or the next file that is opened would be written to by
    whoever writes to stderr.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def last_words(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def failed(text: str, code: int) -> int:
    """``code``, and one line on stderr, whatever letters stand in ``text``."""
    text = re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)
    last_words(f"error: {text}")
    return code


def let_go() -> None:
    """Drop what cannot be written any more; the interpreter would complain about it at the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())


def write_out(text: str, end: str = "\n", to: TextIO | None = None) -> None:
    """Data, to stdout, at once.  An ``OSError`` names stdout.  ``to``: what stdout was, where
    somebody else's prints are led away from it."""
    with named("stdout"):
        print(text, end=end, flush=True, file=to)


def may_redraw() -> bool:
    """Whether stderr is a terminal that may be sent control codes."""
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stderr.isatty() and not dumb and not os.environ.get("NO_COLOR")


class Progress:
    """Use as a context manager; ``quiet`` says nothing at all."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet or sys.stderr is None
        self._live = not self._quiet and may_redraw()
        self._console = _Console(
            file=io.StringIO() if self._quiet else sys.stderr,
            force_terminal=self._live,
            color_system=None,
            highlight=False,
            soft_wrap=True,
            markup=False,
            emoji=False,
        )
        self._status: Status | None = None
        self._last = time.monotonic()
        self._text_under_way = False

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._print(f"\n{text}" if self._text_under_way else text)

    def show(self, text: str) -> None:
        """What is going on right now."""
        if self._quiet or self._text_under_way:
            return
        if self._live:
            with self._or_silence():
                if self._status is None:
                    self._status = self._console.status(text, spinner="line")
                    self._status.start()
                self._status.update(text)
        elif time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._print(text)

    def clear(self) -> None:
        """Take the changing line away, before something else is written to the terminal."""
        if self._status is not None:
            with self._or_silence():
                self._status.stop()
            self._status = None

    def text_begins(self) -> None:
        """From now on text grows on stdout; if that is the same terminal, its line is not ours."""
        self.clear()
        if not self._quiet:
            self._text_under_way = sys.stderr.isatty() and sys.stdout.isatty()

    def text_ends(self) -> None:
        """The text has got its last newline."""
        self._text_under_way = False

    def _print(self, text: str) -> None:
        with self._or_silence():
            self._console.print(text)

    @contextmanager
    def _or_silence(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._quiet = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the caller; the library would end the process and drop stdout as well."""
        raise BrokenPipeError


@contextmanager
def loading_libraries(progress: Progress) -> Iterator[None]:
    """Say so; meanwhile Ctrl-C leaves at once, since an import may swallow an interrupt."""

    def leave(number: int, frame: Any) -> None:
        os.write(2, b"\ninterrupted\n")
        os._exit(INTERRUPTED)

    progress.say("loading libraries")
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    ours = main and before is signal.default_int_handler  # not where a caller ignores it
    if ours:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


class Meter:
    """How far a run has got: prompt tokens done of all, bytes read, rate, time left; then tokens.

    ``layer`` is told of every layer, so that a sweep that takes minutes is seen to move.  The rate
    is that of the last whole sweep and the one under way: attention slows down as a prompt grows.
    ``read`` says how many bytes were read so far.
    """

    def __init__(
        self, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show, self._clock = show, clock
        self._sweeps = [(clock(), 0)]  # when the last two began, and how many tokens were done
        self._total, self._step, self._made = 0, 0, 0
        self.read: Callable[[], int] = lambda: 0
        self._read_before = 0

    def prompt(self, done: int, total: int, step: int) -> None:
        """``done`` of ``total`` prompt tokens are computed, the next ``step`` are under way."""
        before = self._sweeps[-1:] if done else []
        self._read_before = self._read_before if done else self.read()
        self._sweeps = [*before, (self._clock(), done)]
        self._total, self._step = total, step

    def token(self, made: int) -> None:
        """``made`` tokens are sampled."""
        self._made = made

    def layer(self, layer: int, layers: int) -> None:
        """Layer ``layer`` (from 0) of ``layers`` begins."""
        place = f"layer {layer + 1} of {layers}"
        if self._made:
            self._show(f"token {self._made + 1:,}: {place}")
            return
        done = self._sweeps[-1][1]
        line = f"prompt: {done:,} of {self._total:,} tokens"
        if read := self.read() - self._read_before:
            line += f", {show_size(read)} read"
        reached = done + self._step * layer / layers
        begin, before = self._sweeps[0]
        seconds = self._clock() - begin
        if reached > before and seconds > 0:
            rate = (reached - before) / seconds
            left = show_seconds((self._total - reached) / rate)
            line += f", {rate:.3g} tokens/s, {left} left"
        self._show(f"{line}, {place}")


def show_seconds(seconds: float) -> str:
    """``42 s``, ``3 min 5 s``, ``2 h 7 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
