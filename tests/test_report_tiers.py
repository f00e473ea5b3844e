"""Lanes of reports: exact for a log that is written here, and the stores' counts for a real one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from k3offload.errors import UsageError
from k3offload.report_tiers import timelines, union
from k3offload.scheduler.lease import Event
from k3offload.trace import Trace, read_trace
from k3offload.trace_made import Size, pattern, trace_of
from tests.helpers_report import numbers, recorded, report


def test_timelines_are_those_of_the_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [word for sweep in range(13) for word in ("--sweep", sweep)]
    arguments = [recorded(), "--capacity", "25%", "--policy", "lru", *every]
    page, trace = report(arguments, tmp_path / "r.html", capsys), read_trace(recorded())
    steps = Counter(int(trace.sweep[s.at[0]]) for s in trace.leases() for _ in s.pages)
    kinds = [page.row("Sweeps", f"requests: {kind}") for kind in ("hit", "late", "miss")]
    assert [sum(map(int, one)) for one in zip(*kinds, strict=True)] == [steps[s] for s in range(13)]
    assert page.row("Sweeps", "tokens") == ["40", *["1"] * 12]
    events = trace.events
    seen = np.bincount(events["event_kind"], minlength=len(Event))
    totals = [sum(map(int, row)) for row in kinds]
    assert totals == [seen[Event.HIT], seen[Event.LATE], seen[Event.MISS]]
    landed = sum(map(int, page.row("Sweeps", "disk: bytes that came")))
    early = events["event_time"] < events["event_time"][events["event_kind"] <= 2].min()
    ended = events["event_kind"] == Event.ENDED
    assert landed == events["event_bytes"][ended & ~early].sum() > 0
    whole, waited, computed = (
        np.array(numbers(page.row("Sweeps", name))) for name in ("ms", "ms waiting", "ms computing")
    )
    assert (waited + computed == pytest.approx(whole, rel=1e-2)) and (waited > 0).all()


#: Two sweeps of layers 1 and 2: store, kind, layer, expert, bytes, time, sweep
LOG = [
    (0, Event.MISS, 1, 0, 10, 1.0, 0), (0, Event.STEP, -1, -1, 0, 1.0, 0),
    (0, Event.PREFETCH, 2, 5, 10, 1.5, 0), (0, Event.ENDED, 1, 0, 10, 2.0, 0),
    (0, Event.TAKEN, -1, -1, 0, 2.0, 0), (0, Event.LATE, 2, 5, 0, 3.0, 0),
    (0, Event.STEP, -1, -1, 0, 3.0, 0), (0, Event.MISS, 2, 6, 10, 3.0, 0),
    (0, Event.ENDED, 2, 5, 10, 3.5, 0), (0, Event.ENDED, 2, 6, 10, 4.0, 0),
    (0, Event.TAKEN, -1, -1, 0, 4.0, 0), (0, Event.HIT, 1, 0, 0, 6.0, 1),
    (0, Event.EVICTED, 2, 5, 0, 6.0, 1), (0, Event.MISS, 1, 1, 10, 6.0, 1),
    (0, Event.FAILED, 1, 1, 4, 6.5, 1), (0, Event.MISS, 2, 5, 10, 7.0, 1),
    (0, Event.ENDED, 2, 5, 10, 9.0, 1),
]  # fmt: skip


def logged(log: Sequence[tuple[float, ...]]) -> Trace:
    trace = trace_of(pattern("uniform", 2, Size(2, 20, 2)), 20)
    tier, kind, layer, expert, size, when, sweep = map(np.array, zip(*log, strict=True))
    names = ("tier", "kind", "layer", "expert", "bytes", "time", "sweep")
    columns = zip(names, (tier, kind, layer, expert, size, when, sweep), strict=True)
    return dataclasses.replace(trace, events={f"event_{name}": column for name, column in columns})


def test_lanes_of_a_known_log() -> None:
    first, second = timelines(logged(LOG))
    assert (first.sweep, second.sweep, first.seconds, second.seconds) == (0, 1, 5.0, 3.0)
    assert first.lanes == {
        "disk, asked for": [(0, 1), (2, 3)], "disk, ahead": [(0.5, 2.5)], "joined late": [(2, 2)],
        "waiting": [(0, 1), (2, 3)], "computing": [(1, 2), (3, 5)], "every 2nd layer": [(2, 5)],
    }  # fmt: skip
    assert first.requests == {Event.HIT: 0, Event.LATE: 1, Event.MISS: 2}
    assert second.requests == {Event.HIT: 1, Event.LATE: 0, Event.MISS: 2}
    assert first.busy == {"disk, asked for": (2, 2), "disk, ahead": (2, 2)}
    assert second.lanes["disk, asked for"] == [(0, 0.5), (1, 3)]
    assert (first.landed, second.landed) == ((30,), (4,))  # the last event is the end, not in it
    with pytest.raises(UsageError, match="no events of sweep 7"):
        timelines(logged(LOG), [7])


def test_lanes_of_a_device() -> None:
    """Its store is what a layer waits for; that in RAM is behind it."""
    near = [(1, *event[1:]) for event in LOG]
    far = [(0, Event.MISS, 1, 0, 10, 1.1, 0), (0, Event.ENDED, 1, 0, 10, 1.9, 0)]
    log = sorted([*near, *far], key=lambda event: event[5])
    first, _ = timelines(logged(log))
    assert first.lanes["copy, asked for"] == [(0, 1), (2, 3)]
    assert np.array(first.lanes["disk, asked for"]) == pytest.approx(np.array([[0.1, 0.9]]))
    assert first.requests[Event.MISS] == 2 and first.landed == (10, 30)


def test_reads_beside_each_other_are_busy_once() -> None:
    spans = [(0.0, 2.0), (1.0, 1.5), (1.0, 3.0), (4.0, 5.0)]
    assert union(spans) == [(0, 3), (4, 5)] and union([]) == []
    reads = [
        (Event.MISS, 3, 1.0),
        (Event.MISS, 4, 2.0),
        (Event.ENDED, 3, 3.0),
        (Event.ENDED, 4, 5.0),
    ]
    log = [(0, kind, 1, expert, 10, when, 0) for kind, expert, when in reads]
    (only,) = timelines(logged(log))
    assert only.busy["disk, asked for"] == (4, 5) and only.landed == (10,)
