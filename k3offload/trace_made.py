"""Traces that no engine recorded: routings without structure, or made to hurt some policy.

Knows traces and numbers, no engine.  ``trace_fit.py`` makes routing that is like a recorded one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .scheduler.hints import NEAR, nearest, quantise
from .trace import Trace, Writer

Chosen = npt.NDArray[np.int64]


class Size(NamedTuple):
    """Of a model; the embedded one unless said."""

    layers: int = 7
    experts: int = 48
    top_k: int = 4


NANO = Size()


def patterns(tokens: int, size: Size = NANO, seed: int = 0) -> dict[str, Chosen]:
    """Routings [tokens, layers, k] by name."""
    rng, k = np.random.default_rng(seed), size.top_k
    turn, place = np.arange(tokens)[:, None, None], np.arange(k)
    across = (1, size.layers, 1)
    result = {
        "uniform": _draw(rng, tokens, size),
        "scan": np.tile((turn * k + place) % size.experts, across),
        "flips": np.tile(turn % 2 * k + place, across),
        "skewed": _skewed(rng, tokens, size),
        "stack": _stack(rng, tokens, size),
    }
    for period in (3, 9, 20):
        result[f"loop of {period}"] = _draw(rng, period, size)[np.arange(tokens) % period]
    for period, wide in ((20, k + 2), (100, k + 2), (20, 3 * k + 2), (100, 3 * k + 2)):
        count = -(-tokens // period)  # a working set that changes
        sets = np.stack([_shuffled(rng, size)[:, :wide] for _ in range(count)])
        inside = _draw(rng, tokens, size._replace(experts=wide))
        phases = np.take_along_axis(sets[np.arange(tokens) // period], inside, axis=2)
        result[f"{wide} for {period}"] = phases
    fifth = tokens // 5
    parts = ("loop of 9", f"{k + 2} for 20", "uniform", "stack", "flips")
    result["one after the other"] = np.concatenate([result[name][:fifth] for name in parts])
    return {name: np.sort(chosen, axis=2) for name, chosen in result.items()}


def _draw(rng: np.random.Generator, tokens: int, size: Size) -> Chosen:
    drawn = rng.random((tokens, size.layers, size.experts), np.float32)
    return np.argpartition(drawn, size.top_k - 1, axis=2)[..., : size.top_k]


def _shuffled(rng: np.random.Generator, size: Size) -> Chosen:
    return np.argsort(rng.random((size.layers, size.experts)), axis=1)


def _skewed(rng: np.random.Generator, tokens: int, size: Size) -> Chosen:
    """Expert number r of a layer is about 1/r as likely as its first."""
    keys = rng.gumbel(size=(tokens, size.layers, size.experts))
    keys -= np.log(np.arange(1, size.experts + 1))
    ranks = np.argsort(-keys, axis=2)[..., : size.top_k]
    return np.take_along_axis(np.tile(_shuffled(rng, size), (tokens, 1, 1)), ranks, axis=2)


def _stack(rng: np.random.Generator, tokens: int, size: Size) -> Chosen:
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
