"""What happens, on stderr, from the first second: lines that stay and one line that changes.

On a terminal the changing line is redrawn; elsewhere it is printed at most every five seconds.
Nothing here ever writes to stdout.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

EVERY = 5.0  #: seconds between lines where nothing can be redrawn


class Progress:
    """Use as a context manager; ``quiet`` says nothing at all."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True, markup=False)
        self._quiet = quiet
        self._live = self._console.is_terminal and not quiet
        self._status: Status | None = None
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(text)

    def show(self, text: str) -> None:
        """What is going on right now."""
        if self._quiet:
            return
        if self._live:
            if self._status is None:
                self._status = self._console.status(text, spinner="line")
                self._status.start()
            self._status.update(text)
        elif time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._console.print(text)

    def clear(self) -> None:
        """Take the changing line away, before something else is written to the terminal."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
