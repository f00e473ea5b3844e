"""near: LRU, but an expert that a router nearly chose counts as asked for too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from k3offload.tiers.base import PageId


class Policy:
    """``slots``: pages that the tier has room for."""

    hears_router = True

    def __init__(self, slots: int) -> None:
        self._pages: OrderedDict[PageId, None] = OrderedDict()  # the next to leave comes first

    def hit(self, page: PageId) -> None:
        self._pages.move_to_end(page)

    def insert(self, page: PageId) -> None:
        self._pages[page] = None

    def forget(self, page: PageId) -> None:
        del self._pages[page]

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        victim = next(page for page in self._pages if not busy(page))
        del self._pages[victim]
        return victim

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        for expert in experts.tolist():
            page = PageId(layer, expert)
            if page in self._pages:
                self._pages.move_to_end(page)
