"""Real replay: what a trace asks for, read from a real model by the real tiers, without arithmetic;
beside the same requests in modelled time.

Each page of the trace stands for an expert of the model, in the order of the files.  In each repeat
a link is measured (bursts of pages that nobody has, through store and disk tier, as misses are
read), the trace is replayed from the disk, the link is measured again, and the trace is replayed in
modelled time over the mean of both.  A drive's speed drifts: the median of the ratios counts.
Knows no arithmetic; computing is time that passes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .bench_frame import Frame, must_be
from .bench_policies import BASELINE, NOTHING, Room, predictor_of, refuse_blind
from .checkpoint import Checkpoint
from .config import show_size
from .errors import CheckpointError, DoesNotFit, UsageError
from .machine import read_machine
from .registry import chosen, short
from .scheduler.counts import Counts
from .scheduler.replay import Leases, replay
from .scheduler.replay_real import RealTier
from .scheduler.replay_tiers import Link, ModelTier
from .scheduler.replay_timed import Pace, replay_timed
from .scheduler.store import ExpertStore
from .tiers.base import Buffer, Location, PageId
from .tiers.tier_disk import DiskTier, windows
from .tiers.tier_ram import Slab
from .trace import Trace

ENOUGH: Final = 0.15  #: what modelled time may be off by
SMALL: Final = 1 << 20  #: bytes of a page; reading a smaller one is more Python than disk
BURSTS: Final = 5  #: of each size, a measurement of the link
SPARE: Final = 500_000_000  #: bytes of memory that are left to everything else
BESIDE: Final = 16 << 20  #: bytes; Python's own files, and what the system reads ahead in them
MORE_WAS_READ: Final = (
    "In some round this process read much beside the pages: its code, or what it shares with other "
    "work."
)
MEANINGS: Final = {
    "ratio": "modelled time over real time",
    "waited_ratio": "the same of the waits for pages",
    "seconds": "s, real, computing included",
    "modelled_seconds": "s, modelled",
    "rate": "bytes/s of the link, fitted before and after",
    "latency": "s until its first byte",
    "bytes": "bytes read",
}


class Played(NamedTuple):
    """A replay: seconds until the last request was served, and what the file system counted."""

    counts: Counts
    seconds: float
    disk_bytes: int = 0  #: of pages, as the disk tier counts them
    overhead: int = 0  #: what alignment added
    proc_bytes: int | None = None  #: that the system fetched for this process; None if unknown


class Pages:
    """The experts of ``checkpoint`` in the order of its files, as the pages of ``trace``: expert
    number r by place of layer number l is number l * E + r.  Those of a longer trace begin again.

    Raises ``CheckpointError`` where there are none.
    """

    def __init__(self, trace: Trace, checkpoint: Checkpoint) -> None:
        spec, moe = checkpoint.spec, checkpoint.spec.moe
        pages = [
            checkpoint.expert(layer, e).extents
            for layer in spec.moe_layers
            for e in range(moe.experts if moe else 0)
        ]
        if not pages:
            raise CheckpointError("The model has no routed experts.", "Name one that has.")
        self._pages: list[tuple[Location, ...]] = sorted(pages)
        self._layers = {int(layer): place for place, layer in enumerate(trace.layers)}
        self._order = trace.order.astype(np.int64)
        self._experts = trace.experts
        self.page_bytes = checkpoint.expert_bytes
        self.window_bytes = max(windows(page)[1] for page in self._pages)
        self.wanted, self.have = len(trace.layers) * trace.experts, len(self._pages)

    def locate(self, page: PageId) -> tuple[Location, ...]:
        place = self._layers[page.layer]
        number = place * self._experts + int(self._order[place, page.expert])
        return self._pages[number % self.have]


class _Real:
    """The disk tier and memory for as many slots as the largest replay needs."""

    def __init__(self, trace: Trace, checkpoint: Checkpoint, slots: int) -> None:
        self.pages, self.top_k = Pages(trace, checkpoint), trace.top_k
        need, free = slots * self.pages.window_bytes, read_machine().ceiling - SPARE
        if need > free:
            raise DoesNotFit(
                f"{slots:,} pages of {show_size(self.pages.page_bytes)} take {show_size(need)}; "
                f"{show_size(max(0, free))} of memory are free for them.",
                "Give a smaller --capacity, or a model of smaller experts.",
                missing=need - free,
            )
        self.slots: list[Buffer] = Slab(need).slots(self.pages.window_bytes)
        self.disk = DiskTier(checkpoint.files, self.pages.locate)
        layers = trace.layers.tolist()
        self._every = [PageId(la, e) for la in layers for e in range(trace.experts)]

    def __enter__(self) -> _Real:
        return self

    def __exit__(self, *error: object) -> None:
        self.disk.close()

    @property
    def mode(self) -> str:
        return " and ".join(sorted(set(self.disk.counts.modes.values())))

    def bursts(self, rng: random.Random) -> dict[int, list[float]]:
        """Seconds of leases of so many pages at random, none of which is there."""
        most = min(self.top_k, len(self.slots), self.pages.have)
        sizes = sorted({1, *(2**i for i in range(most.bit_length())), most})
        found: dict[int, list[float]] = {size: [] for size in sizes}
        lru = chosen("policy", BASELINE)
        for _ in range(BURSTS):
            for size in sizes:
                store = ExpertStore(self.disk, self.slots[:size], lru(size))
                some = rng.sample(self._every, size)
                begin = time.perf_counter()
                with store.lease(some) as arrivals:
                    for _ in arrivals:
                        pass
                found[size].append(time.perf_counter() - begin)
        return found

    def play(
        self, trace: Trace, run: Leases, slots: int, policy: Any, predictor: Any, pace: Pace
    ) -> Played:
        before, began = replace(self.disk.counts), _fetched()
        tier = RealTier(self.pages.page_bytes, self.disk)
        counts = replay_timed(
            run, policy, predictor, self.slots[:slots], tier, guessed=trace.guessed, pace=pace
        )
        ended, after = _fetched(), self.disk.counts
        fetched = None if began is None or ended is None else ended - began
        read, overhead = after.bytes - before.bytes, after.overhead - before.overhead
        assert tier.over is not None
        return Played(counts, tier.over, read, overhead, fetched)


def fitted(bursts: dict[int, list[float]], size: int) -> Link:
    """The link over which bursts of n pages of ``size`` bytes take what they took: seconds =
    latency + n * size / rate, by least squares of the relative errors of the medians."""
    counts = np.array(list(bursts), float)
    seconds = np.array([statistics.median(several) for several in bursts.values()])
    wide = np.stack([np.ones_like(counts), counts * size], axis=1) / seconds[:, None]
    latency, each = np.linalg.lstsq(wide, np.ones_like(seconds), rcond=None)[0]
    if len(counts) < 2 or latency < 0 or each <= 0:  # no latency that could be told apart
        each = float((wide[:, 1]).sum() / (wide[:, 1] ** 2).sum())
        latency = 0.0
    return Link(1 / float(each), float(latency))


def _fetched() -> int | None:
    """Bytes that the system has fetched from drives for this process; None where it says none."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]) if "read_bytes" in fields else None


def compare(
    frame: Frame,
    trace: Trace,
    checkpoint: Checkpoint,
    rooms: Sequence[Room],
    policies: Sequence[str],
    predictors: Sequence[str],
    pace: Pace,
    about: Mapping[str, Any],
) -> None:
    """Lines of all capacities, predictors and policies.  ``trace``: its ``page_bytes`` those of the
    model (``as_in``); ``about``: settings of all cases.  Raises ``DoesNotFit``, ``ReadError``,
    ``UsageError``, and ``K3Error`` where two accounts differ."""
    for place in rooms:
        if len(place.slots) != 1:
            raise UsageError(
                f"--capacity {place.text} names two tiers.", "Real replay is of RAM over the disk."
            )
    refuse_blind(trace, predictors)
    run = trace.leases()
    with _Real(trace, checkpoint, max(place.slots[0] for place in rooms)) as real:
        real.bursts(random.Random(frame.often.seed))  # files are open, and the mode is known
        frame.notes += _notes(real)
        for place in rooms:
            for predictor in predictors:
                for policy in policies:
                    case = {
                        **about, "policy": short(policy), "predictor": short(predictor),
                        "capacity": place.text, "page_bytes": real.pages.page_bytes,
                    }  # fmt: skip
                    measure = partial(_round, frame, real, trace, run, place, policy, predictor)
                    frame.case(case, partial(measure, pace))


def _round(
    frame: Frame, real: _Real, trace: Trace, run: Leases, place: Room, policy: str, predictor: str,
    pace: Pace, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Figures of a turn of disk and model."""
    rng, slots = random.Random(seed), place.slots[0]
    before = fitted(real.bursts(rng), trace.page_bytes)
    found = real.play(trace, run, slots, *_made(trace, place, policy, predictor), pace)
    link = _between(before, fitted(real.bursts(rng), trace.page_bytes))
    model = _modelled(trace, run, slots, *_made(trace, place, policy, predictor), pace, link)
    _check(trace, run, place, policy, predictor, found, model, real.mode)
    beside = (found.proc_bytes or 0) - found.disk_bytes - found.overhead
    if real.mode == "direct" and beside > max(BESIDE, found.disk_bytes // 100):
        frame.notes.append(MORE_WAS_READ)
    return {"slots": slots, "mode": real.mode, **_figures(found, model, link)}


def as_in(trace: Trace, checkpoint: Checkpoint) -> Trace:
    """``trace`` with pages as large as those of ``checkpoint``."""
    return replace(trace, page_bytes=max(1, checkpoint.expert_bytes))


def _made(trace: Trace, place: Room, policy: str, predictor: str) -> tuple[Any, Any]:
    return chosen("policy", policy)(place.slots[0]), predictor_of(predictor, trace)


def _between(before: Link, after: Link) -> Link:
    """As fast as the two on average: the mean of seconds a byte."""
    each = (1 / before.rate + 1 / after.rate) / 2
    return Link(1 / each, (before.latency + after.latency) / 2)


def _modelled(
    trace: Trace, run: Leases, slots: int, policy: Any, predictor: Any, pace: Pace, link: Link
) -> Played:
    tier = ModelTier(trace.page_bytes, link)
    counts = replay_timed(run, policy, predictor, slots, tier, guessed=trace.guessed, pace=pace)
    assert tier.over is not None
    return Played(counts, tier.over)


def _check(
    trace: Trace,
    run: Leases,
    place: Room,
    policy: str,
    predictor: str,
    real: Played,
    model: Played,
    mode: str,
) -> None:
    """What holds of every round; that hits, late and misses are the requests, and bytes those that
    came, ``replay_timed`` has checked.  Raises ``K3Error``."""
    must_be("bytes that the disk tier read", real.disk_bytes, real.counts.bytes)
    must_be("modelled requests", model.counts.requests, real.counts.requests)
    if predictor == NOTHING:
        clockless = chosen("policy", policy)(place.slots[0])
        counts = vars(replay(run, clockless, place.slots[0], trace.page_bytes))
        for kind, other in (("real", vars(real.counts)), ("modelled", vars(model.counts))):
            for name in sorted(counts.keys() - {"wait_seconds"}):
                must_be(f"{kind} {name} beside replay without a clock", other[name], counts[name])
    # less was read only if some came out of a cache; what is read beside the pages is noted
    if mode == "direct" and real.proc_bytes is not None:
        less = min(real.proc_bytes, real.disk_bytes)
        must_be("what the kernel says was read of the pages", less, real.disk_bytes)


def _notes(real: _Real) -> list[str]:
    pages, notes = real.pages, list[str]()
    if pages.wanted > pages.have:
        notes.append(
            f"The trace has {pages.wanted:,} pages and the model {pages.have:,}: several of the "
            "trace are the same bytes of a file."
        )
    if pages.page_bytes < SMALL:
        notes.append(
            f"A page is {show_size(pages.page_bytes)}: this times Python and the drive's own "
            "memory.  Experts as large as K3's: k3offload make-tiny OUT --size io-real."
        )
    if real.mode != "direct":
        notes.append("Buffered reads may come from the page cache and not from the drive.")
    return notes


def _figures(found: Played, model: Played, link: Link) -> dict[str, Any]:
    c, waited = found.counts, found.counts.wait_seconds
    return {
        "ratio": model.seconds / found.seconds,
        "waited_ratio": model.counts.wait_seconds / waited if waited else None,
        "seconds": found.seconds, "modelled_seconds": model.seconds,
        "waited_seconds": waited, "modelled_waited_seconds": model.counts.wait_seconds,
        "rate": link.rate, "latency": link.latency, "bytes": c.bytes,
        "modelled_bytes": model.counts.bytes, "overhead_bytes": found.overhead,
        "proc_bytes": found.proc_bytes, "requests": c.requests, "hits": c.hits, "late": c.late,
        "misses": c.misses, "prefetches": c.prefetches,
    }  # fmt: skip
