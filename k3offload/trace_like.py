"""Routing drawn from a model of locality, by hand or fitted to a recorded trace.

An expert's log odds are the sum of: how popular it is in its layer (``skew``: the exponent of a
power law), how much its sequence likes it (``topic``), how often it was used of late, over a few
tokens (``short``) and over some dozens (``long``), and how many of the experts that the layer above
has just chosen point to it (``link``).  Gumbel noise makes draws of that; drawn odds are the
router's scores, so near misses mean something.  Knows traces, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .scheduler.hints import nearest, quantise
from .scheduler.policy_lru import Policy as Lru
from .scheduler.replay import replay
from .trace import Trace
from .trace_made import Size, plain

SHARES = (0.06, 0.12, 0.25, 0.5, 0.75)  #: capacities of a miss curve
HALF = (1.5, 24.0)  #: half lives in tokens: short, long
POINTS = 0.15  #: share of a layer's experts that an expert of the layer above points to
ROWS = 800  #: tokens that a fit looks at
#: that a fit tries for each strength, round by round
FACTORS = ((0.0, 0.5, 2.0), (0.7, 1.4), (0.7, 1.4), (0.87, 1.15), (0.94, 1.07))
TINY = np.float32(1e-20)
F32 = npt.NDArray[np.float32]


class Likeness(NamedTuple):
    """Strengths of what routing depends on; all 0 is uniform."""

    skew: float = 0.0
    topic: float = 0.0
    short: float = 0.0
    long: float = 0.0
    link: float = 0.0


START = Likeness(0.4, 0.4, 1.0, 1.0, 0.5)


def drawn(
    likeness: Likeness, size: Size, lengths: Sequence[int], seed: int = 0, page_bytes: int = 1
) -> Trace:
    """A trace of sequences of these lengths."""
    rng, (layers, experts, k) = np.random.default_rng(seed), size
    ranks = np.argsort(rng.random((layers, experts)), axis=1)
    popular = -likeness.skew * np.log1p(ranks).astype(np.float32)
    points = rng.random((layers, experts, experts), np.float32) < POINTS
    link = np.float32(likeness.link / (POINTS * k))
    keep = np.float32(0.5) ** (1 / np.array(HALF, np.float32))[:, None, None]
    total = sum(lengths)
    best, codes = [], []
    for length in lengths:
        own = popular + np.float32(likeness.topic) * rng.standard_normal(
            (layers, experts), np.float32
        )
        used = np.zeros((2, layers, experts), np.float32)  # running means, 1 if in every token
        for _ in range(length):
            odds = own + np.einsum("h,hle->le", np.array(likeness[2:4], np.float32), used)
            odds -= np.log(TINY + rng.standard_exponential((layers, experts), np.float32))
            used *= keep
            before = np.zeros(0, np.int64)
            for layer in range(layers):
                if layer and link:
                    odds[layer] += link * points[layer, before].sum(0, dtype=np.float32)
                before = np.argpartition(-odds[layer], k - 1)[:k]
                used[:, layer, before] += 1 - keep[:, 0]
            row = nearest(quantise(odds, k), k)
            best.append(row[0].astype(np.uint16))
            codes.append(row[1])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    assert total == len(best)
    return plain(
        np.arange(1, layers + 1), experts, k, np.stack(best), np.stack(codes), sequence, position,
        page_bytes=page_bytes, likeness=likeness._asdict(), seed=seed,
    )  # fmt: skip


def split(trace: Trace) -> tuple[Trace, Trace]:
    """The first half of its sequences, and the others, which a fit is not to see."""
    numbers = np.unique(trace.sequence)
    first = np.isin(trace.sequence, numbers[: (len(numbers) + 1) // 2])
    return trace.rows(first), trace.rows(~first)


def miss_curve(trace: Trace, shares: Sequence[float] = SHARES) -> list[float]:
    """Share of requests that LRU misses, for each capacity."""
    run, found = trace.leases(), []
    for share in shares:
        slots = max(1, round(share * run.total))
        counts = replay(run, Lru(slots), slots)
        found.append(counts.misses / counts.requests)
    return found


def linked(trace: Trace) -> float:
    """How far the layer above tells what a layer will choose: of its k likeliest experts by what
    came together so far, the share that it chooses, less that of its k most popular ones."""
    chosen, k = trace.chosen.astype(np.int64), trace.top_k
    tokens, layers, _ = chosen.shape
    right = usual = 0
    for layer in range(1, layers):
        together = np.zeros((trace.experts, trace.experts), np.float32)
        times = np.zeros(trace.experts, np.float32)
        for row in range(tokens):
            above, here = chosen[row, layer - 1], chosen[row, layer]
            if row >= tokens // 2:
                told = (together[above] / (1 + together[above].sum(1, keepdims=True))).sum(0)
                right += np.isin(here, np.argpartition(-told, k - 1)[:k]).sum()
                usual += np.isin(here, np.argpartition(-times, k - 1)[:k]).sum()
            together[above[:, None], here] += 1
            times[here] += 1
    asked = max(1, (tokens - tokens // 2) * (layers - 1) * k)
    return float((right - usual) / asked)


def popularity(trace: Trace) -> float:
    """Share of all requests that the quarter of each layer's experts gets that is asked most."""
    quarter, found = max(1, trace.experts // 4), 0
    for layer in range(len(trace.layers)):
        times = np.bincount(trace.chosen[:, layer].ravel(), minlength=trace.experts)
        found += int(np.sort(times)[-quarter:].sum())
    return found / trace.chosen.size


def fit(trace: Trace, seed: int = 0) -> tuple[Likeness, dict[str, Any]]:
    """The likeness whose draws have the LRU miss curve, popularity and links of ``trace``, about;
    and how close a draw with another seed comes."""
    some = _some(trace)
    lengths = np.unique(some.sequence, return_counts=True)[1].tolist()
    size = Size(len(trace.layers), trace.experts, trace.top_k)
    wanted = _signs(some)

    def far(likeness: Likeness, draw: int) -> float:
        found = _signs(drawn(likeness, size, lengths, draw))
        off = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
        result: float = sum(off) + sum(off[: len(SHARES)])
        return result

    best, least = START, far(START, seed)
    for factors in FACTORS:
        for name in Likeness._fields:
            for factor in factors:
                value = round(getattr(best, name) * factor, 4) if getattr(best, name) else factor
                tried = best._replace(**{name: value})
                distance = far(tried, seed)
                if distance < least:
                    best, least = tried, distance
    found = _signs(drawn(best, size, lengths, seed + 1))
    curve = len(SHARES)
    return best, {
        "capacities": list(SHARES),
        "recorded": [round(x, 4) for x in wanted[:curve]],
        "drawn": [round(x, 4) for x in found[:curve]],
        "farthest": round(max(abs(a - b) for a, b in zip(found[:curve], wanted, strict=False)), 4),
        "popularity": [round(wanted[curve], 4), round(found[curve], 4)],
        "linked": [round(wanted[-1], 4), round(found[-1], 4)],
    }


def _signs(trace: Trace) -> list[float]:
    return [*miss_curve(trace), popularity(trace), linked(trace)]


def _some(trace: Trace) -> Trace:
    """The beginnings of its sequences, ``ROWS`` rows in all, about."""
    each = max(1, ROWS // len(np.unique(trace.sequence)))
    seen: dict[int, int] = {}
    keep = np.zeros(len(trace.best), bool)
    for row, sequence in enumerate(trace.sequence.tolist()):
        seen[sequence] = seen.get(sequence, 0) + 1
        keep[row] = seen[sequence] <= each
    return trace.rows(keep)


def drawn_like(
    trace: Trace, tokens: int | None = None, seed: int = 0
) -> tuple[Trace, dict[str, Any]]:
    """A trace of sequences as long as those of ``trace``, or of ``tokens`` tokens in all, and how
    close its miss curve comes: to the half that was fitted, and to the other."""
    learned, other = split(trace)
    likeness, report = fit(learned, seed)
    size = Size(len(trace.layers), trace.experts, trace.top_k)

    def like(part: Trace, draw: int) -> Trace:
        lengths = np.unique(part.sequence, return_counts=True)[1].tolist()
        return drawn(likeness, size, lengths, draw, trace.page_bytes)

    if len(other.best) == 0:  # one sequence: nothing is held out
        other = learned
    curves = miss_curve(other), miss_curve(like(other, seed + 2))
    report |= {
        "likeness": likeness._asdict(),
        "held_out": [round(x, 4) for x in curves[0]],
        "held_out_drawn": [round(x, 4) for x in curves[1]],
        "held_out_farthest": round(max(abs(a - b) for a, b in zip(*curves, strict=True)), 4),
    }
    if tokens is not None:
        return drawn(likeness, size, [tokens], seed + 3, trace.page_bytes), report
    return like(trace, seed + 3), report
