"""The residual stream of a sweep: the running sum, and the block summaries that were sealed.

Summaries never change once sealed and every later layer reads all of them, row by row: they stay in
memory, or lie in scratch files and come back tile by tile while the tile before is mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from .config import LATENT_BLOCK, ROW_TILE
from .layer_moe import Side
from .scheduler.sweep import Group, without
from .tiers.spill import Block, Spill, SpillArray

TILE = LATENT_BLOCK  #: rows of a sweep that are read back together
#: Mixes the sums [n, H] that a row sees, in order -> [n, H]
Mix = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Resident:
    """Summaries [R, H] in the memory of whatever computes."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []

    def seal(self, p: torch.Tensor) -> torch.Tensor:
        """Keep ``p`` [R, H]; returns memory for the next running sum."""
        self.sums.append(p)
        return torch.empty_like(p)

    def mixed(
        self, groups: Sequence[Group], p: torch.Tensor | None, mix: Mix
    ) -> Iterator[torch.Tensor]:
        """The rows of each group in turn, mixed of all summaries and then ``p`` if it is given."""
        entries = self.sums if p is None else [*self.sums, p]
        for group in groups:
            yield mix([own(entry, group) for entry in entries])

    def picked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """``rows`` (their numbers, [n]) of each summary."""
        return [entry[rows] for entry in self.sums]

    def keep(self, rows: torch.Tensor) -> None:
        """From now on the sweep has ``rows`` (their numbers, rising) alone."""
        self.sums = [kept(entry, rows) for entry in self.sums]


class Spilled:
    """Summaries in scratch files.  Raises ``ScratchError``.

    A row keeps its place in all of them when others leave the sweep: what was written stays.
    """

    def __init__(self, spill: Spill[torch.Tensor]) -> None:
        self._spill = spill
        self._arrays: list[SpillArray] = []
        self._blocks: list[dict[int, Block]] = []  # of each summary its tiles
        self._at = torch.empty(0, dtype=torch.int64)  # of each row its place, rising

    def seal(self, p: torch.Tensor) -> torch.Tensor:
        """Write ``p`` [R, H] behind; its memory is free for the next running sum."""
        array = self._spill.array("summaries")
        self._arrays.append(array)  # an array that nobody has is at its end
        if not self._blocks:
            self._at = torch.arange(len(p))
        padded = p.new_empty(TILE, p.shape[1])
        blocks = {}
        for t, begin, end in self._tiles(0, len(p)):
            tile = p[begin:end]
            if len(tile) < TILE:  # what lies between and behind its rows is never read
                padded[self._within(t, begin, end)] = tile
                tile = padded
            blocks[t] = array.append(tile.view(-1).view(torch.uint8).numpy())
        self._blocks.append(blocks)
        return p

    def mixed(
        self, groups: Sequence[Group], p: torch.Tensor | None, mix: Mix
    ) -> Iterator[torch.Tensor]:
        """As ``Resident.mixed``.  The next tile is read while the caller works on a group."""
        parts = [list(self._tiles(group.begin, group.end)) for group in groups]
        tiles = self._read([t for own in parts for t, _, _ in own])
        for group, own in zip(groups, parts, strict=True):
            out: torch.Tensor | None = None
            for t, begin, end in own:
                within = self._within(t, begin, end)
                entries = [entry[within] for entry in next(tiles)]
                if p is not None:
                    entries.append(p[begin:end])
                some = mix(entries)
                if out is None:
                    out = some.new_empty(group.end - group.begin, some.shape[1])
                out[begin - group.begin : end - group.begin] = some
            assert out is not None
            yield out

    def picked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """As ``Resident.picked``."""
        found: list[torch.Tensor] = []
        numbers = self._at[rows].tolist()
        wanted = sorted({row // TILE for row in numbers})
        for t, entries in zip(wanted, self._read(wanted), strict=True):
            found = found or [entry.new_empty(len(numbers), entry.shape[1]) for entry in entries]
            for i, row in enumerate(numbers):
                if row // TILE == t:
                    for to, entry in zip(found, entries, strict=True):
                        to[i] = entry[row - t * TILE]
        return found

    def keep(self, rows: torch.Tensor) -> None:
        """As ``Resident.keep``."""
        self._at = self._at[rows] if self._blocks else self._at
        stay = set((self._at // TILE).tolist())
        self._blocks = [{t: own[t] for t in stay} for own in self._blocks]

    def _tiles(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The tiles that rows ``begin`` to ``end`` lie in: tile, its first of them, their end."""
        while begin < end:
            t = int(self._at[begin]) // TILE
            stop = int(torch.searchsorted(self._at, (t + 1) * TILE))
            yield t, begin, min(end, stop)
            begin = stop

    def _within(self, t: int, begin: int, end: int) -> slice | torch.Tensor:
        """Where rows ``begin`` to ``end`` lie in tile ``t``."""
        first, last = int(self._at[begin]) - t * TILE, int(self._at[end - 1]) - t * TILE
        if last - first == end - 1 - begin:  # nobody between them has left
            return slice(first, last + 1)
        return self._at[begin:end] - t * TILE

    def _read(self, tiles: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """Each of ``tiles`` of all summaries, [256, H]; good until the next one is asked for."""
        return self._spill.tiles([[own[t] for own in self._blocks] for t in tiles])


class Stream:
    """``p`` [R, H] the running sum, ``sealed`` the summaries, ``peaks`` the largest magnitude of
    each row after each layer so far, parts of [layers * R]; where it is, what computes there."""

    def __init__(self, p: torch.Tensor, side: Side, sealed: Resident | Spilled) -> None:
        self.p, self.side, self.sealed = p, side, sealed
        self.peaks: list[torch.Tensor] = []

    def move(self, side: Side) -> None:
        """Go on at ``side``."""
        if side.where != self.side.where:
            assert isinstance(self.sealed, Resident)  # no device has part in a sweep that spills
            sums, peaks = self.sealed.sums, [torch.cat(self.peaks)] if self.peaks else []
            self.p, *rest = side.kernels.here(self.p, *sums, *peaks)
            self.sealed.sums, self.peaks = rest[: len(sums)], rest[len(sums) :]
        self.side = side

    def leave(self, groups: list[Group], gone: Collection[int]) -> list[Group]:
        """Between two layers: the runs ``gone`` of ``groups`` leave the sweep, if they have not
        yet.  The groups of those that stay."""
        if not gone:
            return groups
        left, rows = without(groups, gone)
        if rows and len(rows) < groups[-1].end:
            self.side.kernels.finish()
            (index,) = self.side.kernels.here(torch.tensor(rows))
            if self.peaks:
                peaks = torch.cat(self.peaks).view(-1, self.p.shape[0])
                self.peaks = [peaks[:, index].view(-1)]
            self.p = kept(self.p, index)
            self.sealed.keep(index)
        return left

    def picked(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """``rows`` of each summary and of the running sum."""
        if isinstance(self.sealed, Resident) and len(rows) == self.p.shape[0]:  # all, in order
            return [*self.sealed.sums, self.p]
        (index,) = self.side.kernels.here(torch.tensor(rows))
        return [*self.sealed.picked(index), self.p[index]]


def kept(sums: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``rows`` (their numbers, rising) of ``sums`` [R, H], in the memory of ``sums``: a sweep in
    which everything is planned has none for another copy."""
    for begin in range(0, len(rows), ROW_TILE):  # a row never moves to one that is read later
        some = rows[begin : begin + ROW_TILE]
        sums[begin : begin + len(some)] = sums[some]
    return sums[: len(rows)]


def own(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows of ``group`` among those of a sweep."""
    return rows if rows.shape[0] == group.end - group.begin else rows[group.rows]
