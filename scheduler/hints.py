"""What predictors are told and how they keep account: hints, 8-bit router scores, precision.

A predictor names the pages that a later layer will probably ask for, so that they can be read
while the disk would idle.  It knows layers, experts and counts, never a tensor and no clock.
``scheduler/predict_NAME.py`` holds a class ``Predictor``; being wrong costs reads, never a bit of
the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..tiers.base import PageId

Experts = npt.NDArray[np.integer[Any]]  #: [rows, k]
Codes = npt.NDArray[np.uint8]  #: [rows, E], router scores as ``quantise`` gives them
Floats = npt.NDArray[np.float32]
Code = Callable[[Floats, int, Experts | None], tuple[Experts, Codes]]  #: see ``coded``
Kind = tuple[int, ...]  #: what kind of guess: layer, rank, how it was made
Guess = tuple[PageId, float]  #: a page and how likely it is asked for, 0 to 1
TINY = np.float32(1e-30)  #: below it a difference of scores is none
CHOSEN = 128  #: codes from here on are among the row's top k
NEAR = 4  #: near misses of a row that policies, predictors and traces are told of
KEEP = 1 - 1 / 64  #: decay of what was seen, for each thing seen: the last 64 or so count
PAYS = 0.6  #: confidence from which a read ahead pays even where the disk never idles: see LOG.md
DOUBT = 2.0  #: misses that everything begins with, so that two lucky hits prove nothing


@dataclass(frozen=True)
class Hints:
    """What is known in layer ``layer`` of a decode sweep, at the end of a dense one, in a MoE layer
    before its routed experts have run.

    ``next_layer``: the next MoE layer, None after the last.  ``next_scores``: codes that its
    router, on its own mix and norm of the stream as it stands (with ``layer``'s shared experts),
    gives for each decode row.
    ``latent`` [rows, Z]: what the experts of ``layer`` were given.  ``absent``: whether a page is
    neither in RAM nor being read; only of such pages is a guess worth anything.
    """

    layer: int
    next_layer: int | None
    next_scores: Codes | None = None
    latent: npt.NDArray[np.float32] | None = None
    absent: Callable[[PageId], bool] = lambda page: True


class Predictor(Protocol):
    """Made once for an engine: ``Predictor(layers, experts, top_k)``, ``layers`` the MoE layers in
    order.  The same calls give the same answers.  One that has ``tried = True`` is not asked in
    sweeps in which that would not pay (``trial.py``)."""

    asks_router: bool  #: whether it wants ``next_scores``
    asks_latent: bool  #: whether it wants ``latent``

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        """Distinct pages of layers after ``layer``, the most likely first; called in it."""
        ...

    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        """``layer`` chose ``experts`` [rows, k] for the decode rows; called after its router."""
        ...


def quantise(scores: npt.ArrayLike, top_k: int) -> Codes:
    """Biased router scores [rows, E], any scale, as one byte each, relative to their row.

    From 128 at the k-th highest up to 255 at the highest; from 127 just below the k-th down to 0
    at the row's median (at rank 2k where the median is above that) and under it.  So a byte says
    chosen, near miss or far whatever the spread of a router's scores is, and keeps their order.
    A number that is not finite counts as 0.
    """
    s = np.asarray(scores, np.float32)
    if not np.isfinite(s).all():
        s = np.where(np.isfinite(s), s, np.float32(0))
    experts = s.shape[1]
    far = experts - 1 - min(max(experts // 2, 2 * top_k), experts - 1)
    ranked = np.partition(s, [far, experts - top_k, experts - 1], axis=1)
    low, cut, top = ranked[:, far, None], ranked[:, -top_k, None], ranked[:, -1, None]
    above = CHOSEN + (s - cut) * ((255 - CHOSEN) / np.maximum(top - cut, TINY))
    below = np.clip((s - low) * (CHOSEN / np.maximum(cut - low, TINY)), 0, CHOSEN - 1)
    codes: Codes = np.where(s >= cut, above, below).astype(np.uint8)
    return codes


def nearest(
    codes: Codes, top_k: int, chosen: npt.NDArray[np.integer[Any]] | None = None
) -> tuple[npt.NDArray[np.int64], Codes]:
    """Of codes [rows, E] the best k + ``NEAR`` of each row: experts by falling code, the lower
    number first among equals, and their codes.  The ``chosen`` [rows, k] come before all others."""
    behind = 255 - codes.astype(np.int16)
    if chosen is not None:
        np.put_along_axis(behind, chosen, np.take_along_axis(behind, chosen, 1) - 256, axis=1)
    order = np.argsort(behind, axis=1, kind="stable")[:, : top_k + NEAR]
    return order, np.take_along_axis(codes, order, axis=1)


def coded(scores: Floats, top_k: int, chosen: Experts | None) -> tuple[Experts, Codes]:
    """Of router scores [rows, E] what policies and predictors are told: ``nearest``."""
    return nearest(quantise(scores, top_k), top_k, chosen)


def spread(best: npt.NDArray[np.integer[Any]], codes: Codes, experts: int) -> Codes:
    """[rows, E]: what ``nearest`` took them from, with 0 for all others."""
    dense = np.zeros((len(codes), experts), np.uint8)
    np.put_along_axis(dense, best.astype(np.int64), codes, axis=1)
    return dense


def ranked(codes: Codes, top_k: int) -> Iterator[tuple[int, int]]:
    """(expert, rank) of each row's ``top_k`` best, each expert once with its best rank, best first.

    Equal codes: the lower expert number, and the earlier row, comes first.
    """
    order = np.argsort(255 - codes, axis=1, kind="stable")[:, :top_k]
    seen: set[int] = set()
    for rank, column in enumerate(order.T.tolist()):
        for expert in column:
            if expert not in seen:
                seen.add(expert)
                yield expert, rank


class Precision:
    """Running share of guesses that came true, for each kind of guess: recent ones count most."""

    def __init__(self) -> None:
        self._hits: dict[Kind, float] = {}
        self._guesses: dict[Kind, float] = {}
        self.share: dict[Kind, float] = {}  #: in [0, 1); a kind never seen is missing

    def count(self, kind: Kind, hit: bool) -> None:
        hits = self._hits[kind] = self._hits.get(kind, 0.0) * KEEP + hit
        guesses = self._guesses[kind] = self._guesses.get(kind, 0.0) * KEEP + 1.0
        self.share[kind] = hits / (guesses + DOUBT)


class Ranked(ABC):
    """A predictor that ranks candidates and is as sure of each as its kind came true of late.

    Candidates that are not absent are left out and teach nothing: what is in RAM anyway is easier
    to foresee than what is missing.  What a layer chose tells about every candidate, named or not,
    so a kind of guess that went bad is noticed to be good again without trying it.
    """

    asks_router = asks_latent = False
    bar = 0.0  #: candidates of less confidence are not named

    def __init__(self, layers: Sequence[int], experts: int, top_k: int) -> None:
        self.layers, self.experts, self.top_k = tuple(layers), experts, top_k
        self.precision = Precision()
        self._known = frozenset(layers)
        #: of each layer, by the layer at whose end it was guessed: what was tried, what was named
        self._open: dict[int, dict[int, tuple[list[tuple[int, Kind]], list[int]]]] = {
            la: {} for la in layers
        }

    @abstractmethod
    def rank(self, hints: Hints) -> Iterator[tuple[PageId, Kind]]:
        """Candidates, the best first, with the kind of guess they are; a page that is named twice
        is as sure as the surer of the two."""

    def outcome(self, hit: bool) -> None:  # noqa: B027, a place to hook in
        """A page that was named turned out to be asked for, or not."""

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        found: dict[PageId, float] = {}
        tried: dict[int, list[tuple[int, Kind]]] = {}
        share, absent = self.precision.share, hints.absent
        for page, kind in self.rank(hints):
            if page.layer in self._known and absent(page):
                tried.setdefault(page.layer, []).append((page.expert, kind))
                confidence = share.get(kind, 0.0)
                if confidence >= self.bar:
                    found[page] = max(confidence, found.get(page, 0.0))
        for target, kinds in tried.items():
            named = [page.expert for page in found if page.layer == target]
            self._open[target][layer] = (kinds, named)
        return sorted(found.items(), key=lambda item: -item[1])

    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        waiting = self._open.get(layer)
        if not waiting:
            return
        chosen = set(experts.ravel().tolist())
        for kinds, named in waiting.values():
            for expert, kind in kinds:
                self.precision.count(kind, expert in chosen)
            for expert in named:
                self.outcome(expert in chosen)
        waiting.clear()
