"""A benchmark of cache policies and predictors over traces, without hardware.

For each capacity: bytes of every policy beside LRU, Belady's MIN and the compulsory bound (each
page once), and the share of the gap between LRU and MIN that it closes.  All have the same requests
and leases, from a cold cache.  Policies and predictors are found by file name.  What this knows of
a predictor is modelled time: a link, and seconds of computing.
"""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final, NamedTuple, cast

from .config import parse_size
from .errors import UsageError
from .machine import default_threads
from .registry import chosen, names, short
from .scheduler.belady import fewest_misses
from .scheduler.counts import Counts
from .scheduler.hints import Predictor
from .scheduler.replay import Cache, Leases, Requests, Step, replay
from .scheduler.replay_tiers import Link, ModelTier
from .scheduler.replay_timed import Pace, replay_timed
from .scheduler.schedule import predictor_named
from .tiers.base import PageId
from .trace import Trace

CAPACITIES = ("12%", "25%", "50%")
BASELINE, NOTHING = "lru", "none"
LARGE: Final = 10_000_000  #: requests of all replays from which processes of their own pay
PR_SET_PDEATHSIG: Final = 1  #: of Linux's prctl


class Room(NamedTuple):
    """A capacity: slots of the tiers, the nearest first, and how it was written."""

    text: str
    slots: tuple[int, ...]


class Speeds(NamedTuple):
    """What replay in modelled time takes for granted.  Links: from the disk, and to a device."""

    links: tuple[Link, Link] = (Link(6e9, 1e-4), Link(25e9, 2e-5))
    pace: Pace = Pace(2e-3, 2e-4)


@dataclass(frozen=True)
class Bounds:
    """Bytes that one tier reads for its requests: by LRU, at least, and each page once."""

    lru: int
    least: int
    compulsory: int

    def closed(self, size: int) -> float:
        """Share of the gap that reading ``size`` bytes closes."""
        gap = self.lru - self.least
        return round((self.lru - size) / gap, 4) if gap else 0.0


def room(text: str, trace: Trace) -> Room:
    """``25%`` of all experts, ``64G``, or two of these for two tiers: ``8G+64G``.  Raises
    ``UsageError``."""
    total, slots = len(trace.layers) * trace.experts, []
    for part in text.split("+"):
        if part.strip().endswith("%"):
            try:
                count = round(float(part.strip()[:-1]) / 100 * total)
            except (ValueError, OverflowError) as error:  # nan, inf
                raise UsageError(f"{part!r} is no share.", "Write it like 25%.") from error
        else:
            count = parse_size(part) // trace.page_bytes
        slots.append(count)
    said = f"The capacity {text!r} is {' and '.join(map(str, slots))} experts of {total}"
    if max(slots) > 10 * total:
        raise UsageError(f"{said}, more than ten times all of them.", "Give less.")
    if len(slots) > 2 or min(slots) < 1:
        raise UsageError(
            f"{said}.",
            "Give at least one, of one tier or of two: --capacity 25%, 64G or 8G+64G.",
        )
    return Room(text, tuple(slots))


def rooms(texts: Sequence[str], trace: Trace) -> list[Room]:
    """``room`` of each, those of the same slots once, as written first.  Raises ``UsageError``."""
    found: dict[tuple[int, ...], Room] = {}
    for text in texts:
        one = room(text, trace)
        found.setdefault(one.slots, one)
    return list(found.values())


def chosen_names(kind: str, given: Sequence[str] | None, all_of: bool) -> list[str]:
    """The names of ``given``, or all that there are; also paths of files of one's own.  Raises
    ``UsageError``."""
    if not given:
        return names("scheduler", kind) if all_of else [NOTHING]
    found = list(dict.fromkeys(given))
    for name in found:
        predictor_named(name) if kind == "predict" else chosen(kind, name)
    if len({short(name) for name in found}) < len(found):
        raise UsageError(
            f"Two of {', '.join(found)} have the same name.", "Call one of the files otherwise."
        )
    return found


def refuse_blind(trace: Trace, predictors: Sequence[str]) -> None:
    """Raise ``UsageError`` where a predictor asks for what the trace does not hold."""
    for name in predictors:
        made, _ = predictor_named(name)
        for asks, part in (("asks_router", "ahead"), ("asks_latent", "latent")):
            if getattr(made, asks) and not any(n.startswith(part) for n in trace.more):
                raise UsageError(
                    f"The trace does not hold what the predictor {name} asks for.",
                    f"Record it with --trace-with {part}, or leave the predictor out.",
                )


def predictor_of(name: str, trace: Trace) -> Predictor:
    """A new one, for the layers of ``trace``."""
    made, fit = predictor_named(name)
    known = {} if fit is None else {"path": fit}
    made = made(trace.layers.tolist(), trace.experts, trace.top_k, **known)
    return cast(Predictor, made)


class _Job(NamedTuple):
    """A replay: of a policy, or of the bounds of a capacity where ``policy`` is empty."""

    place: Room
    predictor: str = NOTHING
    policy: str = ""


class _Done(NamedTuple):
    """What a replay of a policy found: counts of each tier beside its bounds (None: those of the
    capacity), and the seconds that it took."""

    tiers: list[tuple[Counts, Bounds | None]]
    seconds: float


def compare(
    trace: Trace,
    rooms: Sequence[Room],
    policies: Sequence[str],
    predictors: Sequence[str] = (NOTHING,),
    speeds: Speeds = Speeds(),  # noqa: B008, it is immutable
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """A line of figures for each capacity, predictor, policy and tier.

    Large traces are replayed by processes of their own, as many as there are processors.  Raises
    ``UsageError`` for a predictor that ``trace`` has nothing for.
    """
    refuse_blind(trace, predictors)
    jobs = []
    for place in rooms:
        jobs.append(_Job(place))
        jobs += [_Job(place, predictor, policy) for predictor in predictors for policy in policies]
    replays = _Replays(trace, speeds)
    about, bounds = _about(trace, replays.run), Bounds(0, 0, 0)
    found = _each(replays, jobs)
    for job in jobs:
        place = job.place
        tell(f"{place.text}: " + (f"{job.policy}, {job.predictor}" if job.policy else "MIN"))
        done = next(found)
        if isinstance(done, Bounds):
            bounds = done
            continue
        what = {"policy": short(job.policy), "predictor": short(job.predictor)}
        for tier, (counts, own) in enumerate(done.tiers):
            where = {"capacity": place.text, "tier": tier, "slots": place.slots[tier]}
            seconds = {"replay_seconds": done.seconds}
            figures = _figures(counts, own or bounds, trace.page_bytes)
            yield {**about, **what, **where, **seconds, **figures}


class _Replays:
    """Replays of one trace."""

    def __init__(self, trace: Trace, speeds: Speeds) -> None:
        self.trace, self.speeds, self.run = trace, speeds, trace.leases()

    def __call__(self, job: _Job) -> Bounds | _Done:
        place, size = job.place, self.trace.page_bytes
        if not job.policy:
            return _bounds(self.run, place.slots[0], size, self.run.distinct)
        begin, below = time.perf_counter(), Requests()
        counts, low = _play(
            self.trace, self.run, place, job.policy, job.predictor, self.speeds, below
        )
        seconds = round(time.perf_counter() - begin, 3)
        tiers: list[tuple[Counts, Bounds | None]] = [(counts, None)]
        if low is not None:
            tiers.append((low, _bounds(below, place.slots[1], size, below.distinct)))
        return _Done(tiers, seconds)


def _each(replays: _Replays, jobs: Sequence[_Job]) -> Iterator[Bounds | _Done]:
    """What ``replays`` says of each of ``jobs``, in their order."""
    trace, count = replays.trace, min(default_threads(), len(jobs))
    if count < 2 or len(jobs) * trace.chosen.size < LARGE:
        yield from map(replays, jobs)
        return
    # started anew: a process that was forked would have the threads of zarr half
    how = get_context("spawn")
    with ProcessPoolExecutor(count, how, _begin, (trace, replays.speeds)) as pool:
        yield from pool.map(_do, jobs)


_replays: _Replays | None = None  # of this process, where it is one of several


def _begin(trace: Trace, speeds: Speeds) -> None:
    """In a process of its own.  It ends with the one that began it, whatever ends that."""
    global _replays
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as whoever began us wants it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _replays = _Replays(trace, speeds)


def _do(job: _Job) -> Bounds | _Done:
    assert _replays is not None
    return _replays(job)


def _play(
    trace: Trace,
    run: Leases,
    place: Room,
    policy: str,
    predictor: str,
    speeds: Speeds,
    seen: Requests,
) -> tuple[Counts, Counts | None]:
    """Counts of the nearest tier, and of the one below it if there is one; ``seen`` hears what
    that is asked for."""
    make = chosen("policy", policy)
    slots, size = place.slots[0], trace.page_bytes
    low: Cache | None = None
    if len(place.slots) == 2:
        low = _Heard(make(place.slots[1]), place.slots[1], size, seen)
    if predictor == NOTHING:
        counts = replay(run, make(slots), slots, size, low.request if low else None)
    else:
        disk, bus = speeds.links
        tier = ModelTier(size, disk) if low is None else ModelTier(size, bus, low, disk)
        guess = predictor_of(predictor, trace)
        counts = replay_timed(
            run, make(slots), guess, slots, tier, guessed=trace.guessed, pace=speeds.pace
        )
    return counts, None if low is None else low.result()


class _Heard(Cache):
    """A tier below another, which writes down what it is asked for."""

    def __init__(self, policy: Any, slots: int, size: int, seen: Requests) -> None:
        super().__init__(policy, slots, size)
        self._seen = seen

    def request(self, page: PageId) -> None:
        self._seen.add(page)
        super().request(page)


def _bounds(run: Iterable[Step], slots: int, size: int, distinct: int) -> Bounds:
    lru = chosen("policy", BASELINE)
    least = fewest_misses(run, slots) * size
    return Bounds(replay(run, lru(slots), slots, size).bytes, least, distinct * size)


def _figures(counts: Counts, bounds: Bounds, size: int) -> dict[str, Any]:
    c, in_time = counts, counts.useful - counts.late
    return {
        "bytes": c.bytes, "lru_bytes": bounds.lru, "min_bytes": bounds.least,
        "compulsory_bytes": bounds.compulsory, "gap_closed": bounds.closed(c.bytes),
        "requests": c.requests, "hits": c.hits, "resident": c.hits - in_time,
        "prefetched_in_time": in_time, "late": c.late, "misses": c.misses,
        "prefetches": c.prefetches, "prefetch_bytes": c.prefetch_bytes, "page_bytes": size,
        "waited_seconds": round(c.wait_seconds, 6),
    }  # fmt: skip


def _about(trace: Trace, run: Leases) -> dict[str, Any]:
    return {
        "trace": trace.digest, "source": trace.source, "rows": len(trace.best),
        "layers": len(trace.layers), "experts": trace.experts, "top_k": trace.top_k,
        "sequences": len(set(trace.sequence.tolist())), "pages": run.total,
    }  # fmt: skip
