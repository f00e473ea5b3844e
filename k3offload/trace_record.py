"""Recording a trace of an engine while it runs: what its hooks and its stores tell, row by row.

Hooks only copy what they are told; it is put into 8 bits for many rows at a time.  A sweep that
did not pass all layers is left out.  Where the trace cannot be written (a full disk), recording
ends with a warning and the run goes on.  This file knows engines and sweeps; ``trace.py`` knows
the format.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .errors import UsageError
from .kernels.attnres_reference import shares
from .paths import show_path
from .scheduler.hints import NEAR, nearest, quantise
from .scheduler.lease import Event, Watch
from .tiers.base import PageId
from .trace import EVENT, EVENTS, PARTS, Array, Writer

if TYPE_CHECKING:
    from .engine import Engine
    from .model import Run
    from .scheduler.store import ExpertStore
    from .scheduler.sweep import Group

RAW: Final = 4 << 20  #: bytes of scores that wait to be put into 8 bits, about
MANY: Final = 64  #: rows whose scores do not wait
MEMORY: Final = 48 << 20  #: bytes that recording takes at most, about


class _Piece(NamedTuple):
    """What one router said about rows ``begin`` and on of a sweep: floats, or what became of
    them.  ``chosen`` is None for a guess of the layer above."""

    begin: int
    place: int
    chosen: Array | None
    scores: Array | None
    told: tuple[Array, ...] = ()


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
        self._count = self._sweeps = 0  # sequences, whole sweeps
        self._events: list[tuple[float, ...]] = []
        self._began = time.perf_counter()
        self._waiting: list[tuple[list[Group], list[int], list[_Piece], dict[str, Array]]] = []
        self._rows = self._bytes = 0  # of these
        self._begin()

    def on_sweep(self, runs: Sequence[Run]) -> None:
        """A sweep over ``runs`` begins: each state is a sequence of its own."""
        self._begin()
        for run in runs:
            if run.state not in self._numbers:
                self._numbers[run.state] = self._count
                self._count += 1
        self._sequences = [self._numbers[run.state] for run in runs]

    def on_ahead(
        self, layer: int, next_layer: int, scores: Array | None, latent: Array | None = None
    ) -> None:
        """At the end of ``layer`` of a decode sweep: the ``scores`` [rows, E] that the router of
        ``next_layer`` gives now, and the ``latent`` [rows, Z] of ``layer``, if they are known."""
        if scores is not None and "ahead_best" in self._more and next_layer in self._places:
            self._pieces.append(_Piece(0, self._places[next_layer], None, scores.copy()))
        if latent is not None and "latent" in self._more and layer in self._places and self._groups:
            place = self._places[layer]
            self._side.setdefault("latent", self._empty("latent"))[:, place] = latent

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
        place, chosen, said = self._places[layer], experts.numpy().copy(), scores.cpu().numpy()
        if len(chosen) >= MANY:
            piece = _Piece(group.begin, place, chosen, None, self._told(said, chosen))
        else:
            piece = _Piece(group.begin, place, chosen, said.copy())
        self._pieces.append(piece)
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

    # ---- one sweep ----

    def _begin(self) -> None:
        self._groups: list[Group] = []
        self._pieces: list[_Piece] = []
        self._side: dict[str, Array] = {}
        self._mixed: dict[int, list[Array]] = {}
        self._heard = 0

    def _empty(self, name: str) -> Array:
        shape, kind = self._more[name]
        return np.zeros((self._groups[-1].end, *shape), kind)

    def _keep(self) -> None:
        """The last router has spoken; what comes after it in this sweep is not waited for."""
        count = self._groups[-1].end
        runs = 1 + max(part.run for group in self._groups for part in group.parts)
        sequences = self._sequences or list(range(runs))
        if "mixing" in self._more:
            self._side["mixing"] = mixing = self._empty("mixing")
            for at, parts in self._mixed.items():
                share = np.concatenate(parts)[:count]
                mixing[: len(share), at, : share.shape[1]] = share
        self._waiting.append((self._groups, sequences, self._pieces, self._side))
        self._rows += count
        told = (p.told if p.scores is None else (p.scores,) for p in self._waiting[-1][2])
        self._bytes += sum(array.nbytes for arrays in told for array in arrays)
        self._sweeps += 1
        self._begin()
        if self._bytes >= RAW or self._rows >= 4096:
            self._write()
        if len(self._events) >= EVENTS:
            self._write_events()

    # ---- many rows ----

    def _told(self, scores: Array, chosen: Array | None) -> tuple[Array, ...]:
        """Experts, codes and margins of rows."""
        best, codes = nearest(quantise(scores, self._top_k), self._top_k, chosen)
        margin = np.zeros(0, np.float16)
        if "margin" in self._more and chosen is not None:
            rest = scores.copy()
            np.put_along_axis(rest, chosen, -np.inf, axis=1)
            least = np.take_along_axis(scores, chosen, 1).min(axis=1)
            margin = (least - rest.max(axis=1)).astype(np.float16)
        return best.astype(np.uint16), codes, margin

    def _write(self) -> None:
        if not self._waiting:
            return
        rows = self._plain_rows()
        deep = (len(self._places), self._wide)
        told = {"best": (deep, "u2"), "codes": (deep, "u1"), **self._more}
        for name, (shape, kind) in told.items():
            rows.setdefault(name, np.zeros((self._rows, *shape), kind))
        raw: dict[bool, list[tuple[int, _Piece]]] = {False: [], True: []}
        first = 0
        for groups, _, pieces, _ in self._waiting:
            for piece in pieces:
                if piece.scores is None:
                    at = slice(first + piece.begin, first + piece.begin + len(piece.told[0]))
                    self._put(rows, at, piece.place, piece.told, False)
                else:
                    raw[piece.chosen is None].append((first + piece.begin, piece))
            first += groups[-1].end
        for guessed, some in raw.items():
            if some:
                self._put(rows, *self._told_of(some), guessed)
        self._waiting, self._rows, self._bytes = [], 0, 0
        self.writer.append(**rows)

    def _told_of(
        self, some: Sequence[tuple[int, _Piece]]
    ) -> tuple[Array, Array, tuple[Array, ...]]:
        """Rows, places, and what became of the scores, of pieces that begin at these rows."""
        scores = [piece.scores for _, piece in some if piece.scores is not None]
        chosen = [piece.chosen for _, piece in some if piece.chosen is not None]
        counts = [len(part) for part in scores]
        rows = [np.arange(b, b + n) for (b, _), n in zip(some, counts, strict=True)]
        places = np.repeat([piece.place for _, piece in some], counts)
        told = self._told(np.concatenate(scores), np.concatenate(chosen) if chosen else None)
        return np.concatenate(rows), places, told

    def _put(
        self, rows: Mapping[str, Array], at: Any, place: Any, told: Sequence[Array], guessed: bool
    ) -> None:
        kind = "ahead_" if guessed else ""
        rows[f"{kind}best"][at, place], rows[f"{kind}codes"][at, place] = told[:2]
        if "margin" in rows and not guessed:
            rows["margin"][at, place] = told[2]

    def _plain_rows(self) -> dict[str, Array]:
        """Who and where each row is, and what was kept as it is."""
        rows = {name: np.zeros(self._rows, np.int32) for name in ("sweep", "sequence", "position")}
        rows["decode"] = np.zeros(self._rows, bool)
        for name in {"latent", "mixing"} & self._more.keys():
            rows[name] = np.zeros((self._rows, *self._more[name][0]), self._more[name][1])
        first, sweep = 0, self._sweeps - len(self._waiting)
        for groups, sequences, _, side in self._waiting:
            for group in groups:
                rows["decode"][first + group.begin : first + group.end] = group.decode
                for part in group.parts:
                    own = slice(first + part.row, first + part.row + part.count)
                    rows["sequence"][own] = sequences[part.run]
                    rows["position"][own] = np.arange(part.start, part.start + part.count)
            end = first + groups[-1].end
            rows["sweep"][first:end] = sweep
            for name, array in side.items():
                rows[name][first:end] = array
            first, sweep = end, sweep + 1
        return rows

    def _write_events(self) -> None:
        """The list stays the same one: stores append to it from their threads."""
        count = len(self._events)
        some = self._events[:count]
        del self._events[:count]
        if some:
            columns = zip(EVENT, zip(*some, strict=True), strict=True)
            self.writer.append_events(**{n: np.array(c, EVENT[n]) for n, c in columns})


def check_parts(parts: Collection[str]) -> None:
    """Raise ``UsageError`` for parts of a trace that are not known."""
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"A trace has no part {part!r}.", f"Use {', '.join(PARTS)}.")


def record(
    engine: Engine,
    folder: Path,
    parts: Collection[str] = (),
    about: Mapping[str, Any] | None = None,
) -> None:
    """Record what ``engine`` does from now on, until it is closed.  Raises ``UsageError``."""
    check_parts(parts)
    moe, spec = engine.spec.moe, engine.spec
    if moe is None or engine.store is None:
        raise UsageError("This model has no routed experts to trace.", "Leave --trace out.")
    recorder = Recorder(
        folder, spec.moe_layers, moe.experts, moe.top_k,
        ahead="ahead" in parts, margin="margin" in parts, tiers="tiers" in parts,
        latent=(moe.latent or spec.hidden) if "latent" in parts else 0,
        mixing=_mixing(engine) if "mixing" in parts else None,
        order=_order(engine), page_bytes=engine.checkpoint.expert_bytes,
        source="k3offload",
        about={"slots": engine.store.slots, "policy": engine.options.policy,
               "predict": engine.options.predict, **(about or {})},
    )  # fmt: skip
    safe = _Safe(engine, recorder)
    engine.hooks.add(
        on_sweep=safe.of(recorder.on_sweep), on_route=safe.of(recorder.on_route),
        on_ahead=safe.of(recorder.on_ahead),
    )  # fmt: skip
    engine.hooks.wants = {"router" if part == "ahead" else part for part in parts}
    if "mixing" in parts:
        engine.hooks.on_mix = safe.of(recorder.on_mix)
    if "tiers" in parts:
        stores: list[ExpertStore | None] = [engine.store]
        if engine.accelerator is not None:
            stores.append(engine.accelerator.store)
        for tier, store in enumerate(stores):
            if store is not None:
                store.watch = recorder.watch(tier)
    engine.closing.append(safe.of(recorder.close))


class _Safe:
    """Ends the recording, with a warning, where the trace can no longer be written."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self._warn, self._folder, self._ended = engine.warn, recorder.writer.folder, False

    def of(self, heard: Any) -> Any:
        def safe(*given: Any) -> None:
            if self._ended:
                return
            try:
                heard(*given)
            except OSError as error:
                self._ended = True
                self._warn(f"the trace {show_path(self._folder)} ends here: {error.strerror}")

        return safe


def _order(engine: Engine) -> Array:
    """[L, E]: places of experts in the files."""
    moe = engine.spec.moe
    assert moe is not None
    order = np.zeros((len(engine.spec.moe_layers), moe.experts), np.uint16)
    for place, layer in enumerate(engine.spec.moe_layers):
        pages = sorted((PageId(layer, e) for e in range(moe.experts)), key=engine.disk.order)
        order[place, [page.expert for page in pages]] = np.arange(moe.experts)
    return order


def _mixing(engine: Engine) -> tuple[int, int]:
    """Sublayers, and most entries of a mix."""
    layers, block = len(engine.spec.layers), engine.spec.attnres_block
    if block is None:
        raise UsageError("This model has no residual attention to trace.", "Leave mixing out.")
    return 2 * layers, -(-layers // block) + 1
