"""Belady's MIN: the page whose next use is farthest leaves.  Needs the future, so it is offered to
comparisons only (no ``policy_`` in the file's name: the registry does not find it)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId
from .replay import Step


class Belady:
    """The fewest misses that any policy can have on ``run``, with the same leases.

    It must be replayed over exactly that run.  Pages are alike in size, so fewest misses are
    fewest bytes.
    """

    def __init__(self, run: Iterable[Step]) -> None:
        self._uses: dict[PageId, deque[int]] = {}
        self._never = 0
        for self._never, step in enumerate(run, 1):  # later than all uses
            for page in step.pages:
                self._uses.setdefault(page, deque()).append(self._never - 1)
        self._next: dict[PageId, int] = {}
        self._farthest: list[tuple[int, PageId]] = []  # (minus next use, page), some outdated

    def hit(self, page: PageId) -> None:
        uses = self._uses[page]
        uses.popleft()
        self._next[page] = use = uses[0] if uses else self._never
        heapq.heappush(self._farthest, (-use, page))

    insert = hit

    def forget(self, page: PageId) -> None:
        del self._next[page]

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        held = []
        while True:
            item = heapq.heappop(self._farthest)
            if self._next.get(item[1]) != -item[0]:
                continue
            if not busy(item[1]):
                break
            held.append(item)
        for other in held:
            heapq.heappush(self._farthest, other)
        del self._next[item[1]]
        return item[1]

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        """It knows already."""
