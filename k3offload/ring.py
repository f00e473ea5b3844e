"""A few buffers in which parts of the trunk take turns, the next one fetched while one is in use.

The parts (layers, or blocks of the head) are asked for round and round in one order, so what comes
next is known: after the last comes the first, in the next sweep.  With two buffers a part is read
while the one before it is computed; with one, as soon as that has been left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from .arena import LayerWeights, Memory
from .errors import ReadError
from .fetch import Fetch
from .kernels.workers import Workers
from .scheduler.counts import Counts
from .tiers.base import Cancelled, Priority
from .tiers.device import DeviceError

Lay = Callable[[int, Any], LayerWeights]  #: a part's number and its memory -> its weights
#: A part's number and weights -> what fills them, not yet begun.
Start = Callable[[int, LayerWeights, Priority], Fetch]
Urgency = Callable[[], Priority]  #: asked again and again: it may rise meanwhile


def demand() -> Priority:
    return Priority.DEMAND


def _one_thread() -> None:
    torch.set_num_threads(1)


class Ring:
    """The parts ``order`` in ``buffers``.  One caller at a time.

    ``counts``: a part that is there when asked for is a hit, one on its way is late, else it is a
    miss; ``bytes`` are those of all reads begun."""

    def __init__(
        self,
        order: Sequence[int],
        buffers: Sequence[Memory],
        lay: Lay,
        start: Start,
        counts: Counts,
        workers: Workers | None = None,
    ) -> None:
        self._next = dict(zip(order, [*order[1:], *order[:1]], strict=True))
        self.buffers, self._lay, self._fetch = list(buffers), lay, start
        self.counts, self._workers = counts, workers
        self._fetches: list[Fetch | None] = [None] * len(self.buffers)
        self._keys = [-1] * len(self.buffers)
        self._laid: dict[tuple[int, int], LayerWeights] = {}
        self._in_use = -1
        self._pool = ThreadPoolExecutor(1, "k3-trunk", _one_thread)

    @contextmanager
    def use(self, key: int, urgency: Urgency = demand) -> Iterator[LayerWeights]:
        """The weights of part ``key``, valid inside the ``with`` block.  Whoever makes it more
        urgent meanwhile calls ``hasten``."""
        self.counts.requests += 1
        place = self._place_of(key)
        fetch = None if place is None else self._fetches[place]
        if place is None or fetch is None:
            self.counts.misses += 1
            place = self._room(key)
            assert place is not None, "one part at a time"
            fetch = self._start(place, key, urgency())
        elif fetch.ended():
            self.counts.hits += 1
        else:
            self.counts.late += 1
        fetch.raise_to(urgency())  # asked once more: it may have risen before the fetch was there
        self._in_use = place
        try:
            self._read_ahead(key)
            yield self._arrived(place, key, fetch, urgency)
        finally:
            self._in_use = -1
        self._read_ahead(key)

    def peek(self, key: int) -> LayerWeights | None:
        """The weights of part ``key`` if they are here now."""
        place = self._place_of(key)
        fetch = None if place is None else self._fetches[place]
        there = fetch is not None and fetch.ended() and not fetch.failed()
        return fetch.weights if there and fetch is not None else None

    def hasten(self, key: int | None) -> None:
        """Somebody waits for part ``key``, or for all on their way.  From any thread."""
        for own, fetch in zip(self._keys, self._fetches, strict=True):
            if fetch is not None and key in (own, None):
                fetch.raise_to(Priority.DEMAND)

    def close(self) -> None:
        """Give up reads under way; nothing writes to the buffers when this returns."""
        for fetch in self._fetches:
            if fetch is not None:
                fetch.drop()
        self._pool.shutdown()

    def _arrived(self, place: int, key: int, fetch: Fetch, urgency: Urgency) -> LayerWeights:
        begin = time.perf_counter()
        try:
            try:
                fetch.wait(self._workers)
            except (ReadError, DeviceError, Cancelled):
                if fetch.asked == Priority.DEMAND or urgency() != Priority.DEMAND:
                    raise
                # Nobody needed what failed while it was read ahead; now somebody does.
                fetch = self._start(place, key, Priority.DEMAND)
                fetch.wait(self._workers)
        finally:
            self.counts.wait_seconds += time.perf_counter() - begin
        return fetch.weights

    def _read_ahead(self, key: int) -> None:
        """Begin to read what follows ``key``, if a buffer is free for it."""
        following = self._next[key]
        if self._place_of(following) is None and (place := self._room(following)) is not None:
            self._start(place, following, Priority.TRUNK).begin(self._pool)

    def _place_of(self, key: int) -> int | None:
        """The buffer that holds part ``key`` or will."""
        for place, fetch in enumerate(self._fetches):
            if self._keys[place] == key and fetch is not None and not fetch.failed():
                return place
        return None

    def _room(self, key: int) -> int | None:
        """A buffer for part ``key``: not the one in use, nor what follows if that can be helped."""
        places = [place for place in range(len(self.buffers)) if place != self._in_use]
        held = {p: self._keys[p] for p in places if self._fetches[p] is not None}
        places.sort(key=lambda p: (p in held, held.get(p) == self._next[key]))
        return places[0] if places else None

    def _start(self, place: int, key: int, priority: Priority) -> Fetch:
        old = self._fetches[place]
        if old is not None:
            old.drop()
        weights = self._laid.get((key, place))
        if weights is None:
            weights = self._laid[key, place] = self._lay(key, self.buffers[place])
        fetch = self._fetch(key, weights, priority)
        self._keys[place], self._fetches[place] = key, None
        self._fetches[place] = fetch
        self.counts.bytes += weights.read_bytes
        return fetch
