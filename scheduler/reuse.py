"""How soon each page will be asked for again, learned from the routers while the model runs.

Knows layers, experts and 8-bit router scores (see ``hints.quantise``), no slot and no clock.  For
each layer visited it gives every expert of the layer a value: an estimate of ``keep ** (n - 1)``
where the expert is used next at the n-th visit of the layer from now, so 1 if at the next one and
near 0 if not for long.  Two linear models make it.  Both are fitted by least squares as the visits
come; nothing is fitted beforehand or stored:

* context: what the routers of all layers said last -> the value of each expert.  A token makes
  experts likely at the next few tokens that were not used of late.  Recursive least squares
  (R. L. Plackett 1950), ``BLOCK`` visits at once; the inverse covariance is shared by all layers.
* mix: an expert's decayed frequencies and scores (near misses count), its recency and what the
  context model says -> its value.  One set of weights for all experts.

A visit's target is taken ``AHEAD`` visits later: what was used meanwhile, and for the rest the
estimate of then (n-step temporal difference, R. Sutton 1988).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .hints import CHOSEN

F32 = npt.NDArray[np.float32]
Experts = npt.NDArray[np.integer[Any]]
Scores = npt.NDArray[np.uint8]

WEIGHTS = 2**23  #: most weights of all context models, of 4 bytes
WIDTHS = (96, 384)  #: numbers of the context, at least and at most
USES, SCORES = (4, 32, 256), (2, 8)  #: half lives in visits of the frequencies, of the scores
RECENT = 0.9  #: recency is 1 when used and falls by this factor with each visit
OWN = len(USES) + len(SCORES) + 1  #: numbers kept of each expert, recency last
FEATURES = OWN + 2  #: and 1, and the value by the context
AHEAD = 4  #: visits after which a target is taken
BLOCK = 8  #: visits of a layer that the context model learns from at once
PRIOR = 30.0  #: squared sum of a context number over the visits at which it begins to be believed
DOUBT = 0.0003  #: share of the belief given up again with each visit
MIX_KEEP = 0.999  #: weight of a sweep in the mix, one sweep later
MIX_PRIOR = 0.01
PRODUCT = 200_000  #: multiplications of one matrix product, at most

_HALF = np.array([*USES, *SCORES], np.float64)
UNIT = np.eye(BLOCK, dtype=np.float32)
RATES: F32 = np.array([*(1 - 0.5 ** (1 / _HALF)), 1 - RECENT], np.float32)[:, None]
FADES: F32 = -RATES  #: towards nothing


def memory(layers: int, experts: int) -> int:
    """Bytes that the models of ``layers`` layers of ``experts`` experts take."""
    count = layers * experts
    width = _width(count) + 1
    numbers = (AHEAD + 1) * FEATURES + BLOCK + 2 + width
    return count * (4 * numbers + 8) + 3 * 4 * width**2


def _width(experts: int) -> int:
    """How wide the context is for so many experts in all layers."""
    low, high = WIDTHS
    return min(max(WEIGHTS // max(1, experts), low), high)


def times(a: F32, b: F32) -> F32:
    """``a @ b`` in pieces so small that the BLAS stays on the calling thread: its own threads spin
    for a while after each product and would take the processors from the model."""
    return np.concatenate([a @ b[:, some] for some in _pieces(a, b)], axis=1)


def add_times(c: F32, a: F32, b: F32) -> None:
    """``c += times(a, b)``"""
    for some in _pieces(a, b):
        c[:, some] += a @ b[:, some]


def _pieces(a: F32, b: F32) -> Iterator[slice]:
    """Columns of ``b``, some at a time."""
    step = max(1, PRODUCT // a.size)
    return (slice(i, i + step) for i in range(0, b.shape[1], step))


def _clip(value: F32, out: F32) -> F32:
    """``value`` between 0 and 1; quicker than ``np.clip``."""
    np.maximum(value, 0, out=out)
    return np.minimum(out, 1, out=out)


def seen(before: F32, now: F32, experts: Experts, scores: Scores) -> tuple[F32, Experts]:
    """The numbers kept of each expert go from ``before`` some way to what this visit says of it,
    which is nothing of most.  Returns ``now``, where they are put, and the chosen ones."""
    chosen = scores >= CHOSEN
    np.multiply(before, FADES, out=now)
    now += before
    old = before.take(experts, axis=1)
    said = np.zeros(old.shape, np.float32)
    said[: len(USES)] = chosen
    np.multiply(scores, np.float32(1 / 255), out=said[len(USES) : -1])
    said -= old
    said *= RATES
    said += old
    np.putmask(said[-1], chosen, 1)
    now[:, experts] = said
    return now, experts[chosen]


class _Layer:
    """What is remembered of one layer.  Rings have a place for each of the last visits."""

    def __init__(self, experts: int, width: int, usual: F32) -> None:
        """``usual`` [OWN]: what an expert of which nothing is known begins with."""
        self.visits = 0
        self.features: F32 = np.zeros((AHEAD + 1, FEATURES, experts), np.float32)
        self.own: F32 = np.repeat(usual[:, None], experts, axis=1)  # later in ``features``
        self.used: list[Experts] = [np.zeros(0, np.int64)] * (AHEAD + 1)
        self.contexts: F32 = np.zeros((AHEAD + 1, width), np.float32)
        self.weights: F32 = np.zeros((width, experts), np.float32)
        self.value: F32 = np.zeros(experts, np.float32)
        self.bucket = np.full(experts, -1)
        self.sign: F32 = np.zeros(experts, np.float32)
        self.said: tuple[npt.NDArray[np.int64], F32] = (self.bucket[:0], self.sign[:0])
        self.inputs: list[F32] = []
        self.targets: list[F32] = []

    def grow(self, experts: int) -> None:
        more = experts - self.bucket.size

        def wider(a: Any, fill: float = 0) -> Any:
            return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, more)], constant_values=fill)

        mean = self.own.mean(axis=1, keepdims=True)
        self.own = np.concatenate([self.own, np.repeat(mean, more, axis=1)], axis=1)
        self.features = wider(self.features)
        self.weights, self.value = wider(self.weights), wider(self.value)
        self.bucket, self.sign = wider(self.bucket, -1), wider(self.sign)
        self.targets = [wider(target) for target in self.targets]


class Reuse:
    """The two models.  ``keep`` may be changed at any time."""

    def __init__(self) -> None:
        self.keep = 0.8
        self._sizes: dict[int, int] = {}  # experts of each layer, while the first sweep shows them
        self._layers: dict[int, _Layer] = {}
        self._last = -1
        self._buckets = 0
        self._context: F32 = np.zeros(0, np.float32)  # sums of scores: whole numbers, so exact
        self._inverse: F32 = np.zeros((0, 0), np.float32)
        self._moment, self._product = np.zeros((FEATURES, FEATURES)), np.zeros(FEATURES)
        self._mix: F32 = np.zeros(FEATURES, np.float32)

    def visit(self, layer: int, experts: Experts, scores: Scores) -> F32:
        """The router of ``layer`` gave the distinct ``experts`` these ``scores``.  Returns the
        values of the layer's experts; in the first sweep, which shows the sizes, all are 0."""
        size = -(-(max(experts.tolist()) + 1) // 16) * 16
        if not self._inverse.size:
            if layer not in self._sizes:
                self._sizes[layer] = size
                return np.zeros(size, np.float32)
            self._begin()
        if layer <= self._last:
            self._end_sweep()
        self._last = layer
        state = self._layer(layer, size, scores)
        now = state.visits % (AHEAD + 1)
        context, features = state.contexts[now], state.features[now]
        state.own, state.used[now] = seen(state.own, features[:OWN], experts, scores)
        self._hear(state, experts, scores)
        crowd = max(1.0, self._buckets / self._context.size)
        np.multiply(self._context, np.float32(crowd**-0.5 / 255), out=context[:-1])
        context[-1] = 1
        features[OWN] = 1
        _clip(context @ state.weights, features[-1])
        state.value = self._mix @ features
        state.visits += 1
        if state.visits > AHEAD:
            self._learn(state)
        return state.value

    def _begin(self) -> None:
        """The sizes are known: choose how wide the context is."""
        width = _width(sum(self._sizes.values()))
        self._context = np.zeros(width, np.float32)
        self._inverse = np.eye(width + 1, dtype=np.float32) / np.float32(PRIOR)

    def _layer(self, layer: int, size: int, scores: Scores) -> _Layer:
        state = self._layers.get(layer)
        if state is None:
            size = max(size, self._sizes.get(layer, 0))
            use, score = np.count_nonzero(scores >= CHOSEN) / size, float(scores.sum()) / 255 / size
            usual = np.array([use] * len(USES) + [score] * len(SCORES) + [0], np.float32)
            state = self._layers[layer] = _Layer(size, len(self._inverse), usual)
        elif size > state.bucket.size:
            state.grow(size)
        return state

    def _hear(self, state: _Layer, experts: Experts, scores: Scores) -> None:
        """Put the scores in the context in place of those of the layer's last visit.

        An expert adds to one number of the context, its own while there are enough of them; then
        it shares one with others, some of which count negative, so that they do not add up.
        """
        for expert in experts[state.bucket[experts] < 0].tolist():
            turn, state.bucket[expert] = divmod(self._buckets, self._context.size)
            odd = turn and (self._buckets * 0x9E3779B1 >> 16) & 1  # a fixed coin
            state.sign[expert] = -1 if odd else 1
            self._buckets += 1
        np.subtract.at(self._context, *state.said)
        state.said = (state.bucket[experts], state.sign[experts] * scores)
        np.add.at(self._context, *state.said)

    def _learn(self, state: _Layer) -> None:
        """From the visit ``AHEAD`` visits ago."""
        newest, keep = state.visits - 1, np.float32(self.keep)
        target = _clip(state.value, np.empty_like(state.value))
        for visit in range(newest, newest - AHEAD, -1):
            target *= keep
            target[state.used[visit % (AHEAD + 1)]] = 1
        then = (newest - AHEAD) % (AHEAD + 1)
        features = state.features[then]
        self._moment += features @ features.T
        self._product += features @ target
        state.inputs.append(state.contexts[then].copy())
        state.targets.append(target)
        if len(state.inputs) == BLOCK:
            self._learn_context(state)

    def _learn_context(self, state: _Layer) -> None:
        x, y = np.array(state.inputs), np.array(state.targets)
        state.inputs.clear()
        state.targets.clear()
        towards = times(x, self._inverse)
        spread = UNIT + towards @ x.T
        gain = np.linalg.solve(spread, towards)
        add_times(state.weights, np.ascontiguousarray(gain.T), y - times(x, state.weights))
        if state is next(iter(self._layers.values())):  # one layer speaks for all
            doubt = DOUBT * BLOCK
            self._inverse -= times(np.ascontiguousarray(towards.T), gain)
            self._inverse *= np.float32(1 - doubt)
            self._inverse.flat[:: len(self._inverse) + 1] += np.float32(doubt / PRIOR)

    def _end_sweep(self) -> None:
        prior = MIX_PRIOR * np.eye(FEATURES)
        self._mix = np.linalg.solve(self._moment + prior, self._product).astype(np.float32)
        self._moment *= MIX_KEEP
        self._product *= MIX_KEEP
