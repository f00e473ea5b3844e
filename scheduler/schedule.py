"""What to read ahead while a sweep runs, layer by layer, and what the policy is told.

Decides only: numbers of layers and experts, 8-bit scores, no tensor.  A guess is read behind
everything that is certain, and given up when its layer's requests are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UsageError
from ..registry import chosen, is_file
from ..tiers.base import PageId
from .hints import Code, Codes, Experts, Floats, Hints, Predictor, coded, spread
from .lease import Event
from .store import ExpertStore
from .trial import Trial

#: so many rows of a crowd that would choose an expert by now make it certain that one will
SURE = 8


def predictor_named(name: str) -> tuple[Any, str | None]:
    """The class behind ``--predict NAME``, ``NAME=FIT`` or a path to ``predict_NAME.py``, and the
    file of the fit.  Raises ``UsageError``."""
    kind, _, path = (name, "", "") if is_file(name) else name.partition("=")
    made = chosen("predict", kind)
    if (kind == "latent") != bool(path):
        raise UsageError(
            f"--predict {name!r} does not say what to predict from.",
            "latent takes a fit, latent=FILE (see docs/benchmarks.md); others take none.",
        )
    return made, path or None


class Schedule:
    """Look-ahead for one store.  Call ``begin`` and ``end`` around each sweep.

    A predictor that says ``tried`` is asked only in sweeps in which that pays (``trial.py``).
    """

    def __init__(
        self,
        store: ExpertStore,
        predictor: Predictor,
        top_k: int,
        clock: Callable[[], float] = time.perf_counter,
        code: Code = coded,
    ) -> None:
        """``code``: as ``coded``, perhaps quicker."""
        self._store, self._predictor, self._top_k, self._code = store, predictor, top_k, code
        self._trial = Trial(clock) if getattr(predictor, "tried", False) else None
        self.asks_router = predictor.asks_router
        self.asks_latent = predictor.asks_latent

    def routed(self, layer: int, experts: Experts, scores: Floats) -> None:
        """The router of ``layer`` chose ``experts`` [rows, k] by ``scores`` [rows, E]."""
        told = None
        if self._store.hears_router:
            told = self._code(scores, self._top_k, experts)
        self.heard(layer, experts, told)

    def heard(self, layer: int, experts: Experts, told: tuple[Experts, Codes] | None) -> None:
        """The same, with the scores in 8 bits: what ``nearest`` gives."""
        self._predictor.learn(layer, experts)
        if told is not None and self._store.hears_router:
            for best, codes in zip(*told, strict=True):
                self._store.note(layer, best, codes)

    def begin(self, rows: int, experts: int) -> bool:
        """A sweep of ``rows`` decode rows begins; whether to guess in it.  Not for a crowd, by
        whose rows each of the ``experts`` of a layer is chosen ``SURE`` times on average: most come
        anyway, as in a prompt."""
        if self.asks_router and rows * self._top_k >= SURE * experts:
            return False
        if self._trial:
            self._trial.begin(rows)
        return True

    def end(self) -> None:
        """It has ended, and well."""
        if self._trial:
            self._trial.end()

    def asks(self) -> bool:
        """Whether to call ``ahead`` now."""
        return self._trial is None or self._trial.ask()

    def ahead(
        self, layer: int, next_layer: int, scores: Floats | None, latent: Floats | None
    ) -> None:
        """In ``layer``: ``next_layer`` would choose by ``scores`` [rows, E] now, and the routed
        experts of ``layer`` are given ``latent`` [rows, Z]."""
        codes = None
        if self.asks_router and scores is not None:  # no more than a trace keeps
            best = self._code(scores, self._top_k, None)
            codes = spread(*best, scores.shape[1])
        self.guess(layer, next_layer, codes, latent)
        self.answered()

    def answered(self) -> None:
        """What ``asks`` allowed has been done."""
        if self._trial:
            self._trial.answered()

    def guess(
        self, layer: int, next_layer: int, codes: Codes | None, latent: Floats | None
    ) -> None:
        """``ahead`` with the scores in 8 bits."""
        self._store.watch(Event.ASKED, PageId(layer, next_layer), 0)
        if not self.asks_router:
            codes = None
        if not self.asks_latent:
            latent = None
        hints = Hints(layer, next_layer, codes, latent, self._store.absent)
        guesses = self._predictor.guess(layer, hints)
        if guesses:
            self._store.prefetch([page for page, _ in guesses])

    def read_on(self, next_layer: int, chosen: Experts, experts: int) -> None:
        """Some rows of a crowd would choose ``chosen`` [rows, k] of the ``experts`` of
        ``next_layer`` by now.

        Only what is certain is read: one page in vain costs as much as one page brought early
        saves.  Rows so much alike that they leave out half of the experts are not many witnesses
        but one, and make nothing certain.  In rising order, in which pages lie on disk."""
        times = np.bincount(chosen.ravel(), minlength=experts)
        if 2 * np.count_nonzero(times) < experts:
            return
        named = [PageId(next_layer, int(e)) for e in np.argsort(-times, kind="stable")]
        sure = [page for page in named if times[page.expert] >= SURE and self._store.absent(page)]
        self._store.prefetch(sorted(sure[: 2 * self._store.prefetch_room]), sure=True)
