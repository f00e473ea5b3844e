"""Predictors of the next use of every page, fitted offline to recorded routing, for comparisons.

Knows traces and numbers, no cache: ``policy_bounds.py`` replays what is predicted here.

What is predicted is ``keep ** n`` for a page whose next use is n tokens away.  Everything a fit is
given is known when a page has to leave: decayed frequencies and router scores (near misses count),
recency, the last interval, the place of the layer in the sweep, the place in the sequence, and
the value that the online model of ``reuse`` has learned by then.  Two models: a ridge regression
(what all routers said -> every page), and a network over it and over what is known of each page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from k3offload.scheduler.replay import Step
from k3offload.scheduler.reuse import Reuse
from k3offload.trace import Trace

KEEPS = (0.6, 0.75, 0.9)  #: discounts of a token, tried for each capacity
USES = (1, 2, 4, 8, 32, 128, 512)  #: half lives of the frequencies, tokens
SCORES = (1, 3, 10)  #: of the router scores, tokens
CONTEXT = (0, 2, 16)  #: of the scores of all pages that the ridge regression is given; 0: the last
PENALTIES = (30.0, 100.0, 300.0, 1000.0)  #: of the ridge; the best on sequences left out is taken
SAMPLE = 1_200_000  #: rows that a network is trained on
EPOCHS, BATCH, WIDTH, RATE = 6, 2048, 64, 3e-3  #: of the network
CALL = 1 << 18  #: rows that the network is asked about at once
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """Some sequences of T tokens over L layers of E experts.

    State arrays [T + 1, L, E] have a row for before the first token: row t is what is known
    before token t, row t + 1 after it.
    """

    trace: Trace
    reuse: F32  #: [T + 1, L, E] value by the online model
    used: npt.NDArray[np.bool_]  #: [T, L, E]
    said: F32  #: [T, L, E] router scores, 0 to 1

    @property
    def shape(self) -> tuple[int, int, int]:
        count, layers, experts = self.used.shape
        return count, layers, experts

    def leases(self) -> list[Step]:
        return list(self.trace.leases())


def part_of(trace: Trace, reuse: F32, rows: npt.NDArray[np.bool_]) -> Part:
    """The rows of ``trace`` in the mask; ``reuse`` [T + 1, L, E] is of the whole trace."""
    own = trace.rows(rows)
    used = np.zeros((*own.chosen.shape[:2], own.experts), bool)
    np.put_along_axis(used, own.chosen.astype(np.int64), True, axis=2)
    first = int(np.flatnonzero(rows)[0])
    values = np.concatenate([reuse[first : first + 1], reuse[1:][rows]])
    return Part(own, values, used, own.dense().astype(np.float32) / np.float32(255))


def online_values(trace: Trace) -> F32:
    """[T + 1, L, E]: what ``reuse`` thinks each page is worth, learning as the trace goes on."""
    count, layers, _ = trace.chosen.shape
    model, result = Reuse(), np.zeros((count + 1, layers, trace.experts), np.float32)
    for row in range(count):
        for place, layer in enumerate(trace.layers.tolist()):
            best = trace.best[row, place].astype(np.int64)
            value = model.visit(layer, best, trace.codes[row, place])[: trace.experts]
            result[row + 1, place, : len(value)] = value
    return result


# ---- what is known, and what is to be foretold ----


def at(state: npt.NDArray[Any], place: int) -> npt.NDArray[Any]:
    """[T, L, ...]: of a state array, what holds when layer number ``place`` of a token is visited:
    the layers up to it have passed, the others have not yet."""
    return np.concatenate([state[1:, : place + 1], state[:-1, place + 1 :]], axis=1)


def decayed(signal: npt.NDArray[Any], half: float) -> F32:
    """State array of a running mean with a half life in tokens; 0 keeps the last."""
    rate = np.float32(1 - 0.5 ** (1 / half)) if half else np.float32(1)
    result = np.zeros((len(signal) + 1, *signal.shape[1:]), np.float32)
    for row, now in enumerate(signal):
        result[row + 1] = result[row] + rate * (now - result[row])
    return result


def distance(part: Part, place: int) -> F32:
    """[T, L, E]: steps (a token has L) from a visit of ``place`` to the next use of each page."""
    count, layers, _ = part.shape
    following = np.full((count + 1, *part.shape[1:]), np.inf, np.float32)
    for row in range(count - 1, -1, -1):
        following[row] = np.where(part.used[row], row, following[row + 1])
    ahead = np.arange(layers)[None, :, None] - place
    now = np.arange(count)[:, None, None]
    return ((at(following, place) - now) * layers + ahead).astype(np.float32)


def targets(part: Part, place: int) -> F32:
    """[T, L, E, keeps]."""
    far = distance(part, place)[..., None] / part.shape[1]
    return (np.array(KEEPS, np.float32) ** far).astype(np.float32)


def own_features(part: Part) -> F32:
    """State array [T + 1, L, E, F]: what is known of a page by itself."""
    count = len(part.used)
    found = [decayed(part.used, half) for half in USES]
    found += [decayed(part.said, half) for half in SCORES]
    since, gap = np.full((2, count + 1, *part.used.shape[1:]), 1000, np.float32)
    for row, used in enumerate(part.used):
        gap[row + 1] = np.where(used, since[row] + 1, gap[row])
        since[row + 1] = np.where(used, 0, since[row] + 1)
    found += [np.log2(1 + since) / 10, np.log2(1 + gap) / 10, part.reuse]
    return np.stack(found, axis=3)


def context(part: Part, place: int) -> F32:
    """[T, C]: what the routers of all layers said, as known at ``place``."""
    count = len(part.used)
    found = [at(decayed(part.said, half), place).reshape(count, -1) for half in CONTEXT]
    return np.concatenate([*found, np.ones((count, 1), np.float32)], axis=1)


# ---- fits ----


def ridge(x: F32, y: F32, penalty: float) -> F32:
    """Weights [C, N] of ``y`` [T, N] by ``x`` [T, C]."""
    moment = x.T @ x + np.float32(penalty) * np.eye(x.shape[1], dtype=np.float32)
    result: F32 = np.linalg.solve(moment, x.T @ y)
    return result


class Fit:
    """The ridge regression and the network over it, trained on ``parts``."""

    def __init__(self, parts: Sequence[Part], left_out: bool) -> None:
        """``left_out``: whether the network sees predictions for sequences the regression was not
        fitted on, as it will where it is tried."""
        self._rng = np.random.default_rng(0)
        layers = parts[0].shape[1]
        self.penalty = 0.0
        self._weights: list[F32] = []
        rows, wanted = [], []
        own = [own_features(part) for part in parts]
        groups = np.concatenate([p.trace.sequence + 1000 * i for i, p in enumerate(parts)])
        for place in range(layers):
            x = np.concatenate([context(part, place) for part in parts])
            y = np.concatenate([targets(part, place).reshape(len(part.used), -1) for part in parts])
            guess = self._fit_ridge(x, y, groups, left_out)
            begin = 0
            for part, known in zip(parts, own, strict=True):
                said = guess[begin : begin + len(part.used)]
                begin += len(part.used)
                share = SAMPLE * len(part.used) / len(x) / layers
                chosen = self._rng.integers(part.used.size, size=int(share))
                rows.append(features(part, known, said, place)[chosen])
                wanted.append(targets(part, place).reshape(-1, len(KEEPS))[chosen])
        self._net = self._train(np.concatenate(rows), np.concatenate(wanted))

    def _fit_ridge(self, x: F32, y: F32, groups: npt.NDArray[Any], left_out: bool) -> F32:
        """Keeps the weights of one place; returns what the network is to see."""
        names, guess = np.unique(groups), np.empty_like(y)
        folds = [groups == name for name in names]
        if not self.penalty:  # chosen at the first place, for all
            tried = {}
            for penalty in PENALTIES:
                test = folds[0]
                tried[penalty] = np.square(x[test] @ ridge(x[~test], y[~test], penalty) - y[test])
            self.penalty = min(PENALTIES, key=lambda p: float(tried[p].mean()))
        self._weights.append(ridge(x, y, self.penalty))
        if not left_out:
            return x @ self._weights[-1]
        for test in folds:
            guess[test] = x[test] @ ridge(x[~test], y[~test], self.penalty)
        return guess

    def _train(self, x: F32, y: F32) -> torch.nn.Module:
        torch.manual_seed(0)
        self._mean, self._spread = x.mean(axis=0), x.std(axis=0) + np.float32(1e-6)
        inputs = torch.from_numpy((x - self._mean) / self._spread)
        outputs = torch.from_numpy(y)
        net = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], WIDTH),
            torch.nn.SiLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.SiLU(),
            torch.nn.Linear(WIDTH, len(KEEPS)),
        )
        count = EPOCHS * len(x) // BATCH
        adam = torch.optim.Adam(net.parameters(), lr=RATE)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, count)
        for _ in range(count):
            batch = torch.randint(len(x), (BATCH,))
            loss = torch.nn.functional.mse_loss(net(inputs[batch]), outputs[batch])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            falling.step()
        return net.eval()

    def worths(self, part: Part) -> dict[str, F32]:
        """Of the ridge alone and of the network: [T, L now, pages, keeps]."""
        count, layers, experts = part.shape
        shape = (count, layers, layers * experts, len(KEEPS))
        result = {"ridge": np.empty(shape, np.float32), "network": np.empty(shape, np.float32)}
        own = own_features(part)
        for place in range(layers):
            said = context(part, place) @ self._weights[place]
            result["ridge"][:, place] = said.reshape(count, -1, len(KEEPS))
            x = (features(part, own, said, place) - self._mean) / self._spread
            with torch.no_grad():
                some = [torch.from_numpy(x[i : i + CALL]) for i in range(0, len(x), CALL)]
                pieces = [self._net(piece).numpy() for piece in some]
            result["network"][:, place] = np.concatenate(pieces).reshape(count, -1, len(KEEPS))
        return result


def features(part: Part, own: F32, said: F32, place: int) -> F32:
    """[T x L x E, F] at the visits of ``place``; ``said`` [T, pages x keeps] is the ridge's."""
    count, layers, experts = part.shape
    known = at(own, place)
    still = np.zeros((count, layers, experts, 2 * layers + 1), np.float32)
    still[:, np.arange(layers), :, np.arange(layers)] = 1
    rounds = (np.arange(layers) - place - 1) % layers  # layers between now and the page's
    still[:, np.arange(layers), :, layers + rounds] = 1
    still[..., -1] = np.log2(1 + part.trace.position)[:, None, None] / 10
    guess = said.reshape(count, layers, experts, len(KEEPS))
    return np.concatenate([known, still, guess], axis=3).reshape(count * layers * experts, -1)
