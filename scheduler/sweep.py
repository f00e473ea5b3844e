"""Which tokens go into the next sweep, and how they lie in tiles.  Numbers only.

A sweep takes a list of runs, each the next tokens of one sequence.  A prefill run is cut at
absolute multiples of the KDA chunk; the pieces (parts) are packed into tiles of 64 rows, never
split.  Decode runs are one token long and share tiles.  What a row computes depends on the kind
of its run and its absolute position, never on the tile it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..config import KDA_CHUNK, ROW_TILE


class Span(NamedTuple):
    """The tokens of one run: ``count`` of them from absolute position ``start``."""

    start: int
    count: int  # type: ignore[assignment]  # not the tuple's method
    decode: bool


class Part(NamedTuple):
    """``count`` rows of run ``run`` from row ``at`` of a tile; ``start`` is the first position."""

    run: int
    at: int
    start: int
    count: int  # type: ignore[assignment]  # not the tuple's method
    decode: bool


class Tile(NamedTuple):
    """64 rows of the sweep's arrays from row ``begin``; ``used`` of them hold tokens."""

    begin: int
    used: int
    parts: tuple[Part, ...]

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + ROW_TILE)


def pack(spans: Sequence[Span]) -> list[Tile]:
    """Tiles of a sweep over ``spans``, runs in order, parts in rising position."""
    groups: list[list[Part]] = []
    used = ROW_TILE
    for run, span in enumerate(spans):
        position, end = span.start, span.start + span.count
        while position < end:
            stop = min(end, position // KDA_CHUNK * KDA_CHUNK + KDA_CHUNK)
            if used + stop - position > ROW_TILE:
                groups.append([])
                used = 0
            groups[-1].append(Part(run, used, position, stop - position, span.decode))
            used += stop - position
            position = stop
    return [
        Tile(i * ROW_TILE, parts[-1].at + parts[-1].count, tuple(parts))
        for i, parts in enumerate(groups)
    ]


def cut(position: int, waiting: int, budget: int) -> int:
    """How many of ``waiting`` prefill tokens from ``position`` go into a sweep of ``budget``.

    The cut falls on an absolute multiple of the chunk: what a budget leaves over must not split
    one, or the bits would depend on the sweep's other runs.  0 if the budget reaches none; a
    budget of a whole chunk always does.
    """
    if waiting <= budget:
        return waiting
    return max(0, (position + budget) // KDA_CHUNK * KDA_CHUNK - position)
