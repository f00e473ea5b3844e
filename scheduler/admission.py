"""When documents of a batch begin: how many places have to be free before new ones take them.

A sweep with a prompt in it reads experts that decoding alone would not, whether it brings one new
document or ten.  So it may pay to let places stand empty until several can be filled at once; but
the more of them stand empty, the fewer documents share the other sweeps.  What is best follows from
how long answers are, from the seconds of a sweep that only decodes, and from those that a prompt
adds whatever its length: with these, as they were measured so far, the next documents are played
through.  Knows seconds and counts, no document; whatever it decides, no bit of a result depends on
it.
"""

from __future__ import annotations

import itertools
from collections import deque
from heapq import heappop, heappush

KEEP = 0.9  #: weight of what was seen before, one sweep later
ANSWERS = 64  #: lengths of answers that are remembered
AHEAD = 8  #: times the places: documents that are played through


class _Mean:
    """A mean in which what is recent counts most."""

    def __init__(self) -> None:
        self.weight = self._sum = 0.0

    def add(self, value: float) -> None:
        self.weight = KEEP * self.weight + 1
        self._sum = KEEP * self._sum + value

    @property
    def value(self) -> float:
        return self._sum / self.weight


class Admission:
    """For ``places`` documents at a time.  Call ``swept`` and ``ended`` as things happen."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._answers: deque[int] = deque(maxlen=ANSWERS)
        self._decode = _Mean()
        # of sweeps with prompts: rows, seconds, and their products, for a straight line
        self._rows, self._seconds, self._square, self._product = (_Mean() for _ in range(4))
        self._group, self._fresh = 1, 0

    def swept(self, seconds: float, prompt_rows: int) -> None:
        """A sweep took ``seconds``, with ``prompt_rows`` rows of prompts, 0 if it only decoded."""
        if not prompt_rows:
            self._decode.add(seconds)
            return
        self._rows.add(prompt_rows)
        self._seconds.add(seconds)
        self._square.add(prompt_rows * prompt_rows)
        self._product.add(prompt_rows * seconds)

    def ended(self, tokens: int) -> None:
        """A document ended after ``tokens`` new tokens."""
        self._answers.append(max(1, tokens))
        self._fresh += 1

    def begins(self, free: int) -> bool:
        """Whether new documents begin now that ``free`` places are."""
        return free > 0 and (free == self.places or free >= self.group())

    def group(self) -> int:
        """How many documents had best begin at a time, from what was seen; at first 1."""
        if self._fresh > 0 and self._decode.weight and self._rows.weight:
            self._fresh = -self.places  # thought over once in as many documents as there are places
            step, extra = self._decode.value, self._extra()
            sizes = {1, *(max(1, self.places * i // 16) for i in range(1, 17))}
            self._group = min(sorted(sizes), key=lambda size: self._play(size, step, extra))
        return self._group

    def _play(self, group: int, step: float, extra: float) -> float:
        """Seconds of the next documents if ``group`` of them begin at a time."""
        ends: list[int] = []  # of those that run, counted in sweeps
        now = begins = 0
        lengths, left = itertools.cycle(self._answers), AHEAD * self.places
        while left:
            while self.places - len(ends) < min(group, left):
                now = heappop(ends)
            while ends and ends[0] == now:  # what ends at the same time makes room as well
                heappop(ends)
            new = min(left, self.places - len(ends))
            for length in itertools.islice(lengths, new):
                heappush(ends, now + length)
            left -= new
            begins += 1
        return max(ends) * step + begins * extra

    def _extra(self) -> float:
        """Seconds that a prompt adds to a sweep, however short it is: where the line of seconds
        over rows begins, less a sweep that only decodes."""
        rows, seconds = self._rows.value, self._seconds.value
        spread = self._square.value - rows * rows
        slope = 0.0
        if spread > 1e-6 * rows * rows:
            slope = (self._product.value - rows * seconds) / spread
        slope = min(max(slope, 0.0), seconds / rows)
        return max(0.0, seconds - slope * rows - self._decode.value)
