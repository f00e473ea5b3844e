"""The ``chat`` command: lines in, answers out as they come, commands in between, Ctrl-C.

Answers go to stdout; reasoning and everything else to stderr, reasoning dimmed where that is a
terminal that may be sent colours.  Without a terminal each line of stdin is a message.

An interrupt drops the answer under way at the next layer or token and keeps the conversation; a
second one within a second leaves.  However it ends, by a signal or a closed pipe as well, what was
to be saved is saved.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from .chat_parse import Content, Finish, Reasoning, ToolCall
from .config import show_size
from .conversation import Conversation, Hold, read_folder
from .errors import K3Error, UsageError
from .generate import Prefill
from .progress import Meter, Progress, may_redraw, write_out
from .session_manifest import refuse_in_model

AGAIN: Final = 1.0  #: seconds in which a second interrupt leaves
#: What becomes of signals where nobody has said anything else.
USUAL: Final[dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers]] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
HELP: Final = """\
/save [FOLDER]   write the conversation; without FOLDER to that of --session, or the last one named
/load FOLDER     go on with the conversation in FOLDER; with --session the present one is saved
                 first, and in the end FOLDER is saved to
/undo            take the last message and its answer back
/system [TEXT]   tell the model TEXT at the beginning; without TEXT, nothing
/stats           figures
/quit            leave
//...            a message that begins with /"""


class Interrupted(BaseException):
    """The answer under way is not wanted any more; raised between layers and tokens alone."""


class Leave(Exception):
    """The conversation is over."""


class Interrupts:
    """What Ctrl-C means, and signals that ask a process to end.  Leaves alone what a caller ignores
    or handles, and does nothing outside the main thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, float("-inf")
        self._pending = self._waiting = False
        self.left = 0  #: the signal to leave at; of interrupts the second if it came soon enough

    @contextmanager
    def held(self) -> Iterator[None]:
        main = threading.current_thread() is threading.main_thread()
        ours = [number for number, usual in USUAL.items() if signal.getsignal(number) == usual]
        for number in ours if main else ():
            signal.signal(number, self._came)
        try:
            yield
        finally:
            for number in ours if main else ():
                signal.signal(number, USUAL[number])

    def _came(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        again, self._last = now - self._last < AGAIN, now
        if self.left and number == signal.SIGINT:
            raise KeyboardInterrupt  # a third: at once, wherever that is
        if self.left:
            return  # a terminal that goes away may say so twice
        self._pending = True
        if again or number != signal.SIGINT:
            self.left = number
        if self._waiting:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise ``Interrupted`` if one has come."""
        if self._pending:
            self._pending = False
            raise Interrupted

    def read(self, line: Callable[[], str]) -> str:
        """A line, unless an interrupt comes meanwhile, which raises ``Interrupted``."""
        self._waiting = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            given = line()
            self._last = float("-inf")  # the next interrupt is of something else
            return given
        except KeyboardInterrupt:
            self._pending = False
            raise Interrupted from None
        finally:
            self._waiting = False


class Chat:
    """The terminal's side of a conversation."""

    def __init__(
        self, talk: Conversation, progress: Progress, meter: Meter, place: Path | None, hold: Hold
    ) -> None:
        """``place``: where it is saved in the end, which ``hold`` holds."""
        self._talk, self._progress, self._meter, self._place = talk, progress, meter, place
        self._interrupts = Interrupts()
        self._last = "no answer yet"
        self._failed = False
        self._kept, self._hold = place, hold

    def run(self) -> bool:
        """Until the input ends; whether every message got its answer."""
        hooks = self._talk.engine.hooks
        hooks.before_layer = lambda layer: self._interrupts.check()
        with self._interrupts.held():
            try:
                while True:
                    self._one()
            except (EOFError, Leave):
                pass
            finally:
                hooks.before_layer = lambda layer: None
                if self._kept is not None:
                    self._save(self._kept)
        if self._interrupts.left == signal.SIGINT:
            raise KeyboardInterrupt
        if self._interrupts.left:
            raise SystemExit(128 + self._interrupts.left)
        return not self._failed

    def _one(self) -> None:
        """One line of input and what follows from it."""
        self._progress.clear()
        try:
            line = self._interrupts.read(_line).strip()
        except Interrupted:
            if not self._interrupts.left:
                self._progress.say("\nCtrl-C again, or /quit, leaves")
        else:
            try:
                if line.startswith("/") and not line.startswith("//"):
                    self._command(line)
                elif line:
                    self._answer(line.removeprefix("/") if line.startswith("//") else line)
            except (K3Error, OSError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                self._failed = True
                self._progress.clear()
                self._progress.say(f"error: {error}")
        if self._interrupts.left:
            raise Leave

    # ---- answers ----

    def _answer(self, text: str) -> None:
        printer = _Printer(self._progress)
        begin, first, prompt = time.perf_counter(), 0.0, 0
        rows = self._talk.engine.plan.sweep_rows
        self._meter.token(0)
        try:
            for event in self._talk.ask(text):
                self._interrupts.check()
                if isinstance(event, Prefill):
                    prompt = self._talk.session.length
                    self._meter.prompt(event.done, event.total, min(rows, event.total - event.done))
                    continue
                first = first or time.perf_counter()
                self._meter.token(self._talk.session.length - prompt)
                printer.show(event)
        except Interrupted:
            printer.ends()
            said = "your message stays, /undo takes it back"
            self._progress.say(f"interrupted: the answer is dropped; {said}")
            return
        except BaseException:
            printer.ends()
            raise
        printer.ends()
        seconds = time.perf_counter() - begin
        self._last = f"last answer: {first - begin:.2f} s to its first text, {seconds:.2f} s in all"

    # ---- commands ----

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        known: dict[str, Callable[[str], None]] = {
            "/save": self._save_as,
            "/load": self._load,
            "/undo": self._undo,
            "/system": self._system,
            "/stats": self._stats,
            "/help": lambda rest: self._progress.say(HELP),
        }
        if name == "/quit":
            raise Leave
        if name not in known:
            raise UsageError(f"{name} is no command.", "/help lists them; // begins a message.")
        known[name](rest)

    def _save_as(self, rest: str) -> None:
        place = Path(rest) if rest else self._place
        if place is None:
            raise UsageError("/save has no folder.", "Write /save FOLDER.")
        self._save(place)
        self._place = place

    def _save(self, place: Path) -> None:
        self._talk.save(place)
        self._progress.say(f"saved to {place}")

    def _load(self, rest: str) -> None:
        if not rest:
            raise UsageError("/load has no folder.", "Write /load FOLDER.")
        place = Path(rest)
        if self._kept is None:
            self._talk.load(place)
        else:
            self._move(self._kept, place)
        self._place = place
        self._progress.say(f"{len(self._talk.messages)} messages from {rest}")

    def _move(self, old: Path, new: Path) -> None:
        """Leave the conversation in ``old`` and go on with, and save to, that in ``new``; of one
        and the same, what was not saved is given up."""
        refuse_in_model(new, self._talk.engine.checkpoint.folder)
        read_folder(new)  # before anything is made there
        if os.path.realpath(old) != os.path.realpath(new):
            self._save(old)
        self._hold.move(new)
        self._talk.load(new)
        self._kept = new

    def _undo(self, rest: str) -> None:
        text = self._talk.undo()
        if text is None:
            raise UsageError("There is no message to take back.", "Write one.")
        self._progress.say(f"taken back: {text}")

    def _system(self, rest: str) -> None:
        self._talk.system = rest
        self._progress.say("the model is told it from the next message on")

    def _stats(self, rest: str) -> None:
        session, engine = self._talk.session, self._talk.engine
        limit = min(engine.options.context, engine.spec.context)
        self._progress.say(
            f"{len(self._talk.messages)} messages; {session.length:,} of {limit:,} tokens, "
            f"{show_size(session.state.nbytes)} of state\n{self._last}"
        )


class _Printer:
    """One answer: reasoning to stderr, content to stdout, which may be one terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if may_redraw() else ("", "")
        self._under_way = ""  # what is being written: "reasoning", or "content"

    def show(self, event: Any) -> None:
        if isinstance(event, Reasoning):
            self._turn("reasoning")
            _err(f"{self._dim}{event.text}{self._plain}")
        elif isinstance(event, Content):
            self._turn("content")
            write_out(event.text, end="")
        elif isinstance(event, ToolCall):
            self._turn("")
            self._progress.say(f"the model calls {event.name}, which nobody answers here")
        elif isinstance(event, Finish) and event.reason == "length":
            self._turn("")
            self._progress.say("cut off at the most tokens of an answer (-n), or of the context")

    def ends(self) -> None:
        self._turn("")

    def _turn(self, what: str) -> None:
        """From now on ``what`` is written; a line of the other is ended."""
        if what == self._under_way:
            return
        if self._under_way == "reasoning":
            _err("\n")
        elif self._under_way == "content":
            write_out("")
        self._under_way = what
        if what:
            self._progress.text_begins()
        else:
            self._progress.clear()
            self._progress.text_ends()


def _err(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _line() -> str:
    """The next line of the input; raises ``EOFError`` at its end."""
    if sys.stdin is None:
        raise EOFError
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # noqa: F401  for editing and history; ``input`` finds it

        return input("> ")
    data = sys.stdin.buffer.readline()
    if not data:
        raise EOFError
    # what is no UTF-8 becomes something that no message can hold, and is refused as one
    return data.decode("utf-8", "surrogateescape")
