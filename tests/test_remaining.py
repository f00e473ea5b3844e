"""How long the rest of a batch takes, against batches of which it can be said."""

from __future__ import annotations

import random
import time

import pytest

from k3offload.scheduler.remaining import Remaining, UnderWay

EACH, DECODE, PROMPT = 20.0, 0.5, 0.1


def measured(sweeps: int = 40, seed: int = 3) -> Remaining:
    """After some sweeps with rows of all kinds, a tenth slower or faster than they should be."""
    drawn, rest = random.Random(seed), Remaining(512)
    for i in range(sweeps):
        decode, prompt = drawn.randrange(1, 9), drawn.randrange(500) * (i % 4 == 0)
        seconds = EACH + DECODE * decode + PROMPT * prompt
        rest.swept(seconds * drawn.uniform(0.9, 1.1), decode, prompt)
    return rest


def test_nothing_is_said_before_a_sweep_and_something_after_one() -> None:
    rest = Remaining(512)
    assert rest.seconds([], 3, 10, 4, 1) is None
    rest.swept(25.0, 0, 100)
    left = rest.seconds([UnderWay(0, 1, 10)], 0, 10, 4, 1)
    assert left is not None and 0 < left < 9 * 25 * 1.01


@pytest.mark.parametrize("waiting", [0, 30, 1_000, 1_000_000])
def test_answers_of_one_length(waiting: int) -> None:
    """In waves of 8: each 20 sweeps, of which the first has 8 prompts of 64 tokens."""
    rest = Remaining(512)
    for _ in range(3):
        for _ in range(8):
            rest.taken(True)
        rest.swept(EACH + PROMPT * 512, 0, 512)
        for _ in range(19):
            rest.swept(EACH + DECODE * 8, 8, 0)
        for _ in range(8):
            rest.ended(20)
    under_way = [UnderWay(0, 10, 100)] * 8  # in their middle: they do not make it longer
    rest.swept(EACH + PROMPT * 512, 0, 512)
    for _ in range(8):
        rest.taken(True)
    begin = time.perf_counter()
    left = rest.seconds(under_way, waiting, 100, 8, 8)
    assert time.perf_counter() - begin < 1
    waves = waiting / 8
    wave = 20 * EACH + 19 * 8 * DECODE + 512 * PROMPT
    want = 10 * (EACH + 8 * DECODE) + waves * wave
    assert left == pytest.approx(want, rel=0.02 if waiting != 30 else 0.1)


def test_what_a_sweep_and_a_row_cost_is_found_apart() -> None:
    rest = measured()
    one = rest.seconds([UnderWay(0, 0, 100)], 0, 100, 8, 1)
    eight = rest.seconds([UnderWay(0, 0, 100)] * 8, 0, 100, 8, 1)
    assert one == pytest.approx(100 * (EACH + DECODE), rel=0.1)
    assert eight == pytest.approx(100 * (EACH + 8 * DECODE), rel=0.1)
    prompt = rest.seconds([UnderWay(2048, 0, 1)], 0, 1, 8, 1)  # four sweeps
    assert prompt == pytest.approx(4 * EACH + 2048 * PROMPT, rel=0.1)


def test_those_that_run_are_counted_with_those_that_ended() -> None:
    """Short answers end first: taken alone they would promise that all are short."""
    rest = measured()
    for length in (1, 2, 2, 3):
        rest.ended(length)
    left = rest.seconds([UnderWay(0, 60, 100)] * 12, 0, 100, 16, 1)
    assert left == pytest.approx(40 * (EACH + 12 * DECODE), rel=0.1)  # the most that can be
    for length in (62, 63, 64) * 20:
        rest.ended(length)
    left = rest.seconds([UnderWay(0, 60, 100)] * 12, 0, 100, 16, 1)
    assert left == pytest.approx(4 * (EACH + 12 * DECODE), rel=0.25)


def test_documents_that_end_before_they_begin_cost_nothing() -> None:
    rest = measured()
    for i in range(30):
        rest.taken(i % 3 > 0)
        rest.ended(10)
    some, all_good = (
        rest.seconds([], 300, 10, 4, 1),
        measured().seconds([], 200, 10, 4, 1),
    )
    assert some is not None and all_good is not None
    assert some == pytest.approx(all_good, rel=0.35)  # these bring prompts as well
