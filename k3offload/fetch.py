"""One layer's weights on their way from disk to memory, quantised on the way where that is asked.

A fetch is run by whoever comes first: a thread in the background, or the caller who waits for it.
So a fetch that nobody has begun can never be waited for in vain.  What it reads in order to
quantise it passes through a few small buffers, the next rows being read while some are worked on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np
import torch

from .arena import LayerWeights, view
from .checkpoint import Tensor
from .errors import CheckpointError
from .kernels.quantize import quantize_into
from .kernels.workers import Workers, single_threaded
from .layout import BLOCK, DEPTH, Item, rows_of
from .tiers.base import Buffer, Cancelled, Location, Priority, Ticket
from .tiers.tier_disk import DiskTier


class Fetch:
    """Fills ``weights`` from ``disk``."""

    def __init__(self, weights: LayerWeights, disk: DiskTier | None, priority: Priority) -> None:
        self.weights, self._disk = weights, disk
        self.asked = self._priority = priority
        self._begun = threading.Lock()  # taken once, by whoever runs the fetch
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []
        self._dropped = False
        self._ended = threading.Event()
        self._error: BaseException | None = None

    # ---- what the owner of the memory calls ----

    def begin(self, pool: Executor) -> None:
        """Let it run in the background."""
        pool.submit(self._run_once, None)

    def ended(self) -> bool:
        return self._ended.is_set()

    def failed(self) -> bool:
        return self._error is not None

    def raise_to(self, priority: Priority) -> None:
        """Read what is left at ``priority``, if that is before its present one."""
        with self._lock:
            self._priority = min(self._priority, priority)
            for ticket in self._tickets:
                ticket.raise_to(self._priority)

    def wait(self, workers: Workers | None = None) -> None:
        """Until the weights are there; raises what went wrong.  Quantises on ``workers`` if the
        fetch has to be run here."""
        self._run_once(workers)
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Give it up; nothing writes to the memory any more when this returns."""
        with self._lock:
            self._dropped = True
            for ticket in self._tickets:
                ticket.cancel()
        self._run_once(None)
        self._ended.wait()
        self._settle()

    # ---- the one who runs it ----

    def _run_once(self, workers: Workers | None) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            with single_threaded():
                self._fill(workers)
        except BaseException as error:
            self._error = error
        finally:
            try:
                self._settle()
            finally:
                self._ended.set()

    def _fill(self, workers: Workers | None) -> None:
        arena, pieces = self.weights.arena, []
        assert not isinstance(arena, torch.Tensor)
        for item in self.weights.items:
            if not item.quantised:
                begin, location = item.at[0], item.tensor.location
                pieces.append((location, arena[begin : begin + location.length]))
        ready = self._read(pieces)
        for item, begin, rows in self._blocks():
            self._quantise(item, begin, rows, workers)
        ready.wait()
        self.weights.check_values()

    def _blocks(self) -> Iterator[tuple[Item, int, torch.Tensor]]:
        """(item, first row, rows) of all that is to be quantised, read some blocks ahead."""
        todo = [
            (item, begin, rows_of(item.tensor, begin, min(begin + step, item.tensor.shape[0])))
            for item in self.weights.items
            if item.quantised
            for step in [_block_rows(item.tensor)]
            for begin in range(0, item.tensor.shape[0], step)
        ]
        if not todo:
            return
        size = max(block.location.length for _, _, block in todo)
        staging = [np.empty(size, np.uint8) for _ in range(DEPTH)]
        coming: deque[Ticket] = deque()

        def start(i: int) -> None:
            if i < len(todo):
                location = todo[i][2].location
                memory = staging[i % DEPTH][: location.length]
                coming.append(self._read([(location, memory)]))

        for i in range(DEPTH - 1):
            start(i)
        for i, (item, begin, block) in enumerate(todo):
            start(i + DEPTH - 1)
            coming.popleft().wait()
            memory = staging[i % DEPTH][: block.location.length]
            yield item, begin, view(memory, block.dtype, block.shape)

    def _quantise(
        self, item: Item, begin: int, rows: torch.Tensor, workers: Workers | None
    ) -> None:
        end = begin + rows.shape[0]
        codes, scale = (self.weights.tensor(part.name)[begin:end] for part in item.parts)
        try:
            quantize_into(rows, self.weights.precision, codes, scale, workers)
        except ValueError as error:
            raise CheckpointError(
                f"The tensor {self.weights.full_name(item.tensor.name)} holds a value that is not "
                f"finite, between its rows {begin:,} and {end:,}.",
                "Download or copy its shard again.",
            ) from error

    def _read(self, pieces: list[tuple[Location, Buffer]]) -> Ticket:
        with self._lock:
            if self._dropped:
                raise Cancelled("nobody wants these weights any more")
            self._tickets = [t for t in self._tickets if not t.done()]
            assert self._disk is not None
            ticket = self._disk.read_scatter(pieces, self._priority)
            self._tickets.append(ticket)
        return ticket

    def _settle(self) -> None:
        """Wait for reads that an error left under way: they still write."""
        for ticket in self._tickets:
            ticket.cancel()
        for ticket in self._tickets:
            ticket.settle()


def _block_rows(tensor: Tensor) -> int:
    return max(1, BLOCK * tensor.shape[0] // tensor.location.length)
