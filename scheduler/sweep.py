"""Which tokens go into the next sweep, and how their rows lie.  Numbers only.

A sweep takes a list of runs, each the next tokens of one sequence.  Its rows are compact: first
those of decode runs, one token each, then those of prompts, cut at absolute multiples of the KDA
chunk into parts.  Rows pass a layer in groups of one kind, so that a weight is read once for many
rows.  What a row computes depends on the kind of its run and its absolute position, never on the
group it shares.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..config import GROUP_ROWS, KDA_CHUNK


class Span(NamedTuple):
    """The tokens of one run: ``count`` of them from absolute position ``start``."""

    start: int
    count: int  # type: ignore[assignment]  # not the tuple's method
    decode: bool


class Part(NamedTuple):
    """``count`` rows of run ``run`` from row ``row`` of the sweep; ``start`` is their position."""

    run: int
    row: int
    start: int
    count: int  # type: ignore[assignment]  # not the tuple's method


class Group(NamedTuple):
    """Rows ``begin`` to ``end`` of a sweep, all of one kind, and the parts they consist of."""

    begin: int
    end: int
    decode: bool
    parts: tuple[Part, ...]

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)

    def own(self, part: Part) -> slice:
        """The rows of ``part`` within the group."""
        return slice(part.row - self.begin, part.row - self.begin + part.count)


def pack(spans: Sequence[Span]) -> list[Group]:
    """Groups of a sweep over ``spans``: decode runs, then prompts in order of their runs."""
    groups: list[Group] = []
    for decode in (True, False):
        row = groups[-1].end if groups else 0
        waiting: list[Part] = []
        for part in _parts(spans, decode, row):
            if waiting and part.row + part.count - waiting[0].row > GROUP_ROWS:
                groups.append(_group(waiting, decode))
                waiting = []
            waiting.append(part)
        if waiting:
            groups.append(_group(waiting, decode))
    return groups


def _parts(spans: Sequence[Span], decode: bool, row: int) -> list[Part]:
    parts = []
    for run, span in enumerate(spans):
        position, end = span.start, span.start + span.count
        while span.decode == decode and position < end:
            stop = min(end, position // KDA_CHUNK * KDA_CHUNK + KDA_CHUNK)
            parts.append(Part(run, row, position, stop - position))
            row += stop - position
            position = stop
    return parts


def _group(parts: Sequence[Part], decode: bool) -> Group:
    return Group(parts[0].row, parts[-1].row + parts[-1].count, decode, tuple(parts))


def without(groups: Sequence[Group], gone: Collection[int]) -> tuple[list[Group], list[int]]:
    """``groups`` as they are once the runs ``gone`` have left the sweep, and which rows stay."""
    left: list[Group] = []
    rows: list[int] = []
    for group in groups:
        parts = []
        for part in group.parts:
            if part.run not in gone:
                parts.append(part._replace(row=len(rows)))
                rows += range(part.row, part.row + part.count)
        if parts:
            left.append(_group(parts, group.decode))
    return left, rows


def cut(position: int, waiting: int, budget: int) -> int:
    """How many of ``waiting`` prefill tokens from ``position`` go into a sweep of ``budget``.

    The cut falls on an absolute multiple of the chunk: what a budget leaves over must not split
    one, or the bits would depend on the sweep's other runs.  0 if the budget reaches none; a
    budget of a whole chunk always does.
    """
    if waiting <= budget:
        return waiting
    return max(0, (position + budget) // KDA_CHUNK * KDA_CHUNK - position)
