"""reuse: the page least likely to be asked for soon leaves; never worse than LRU.

How likely comes from what the routers say (``reuse.py``) and from the place of the page's layer in
the sweep (``reuse_rank.py``).  At first the cache is LRU, and the learned choice plays on a cache
in thought until it is clearly ahead.  Then it decides, but a guard (``reuse_guard.py``) lets it
lose no more against LRU than it has won before and ``SLACK`` misses.  When it loses much of that,
or all, the cache is LRU again and there is another trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..tiers.base import PageId
from .hints import CHOSEN
from .reuse import Experts, Reuse, Scores
from .reuse_guard import Guard
from .reuse_rank import Rank

SLACK = 8  #: misses against LRU that are risked after a trial
STAKE = (48, 256)  #: bounds of the misses to be won in a trial; half of the slots in between
SHARE = 20  #: and they are one in so many of LRU's misses of late, at least
KEEP_LOW, KEEP_HIGH = 0.6, 0.95  #: bounds of a value's decay from one visit to the next
SMOOTH = 0.9  #: weight of the misses of a sweep, one sweep later


class Policy:
    """``slots``: of the tier."""

    hears_router = True

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._guard, self._model, self._rank = Guard(slots), Reuse(), Rank()
        self._news: list[tuple[Experts, Scores]] = []  # rows of the present layer, not yet taken in
        self._expected: set[PageId] = set()  # pages of the lease that the guard has heard of
        self._idle = True  # no page has had to leave yet, so nothing needs to be learned
        self._thought: set[PageId] | None = None  # pages of the trial's cache; None: no trial
        self._won = self._missed = 0  # in this trial: misses fewer than LRU, and LRU's own
        self._best = 0  # the guard's ``ahead`` at its best since the last trial
        self._stake = min(max(STAKE[0], slots // 2), STAKE[1])
        self._misses, self._rate = 0, 0.0  # of this sweep; of a sweep, smoothed

    def hit(self, page: PageId) -> None:
        """By a lease, or by a prefetch."""
        if self._news:
            self._take_in()
        if page in self._expected:
            self._expected.remove(page)
        else:
            self._ask([page])
        if self._thought is None:
            if self._guard.ahead > self._best:
                self._best = self._guard.ahead
        elif page not in self._thought:
            self._try(self._thought, page)

    def insert(self, page: PageId) -> None:
        self.hit(page)
        guard = self._guard
        guard.insert(page)
        self._misses += 1
        if self._thought is None and not self._idle:
            self._rank.add(page)
            if guard.ahead <= guard.floor or guard.ahead <= self._best - 2 * self._stake:
                self._begin_trial()

    def forget(self, page: PageId) -> None:
        self._guard.forget(page)
        if self._thought is None and not self._idle:
            self._rank.remove(page)

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        if self._news:
            self._take_in()
        if self._idle:
            self._idle = False
            self._begin_trial()
        if self._thought is not None:
            victim = self._guard.safest(busy)
        else:
            bold = self._rank.least(busy)
            if bold is not None and self._guard.allows(bold):
                victim = bold
            else:
                victim = self._guard.spare(busy, self._rank.worth)
            self._rank.remove(victim)
        self._guard.remove(victim)
        return victim

    def note(self, layer: int, experts: Experts, scores: Scores) -> None:
        if self._idle:
            return
        if layer != self._rank.layer:
            if self._news:
                self._take_in()
            if layer < self._rank.layer:
                self._end_sweep()
            self._rank.go_to(layer, self._model.keep)
        self._news.append((experts, scores))

    def _take_in(self) -> None:
        """All rows of the sweep have been heard; the lease of what they chose begins."""
        experts, scores = self._news[0]
        if len(self._news) > 1:  # an expert counts as its best row
            every = np.concatenate([row[0] for row in self._news])
            experts, place = np.unique(every, return_inverse=True)
            scores = np.zeros(len(experts), np.uint8)
            np.maximum.at(scores, place, np.concatenate([row[1] for row in self._news]))
        self._news.clear()
        layer, chosen = self._rank.layer, experts[scores >= CHOSEN]
        chosen.sort()
        pages = self._rank.revalue(layer, self._model.visit(layer, experts, scores), chosen)
        if len(pages) <= self._slots:
            self._ask(pages)
            self._expected = set(pages)

    def _ask(self, pages: Sequence[PageId]) -> None:
        missed = self._guard.ask(pages)
        self._won += missed
        self._missed += missed
        if self._missed > SHARE * self._stake:  # so only what was won of late can be enough
            self._won //= 2
            self._missed //= 2

    def _begin_trial(self) -> None:
        self._thought = set(self._guard.pages)
        self._won = self._missed = 0
        self._rank.reset(self._thought)

    def _try(self, thought: set[PageId], page: PageId) -> None:
        """``page`` comes into the cache of the trial."""
        self._won -= 1
        if len(thought) >= self._slots:
            least = self._rank.least(lambda page: False)
            assert least is not None
            self._rank.remove(least)
            thought.remove(least)
        self._rank.add(page)
        thought.add(page)
        if self._won >= self._stake:
            self._thought = None
            self._rank.reset(self._guard.pages)
            self._best = self._guard.ahead
            self._guard.floor = min(0, self._best) - SLACK

    def _end_sweep(self) -> None:
        """Pages that stay long are worth what they do in the long run."""
        rate = SMOOTH * self._rate + (1 - SMOOTH) * self._misses
        self._rate, self._misses = rate if self._rate else float(self._misses), 0
        stay = self._slots / max(self._rate, 1.0)  # sweeps
        self._model.keep = min(max(1 - 1 / (2 + stay / 2), KEEP_LOW), KEEP_HIGH)
