"""Routing of an engine that runs, row by row: what its hooks and its stores tell, for a trace.

Hooks only copy what they are told; it is put into 8 bits for many rows at a time.  A sweep that
did not pass all layers with all its rows is left out.  This file knows sweeps and numbers;
``trace.py`` knows the format, ``trace_record.py`` the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .kernels.attnres_reference import shares
from .scheduler.hints import NEAR, nearest, quantise
from .scheduler.lease import Event, Watch
from .tiers.base import PageId
from .trace import EVENT, EVENTS, Array, Writer

if TYPE_CHECKING:
    from .model import Run
    from .scheduler.sweep import Group

RAW: Final = 4 << 20  #: bytes of scores that wait to be put into 8 bits, about
MANY: Final = 64  #: rows whose scores do not wait


@dataclass(slots=True)
class _Piece:
    """What one router said about rows ``begin`` and on of a sweep, of its own layer or, as a guess,
    of the next: ``raw``, scores and chosen experts, until it is ``told`` in 8 bits."""

    begin: int
    place: int
    guessed: bool
    raw: tuple[Array, ...]
    told: tuple[Array, ...] = ()


class _Sweep(NamedTuple):
    """A whole sweep that waits to be written."""

    number: int
    groups: list[Group]
    sequences: list[int]
    pieces: list[_Piece]
    latent: Array | None
    mixed: dict[int, Array]


class Recorder:
    """Writes what its ``on_`` methods hear into ``folder``, new or empty.

    ``latent``: the width Z of latents to record, 0 for none; ``mixing``: sublayers, and most
    entries of a mix; ``facts``: more about the trace, for ``Writer``.
    """

    def __init__(
        self,
        folder: str | Path,
        layers: Sequence[int],
        experts: int,
        top_k: int,
        *,
        ahead: bool = False,
        latent: int = 0,
        margin: bool = False,
        mixing: tuple[int, int] | None = None,
        tiers: bool = False,
        **facts: Any,
    ) -> None:
        self._places = {int(layer): place for place, layer in enumerate(layers)}
        self._first, self._last = int(layers[0]), int(layers[-1])
        self._experts, self._top_k = experts, top_k
        self._wide = min(top_k + NEAR, experts)
        deep = (len(layers), self._wide)
        more: dict[str, tuple[tuple[int, ...], str]] = {}
        if ahead:
            more |= {"ahead_best": (deep, "u2"), "ahead_codes": (deep, "u1")}
        if latent:
            more["latent"] = ((len(layers), latent), "f2")
        if margin:
            more["margin"] = ((len(layers),), "f2")
        if mixing:
            more["mixing"] = (mixing, "u1")
        self._more = more
        self.writer = Writer(
            folder, list(self._places), experts, top_k, more=more, events=tiers, **facts
        )
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._sequences: list[int] = []  # of the runs of this sweep
        self._rows = 0  # of all of them; 0 where nobody told
        self._count = self._sweeps = 0  # sequences, whole sweeps
        self._events: list[tuple[float, ...]] = []
        self._began = time.perf_counter()
        self._loose: list[_Piece] = []  # those that are not told yet
        self._loose_bytes = 0
        self._waiting: list[_Sweep] = []
        self._latent: Array | None = None  # of this sweep
        self._bytes = 0  # of these
        self._begin()

    def on_sweep(self, runs: Sequence[Run]) -> None:
        """A sweep over ``runs`` begins: each state is a sequence of its own."""
        self._begin()
        for run in runs:
            if run.state not in self._numbers:
                self._numbers[run.state] = self._count
                self._count += 1
        self._sequences = [self._numbers[run.state] for run in runs]
        self._rows = sum([len(run.tokens) for run in runs])

    def on_ahead(
        self, layer: int, next_layer: int, scores: Array | None, latent: Array | None = None
    ) -> None:
        """At the end of ``layer`` of a decode sweep: the ``scores`` [rows, E] that the router of
        ``next_layer`` gives now, and the ``latent`` [rows, Z] of ``layer``, if they are known."""
        if scores is not None and "ahead_best" in self._more and next_layer in self._places:
            self._add(_Piece(0, self._places[next_layer], True, (scores,)))
        if latent is not None and "latent" in self._more and layer in self._places and self._groups:
            if len(latent) != self._groups[-1].end:
                return  # rows have left the sweep
            if self._latent is None:
                shape, kind = self._more["latent"]
                self._latent = np.zeros((self._groups[-1].end, *shape), kind)
            self._latent[:, self._places[layer]] = latent

    def on_route(
        self,
        layer: int,
        group: Group,
        experts: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """``layer`` chose ``experts`` [n, k] by the biased ``scores`` [n, E] for ``group``."""
        if layer == self._first:
            if group.begin == 0 and self._groups:  # the sweep before did not get to its end
                self._begin()
            self._groups.append(group)
        elif not self._groups:  # recording began within this sweep
            return
        elif group != self._groups[self._heard % len(self._groups)]:  # rows have left the sweep
            self._begin()
            return
        said = scores.cpu().numpy(), experts.numpy()
        self._add(_Piece(group.begin, self._places[layer], False, said))
        self._heard += 1
        whole = len(self._places) * len(self._groups)
        if layer == self._last and self._heard == whole:
            self._keep()

    def on_mix(
        self,
        layer: int,
        site: int,
        entries: Sequence[torch.Tensor],
        norm: torch.Tensor,
        query: torch.Tensor,
        eps: float,
    ) -> None:
        """Sublayer ``site`` (0 or 1) of ``layer`` mixes ``entries`` of some rows."""
        share = shares(entries, norm, query, eps).cpu().numpy()
        self._mixed.setdefault(2 * layer + site, []).append(np.rint(share * 255).astype(np.uint8))

    def watch(self, tier: int) -> Watch:
        """What a store of experts may call as its ``watch``; ``tier``: 0 of RAM, 1 of a device."""
        append, began, clock = self._events.append, self._began, time.perf_counter

        def heard(event: Event, page: PageId, size: int) -> None:
            append((self._sweeps, tier, event, page.layer, page.expert, size, clock() - began))

        return heard

    def close(self) -> None:
        """Write what is left.  A sweep under way is left out."""
        self._write()
        self._write_events()
        self.writer.close()

    def drop(self) -> None:
        """Forget what waits: it will not be written."""
        self._begin()
        self._loose, self._waiting = [], []
        self._events.clear()

    # ---- one sweep ----

    def _begin(self) -> None:
        self._groups: list[Group] = []
        self._pieces: list[_Piece] = []
        self._latent = None
        self._mixed: dict[int, list[Array]] = {}
        self._heard = self._heard_bytes = 0

    def _add(self, piece: _Piece) -> None:
        """Its scores are the engine's: they are told now, or copied."""
        self._pieces.append(piece)
        if len(piece.raw[0]) >= MANY:
            piece.told, piece.raw = self._told(*piece.raw), ()
            self._heard_bytes += sum(array.nbytes for array in piece.told)
            return
        piece.raw = tuple([array.copy() for array in piece.raw])
        size = sum([array.nbytes for array in piece.raw])
        self._heard_bytes += size
        self._loose.append(piece)
        self._loose_bytes += size
        if self._loose_bytes >= RAW:
            self._tell()

    def _keep(self) -> None:
        """The last router has spoken; what comes after it in this sweep is not waited for."""
        if self._rows not in (0, self._groups[-1].end):  # some left before the first router spoke
            self._begin()
            return
        sequences = self._sequences
        if not sequences:  # recording began within this sweep
            runs = 1 + max(part.run for group in self._groups for part in group.parts)
            sequences = list(range(runs))
        mixed = {at: np.concatenate(self._mixed.pop(at)) for at in list(self._mixed)}
        self._waiting.append(
            _Sweep(self._sweeps, self._groups, sequences, self._pieces, self._latent, mixed)
        )
        self._bytes += self._heard_bytes
        self._bytes += sum([array.nbytes for array in mixed.values()])
        self._bytes += 0 if self._latent is None else self._latent.nbytes
        self._sweeps += 1
        self._begin()
        if self._bytes >= RAW:
            self._write()
        if len(self._events) >= EVENTS:
            self._write_events()

    # ---- many rows ----

    def _told(self, scores: Array, chosen: Array | None = None) -> tuple[Array, ...]:
        """Experts, codes and margins of rows."""
        best, codes = nearest(quantise(scores, self._top_k), self._top_k, chosen)
        margin = np.zeros(0, np.float16)
        if "margin" in self._more and chosen is not None:
            rest = scores.copy()
            np.put_along_axis(rest, chosen, -np.inf, axis=1)
            least = np.take_along_axis(scores, chosen, 1).min(axis=1)
            margin = (least - rest.max(axis=1)).astype(np.float16)
        return best.astype(np.uint16), codes, margin

    def _tell(self) -> None:
        """Put what is loose into 8 bits."""
        for guessed in (False, True):
            some = [piece for piece in self._loose if piece.guessed == guessed]
            if not some:
                continue
            whole = map(np.concatenate, zip(*(piece.raw for piece in some), strict=True))
            told, at = self._told(*whole), 0
            for piece in some:
                end = at + len(piece.raw[0])
                piece.told, piece.raw = tuple([array[at:end] for array in told]), ()
                at = end
        self._loose, self._loose_bytes = [], 0

    def _write(self) -> None:
        """Chunk by chunk: all rows of a long sweep at once would be as much again, or more."""
        self._tell()
        step = self.writer.step
        left = sum(sweep.groups[-1].end for sweep in self._waiting)
        rows, count = self._empty(min(step, left)), 0
        for sweep in self._waiting:
            end = sweep.groups[-1].end
            begin = 0
            while begin < end:
                some = min(end - begin, len(rows["sweep"]) - count)
                self._fill(rows, count, sweep, begin, begin + some)
                begin, count, left = begin + some, count + some, left - some
                if count == len(rows["sweep"]):
                    self.writer.append(**rows)
                    rows, count = self._empty(min(step, left)), 0
        self._waiting, self._bytes = [], 0

    def _empty(self, count: int) -> dict[str, Array]:
        """So many rows of all arrays."""
        deep, one = (len(self._places), self._wide), ((), "i4")
        kinds = {"best": (deep, "u2"), "codes": (deep, "u1"), "decode": ((), "?"), **self._more}
        kinds |= {"sweep": one, "sequence": one, "position": one}
        return {name: np.zeros((count, *shape), kind) for name, (shape, kind) in kinds.items()}

    def _fill(self, rows: dict[str, Array], to: int, sweep: _Sweep, begin: int, end: int) -> None:
        """Put those from ``begin`` to ``end`` of a sweep into ``rows``, from row ``to`` on."""
        shift = to - begin
        rows["sweep"][to : end + shift] = sweep.number

        def put(name: str, first: int, array: Array) -> None:
            """What belongs to rows ``first`` and on of the sweep."""
            low, high = max(first, begin), min(first + len(array), end)
            if low < high:
                rows[name][low + shift : high + shift] = array[low - first : high - first]

        for group in sweep.groups:
            put("decode", group.begin, np.full(group.end - group.begin, group.decode))
            for part in group.parts:
                put("sequence", part.row, np.full(part.count, sweep.sequences[part.run]))
                put("position", part.row, np.arange(part.start, part.start + part.count))
        margins = rows.get("margin")
        for piece in sweep.pieces:
            best, codes, margin = piece.told
            low, high = max(piece.begin, begin), min(piece.begin + len(best), end)
            if low >= high:
                continue
            own = slice(low - piece.begin, high - piece.begin)
            at = slice(low + shift, high + shift), piece.place
            kind = "ahead_" if piece.guessed else ""
            rows[kind + "best"][at] = best[own]
            rows[kind + "codes"][at] = codes[own]
            if margins is not None and not piece.guessed:
                margins[at] = margin[own]
        if sweep.latent is not None:
            put("latent", 0, sweep.latent)
        for site, share in sweep.mixed.items():
            some = share[begin:end]
            rows["mixing"][to : to + len(some), site, : share.shape[1]] = some

    def _write_events(self) -> None:
        """The list stays the same one: stores append to it from their threads."""
        count = len(self._events)
        some = self._events[:count]
        del self._events[:count]
        if some:
            columns = zip(EVENT, zip(*some, strict=True), strict=True)
            self.writer.append_events(**{n: np.array(c, EVENT[n]) for n, c in columns})
