"""Figures of routing: how evenly experts are used, how alike two uses are, what skew costs.

Counts and choices in, numbers out; where they come from is unknown here.  Counts are [L, E]: how
often each expert of each MoE layer was chosen.  Choices are [T, L, k]: the experts of each token.
All figures of a layer are averaged over layers unless it says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Choices = npt.NDArray[np.integer[Any]]
TOP: Final = (0.01, 0.1)  #: parts of a layer's experts whose share of the requests is told
TAIL: Final = 0.99


@dataclass(frozen=True)
class Balance:
    """How evenly the experts of the layers are used."""

    entropy: float  #: of the requests over experts, 1 where all are used alike
    top_1: float  #: share of the requests that the most used 1 % of the experts take (at least one)
    top_10: float
    overload: float  #: requests of the most used expert, over the mean
    worst_overload: float  #: of the layer where that is most
    unused: float  #: share of the experts that nobody asked for


@dataclass(frozen=True)
class Latency:
    """Seconds of reads of a token, and the same if every expert were as likely as any other."""

    mean: float
    p99: float
    uniform_mean: float
    uniform_p99: float


def histogram(chosen: Choices, experts: int) -> Counts:
    """``chosen`` [T, L, k] -> [L, E]."""
    counts = np.zeros((chosen.shape[1], experts), np.int64)
    for layer, own in enumerate(np.moveaxis(chosen, 1, 0)):
        counts[layer] = np.bincount(own.reshape(-1), minlength=experts)
    return counts


def balance(counts: Counts) -> Balance:
    """The figures of ``counts`` [L, E]; every layer has requests."""
    experts = counts.shape[1]
    shares = _shares(counts)
    falling = -np.sort(-shares, axis=1)
    tops = [falling[:, : math.ceil(part * experts)].sum(1).mean() for part in TOP]
    overload = falling[:, 0] * experts
    return Balance(
        entropy=float(_entropy(shares).mean() / math.log(experts)) if experts > 1 else 1.0,
        top_1=float(tops[0]),
        top_10=float(tops[1]),
        overload=float(overload.mean()),
        worst_overload=float(overload.max()),
        unused=float((counts == 0).mean()),
    )


def uniform_balance(tokens: int, experts: int, top_k: int, layers: int, seed: int) -> Balance:
    """What ``tokens`` tokens would show if each chose ``top_k`` of the experts at random: few
    tokens never use all experts alike."""
    draw = np.random.default_rng(seed)
    counts = np.zeros((layers, experts), np.int64)
    for layer in range(layers):
        for begin in range(0, tokens, 256):
            some = draw.random((min(256, tokens - begin), experts))
            chosen = np.argpartition(some, top_k - 1, axis=1)[:, :top_k]
            counts[layer] += np.bincount(chosen.reshape(-1), minlength=experts)
    return balance(counts)


def divergence(one: Counts, other: Counts) -> float:
    """Jensen-Shannon divergence of two uses, in bits: 0 for the same, 1 for nothing in common."""
    p, q = _shares(one), _shares(other)
    mixed = _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2
    return float(max(0.0, mixed.mean() / math.log(2)))


def shared_top(one: Counts, other: Counts, part: float = TOP[1]) -> float:
    """The share of the most used ``part`` of the experts that two uses have in common."""
    count = math.ceil(part * one.shape[1])
    tops = [np.argsort(-counts, axis=1, kind="stable")[:, :count] for counts in (one, other)]
    return float(np.mean([len(np.intersect1d(a, b)) / count for a, b in zip(*tops, strict=True)]))


def most_used(counts: Counts, part: float) -> npt.NDArray[np.bool_]:
    """[L, E]: whether an expert is among the ``part`` of all layers' experts with the most
    requests; the lower layer and number first among equals."""
    room = int(part * counts.size)
    held = np.zeros(counts.size, np.bool_)
    held[np.argsort(-counts.reshape(-1), kind="stable")[:room]] = True
    return held.reshape(counts.shape)


def latency(
    chosen: Choices, held: npt.NDArray[np.bool_], expert_bytes: int, disk: float
) -> Latency:
    """What reading takes while the experts ``held`` [L, E] are in RAM and no others.

    A token reads every expert that it chose and that is not held, so its seconds are

        misses(t) x expert_bytes / disk,    misses(t) = sum over layers of |chosen(t) \\ held|.

    If routing were uniform, each of its n = L x k requests would miss with the chance m, the part
    of the experts that is not held: n m x expert_bytes / disk in the mean, and at the 99th percent
    that quantile of the binomial distribution B(n, m).  Skew towards what is held makes the mean
    less than that.  Requests of a token miss together where it is of a kind that the held experts
    are not for: that is the tail.
    """
    layers = np.arange(chosen.shape[1])[None, :, None]
    misses = (~held[layers, chosen]).sum((1, 2))
    requests, missing = chosen.shape[1] * chosen.shape[2], 1 - float(held.mean())
    one = expert_bytes / disk
    return Latency(
        mean=float(misses.mean() * one),
        p99=float(np.quantile(misses, TAIL) * one),
        uniform_mean=requests * missing * one,
        uniform_p99=binomial_quantile(requests, missing, TAIL) * one,
    )


def binomial_quantile(n: int, p: float, part: float) -> int:
    """The smallest number of successes of ``n`` that is reached with the chance ``part``."""
    if p <= 0 or p >= 1:
        return n if p >= 1 else 0
    total = 0.0
    for k in range(n + 1):
        log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        total += math.exp(log + k * math.log(p) + (n - k) * math.log1p(-p))
        if total >= part:
            return k
    return n


def _shares(counts: Counts) -> Floats:
    shares: Floats = counts / counts.sum(1, keepdims=True)
    return shares


def _entropy(shares: Floats) -> Floats:
    """Of each layer, in nats."""
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    entropy: Floats = -(shares * logs).sum(1)
    return entropy
