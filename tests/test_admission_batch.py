"""How many documents of a batch begin at a time, against a batch played through."""

from __future__ import annotations

import random

import pytest

from k3offload.scheduler.admission import Admission


def play(places: int, group: int, step: float, extra: float, row: float, seed: int = 0) -> float:
    """Seconds a document, of 600 with prompts of 50 to 150 rows and 20 to 44 tokens."""
    drawn = random.Random(seed)
    left = [(drawn.randrange(50, 150), drawn.randrange(20, 44)) for _ in range(600)]
    running: list[int] = []
    seconds = 0.0
    while left or running:
        free = places - len(running)
        rows = 0
        if left and (free == places or free >= group):
            new, left = left[:free], left[free:]
            rows = sum(r for r, _ in new)
            running += [tokens for _, tokens in new]
        seconds += step + (extra + row * rows if rows else 0.0)
        running = [tokens - 1 for tokens in running if tokens > 1]
    return seconds / 600


def taught(places: int, step: float, extra: float, row: float) -> Admission:
    drawn = random.Random(1)
    admission = Admission(places)
    for _ in range(40):
        admission.swept(step, 0)
        rows = drawn.randrange(50, 900)
        admission.swept(step + extra + row * rows, rows)
        admission.ended(drawn.randrange(20, 44))
    return admission


@pytest.mark.parametrize(
    ("places", "step", "extra", "row", "gain"),
    [
        (64, 1.0, 0.4, 0.0, 1.1),
        (64, 1.0, 3.0, 0.001, 2.0),
        (16, 1.0, 0.5, 0.01, 1.02),
        (8, 1.0, 20.0, 0.0, 2.5),
    ],
)
def test_it_is_near_the_best_group(
    places: int, step: float, extra: float, row: float, gain: float
) -> None:
    """``gain``: what there is to gain over filling every place at once, at least."""
    chosen = taught(places, step, extra, row).group()
    times = {g: play(places, g, step, extra, row) for g in range(1, places + 1)}
    assert times[chosen] <= 1.05 * min(times.values())
    assert times[1] >= gain * min(times.values())


def test_prompts_that_cost_only_their_rows_do_not_wait() -> None:
    assert taught(64, 1.0, 0.0, 0.01).group() == 1


def test_at_first_and_when_nothing_runs_documents_begin_at_once() -> None:
    fresh = Admission(8)
    assert fresh.begins(1)
    assert not fresh.begins(0)
    waits = taught(8, 1.0, 20.0, 0.0)
    assert waits.group() > 1
    assert not waits.begins(1)
    assert waits.begins(8)
