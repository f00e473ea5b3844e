"""Replay: what a cache policy would have done with the requests of a recorded run, no hardware.

Counts exactly what ``ExpertStore`` counts for the same leases without prefetch: the pages of a
lease that are present are hits and stay, the others are misses in the tier's order, each evicting
where no slot is free, and all are pinned until the lease ends.  Knows pages and 8-bit router
scores, no file format, no byte and no clock: a read ends when it starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tiers.base import CachePolicy, PageId
from .counts import Counts
from .store import MOST

Experts = npt.NDArray[np.integer[Any]]
Scores = npt.NDArray[np.uint8]
Row = tuple[Experts, Scores]  #: best experts of a row, and their scores


class Step(NamedTuple):
    """One lease: its distinct pages in the tier's order, and what the policy is told before it:
    for each row the experts it chose or nearly chose, best first, and their scores."""

    layer: int
    pages: tuple[PageId, ...]
    rows: tuple[Row, ...] = ()


def steps(
    layers: Sequence[int],
    chosen: Experts,
    best: Experts | None = None,
    codes: Scores | None = None,
    rows: int = 1,
    order: Callable[[PageId], Any] | None = None,
) -> list[Step]:
    """The leases of decode sweeps of ``rows`` rows each.

    ``chosen`` [T, len(layers), k]: the experts of each token; ``best``, ``codes`` [T, len(layers),
    M]: what the policy hears, if it is known; ``order``: the tier's, else by number.
    """
    known: dict[tuple[int, ...], tuple[PageId, ...]] = {}  # equal leases share their pages
    result = []
    for begin in range(0, len(chosen), rows):
        sweep = range(begin, min(begin + rows, len(chosen)))
        for place, layer in enumerate(int(layer) for layer in layers):
            key = (layer, *sorted(set(chosen[begin : begin + rows, place].ravel().tolist())))
            if key not in known:
                pages = (PageId(layer, expert) for expert in key[1:])
                known[key] = tuple(sorted(pages, key=order))
            news: tuple[Row, ...] = ()
            if best is not None and codes is not None:
                news = tuple((best[row, place], codes[row, place]) for row in sweep)
            result.append(Step(layer, known[key], news))
    return result


def replay(
    run: Iterable[Step], policy: CachePolicy, slots: int, size: Callable[[PageId], int] | int = 1
) -> Counts:
    """Counts of ``policy`` with ``slots`` slots; ``size``: bytes of a page."""
    counts = Counts()
    present: set[PageId] = set()
    hit, insert = policy.hit, policy.insert
    for step in run:
        for experts, scores in step.rows:
            policy.note(step.layer, experts, scores)
        missing = []
        for page in step.pages:
            if page in present:
                hit(page)
            else:
                missing.append(page)
        counts.requests += len(step.pages)
        counts.hits += len(step.pages) - len(missing)
        counts.misses += len(missing)
        counts.bytes += size * len(missing) if isinstance(size, int) else sum(map(size, missing))
        if len(step.pages) > slots:
            _waves(step.pages, missing, policy, slots, present)
            continue
        busy = set(step.pages).__contains__
        for page in missing:
            if len(present) >= slots:
                present.remove(policy.evict(busy))
            insert(page)
            present.add(page)
    return counts


def _waves(
    pages: Sequence[PageId],
    missing: Sequence[PageId],
    policy: CachePolicy,
    slots: int,
    present: set[PageId],
) -> None:
    """A lease of more pages than slots: slots come free as pages are handed out and used."""
    wanted = deque(missing)
    ready = deque(page for page in pages if page in present)
    pinned = set(ready)
    while wanted or ready:
        while wanted and (len(present) < slots or len(pinned) < len(present)):
            if len(present) >= slots:
                present.remove(policy.evict(pinned.__contains__))
            page = wanted.popleft()
            policy.insert(page)
            present.add(page)
            pinned.add(page)
            ready.append(page)
        limit = min(MOST, max(1, slots // 2)) if wanted else MOST
        for _ in range(min(limit, len(ready))):
            pinned.remove(ready.popleft())
