"""``--adaptive-backend``: an expert that is in RAM and not on the device is computed on the CPU, or
copied and computed there, whichever is expected to end sooner.

Which of them computes an expert then depends on budgets and speeds, and the two round differently:
results are as good, and no longer the same bits from run to run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager

from .kernels.choose import Kernels
from .scheduler.store import Batch, ExpertStore
from .tiers.base import PageId

SMOOTH = 0.8  #: weight of what was known about a time, at each new measurement


class Adaptive:
    """``device`` over ``host``, as ``layer_moe.moe`` asks for experts.  Pages come in slots of
    either; ``kernels`` are those of the CPU.  ``copy_seconds``, ``cpu_seconds``: of one expert, as
    expected at first."""

    def __init__(
        self,
        device: ExpertStore,
        host: ExpertStore,
        kernels: Kernels,
        copy_seconds: float,
        cpu_seconds: float,
    ) -> None:
        self.device, self.host, self.kernels = device, host, kernels
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

    def has_all(self, pages: Set[PageId]) -> bool:
        """As ``ExpertStore.has_all``; what runs beside the device is not put off."""
        return False

    def drop_prefetches(self, layer: int) -> None:
        self.device.drop_prefetches(layer)

    @contextmanager
    def lease(self, pages: Iterable[PageId]) -> Iterator[Iterator[Batch]]:
        """As ``ExpertStore.lease``: copies begin first and run while the CPU computes its part."""
        every = sorted(set(pages))
        here = self.for_cpu(every)
        there = [page for page in every if page not in set(here)]
        with ExitStack() as leases:
            copied = leases.enter_context(self.device.lease(there))
            held = leases.enter_context(self.host.lease(here)) if here else iter(())
            yield itertools.chain(held, copied)
