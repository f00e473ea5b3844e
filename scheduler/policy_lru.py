"""LRU: the page that was asked for longest ago leaves first.  The baseline of every comparison."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId


class Policy:
    """Least recently used."""

    def __init__(self, slots: int = 0) -> None:
        self._pages: OrderedDict[PageId, None] = OrderedDict()

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
        """What the router says changes nothing here."""
