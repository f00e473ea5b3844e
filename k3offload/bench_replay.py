"""Real replay: what a trace asks for, read from a real model by the real tiers, without arithmetic;
beside the same requests in modelled time.

Each page of the trace stands for an expert of the model, in the order of the files.  In turns, a
link is measured (bursts of pages that nobody has, through store and disk tier, as misses are read)
and the trace is replayed, first from the disk and then in modelled time over a link as measured
before and after.  A drive's speed drifts: the median of the rounds' ratios counts.  Knows no
arithmetic; computing is time that passes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .bench_policies import Room
from .checkpoint import Checkpoint
from .config import show_size
from .errors import CheckpointError, DoesNotFit, UsageError
from .machine import read_machine
from .registry import implementation
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
Watch = Callable[[str], None]


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
        lru = implementation("scheduler", "policy", "lru").Policy
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
        assert read == counts.bytes, (read, counts)
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
    trace: Trace,
    checkpoint: Checkpoint,
    rooms: Sequence[Room],
    policies: Sequence[str],
    predictors: Sequence[str],
    pace: Pace,
    rounds: int = 3,
    seed: int = 0,
    tell: Watch = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """A line of figures for each capacity, predictor and policy.  ``trace``: its ``page_bytes``
    those of the model (``as_in``).  Raises ``DoesNotFit``, ``ReadError``, ``UsageError``."""
    for place in rooms:
        if len(place.slots) != 1:
            raise UsageError(
                f"--capacity {place.text} names two tiers.", "Real replay is of RAM over the disk."
            )
    run, rng = trace.leases(), random.Random(seed)
    with _Real(trace, checkpoint, max(place.slots[0] for place in rooms)) as real:
        real.bursts(rng)  # files are open, and the mode is known
        for place in rooms:
            for predictor in predictors:
                for policy in policies:
                    what = {"policy": policy, "predictor": predictor, "capacity": place.text}
                    played = []
                    links = [fitted(real.bursts(rng), trace.page_bytes)]
                    for number in range(rounds):
                        tell(f"{place.text}: {policy}, {predictor}, round {number + 1} of {rounds}")
                        made = _made(trace, place, policy, predictor)
                        found = real.play(trace, run, place.slots[0], *made, pace)
                        links.append(fitted(real.bursts(rng), trace.page_bytes))
                        link = _between(links[-2], links[-1])
                        made = _made(trace, place, policy, predictor)
                        model = _modelled(trace, run, place.slots[0], *made, pace, link)
                        _check(trace, run, place, policy, predictor, found, model, real.mode)
                        played.append((found, model, link))
                    notes = _notes(real, [found for found, _, _ in played])
                    yield {**what, "slots": place.slots[0], **_figures(played, real, notes)}


def as_in(trace: Trace, checkpoint: Checkpoint) -> Trace:
    """``trace`` with pages as large as those of ``checkpoint``."""
    return replace(trace, page_bytes=max(1, checkpoint.expert_bytes))


def _made(trace: Trace, place: Room, policy: str, predictor: str) -> tuple[Any, Any]:
    guess = implementation("scheduler", "predict", predictor).Predictor
    return (
        implementation("scheduler", "policy", policy).Policy(place.slots[0]),
        guess(trace.layers.tolist(), trace.experts, trace.top_k),
    )


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
    came, ``replay_timed`` has checked."""
    assert real.counts.requests == model.counts.requests
    if predictor == "none":
        clockless = implementation("scheduler", "policy", policy).Policy(place.slots[0])
        counts = replay(run, clockless, place.slots[0], trace.page_bytes)
        for other in (real.counts, model.counts):
            assert replace(other, wait_seconds=0.0) == counts, (other, counts)
    # less was read only if some came out of a cache; what is read beside the pages, see ``_notes``
    assert mode != "direct" or real.proc_bytes is None or real.proc_bytes >= real.disk_bytes, real


def _notes(real: _Real, played: Sequence[Played]) -> list[str]:
    pages, notes = real.pages, list[str]()
    beside = max((p.proc_bytes or 0) - p.disk_bytes - p.overhead for p in played)
    if real.mode == "direct" and beside > max(BESIDE, max(p.disk_bytes for p in played) // 100):
        notes.append(
            f"This process read {show_size(beside)} beside the pages of a round: its code, or what "
            "it shares with other work."
        )
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


def _figures(
    played: Sequence[tuple[Played, Played, Link]], real: _Real, notes: Sequence[str]
) -> dict[str, Any]:
    ratios = [model.seconds / found.seconds for found, model, _ in played]
    waits = [
        model.counts.wait_seconds / found.counts.wait_seconds if found.counts.wait_seconds else 1.0
        for found, model, _ in played
    ]
    middle = statistics.median(ratios)
    found, model, link = min(played, key=lambda p: abs(p[1].seconds / p[0].seconds - middle))
    c = found.counts
    return {
        "ratio": round(middle, 4), "ratios": [round(r, 4) for r in ratios],
        "waited_ratio": round(statistics.median(waits), 4), "seconds": found.seconds,
        "modelled_seconds": model.seconds,
        "waited_seconds": c.wait_seconds, "modelled_waited_seconds": model.counts.wait_seconds,
        "rate": link.rate, "latency": link.latency, "bytes": c.bytes,
        "modelled_bytes": model.counts.bytes, "overhead_bytes": found.overhead,
        "proc_bytes": found.proc_bytes, "requests": c.requests, "hits": c.hits, "late": c.late,
        "misses": c.misses, "prefetches": c.prefetches, "page_bytes": real.pages.page_bytes,
        "mode": real.mode, "notes": list(notes),
    }  # fmt: skip
