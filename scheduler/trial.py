"""Whether looking ahead pays on this machine, found out by doing without it for a while.

Asking the next layer's router and guessing takes time in every layer, whatever comes of it.  In a
large model that time is nothing beside a layer; in a small one, or where little is missing, it can
be more than what reads begun early save.  Neither is known beforehand, so where the asking takes
more than ``CHEAP`` of a sweep, sweeps with it and sweeps without it take turns, and the quicker
kind is kept until the next trial.  Knows seconds and rows of sweeps, no page.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

CHEAP = 0.005  #: share of a sweep's time that asking may take without being tried
WARM = 8  #: sweeps before anything is concluded: the cache fills
TURN, TURNS = 2, 12  #: sweeps of a turn, and turns of a trial
REST, MOST_REST = 8, 64  #: trials' lengths from one trial to the next, at first and at most
KEEP = 0.7  #: weight of earlier trials' evidence, one trial later


class Trial:
    """Call ``begin`` and ``end`` around each sweep; ``on`` says whether to look ahead in it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = True
        self._clock = clock
        self._kept = True  # what the last trial found
        self._evidence = 0.0  # log of (seconds with / without), summed over trials, decaying
        self._asking = self._swept = 0.0  # seconds, decaying, of sweeps that asked
        self._asked = 0.0  # of this sweep
        self._begin = self._since = 0.0
        self._wait, self._rest = WARM, REST
        self._rows = 0
        self._taken: dict[bool, list[float]] = {True: [], False: []}  # of the trial under way

    def begin(self, rows: int) -> None:
        """A sweep of ``rows`` decode rows begins."""
        if rows != self._rows:  # its seconds do not compare with those before
            self._rows = rows
            self._clear()
        done = sum(map(len, self._taken.values()))
        self.on = self._kept if self._wait else (done // TURN % 2 == 0) == self._kept
        self._asked = 0.0
        self._begin = self._clock()

    def ask(self) -> bool:
        """Whether to look ahead now; what follows until ``answered`` is the asking."""
        self._since = self._clock()
        return self.on

    def answered(self) -> None:
        self._asked += self._clock() - self._since

    def end(self) -> None:
        """The sweep has ended, and well."""
        seconds = self._clock() - self._begin
        if self.on:
            self._asking = KEEP * self._asking + self._asked
            self._swept = KEEP * self._swept + seconds
        if self._wait:
            self._wait -= 1
        elif not self._kept or self._asking > CHEAP * self._swept:
            self._taken[self.on].append(seconds)
            if sum(map(len, self._taken.values())) == TURN * TURNS:
                self._conclude()
        else:
            self._clear()

    def _conclude(self) -> None:
        ratio = statistics.median(self._taken[True]) / statistics.median(self._taken[False])
        self._evidence = KEEP * self._evidence + math.log(ratio)
        found = self._evidence <= 0
        self._rest = min(2 * self._rest, MOST_REST) if found == self._kept else REST
        self._kept = found
        self._wait = self._rest * TURN * TURNS
        self._clear()

    def _clear(self) -> None:
        for taken in self._taken.values():
            taken.clear()
