"""What ``benchmarks/policy_bounds.py`` replays tables of ranks for, over a short recorded trace.

The fits themselves take minutes; the benchmark compares its table of next uses with MIN as well.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.policy_bounds import HELD_OUT, SURE, Course, Table, steps_of
from benchmarks.policy_fit import online_values, part_of
from k3offload.errors import UsageError
from k3offload.scheduler.belady import Belady
from k3offload.scheduler.policy_lru import Policy as Lru
from k3offload.trace import Trace, read_trace

TOKENS = 24  #: of each of two sequences, the first being its prompt


@pytest.fixture(scope="module")
def short() -> Trace:
    trace = read_trace(HELD_OUT)
    rows = np.zeros(len(trace.chosen), bool)
    for sequence in (0, 1):
        rows[np.flatnonzero(trace.sequence == sequence)[:TOKENS]] = True
    return trace.rows(rows)


@pytest.fixture(scope="module")
def course(short: Trace) -> Course:
    trace = steps_of(short)
    return Course(part_of(trace, online_values(trace), trace.sequence >= 1))


def test_tables_of_ranks_replay_min_and_lru(course: Course) -> None:
    far, recent = course.farness(), course.recency()
    best = course.misses(lambda slots: Belady(course.run))
    assert len(far) == TOKENS - 1
    assert course.ranked(-far) == best
    assert course.ranked(recent) == course.misses(Lru)
    near = course.ranked(np.where(far <= 4 * course.part.shape[1], SURE - far, recent))
    assert sum(best) < sum(near) < sum(course.misses(Lru))


def test_a_table_that_hears_nothing_is_found(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "hears_router", False)
    with pytest.raises(UsageError, match="not there"):
        course.ranked(-course.farness())


def test_steps_of_several_sequences_are_refused(short: Trace) -> None:
    with pytest.raises(UsageError, match="several sequences"):
        steps_of(replace(short, sweep=np.zeros_like(short.sweep)))
