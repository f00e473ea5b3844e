"""What an engine is doing right now: counts and rates of its tiers, lanes over the last seconds,
which experts lie where, how long a prompt still takes; as plain dicts for a page that shows it.

Knows engines and a clock, and nothing of requests, pages or servers.  Of every sweep it keeps how
long it took, which costs nothing; all else is collected only while somebody watches.
"""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .scheduler.counts import Counts
from .scheduler.remaining import Remaining
from .scheduler.sweep import Group
from .tiers.base import PageId, Priority

if TYPE_CHECKING:
    import torch

    from .engine import Engine
    from .model import Run
    from .scheduler.store import ExpertStore

SPAN: Final = 12.0  #: seconds that lanes go back
BIN: Final = 0.06  #: seconds of one value of a lane
RATE: Final = 2.0  #: seconds that rates are taken over, about
MOST: Final = 1 << 14  #: stretches that a lane keeps
DEVICE: Final = " on the device"  #: follows a kind of counts
SUMMED: Final = ("requests", "hits", "late", "misses", "bytes")  #: counts that have a rate

Stretch = tuple[float, float, float]  #: from, to, and the seconds of it that count
Floats = npt.NDArray[np.float64]


class Pace(NamedTuple):
    """A sweep under way: rows that decode, rows of prompts, layers that have passed, seconds."""

    decoding: int
    prompts: int
    layers: int
    seconds: float


class _Lane:
    """When at least one of several things was under way.  From any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._stretches = deque[Stretch](maxlen=MOST)
        self._busy, self._since = 0, 0.0

    def change(self, by: int) -> None:
        """One more is under way, or one less."""
        with self._lock:
            now = self._clock()
            if not self._busy:
                self._since = now
            self._busy += by
            if not self._busy:
                self._stretches.append((self._since, now, now - self._since))

    def stretches(self, now: float) -> list[Stretch]:
        with self._lock:
            known = list(self._stretches)
            return [*known, (self._since, now, now - self._since)] if self._busy else known


class Live:
    """Listens to ``engine`` from now on.  Make it on the thread that runs the sweeps, or between
    two of them, and call ``start`` and ``stop`` there too; ``facts`` from any one thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._clock = engine, clock
        self._lock = threading.Lock()
        moe = engine.spec.moe
        self._places = {layer: i for i, layer in enumerate(engine.spec.moe_layers)} if moe else {}
        self._experts = moe.experts if moe else 0
        self._remaining = Remaining(engine.plan.sweep_rows)
        self._rows, self._layer = (0, 0), 0
        self._runs: Sequence[Run] = ()  # of the sweep under way
        self._began: float | None = None  # when it did begin
        self._sweeps, self._last = 0, 0.0
        self._watched = False
        self._near = _near(engine)
        self._forget()
        engine.hooks.add(
            on_sweep=self._on_sweep, before_layer=self._before_layer, on_swept=self._on_swept,
            on_route=self._on_route,
        )  # fmt: skip

    # ---- who watches ----

    @property
    def watched(self) -> bool:
        return self._watched

    def start(self) -> None:
        """Collect, from nothing."""
        self._forget()
        self._settle()
        self._watched = True
        self._engine.disk.watch(self._on_read)
        if (there := self._engine.accelerator) is not None:
            there.device.watch = self._copy.change

    def stop(self) -> None:
        """Collect no more."""
        self._watched = False
        self._engine.disk.watch(None)
        if (there := self._engine.accelerator) is not None:
            there.device.watch = None
        self._forget()

    def _forget(self) -> None:
        self._asked_for, self._ahead = _Lane(self._clock), _Lane(self._clock)
        self._copy = _Lane(self._clock)
        self._passed = deque[tuple[float, float, float]](maxlen=MOST)  # layers: from, to, waited
        self._begin: tuple[float, float] | None = None  # the layer's under way, and waits till then
        self._others: dict[str, Counts] = {}
        self._wanted = False  # newer ones of these
        self._samples = deque[tuple[float, dict[str, dict[str, Any]], int]]()
        self._asked = self._blank()
        self._drawn: dict[str, tuple[tuple[int, int], str]] = {}

    def _blank(self) -> npt.NDArray[np.bool_]:
        return np.zeros((len(self._places), self._experts), np.bool_)

    # ---- what is heard ----

    def _on_sweep(self, runs: Sequence[Run]) -> None:
        decoding = sum(run.decode for run in runs)
        rows = decoding, sum(len(run.tokens) for run in runs) - decoding
        with self._lock:
            self._rows, self._layer, self._began = rows, 0, self._clock()
            self._runs = runs
        self._turn(True)

    def _before_layer(self, layer: int) -> None:
        self._layer = layer
        self._turn(True)

    def _on_swept(self) -> None:
        with self._lock:
            if self._began is not None:
                whole = self._layer + 1 == len(self._engine.spec.layers)
                whole = whole and not any(run.error for run in self._runs)  # no rows have left it
                self._last = self._clock() - self._began
                if whole:
                    self._remaining.swept(self._last, *self._rows)
                self._sweeps += 1
            self._began, self._runs = None, ()
        self._turn(False)

    def _on_route(
        self, layer: int, group: Group, experts: torch.Tensor, weights: object, scores: object
    ) -> None:
        if self._watched:
            self._asked[self._places[layer], experts.reshape(-1).numpy()] = True

    def _on_read(self, priority: Priority | None, by: int) -> None:
        (self._ahead if priority is Priority.PREFETCH else self._asked_for).change(by)

    def _turn(self, goes_on: bool) -> None:
        """A layer has ended, or the sweep's begin before the first; another follows."""
        if not self._watched:
            return
        if self._wanted or not goes_on:
            self._settle()
        waited, now = self._waited(), self._clock()
        if self._begin is not None:
            begin, before = self._begin
            self._passed.append((begin, now, min(waited - before, now - begin)))
        self._begin = (now, waited) if goes_on else None

    def _settle(self) -> None:
        """Keep the counts of what no lock protects, between two layers, where they agree."""
        counts = self._engine.counts()
        self._others = {kind: own for kind, own in counts.items() if not kind.startswith("experts")}
        self._wanted = False

    def _waited(self) -> float:
        """Seconds that sweeps have waited for pages so far."""
        return sum(counts.wait_seconds for counts in self._near)

    # ---- what is told ----

    def about(self) -> dict[str, Any]:
        """What stays as it is: sizes of the model, and room of the tiers in pages and bytes."""
        engine, spec = self._engine, self._engine.spec
        there = engine.accelerator
        return {
            "layers": len(spec.layers), "moe_layers": list(self._places), "experts": self._experts,
            "top_k": spec.moe.top_k if spec.moe else 0, "span": SPAN,
            "page_bytes": engine.checkpoint.expert_bytes if spec.moe else 0,
            "slots": {tier: store.slots for tier, store in self._stores()},
            "ram": engine.plan.limit, "device": None if there is None else there.device.name,
            "sweep_rows": engine.plan.sweep_rows, "policy": engine.options.policy,
            "predict": engine.options.predict,
            "context": min(engine.options.context, spec.context),
        }  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Everything that changes; call it about twice a second between ``start`` and ``stop``.

        ``tiers``: counts since the engine was loaded, by kind, in which hits + late + misses =
        requests; ``rates``: of these in the last seconds, a second; ``lanes``: shares of each
        ``BIN`` of the last ``SPAN`` seconds, in percent, the newest last; ``resident``: bits
        [MoE layers, experts] of the pages in each tier, ``asked``: of those that routers chose
        since the last call; both packed and in base64.
        """
        now = self._clock()
        seen = {tier: store.seen() for tier, store in self._stores()}
        tiers = {_kind("experts", tier): asdict(counts) for tier, (counts, _) in seen.items()}
        tiers |= {kind: asdict(counts) for kind, counts in self._others.items()}
        self._wanted = True
        read = self._engine.disk.counts.bytes
        asked, self._asked = self._asked, self._blank()
        with self._lock:
            began, rows = self._began, self._rows
            sweep = {
                "number": self._sweeps + (began is not None), "layer": self._layer,
                "busy": began is not None, "decoding": rows[0], "prompts": rows[1],
                "seconds": self._last if began is None else now - began,
            }  # fmt: skip
        return {
            "sweep": sweep, "tiers": tiers, "disk": asdict(self._engine.disk.counts),
            "rates": self._rates(now, tiers, read), "lanes": self._lanes(now),
            "resident": {tier: self._bits(tier, *of) for tier, of in seen.items()},
            "held": {tier: len(pages) for tier, (_, pages) in seen.items()},
            "asked": packed(asked),
        }  # fmt: skip

    def left(self, todo: Sequence[int], decoding: int) -> list[float | None]:
        """Seconds until prompts with ``todo`` tokens left are computed, in order of arrival, beside
        so many answers; None where nobody knows yet.  Tokens of the sweep under way are left."""
        with self._lock:
            pace, now = None, self._clock()
            if self._began is not None:
                pace = Pace(*self._rows, self._layer, now - self._began)
            return prompt_ends(
                self._remaining, todo, decoding, self._engine.plan.sweep_rows, pace,
                len(self._engine.spec.layers),
            )  # fmt: skip

    def _stores(self) -> Iterable[tuple[str, ExpertStore]]:
        engine, there = self._engine, self._engine.accelerator
        if engine.store is not None:
            yield "ram", engine.store
        if there is not None and there.store is not None:
            yield "device", there.store

    def _bits(self, tier: str, counts: Counts, pages: Iterable[PageId]) -> str:
        """Drawn anew only where a read has begun or ended since."""
        pages = list(pages)
        key = counts.misses + counts.prefetches, len(pages)
        if tier not in self._drawn or self._drawn[tier][0] != key:
            bits = self._blank()
            at = [self._places[layer] * self._experts + expert for layer, expert in pages]
            bits.reshape(-1)[np.array(at, np.int64)] = True
            self._drawn[tier] = key, packed(bits)
        return self._drawn[tier][1]

    def _rates(
        self, now: float, tiers: dict[str, dict[str, Any]], read: int
    ) -> dict[str, Any] | None:
        samples = self._samples
        samples.append((now, tiers, read))
        while len(samples) > 2 and now - samples[1][0] >= RATE:
            samples.popleft()
        then, before, read_before = samples[0]
        if now - then <= 0:
            return None
        rates: dict[str, Any] = {
            kind: {name: (own[name] - before[kind][name]) / (now - then) for name in SUMMED}
            for kind, own in tiers.items()
            if kind in before
        }
        return {**rates, "disk": {"bytes": (read - read_before) / (now - then)}}

    def _lanes(self, now: float) -> dict[str, Any]:
        end = np.floor(now / BIN) * BIN  # bins stay where they are while time goes on
        edges = end - np.arange(round(SPAN / BIN), -1, -1) * BIN
        passed = list(self._passed)
        if (begin := self._begin) is not None:
            waited = min(self._waited() - begin[1], now - begin[0])
            passed.append((begin[0], now, waited))
        found = {
            "asked_for": self._asked_for.stretches(now), "ahead": self._ahead.stretches(now),
            "compute": [(a, b, b - a - w) for a, b, w in passed], "waiting": passed,
        }  # fmt: skip
        if self._engine.accelerator is not None:
            found["copy"] = self._copy.stretches(now)
        lanes = {name: shares(some, edges) for name, some in found.items()}
        whole = {name: np.rint(100 * lane).astype(int).tolist() for name, lane in lanes.items()}
        return {"end": round(float(end), 3), "bin": BIN, **whole}


def _near(engine: Engine) -> list[Counts]:
    """Of each kind those of the nearest tier: a device waits for what it asks RAM for beside."""
    store, there, weights = engine.store, engine.accelerator, engine.weights
    if there is not None and there.store is not None:
        store = there.store
    trunk = weights if there is None else there.trunk
    return [
        trunk.counts,
        trunk.head_counts,
        weights.embed_counts,
        *([store.counts] if store else []),
    ]


def _kind(kind: str, tier: str) -> str:
    return kind if tier == "ram" else kind + DEVICE


def packed(bits: npt.NDArray[np.bool_]) -> str:
    """Row after row, eight to a byte, the first the highest; in base64."""
    return b64encode(np.packbits(bits).tobytes()).decode()


def shares(stretches: Sequence[Stretch], edges: Floats) -> Floats:
    """What share of the time between two ``edges`` counts, [bins], of stretches in order that do
    not overlap."""
    if not stretches:
        return np.zeros(len(edges) - 1)
    begins, ends, counted = np.array(stretches, np.float64).T
    points = np.column_stack((begins, ends)).reshape(-1)
    sums = np.repeat(np.cumsum(counted), 2)
    sums[::2] -= counted
    inside: Floats = np.diff(np.interp(edges, points, sums)) / np.diff(edges)
    return np.clip(inside, 0, 1)


def turns(todo: Sequence[int], rows: int) -> tuple[list[int], list[int]]:
    """Rows of the sweeps that prompts with ``todo`` tokens need, ``rows`` in each; and of each
    prompt the sweep with its end.  Who got nothing comes first next time."""
    left, ends, sizes = list(todo), [0] * len(todo), list[int]()
    passed_over: set[int] = set()
    while any(left):
        room, now = max(1, rows), passed_over
        passed_over = set()
        for i in sorted((i for i, n in enumerate(left) if n), key=lambda i: i not in now):
            count = min(left[i], room)
            if not count:
                passed_over.add(i)
            elif count == left[i]:
                ends[i] = len(sizes)
            left[i], room = left[i] - count, room - count
        sizes.append(max(1, rows) - room)
    return sizes, ends


def prompt_ends(
    remaining: Remaining, todo: Sequence[int], decoding: int, rows: int, pace: Pace | None,
    layers: int,
) -> list[float | None]:  # fmt: skip
    """Seconds until each prompt of ``todo`` tokens is computed; see ``Live.left``.  The sweep under
    way tells of itself, the more the farther it is."""
    sizes, ends = turns(todo, rows - decoding)
    cost: list[float | None] = [remaining.sweep(decoding, size) for size in sizes]
    if pace is not None and cost:
        known = remaining.sweep(pace.decoding, pace.prompts)
        share = pace.layers / layers
        own = pace.seconds / share if share else known
        if own is not None:
            whole = own if known is None else share * own + (1 - share) * known
            cost = [own if one is None else one for one in cost]
            rest = max(0.0, whole - pace.seconds)
            if not pace.prompts:  # it is of answers alone: the prompts come after it
                rest += cost[0] or own
            cost[0] = rest
    until: list[float | None] = []
    total: float | None = 0.0
    for one in cost:
        total = None if total is None or one is None else total + one
        until.append(total)
    return [until[end] if tokens else 0.0 for tokens, end in zip(todo, ends, strict=True)]
