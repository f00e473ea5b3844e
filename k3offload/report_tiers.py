"""A few sweeps as lanes over time, from what the stores of experts said: reads, waits, the rest.

Knows the events of a trace and when they were told; decides nothing, and draws by ``plot_svg``.
A sweep lasts here from its first request to the first one of the next, so what follows its last
layer (the head, the choice of a token, the layers before the next one's first experts) is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .plot_svg import lane_chart
from .report_page import Page
from .scheduler.lease import Event
from .trace import Trace

SHOWN: Final = 3  #: sweeps, unless they are named
FROM: Final = ("disk", "copy")  #: what brings pages to the stores, in RAM and on a device
ASKED: Final = (Event.HIT, Event.LATE, Event.MISS)
READS: Final = {Event.MISS: "asked for", Event.PREFETCH: "ahead"}

Spans = list[tuple[float, float]]
Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Timeline:
    """Of one sweep; times in seconds from its begin.  ``busy``: of each lane of reads, seconds in
    which at least one was under way, and the sum of what each took."""

    sweep: int
    tokens: int
    seconds: float
    lanes: dict[str, Spans]
    busy: dict[str, tuple[float, float]]
    requests: dict[Event, int]  #: of the nearest store
    landed: tuple[int, ...]  #: bytes by store

    @property
    def waited(self) -> float:
        return _long(self.lanes["waiting"])


def timelines(trace: Trace, wanted: Sequence[int] | None = None) -> list[Timeline]:
    """Those of the ``wanted`` sweeps, or of the first, a middle one and the last.  Raises
    ``UsageError`` for a sweep that no event is of."""
    log = _Log(trace)
    if wanted is None:
        places = np.linspace(0, len(log.sweeps) - 1, min(SHOWN, len(log.sweeps)))
        wanted = [log.sweeps[round(place)] for place in places.tolist()]
    for sweep in wanted:
        if sweep not in log.sweeps:
            raise UsageError(
                f"The trace has no events of sweep {sweep}.",
                f"It has those of {len(log.sweeps):,} sweeps, {log.sweeps[0]} to {log.sweeps[-1]}."
                if log.sweeps else "It has none of any.",
            )  # fmt: skip
    return [log.timeline(sweep) for sweep in wanted]


class _Log:
    """The events of a trace as columns."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.kind, self.tier, self.layer, self.expert, self.bytes, self.time = (
            np.asarray(trace.events[f"event_{name}"])
            for name in ("kind", "tier", "layer", "expert", "bytes", "time")
        )
        self.stores = int(self.tier.max(initial=0)) + 1
        self._near = self.tier == self.stores - 1
        self._asked = self._near & np.isin(self.kind, ASKED)
        self._of = np.asarray(trace.events["event_sweep"])
        known = set(trace.sweep.tolist())
        asked = np.flatnonzero(self._asked)
        sweeps, first = np.unique(self._of[asked], return_index=True)
        self._begins = dict(zip(sweeps.tolist(), self.time[asked[first]].tolist(), strict=True))
        self.sweeps = [sweep for sweep in self._begins if sweep in known]
        self._reads = [self._read(store) for store in range(self.stores)]

    def _read(self, store: int) -> tuple[Column, Column, Column]:
        """Kind, begin and end of each read of a store that ended: the n-th end of a page is that
        of its n-th read."""
        own = self.tier == store
        begun = np.flatnonzero(own & np.isin(self.kind, list(READS)))
        ended = np.flatnonzero(own & np.isin(self.kind, (Event.ENDED, Event.FAILED)))
        _, a, b = np.intersect1d(self._turn(begun), self._turn(ended), True, return_indices=True)
        return self.kind[begun[a]], self.time[begun[a]], self.time[ended[b]]

    def _turn(self, events: Column) -> Column:
        """A number for the page of each of ``events`` and how often it has been there before."""
        pages = self.layer[events].astype(np.int64) << 16 | self.expert[events]
        order = np.argsort(pages, kind="stable")
        ranked = pages[order]
        first = np.searchsorted(ranked, ranked)
        turns = np.empty(len(events), np.int64)
        turns[order] = np.arange(len(events)) - first
        numbered: Column = pages << 32 | turns
        return numbered

    def timeline(self, sweep: int) -> Timeline:
        begin = self._begins[sweep]
        end = min((t for t in self._begins.values() if t > begin), default=self.time.max())
        lanes: dict[str, Spans] = {}
        busy: dict[str, tuple[float, float]] = {}
        for store, (kinds, begins, ends) in enumerate(self._reads):
            for kind, how in READS.items():
                some = (kinds == kind) & (begins < end) & (ends > begin)
                spans = _within(begins[some], ends[some], begin, end)
                name = f"{FROM[store]}, {how}"
                lanes[name] = union(spans)
                busy[name] = _long(lanes[name]), _long(spans)
        own = self._asked & (self._of == sweep)
        late = self.time[own & (self.kind == Event.LATE)] - begin
        lanes["joined late"] = [(t, t) for t in late.tolist()]
        lanes["waiting"] = union(self._waits(begin, end))
        lanes["computing"] = _between(lanes["waiting"], end - begin)
        lanes["every 2nd layer"] = self._layers(own, begin, end)
        ended = np.isin(self.kind, (Event.ENDED, Event.FAILED))
        inside = ended & (self.time >= begin) & (self.time < end)
        landed = [int(self.bytes[inside & (self.tier == s)].sum()) for s in range(self.stores)]
        return Timeline(
            sweep, int((self._trace.sweep == sweep).sum()), end - begin, lanes, busy,
            {kind: int((own & (self.kind == kind)).sum()) for kind in ASKED}, tuple(landed),
        )  # fmt: skip

    def _waits(self, begin: float, end: float) -> Spans:
        """From a step of a lease to its pages."""
        some = np.flatnonzero(self._near & np.isin(self.kind, (Event.STEP, Event.TAKEN)))
        kinds, times = self.kind[some], self.time[some]
        pairs = np.flatnonzero((kinds[:-1] == Event.STEP) & (kinds[1:] == Event.TAKEN))
        a, b = times[pairs], times[pairs + 1]
        inside = (a < end) & (b > begin)
        return _within(a[inside], b[inside], begin, end)

    def _layers(self, own: Column, begin: float, end: float) -> Spans:
        """Every second layer, from its first request to the first of the next one."""
        at = np.flatnonzero(own)
        _, first = np.unique(self.layer[at], return_index=True)
        times = [*(np.sort(self.time[at[first]]) - begin).tolist(), end - begin]
        return list(zip(times[1::2], times[2::2], strict=False))


def _within(begins: Column, ends: Column, begin: float, end: float) -> Spans:
    a, b = np.maximum(begins, begin) - begin, np.minimum(ends, end) - begin
    return sorted(zip(a.tolist(), b.tolist(), strict=True))


def union(spans: Spans) -> Spans:
    """Stretches in which at least one of ``spans``, which stand in order of their begin, is."""
    found: Spans = []
    for begin, end in spans:
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _between(spans: Spans, end: float) -> Spans:
    edges = [0.0, *(edge for span in spans for edge in span), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def _long(spans: Spans) -> float:
    return sum(b - a for a, b in spans)


def add_timelines(page: Page, trace: Trace, wanted: Sequence[int] | None) -> None:
    page.section("Tiers over time")
    if "event_time" not in trace.events or not len(trace.events["event_time"]):
        page.note("What the stores of experts did was not recorded: --trace-with tiers.")
        return
    found = timelines(trace, wanted)
    if not found:
        page.note("No event is of a whole sweep.")
        return
    page.say(
        "From the first request of a sweep to that of the next one. Reads: at least one was under "
        "way, asked for or read ahead. Waiting: a layer had no expert to go on with; computing is "
        "all other time. Joined late: a request found its read under way."
    )
    for one in found:
        lanes = {
            name: [(1000 * a, 1000 * b) for a, b in spans] for name, spans in one.lanes.items()
        }
        title = f"Sweep {one.sweep}, {one.tokens:,} tokens"
        page.picture(lane_chart(title, "milliseconds", lanes, 1000 * one.seconds))
    head = ["", *(f"sweep {one.sweep}" for one in found)]
    page.table("Sweeps", head, _rows(found))


def _rows(found: Sequence[Timeline]) -> list[list[Any]]:
    rows: list[list[Any]] = [
        ["tokens", *(one.tokens for one in found)],
        ["ms", *(1000 * one.seconds for one in found)],
        ["ms waiting", *(1000 * one.waited for one in found)],
        ["ms computing", *(1000 * _long(one.lanes["computing"]) for one in found)],
    ]
    rows += [
        [f"requests: {kind.name.lower()}", *(one.requests[kind] for one in found)] for kind in ASKED
    ]
    rows += [
        [f"{FROM[store]}: bytes that came", *(one.landed[store] for one in found)]
        for store in range(len(found[0].landed))
    ]
    for name in found[0].busy:
        rows.append([f"{name}: ms", *(1000 * one.busy[name][0] for one in found)])
        at_once = [all_ / some if some else None for some, all_ in (o.busy[name] for o in found)]
        rows.append([f"{name}: reads at once", *at_once])
    return rows
