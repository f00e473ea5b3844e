"""``--adaptive-backend``: an expert that is in RAM and not on the device is computed on the CPU, or
copied and computed there, whichever is expected to end sooner.

Which of them computes an expert then depends on budgets and speeds, and the two round differently:
results are as good, and no longer the same bits from run to run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from .arena import as_bytes, raw_bytes
from .kernels.choose import Kernels
from .scheduler.lease import Batch, Lost
from .scheduler.store import ExpertStore
from .tiers.base import Buffer, PageId, Ticket
from .tiers.device import Device, Mark

SMOOTH = 0.8  #: weight of what was known about a time, at each new measurement


class Outbox:
    """Rows that the CPU has computed, on their way to ``device`` beside its kernels.

    ``memory`` in RAM, locked if the system lets us, is that of rows of ``width`` numbers, which lie
    there until their copies have landed.  It holds any call's rows at least; with more, copies run
    beside the next call.
    """

    def __init__(self, device: Device, memory: Buffer, dtype: torch.dtype, width: int) -> None:
        self._device, self._memory = device, memory
        self._rows = as_bytes(memory).view(dtype).view(-1, width)
        self._free = 0  # the first row that no copy under way reads
        self._under_way: list[Ticket] = []
        self._after: Mark | None = None

    def aim(self, to: torch.Tensor) -> None:
        """Rows are for ``to`` from now on.  Its memory may have been another tensor's, which
        kernels that were called before still read: copies begin behind those."""
        self._device.handed_out(raw_bytes(to))
        self._after = self._device.mark()

    def rows(self, count: int) -> torch.Tensor:
        """Room for ``count`` rows.  Where it ends, all copies have to land first."""
        if self._free + count > len(self._rows):
            self._wait()
        return self._rows[self._free : self._free + count]

    def send(self, to: torch.Tensor) -> None:
        """Copy the rows that were asked for last to ``to``, a part of what was aimed at."""
        row, landed, end = self._memory.nbytes // len(self._rows), Ticket(1), self._free + len(to)
        source = self._memory[self._free * row : end * row]
        self._device.copy(source, raw_bytes(to), self._after, landed.finish)
        self._under_way.append(landed)  # only now: what was not asked for never lands
        self._free = end

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """All copies have landed behind the block, however it ends: nothing writes to what was
        aimed at any more, and kernels called from then on find the rows there."""
        try:
            yield
        except BaseException:
            self._settled()
            raise
        self._wait()

    def _wait(self) -> None:
        for landed in self._settled():
            landed.wait()  # for its error

    def _settled(self) -> list[Ticket]:
        for landed in self._under_way:
            landed.settle()
        ended, self._under_way, self._free = self._under_way, [], 0
        return ended


class Adaptive:
    """``device`` over ``host``, as ``layer_moe.moe`` asks for experts.  Pages come in slots of
    either; ``kernels`` are those of the CPU, whose results go through ``outbox``.
    ``copy_seconds``, ``cpu_seconds``: of one expert, as expected at first."""

    def __init__(
        self,
        device: ExpertStore,
        host: ExpertStore,
        kernels: Kernels,
        outbox: Outbox,
        copy_seconds: float,
        cpu_seconds: float,
    ) -> None:
        self.device, self.host, self.kernels, self.outbox = device, host, kernels, outbox
        self.copy_seconds, self.cpu_seconds = copy_seconds, cpu_seconds
        self.on_cpu = 0  #: experts that the CPU has computed

    def computed(self, seconds: float, experts: int) -> None:
        """The CPU took ``seconds`` for ``experts`` experts."""
        own = seconds / experts
        self.cpu_seconds = SMOOTH * self.cpu_seconds + (1 - SMOOTH) * own
        self.on_cpu += experts

    def for_cpu(self, pages: Iterable[PageId]) -> list[PageId]:
        """Those of ``pages`` that the CPU takes: so many of what would be copied from RAM that both
        are done at the same time.  What RAM has to read first waits for the disk either way."""
        near = [page for page in pages if self.device.absent(page) and self.host.has(page)]
        share = self.copy_seconds / (self.copy_seconds + self.cpu_seconds)
        return near[: round(len(near) * share)]

    def drop_prefetches(self, layer: int) -> None:
        self.device.drop_prefetches(layer)

    @contextmanager
    def lease(self, pages: Iterable[PageId], lost: Lost | None = None) -> Iterator[Iterator[Batch]]:
        """As ``ExpertStore.lease``: copies begin first and run while the CPU computes its part.
        What it has computed is on the device behind the block."""
        every = sorted(set(pages))
        here = self.for_cpu(every)
        there = [page for page in every if page not in set(here)]
        with self.outbox.emptied(), ExitStack() as leases:
            copied = leases.enter_context(self.device.lease(there, lost=lost))
            held = leases.enter_context(self.host.lease(here, lost=lost)) if here else iter(())
            yield itertools.chain(held, copied)
