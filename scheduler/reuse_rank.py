"""Pages ranked by how soon they are needed, with the least needed at hand.

Keeps one value for each page, layer by layer, and the smallest of each layer, so that finding the
least needed page of all compares layers, not pages.  A value is what the page is worth at a visit
of its layer; seen from another layer it decays with the way round to there, for layers are visited
in a circle: of two equal pages the one whose layer has just passed is needed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..tiers.base import PageId
from .reuse import F32, Experts

INF = np.float32(np.inf)
LEAST = np.float32(1e-4)  #: values below are alike


class _Row:
    """One layer: its pages, their values, and keys: the value where a page may leave, else
    infinite."""

    def __init__(self) -> None:
        self.pages: list[PageId] = []
        self.value: F32 = np.zeros(0, np.float32)
        self.key: F32 = np.zeros(0, np.float32)
        self.here = np.zeros(0, bool)

    def grow(self, layer: int, experts: int) -> None:
        begin = len(self.pages)
        experts = max(experts, 2 * begin, 16)
        self.pages += [PageId(layer, expert) for expert in range(begin, experts)]
        more = experts - begin
        self.value = np.concatenate([self.value, np.full(more, LEAST)])
        self.key = np.concatenate([self.key, np.full(more, INF)])
        self.here = np.concatenate([self.here, np.zeros(more, bool)])


class _Worth(dict[PageId, float]):
    """What pages are worth, worked out when it is first asked for."""

    def __init__(self, rows: list[_Row]) -> None:
        super().__init__()
        self._rows = rows
        self.decay: F32 = np.zeros(0, np.float32)  # of each layer as seen from the present one

    def __missing__(self, page: PageId) -> float:
        layer, expert = page
        found = self[page] = float(self._rows[layer].value[expert] * self.decay[layer])
        return found


class Rank:
    """The ranked pages are those added and not removed since."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []  # by layer number
        self._worth = _Worth(self._rows)  # as long as no value changes and nobody moves
        self.worth: Callable[[PageId], float] = self._worth.__getitem__  #: as seen from here
        self.layer = -1  #: where on the circle we are
        self._low: F32 = np.zeros(0, np.float32)  # smallest key of each row
        self._circle: F32 = self._low  # decay by distance, twice around
        self._keep = self._bent = 1.0  # decay of one round: wanted, and in ``_circle``
        self._leased = -1  # a layer some of whose pages are left out
        self._least: PageId | None = None  # as ``least`` has found it, while nothing is below it
        self._bar = INF  # what it is worth

    def go_to(self, layer: int, keep: float) -> None:
        """``layer`` is visited; values decay by ``keep`` in one round."""
        self.layer = layer
        self._keep = keep
        self._row(layer, 0)
        self._look()

    def revalue(self, layer: int, value: F32, leased: Experts) -> list[PageId]:
        """New values of a layer's experts 0, 1, ...  The ``leased`` experts stay out of the choice
        until the next call; returns their pages."""
        row = self._row(layer, len(value) - 1)
        self._worth.clear()
        np.maximum(value, LEAST, out=row.value[: len(value)])
        if self._leased not in (-1, layer):
            self._renew(self._leased)
        self._leased = layer
        self._renew(layer, leased)
        return list(map(row.pages.__getitem__, leased.tolist()))

    def add(self, page: PageId) -> None:
        layer, expert = page
        rows = self._rows
        row = rows[layer] if layer < len(rows) else self._row(layer, expert)
        if expert >= len(row.pages):
            row.grow(layer, expert + 1)
        row.here[expert] = True
        self._offer(row, layer, expert)

    def remove(self, page: PageId) -> None:
        layer, expert = page
        row = self._rows[layer]
        row.here[expert] = False
        key = row.key
        low = key[expert] <= self._low[layer]
        key[expert] = INF
        if low:
            self._find_low(layer, row)
        if page == self._least:
            self._least = None

    def reset(self, pages: Iterable[PageId]) -> None:
        """These are the pages from now on."""
        for layer, row in enumerate(self._rows):
            row.here[:] = False
            row.key[:] = INF
            self._low[layer] = INF
        self._least = None
        for page in pages:
            self.add(page)

    def least(self, busy: Callable[[PageId], bool]) -> PageId | None:
        """The page needed least of those not ``busy``; None if there is none."""
        found = self._least
        if found is not None and not busy(found):
            return found
        held: list[PageId] = []
        found = self._least = None
        while found is None:
            worth = self._low * self._worth.decay
            layer = int(worth.argmin())
            row = self._rows[layer]  # of a layer without experts, if no other has any left
            if self._low[layer] == INF:
                if self._leased == -1:
                    break
                self._renew(self._leased)  # nothing else is left, so those left out come back in
                self._leased = -1
                continue
            expert = int(row.key.argmin())
            page = row.pages[expert]
            if busy(page):
                row.key[expert] = INF
                self._find_low(layer, row)
                held.append(page)
            else:
                found, self._bar = page, worth[layer]
        self._least = found
        for layer, expert in held:
            self._offer(self._rows[layer], layer, expert)
        return found

    def _look(self) -> None:
        """Work out ``_decay``."""
        self._worth.clear()
        self._least = None
        count = len(self._rows)
        if 2 * count != len(self._circle) or self._keep != self._bent:
            distance = np.arange(1, count + 1, dtype=np.float32) / np.float32(count)
            self._circle = np.tile(np.float32(self._keep) ** distance, 2)
            self._bent = self._keep
        self._worth.decay = self._circle[count - self.layer - 1 : 2 * count - self.layer - 1]

    def _row(self, layer: int, expert: int) -> _Row:
        if layer >= len(self._rows):
            more = layer + 1 - len(self._rows)
            self._rows += [_Row() for _ in range(more)]
            self._low = np.concatenate([self._low, np.full(more, INF)])
            self._look()
        row = self._rows[layer]
        if expert >= len(row.pages):
            row.grow(layer, expert + 1)
        return row

    def _find_low(self, layer: int, row: _Row) -> None:
        self._low[layer] = row.key[row.key.argmin()]  # quicker than min()

    def _renew(self, layer: int, leased: Experts | None = None) -> None:
        """Keys of a layer, those of the ``leased`` left out."""
        row = self._rows[layer]
        row.key.fill(INF)
        np.copyto(row.key, row.value, where=row.here)
        if leased is not None:
            row.key[leased] = INF
        self._least = None
        self._find_low(layer, row)

    def _offer(self, row: _Row, layer: int, expert: int) -> None:
        row.key[expert] = value = row.value[expert]
        if value <= self._low[layer]:
            self._low[layer] = value
            if (
                value * self._worth.decay[layer] <= self._bar
            ):  # of equals the first one is the least
                self._least = None
