"""S3-FIFO: new pages go through a short queue, and only those asked for again meanwhile get into
the long one; pages that left a moment ago get into it at once.  (J. Yang and others, SOSP 2023.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId

SHORT = 0.1  #: share of the slots
MOST = 3  #: requests that count


class Policy:
    def __init__(self, slots: int) -> None:
        self._target = max(1, int(SHORT * slots))
        self._ghosts_at_most = max(1, slots - self._target)
        self._short: OrderedDict[PageId, int] = OrderedDict()  # requests since it came in
        self._long: OrderedDict[PageId, int] = OrderedDict()
        self._ghosts: OrderedDict[PageId, None] = OrderedDict()  # left the short queue

    def hit(self, page: PageId) -> None:
        queue = self._short if page in self._short else self._long
        queue[page] = min(MOST, queue[page] + 1)

    def insert(self, page: PageId) -> None:
        if page in self._ghosts:
            del self._ghosts[page]
            self._long[page] = 0
        else:
            self._short[page] = 0

    def forget(self, page: PageId) -> None:
        (self._short if page in self._short else self._long).pop(page)

    def evict(self, busy: Callable[[PageId], bool]) -> PageId:
        """Each turn of a queue takes a request off a page or moves it on, so a page that is not
        busy is reached; busy pages keep their place."""
        while True:
            from_short = len(self._short) >= self._target or not self._long
            for queue in (self._short, self._long) if from_short else (self._long, self._short):
                page = next((page for page in queue if not busy(page)), None)
                if page is None:
                    continue
                asked = queue.pop(page)
                if queue is self._long:
                    if not asked:
                        return page
                    self._long[page] = asked - 1
                elif asked > 1:
                    self._long[page] = 0
                else:
                    self._remember(page)
                    return page
                break

    def _remember(self, page: PageId) -> None:
        self._ghosts[page] = None
        if len(self._ghosts) > self._ghosts_at_most:
            self._ghosts.popitem(last=False)

    def note(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], scores: npt.NDArray[np.uint8]
    ) -> None:
        """What the router says changes nothing here."""
