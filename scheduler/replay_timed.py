"""Replay in which reads take time: predictors, late pages and waits, without hardware.

Here the store, the schedule, the policy and the predictor are the live ones; only the tier below
is not real (``replay_tiers.py``), or it is and nothing is computed (``replay_real.py``).  With a
log of when reads ended, everything happens as it did in the run; in modelled time it is what a disk
that keeps to the model would do, guesses given up included, and with predictor ``none`` no byte
depends on time at all.
What prompts and crowds that decode read ahead (``Schedule.read_on``) is known from a log only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..tiers.base import CachePolicy
from .counts import Counts
from .hints import Predictor, spread
from .replay import At, Leases, check
from .replay_real import RealTier
from .replay_tiers import LoggedTier, ModelTier, Sleep
from .schedule import Schedule
from .store import ExpertStore


class Pace(NamedTuple):
    """Seconds of computing: of a layer before its requests are known, and of a page."""

    layer: float = 0.0
    page: float = 0.0

    @classmethod
    def of(cls, layer: float) -> Pace:
        """Where a page takes a tenth of what a layer does before: what ``--layer`` means."""
        return cls(layer, layer / 10)


class Guessed(NamedTuple):
    """What predictors are told, of each row: the router's guess [T, L, M], codes of 0 where nobody
    asked it, and the latent [T, L, Z]; None where it was not recorded."""

    best: Any = None
    codes: Any = None
    latent: Any = None


def replay_timed(
    run: Leases,
    policy: CachePolicy,
    predictor: Predictor,
    slots: int | Sequence[Any],
    tier: ModelTier | LoggedTier | RealTier,
    *,
    guessed: Guessed = Guessed(),  # noqa: B008, it is immutable
    pace: Pace = Pace(),  # noqa: B008
) -> Counts:
    """Counts of ``run`` over ``tier``; seconds waited are those of the tier.  ``slots``: how many,
    or the memory of each, for a real tier."""
    tier.orders = run.orders
    memory = [None] * slots if isinstance(slots, int) else slots
    change = None if isinstance(tier, RealTier) else Sleep(tier)
    store = ExpertStore(tier, memory, policy, change=change)
    log = tier if isinstance(tier, LoggedTier) else None
    if log is not None:
        log.follow(store)
    clock = (lambda: 0.0) if isinstance(tier, LoggedTier) else (lambda: tier.now)
    schedule = Schedule(store, predictor, run.top_k, clock)
    sweep, guesses = -1, False
    for step in run.steps():
        begin, end, place = at = step.at
        decodes = run.decodes(begin, end)
        if decodes and begin != sweep:
            if guesses:
                schedule.end()
            sweep, guesses = begin, schedule.begin(end - begin, run.experts)
        looks = log is None and decodes and guesses
        if log is not None:
            _as_logged(store, schedule, log, run, at, guessed)
        elif looks and place == 0 and step.layer > 0:  # above it a layer without experts
            _look(schedule, run, at, guessed, None)
        tier.pass_time(pace.layer)
        if decodes:
            schedule.heard(step.layer, run.chosen(begin, end, place), run.told(begin, end, place))
        with store.lease(step.pages) as arrivals:
            store.drop_prefetches(step.layer)
            asked = looks if log is None else log.asks()
            if asked and step.layer + 1 in run.layers[place + 1 : place + 2]:
                _look(schedule, run, (begin, end, place + 1), guessed, log)
            left = len(step.pages)
            for batch in arrivals:
                tier.pass_time(pace.page * len(batch))
                left -= len(batch)
                if not left:  # as the engine, which asks for no more then
                    break
    tier.settle()
    counts = store.counts
    if isinstance(tier, RealTier):  # a ticket has ended a moment before the store hears of it
        with store._change:
            store._change.wait_for(lambda: not store._loading and not store._ending)
    else:
        counts.wait_seconds = tier.waited if isinstance(tier, ModelTier) else 0.0
    if not isinstance(tier, LoggedTier):
        assert counts.bytes == tier.moved  # what it says it read is what came
        assert counts.misses + counts.prefetches == tier.started
    check(counts, tier.size(run.first), len(store._unused))
    return counts


def _look(
    schedule: Schedule, run: Leases, at: At, guessed: Guessed, log: LoggedTier | None
) -> None:
    """``_ask`` if that may pay; in a log it is known that it was asked."""
    if log is not None:
        _ask(schedule, run, at, guessed)
    elif schedule.asks():
        _ask(schedule, run, at, guessed)
        schedule.answered()


def _ask(schedule: Schedule, run: Leases, at: At, guessed: Guessed) -> None:
    """In the layer above, about the rows and the layer ``at`` (as in ``Step``)."""
    begin, end, place = at
    codes = latent = None
    if guessed.codes is not None and guessed.codes[begin:end, place].any():
        own = slice(begin, end), place
        codes = spread(guessed.best[own], guessed.codes[own], run.experts)
    if guessed.latent is not None and place > 0:
        latent = guessed.latent[begin:end, place - 1].astype(np.float32)
    layer = run.layers[place]
    schedule.guess(layer - 1, layer, codes, latent)


def _as_logged(
    store: ExpertStore,
    schedule: Schedule,
    log: LoggedTier,
    run: Leases,
    at: At,
    guessed: Guessed,
) -> None:
    """Ask before a lease where the run asked, and read on where it did."""
    if log.asks():
        _ask(schedule, run, at, guessed)
    else:
        pages = log.guesses()
        if pages is not None:
            store.prefetch(pages, sure=True)
