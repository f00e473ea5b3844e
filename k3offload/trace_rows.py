"""Routing of an engine that runs, row by row: what its hooks and its stores tell, for a trace.

Between two layers there is no time to lose: hooks keep what they are told, which nobody writes to
any more, and it is put into 8 bits and into rows for many sweeps at a time.  Sweeps of many scores
are put into 8 bits layer by layer, since keeping these would take much memory.  A sweep that did
not pass all layers with all its rows is left out; its number is not given again, so that events of
stores are told apart from those of the next.  This file knows sweeps and numbers; ``trace.py``
knows the format, ``trace_record.py`` the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch

from . import router_codes
from .kernels.attnres_reference import shares
from .kernels.workers import Workers
from .scheduler.hints import NEAR
from .scheduler.lease import Event, Watch
from .tiers.base import PageId
from .trace import EVENT, Array, Writer

if TYPE_CHECKING:
    from .model import Run
    from .scheduler.sweep import Group

RAW: Final = 256 << 10  #: bytes of scores that wait to be put into 8 bits, about
LARGE: Final = 1 << 20  #: bytes of a sweep's scores beyond which they do not wait for its end
EVENTS: Final = 1 << 14  #: that wait to be put into arrays


@dataclass(slots=True)
class _Sweep:
    """A sweep of ``rows`` rows.  ``large``: what its routers say is put into 8 bits at once."""

    number: int
    sequences: list[int]  # of its runs
    rows: int
    large: bool
    groups: list[Group] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)  # layer by layer, group by group
    chosen: list[torch.Tensor] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # places whose routers were asked ahead
    guesses: list[torch.Tensor] = field(default_factory=list)  # what they said
    told: dict[str, Array] = field(default_factory=dict)  # whole arrays of its rows
    mixed: dict[int, list[Array]] = field(default_factory=dict)  # by sublayer, group by group


class Recorder:
    """Writes what its ``on_`` methods hear into ``folder``, new or empty.

    ``latent``: the width Z of latents to record, 0 for none; ``mixing``: sublayers, and most
    entries of a mix; ``workers``: who helps to put many rows into 8 bits; ``failed``: is told of
    the error with which recording ends, which is raised if it is None; ``facts``: more about the
    trace, for ``Writer``.
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
        workers: Workers | None = None,
        failed: Callable[[OSError], None] | None = None,
        **facts: Any,
    ) -> None:
        self._places = {int(layer): place for place, layer in enumerate(layers)}
        self._first, self._last = int(layers[0]), int(layers[-1])
        self._top_k, self._workers, self._failed = top_k, workers, failed
        self._row_bytes = len(layers) * (4 * experts + 8 * top_k)  # of scores and choices
        self._deep = deep = (len(layers), min(top_k + NEAR, experts))
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
        self._count = 0  # sequences
        self._sweep = -1  # number of the last one that began; -1 before any
        self._ended = False
        self._events: list[tuple[float, ...]] = []
        self._began = time.perf_counter()
        self._now: _Sweep | None = None  # None between sweeps
        self._waiting: list[_Sweep] = []
        self._bytes = 0  # of their scores, about

    def on_sweep(self, runs: Sequence[Run]) -> None:
        """A sweep over ``runs`` begins: each state is a sequence of its own.  One before it that
        did not get to its end is left out."""
        if self._ended:
            return
        numbers, sequences, rows = self._numbers, [], 0
        for run in runs:
            number = numbers.get(run.state)
            if number is None:
                numbers[run.state] = number = self._count
                self._count += 1
            sequences.append(number)
            rows += len(run.tokens)
        self._sweep += 1
        self._now = _Sweep(self._sweep, sequences, rows, rows * self._row_bytes > LARGE)

    def on_ahead(
        self, layer: int, next_layer: int, scores: Array | None, latent: Array | None = None
    ) -> None:
        """In ``layer`` of a decode sweep: the ``scores`` [rows, E] that the router of
        ``next_layer`` gives now, and the ``latent`` [rows, Z] of ``layer``, if they are known."""
        sweep = self._now
        if sweep is None:
            return
        if any(some is not None and len(some) != sweep.rows for some in (scores, latent)):
            self._now = None  # rows have left the sweep
            return
        if scores is not None and "ahead_best" in self._more and next_layer in self._places:
            place, said = self._places[next_layer], torch.from_numpy(scores)
            if sweep.large:
                for name, part in self._told(said).items():
                    self._whole(sweep, "ahead_" + name)[:, place] = part
            else:
                sweep.asked.append(place)
                sweep.guesses.append(said)
        if latent is not None and "latent" in self._more and layer in self._places:
            self._whole(sweep, "latent")[:, self._places[layer]] = latent

    def on_route(
        self,
        layer: int,
        group: Group,
        experts: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """``layer`` chose ``experts`` [n, k] by the biased ``scores`` [n, E] for ``group``."""
        sweep = self._now
        if sweep is None:  # recording began within this sweep, or has ended
            return
        if layer == self._first:
            sweep.groups.append(group)
        if not group.decode:
            scores = scores.cpu()
        if sweep.large:
            for name, part in self._told(scores, experts).items():
                self._whole(sweep, name)[group.rows, self._places[layer]] = part
        else:
            sweep.scores.append(scores)
            sweep.chosen.append(experts)
        if layer == self._last and group.end == sweep.rows:
            self._keep(sweep)

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
        if self._now is None:
            return
        share = shares(entries, norm, query, eps).cpu().numpy()
        parts = self._now.mixed.setdefault(2 * layer + site, [])
        parts.append(np.rint(share * 255).astype(np.uint8))

    def watch(self, tier: int) -> Watch:
        """What a store of experts may call as its ``watch``; ``tier``: 0 of RAM, 1 of a device.
        What happens between two sweeps is counted to the first of them."""
        append, began, clock = self._events.append, self._began, time.perf_counter

        def heard(event: Event, page: PageId, size: int) -> None:
            append((self._sweep, tier, event, page.layer, page.expert, size, clock() - began))

        return heard

    def write(self) -> None:
        """Put what waits into 8 bits, and give it to the writer."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        for (large, _), some in groupby(waiting, lambda sweep: (sweep.large, sweep.rows)):
            sweeps = list(some)
            self._append(sweeps, sweeps[0].told if large else self._tell(sweeps))

    def close(self) -> None:
        """Write what is left.  A sweep under way is left out."""
        self._now = self._workers = None
        self._try(self.write, self.write_events, self.writer.close)

    # ---- one sweep ----

    def _keep(self, sweep: _Sweep) -> None:
        """The last router has spoken; what comes after it in this sweep is not waited for."""
        self._now = None
        self._waiting.append(sweep)
        self._bytes += sweep.rows * self._row_bytes
        self._bytes += sum(array.nbytes for array in sweep.told.values())
        if self._bytes >= RAW or sweep.large:
            self._try(self.write)
        if len(self._events) >= EVENTS:
            self._try(self.write_events)

    def _try(self, *writes: Callable[[], None]) -> None:
        """An error ends the recording: what waits will not be written."""
        if self._ended:
            return
        try:
            for write in writes:
                write()
        except OSError as error:
            self._ended, self._now, self._waiting = True, None, []
            self._events.clear()
            if self._failed is None:
                raise
            self._failed(error)

    def _whole(self, sweep: _Sweep, name: str) -> Array:
        """An array of all rows of a sweep, all 0 at first."""
        if name not in sweep.told:
            sweep.told[name] = self._zeros(name, sweep.rows)
        return sweep.told[name]

    def _zeros(self, name: str, rows: int) -> Array:
        own = {"best": (self._deep, "u2"), "codes": (self._deep, "u1"), **self._more}
        shape, kind = own[name]
        return np.zeros((rows, *shape), kind)

    # ---- many rows ----

    def _told(self, scores: torch.Tensor, chosen: torch.Tensor | None = None) -> dict[str, Array]:
        """``best`` and ``codes`` of rows; and ``margin``, if it is wanted of those ``chosen``."""
        k, ran = self._top_k, None if chosen is None else chosen.numpy()
        told: dict[str, Array] = {}
        best, codes = router_codes.told(scores.numpy(), k, ran, self._workers)
        told["best"], told["codes"] = best.astype(np.uint16), codes
        if ran is not None and "margin" in self._more:
            rest = scores.numpy().copy()
            least = np.take_along_axis(rest, ran, 1).min(axis=1)
            np.put_along_axis(rest, ran, -np.inf, axis=1)
            told["margin"] = (least - rest.max(axis=1)).astype(np.float16)
        return told

    def _tell(self, sweeps: list[_Sweep]) -> dict[str, Array]:
        """The arrays of sweeps of equally many rows."""
        count, rows, layers = len(sweeps), sweeps[0].rows, self._deep[0]
        scores = torch.cat([some for sweep in sweeps for some in sweep.scores])
        chosen = torch.cat([some for sweep in sweeps for some in sweep.chosen])
        whole: dict[str, Array] = {}
        for name, part in self._told(scores, chosen).items():
            own = part.reshape(count, layers, rows, *part.shape[1:]).swapaxes(1, 2)
            whole[name] = own.reshape(count * rows, layers, *part.shape[1:])
        guesses = [guess for sweep in sweeps for guess in sweep.guesses]
        if guesses:
            places = [place for sweep in sweeps for place in sweep.asked]
            of = np.repeat(np.arange(count), [len(sweep.asked) for sweep in sweeps])
            for name, part in self._told(torch.cat(guesses)).items():
                whole["ahead_" + name] = every = self._zeros("ahead_" + name, count * rows)
                by_sweep = every.reshape(count, rows, *self._deep)
                by_sweep[of, :, places] = part.reshape(len(of), rows, -1)
        if any(sweep.told for sweep in sweeps):
            whole["latent"] = np.concatenate([self._whole(sweep, "latent") for sweep in sweeps])
        return whole

    def _append(self, sweeps: list[_Sweep], told: dict[str, Array]) -> None:
        """Their rows, a chunk at a time: all arrays at once would be as much again, or more."""
        whole = {**_numbered(sweeps), **told}
        mixed: dict[int, Array] = {}
        for site in list(sweeps[0].mixed):
            mixed[site] = np.concatenate([part for s in sweeps for part in s.mixed.pop(site)])
        count = len(whole["sweep"])
        for begin in range(0, count, self.writer.step):
            own = slice(begin, min(begin + self.writer.step, count))
            rows = {name: array[own] for name, array in whole.items()}
            for name in self._more.keys() - rows.keys():
                rows[name] = self._zeros(name, own.stop - begin)
            for site, share in mixed.items():
                rows["mixing"][:, site, : share.shape[1]] = share[own]
            self.writer.append(**rows)

    def write_events(self) -> None:
        """The list stays the same one: stores append to it from their threads."""
        count = len(self._events)
        some = self._events[:count]
        del self._events[:count]
        if some:
            columns = zip(EVENT, zip(*some, strict=True), strict=True)
            self.writer.append_events(**{n: np.array(c, EVENT[n]) for n, c in columns})


def _numbered(sweeps: list[_Sweep]) -> dict[str, Array]:
    """``sweep``, ``sequence``, ``position`` and ``decode`` of all rows of ``sweeps``."""
    parts = [
        (sweep.number, sweep.sequences[part.run], part.start, group.decode, part.count)
        for sweep in sweeps
        for group in sweep.groups
        for part in group.parts
    ]
    number, sequence, start, decode, count = np.array(parts, np.int64).T
    before = np.cumsum(count) - count  # rows of parts that come earlier
    position = np.repeat(start - before, count) + np.arange(count.sum())
    return {
        "sweep": np.repeat(number, count).astype(np.int32),
        "sequence": np.repeat(sequence, count).astype(np.int32),
        "position": position.astype(np.int32), "decode": np.repeat(decode, count).astype(bool),
    }  # fmt: skip
