"""How long the rest of a batch takes, from what was measured so far.

What a sweep takes is fitted to the sweeps that were: so much for itself, so much for each row that
decodes and each row of a prompt.  How long an answer becomes is what those that ended were long,
counted with those that are longer already and have not ended; before the first has ended it is what
it may be at most.  With these the documents that are left are played through, sweep by sweep.
Knows seconds and counts, no document.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

SWEEPS = 48  #: sweeps that are remembered, of those that only decode and of the others
ANSWERS = 256  #: lengths of answers that are remembered
AHEAD = 8  #: times the places: documents that are played through; more take as long each
GOLDEN = 0.6180339887498949  #: its multiples, whole parts left out, spread evenly

Sweep = tuple[float, int, int]  #: its seconds, rows that decoded, rows of prompts


class UnderWay(NamedTuple):
    """A document that has begun: prompt tokens to compute, new tokens made, and at most."""

    prompt: int
    made: int
    most: int


class Remaining:
    """For sweeps of ``rows`` rows at most.  Call ``taken``, ``swept`` and ``ended`` as things
    happen."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._kinds = deque[Sweep](maxlen=SWEEPS), deque[Sweep](maxlen=SWEEPS)
        self._ended = deque[int](maxlen=ANSWERS)
        self._taken = self._begun = self._prompts = 0

    def taken(self, begins: bool) -> None:
        """A document was taken from the input; whether it ``begins``, or has ended already."""
        self._taken += 1
        self._begun += begins

    def swept(self, seconds: float, decoding: int, prompts: int) -> None:
        """A sweep took ``seconds`` for so many rows that decoded and rows of prompts."""
        self._kinds[prompts > 0].append((seconds, decoding, prompts))
        self._prompts += prompts

    def ended(self, tokens: int) -> None:
        """A document ended well after ``tokens`` new tokens."""
        self._ended.append(max(1, tokens))

    def seconds(
        self, under_way: Sequence[UnderWay], waiting: int, most: int, places: int, group: int
    ) -> float | None:
        """Until all are done: those ``under_way``, and ``waiting`` more, which make ``most`` tokens
        at most, ``places`` at a time, and begin when ``group`` of these are free.  None before a
        sweep was measured."""
        if not any(self._kinds):
            return None
        price, lengths = self._price(), _Lengths(self._ended, [u.made for u in under_way])
        good = round(waiting * self._begun / self._taken) if self._taken else waiting
        prompt = 0.0
        if self._begun:
            prompt = (self._prompts + sum(u.prompt for u in under_way)) / self._begun
        now = [
            (u.prompt, lengths.draw((i + 0.5) * GOLDEN % 1, u.made, u.most) - u.made)
            for i, u in enumerate(under_way)
        ]
        new = [
            (round(prompt), lengths.draw((i + 0.5) * GOLDEN % 1, 0, most))
            for i in range(min(good, AHEAD * places))
        ]
        total = self._play(now, new, places, group, price)
        if good > len(new):
            half = len(new) // 2
            each = (total - self._play(now, new[:half], places, group, price)) / (len(new) - half)
            total += each * (good - len(new))
        return total

    def sweep(self, decoding: int, prompts: int) -> float | None:
        """Seconds of a sweep of so many rows that decode and rows of prompts; None before one was
        measured."""
        if not any(self._kinds):
            return None
        each, a_decode, a_prompt = self._price()
        return each + decoding * a_decode + prompts * a_prompt

    def _price(self) -> tuple[float, float, float]:
        """Seconds of a sweep, of a row that decodes, of a row of a prompt; none below 0.  Where the
        sweeps do not tell these apart, all have a part in it."""
        seen = np.array([sweep for kind in self._kinds for sweep in kind])
        x, y = np.column_stack((np.ones(len(seen)), seen[:, 1:])), seen[:, 0]
        scale = np.maximum(x.max(0), 1)
        price, left = np.zeros(3), [0, 1, 2]
        while left:
            found = np.linalg.lstsq((x / scale)[:, left], y, rcond=1e-6)[0]
            if found.min() >= 0:
                price[left] = found
                break
            del left[int(found.argmin())]
        sweep, decode, prompt = (price / scale).tolist()
        return sweep, decode, prompt

    def _play(
        self,
        now: Iterable[tuple[int, int]],
        new: Iterable[tuple[int, int]],
        places: int,
        group: int,
        price: tuple[float, float, float],
    ) -> float:
        """Seconds for documents ``now`` under way and ``new`` ones: their prompt tokens, and the
        new tokens that are left."""
        each, a_decode, a_prompt = price
        prompts = deque[list[int]]()
        ends: list[int] = []  # of those that decode: after which sweep
        for prompt, left in now:
            prompts.append([prompt, left]) if prompt else heappush(ends, left)
        waiting = deque(new)
        sweep, total = 0, 0.0
        while prompts or ends or waiting:
            if places - len(ends) - len(prompts) >= min(group, places):
                while waiting and len(ends) + len(prompts) < places:
                    prompts.append(list(waiting.popleft()))
            room, rows = max(1, self._rows - len(ends)), 0
            decoding, step = len(ends), 1
            while prompts and rows < room:
                part = min(prompts[0][0], room - rows)
                rows += part
                prompts[0][0] -= part
                if not prompts[0][0]:  # its first token comes with the end of its prompt
                    heappush(ends, sweep + max(1, prompts.popleft()[1]))
            if not rows and ends:
                step = max(1, ends[0] - sweep)
            sweep += step
            total += step * (each + decoding * a_decode) + rows * a_prompt
            while ends and ends[0] <= sweep:
                heappop(ends)
        return total


class _Lengths:
    """How long answers become: survival after Kaplan and Meier of those that ``ended`` and, as far
    as they are, of those that run; what runs longer than all that ended goes on ending as often."""

    def __init__(self, ended: Iterable[int], running: Sequence[int]) -> None:
        lengths, others = sorted(ended), sorted(running)
        self._lengths: list[int] = []
        self._survive: list[float] = []  # the share that is longer
        share, count = 1.0, len(lengths)
        for i, length in enumerate(lengths):
            at_risk = count - i + len(others) - bisect_left(others, length)
            share *= 1 - 1 / at_risk
            if self._lengths and self._lengths[-1] == length:
                self._survive[-1] = share
            else:
                self._lengths.append(length)
                self._survive.append(share)
        self._ends = count / max(1, sum(lengths) + sum(others))  # a token

    def draw(self, share: float, made: int, most: int) -> int:
        """The length that a ``share`` of the answers of more than ``made`` tokens do not exceed."""
        if not self._lengths:
            return most
        at = bisect_right(self._lengths, made)
        want = (self._survive[at - 1] if at else 1.0) * (1 - share)
        for i in range(at, len(self._lengths)):
            if self._survive[i] <= want:
                return min(self._lengths[i], most)
        last = max(made, self._lengths[-1])
        alive = self._survive[-1]
        more = math.log(alive / want) / self._ends if want > 0 else most
        return min(last + max(1, round(more)), most)
