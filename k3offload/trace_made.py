"""Traces that no engine recorded: routings without structure, or made to hurt some policy.

Knows traces and numbers, no engine.  ``trace_like.py`` makes routing that is like a recorded one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .scheduler.hints import NEAR, nearest, quantise
from .trace import Trace, Writer

Chosen = npt.NDArray[np.int64]
Rng = np.random.Generator


class Size(NamedTuple):
    """Of a model; the embedded one unless said."""

    layers: int = 7
    experts: int = 48
    top_k: int = 4


NANO = Size()
Made = Callable[[Rng, int, Size], Chosen]


def pattern(name: str, tokens: int, size: Size = NANO, seed: int = 0) -> Chosen:
    """Routing [tokens, layers, k] of one of ``PATTERNS``."""
    rng = np.random.default_rng([seed, list(PATTERNS).index(name)])
    return np.sort(PATTERNS[name](rng, tokens, size), axis=2)


def _draw(rng: Rng, tokens: int, size: Size) -> Chosen:
    """Without structure."""
    return _best(rng, tokens, size, np.zeros(size.experts, np.float32))


def _best(rng: Rng, tokens: int, size: Size, log_odds: npt.NDArray[np.float32]) -> Chosen:
    """Places drawn without putting back, with these odds."""
    result = np.empty((tokens, size.layers, size.top_k), np.int64)
    for row in range(tokens):
        drawn = rng.standard_exponential((size.layers, size.experts), np.float32)
        keys = log_odds - np.log(np.maximum(drawn, np.float32(1e-20)))
        result[row] = np.argpartition(-keys, size.top_k - 1, axis=1)[:, : size.top_k]
    return result


def _shuffled(rng: Rng, size: Size) -> Chosen:
    return np.argsort(rng.random((size.layers, size.experts)), axis=1)


def _scan(rng: Rng, tokens: int, size: Size) -> Chosen:
    turn, place = np.arange(tokens)[:, None, None], np.arange(size.top_k)
    return np.tile((turn * size.top_k + place) % size.experts, (1, size.layers, 1))


def _flips(rng: Rng, tokens: int, size: Size) -> Chosen:
    return _scan(rng, tokens, size)[np.arange(tokens) % 2]


def _loop(period: int) -> Made:
    return lambda rng, tokens, size: _draw(rng, period, size)[np.arange(tokens) % period]


def _phases(period: int, times: int) -> Made:
    """A working set of ``times`` what a token needs, and two, that changes."""

    def made(rng: Rng, tokens: int, size: Size) -> Chosen:
        wide, count = times * size.top_k + 2, -(-tokens // period)
        sets = np.stack([_shuffled(rng, size)[:, :wide] for _ in range(count)])
        inside = _draw(rng, tokens, size._replace(experts=wide))
        return np.take_along_axis(sets[np.arange(tokens) // period], inside, axis=2)

    return made


def _skewed(rng: Rng, tokens: int, size: Size) -> Chosen:
    """Expert number r of a layer is about 1/r as likely as its first."""
    ranks = _best(rng, tokens, size, -np.log(np.arange(1, size.experts + 1, dtype=np.float32)))
    return np.take_along_axis(_shuffled(rng, size)[None], ranks, axis=2)


def _in_turn(rng: Rng, tokens: int, size: Size) -> Chosen:
    parts = ("loop of 9", "narrow for 20", "uniform", "stack", "flips")
    return np.concatenate([PATTERNS[name](rng, -(-tokens // 5), size) for name in parts])[:tokens]


def _stack(rng: Rng, tokens: int, size: Size) -> Chosen:
    """Recency is all there is: the longer unused, the less likely.  LRU is the best there is."""
    result = np.empty((tokens, size.layers, size.top_k), np.int64)
    for layer in range(size.layers):
        stack = rng.permutation(size.experts).tolist()
        for token in range(tokens):
            drawn = rng.geometric(0.3, 3 * size.top_k) - 1
            depths = np.unique(np.minimum(drawn, size.experts - 1))
            spare = np.setdiff1d(np.arange(size.experts), depths)
            chosen = [stack[depth] for depth in [*depths, *spare][: size.top_k]]
            stack = chosen + [expert for expert in stack if expert not in chosen]
            result[token, layer] = chosen
    return result


PATTERNS: dict[str, Made] = {
    "uniform": _draw,
    "scan": _scan,
    "flips": _flips,
    "skewed": _skewed,
    "stack": _stack,
    "loop of 3": _loop(3),
    "loop of 9": _loop(9),
    "loop of 20": _loop(20),
    "narrow for 20": _phases(20, 1),
    "narrow for 100": _phases(100, 1),
    "wide for 20": _phases(20, 3),
    "wide for 100": _phases(100, 3),
    "one after the other": _in_turn,
}


def trace_of(chosen: Chosen, experts: int, seed: int = 0, page_bytes: int = 1) -> Trace:
    """With scores as a router would give them; the near misses mean nothing.  Layers count from 1,
    each token is a sweep."""
    rng = np.random.default_rng(seed)
    tokens, layers, k = chosen.shape
    wide = min(k + NEAR, experts)
    best, codes = (
        np.empty((tokens, layers, wide), np.uint16),
        np.empty((tokens, layers, wide), "u1"),
    )
    for row in range(tokens):
        keys = rng.random((layers, experts), np.float32)
        np.put_along_axis(keys, chosen[row], 2 + rng.random((layers, k), np.float32), axis=1)
        best[row], codes[row] = nearest(quantise(keys, k), k, chosen[row])
    return plain(np.arange(1, layers + 1), experts, k, best, codes, page_bytes=page_bytes)


def plain(
    layers: npt.NDArray[Any],
    experts: int,
    top_k: int,
    best: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.uint8],
    sequence: npt.NDArray[Any] | None = None,
    position: npt.NDArray[Any] | None = None,
    **facts: Any,
) -> Trace:
    """A trace in which each token is a decode sweep; one sequence unless said."""
    count = np.arange(len(best), dtype=np.int32)
    order = np.tile(np.arange(experts, dtype=np.uint16), (len(layers), 1))
    return Trace(
        np.asarray(layers, np.int32), experts, top_k, facts.pop("page_bytes", 1), order,
        best, codes, count,
        np.zeros_like(count) if sequence is None else np.asarray(sequence, np.int32),
        count if position is None else np.asarray(position, np.int32),
        np.ones(len(best), bool), source=facts.pop("source", "made"), about=facts,
    )  # fmt: skip


def write_trace(folder: str | Path, trace: Trace) -> None:
    """Write the rows of ``trace`` as a new one."""
    writer = Writer(
        folder, trace.layers.tolist(), trace.experts, trace.top_k, order=trace.order,
        page_bytes=trace.page_bytes, near=trace.best.shape[2] - trace.top_k,
        more={name: (a.shape[1:], str(a.dtype)) for name, a in trace.more.items()},
        source=trace.source, about=trace.about,
    )  # fmt: skip
    rows = ("best", "codes", "sweep", "sequence", "position", "decode")
    for begin in range(0, len(trace.best), 1024):
        part = trace.rows(slice(begin, begin + 1024))
        writer.append(**{name: getattr(part, name) for name in rows}, **part.more)
    writer.close()
