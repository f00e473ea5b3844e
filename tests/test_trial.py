"""Looking ahead on trial: given up where it costs, kept where it saves, never tried where it is
cheap (R59)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from k3offload.scheduler import predict_combined, predict_router
from k3offload.scheduler.schedule import Schedule
from k3offload.scheduler.trial import TURN, TURNS, WARM, Trial
from tests.helpers_store import make

TRIAL = TURN * TURNS


class Drive:
    """Sweeps of 1 second whose asking takes ``asking`` and which then last ``saved`` less."""

    def __init__(self, seed: int = 0) -> None:
        self.now, self.random = 0.0, random.Random(seed)
        self.trial = Trial(lambda: self.now)

    def sweep(self, asking: float, saved: float, noise: float = 0.0, rows: int = 1) -> bool:
        """Whether it looked ahead."""
        self.trial.begin(rows)
        on = self.trial.ask()
        if on:
            self.now += asking
            self.trial.answered()
        self.now += (1 - saved * on) * self.random.lognormvariate(0, noise)
        self.trial.end()
        return on

    def run(self, sweeps: int, asking: float, saved: float, noise: float = 0.0) -> list[bool]:
        return [self.sweep(asking, saved, noise) for _ in range(sweeps)]


def share(seen: list[bool]) -> float:
    return sum(seen) / len(seen)


@pytest.mark.parametrize("seed", range(5))
def test_given_up_where_it_costs(seed: int) -> None:
    drive = Drive(seed)
    assert all(drive.run(WARM, 0.15, 0.0, 0.05)), "nothing is known yet"
    assert share(drive.run(TRIAL, 0.15, 0.0, 0.05)) == 0.5
    seen = drive.run(4000, 0.15, 0.0, 0.05)
    assert 0.0 < share(seen) < 0.03, "tried again, and seldom"


@pytest.mark.parametrize("seed", range(5))
def test_kept_where_it_saves(seed: int) -> None:
    assert share(Drive(seed).run(4000, 0.05, 0.2, 0.05)) > 0.97


def test_never_tried_where_asking_is_cheap() -> None:
    assert all(Drive().run(4000, 0.001, 0.0, 0.05))


def test_follows_what_changes() -> None:
    drive = Drive()
    for _ in range(2):
        drive.run(6000, 0.15, 0.0, 0.02)
        assert share(drive.run(500, 0.15, 0.0, 0.02)) < 0.1
        drive.run(6000, 0.05, 0.3, 0.02)
        assert share(drive.run(500, 0.05, 0.3, 0.02)) > 0.9


def test_sweeps_of_other_sizes_are_not_compared() -> None:
    """A sweep of two rows takes a second longer; looking ahead neither costs nor saves much."""
    drive = Drive()
    drive.run(WARM, 0.02, 0.1)
    for turn in range(200):
        rows = 1 + turn % 2
        for _ in range(
            TURN
        ):  # in step with the turns: all sweeps without it would be the long ones
            drive.now += rows - 1
            drive.sweep(0.02, 0.1, rows=rows)
    assert drive.trial._evidence == 0.0
    drive.run(TRIAL, 0.02, 0.1)
    assert drive.trial._evidence < 0.0


def test_a_sweep_that_failed_counts_for_nothing() -> None:
    drive = Drive()
    drive.run(WARM + TRIAL // 2, 0.02, 0.1)
    before = {on: list(taken) for on, taken in drive.trial._taken.items()}
    drive.trial.begin(1)
    drive.now += 1000
    drive.sweep(0.02, 0.1)
    assert sum(map(len, drive.trial._taken.values())) == sum(map(len, before.values())) + 1
    assert max(max(taken) for taken in drive.trial._taken.values()) < 2


@pytest.mark.parametrize(
    ("made", "given_up"), [(predict_combined.Predictor, True), (predict_router.Predictor, False)]
)
def test_only_those_that_read_what_pays_are_on_trial(
    made: Callable[..., predict_combined.Predictor], given_up: bool
) -> None:
    now = 0.0
    store, _ = make(8)
    schedule = Schedule(store, made((1, 2), 16, 2), 2, lambda: now)
    asked, scores = 0, np.arange(16, dtype=np.float32)[None]
    for _ in range(400):
        assert schedule.begin(1, 16)
        for layer in (1, 2):
            if schedule.asks():
                asked += 1
                now += 0.5
                schedule.ahead(layer - 1, layer, scores, None)
            schedule.routed(layer, np.array([[0, 1]]), scores)
        now += 1.0
        schedule.end()
    assert (asked < 400) if given_up else (asked == 800)
