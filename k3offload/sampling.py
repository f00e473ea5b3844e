"""From the logits of one step to one token.

Knows the settings of a request and numpy; not the model, not text.  Each request has its own
random stream, so its tokens depend on its seed and its logits and on no other request.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .constrain import Grammar
from .errors import NumericError, UsageError

Row = NDArray[np.float32]  #: logits, [vocab]


@dataclass(frozen=True)
class Sampling:
    """How one request chooses its tokens.

    The settings apply in the order temperature, top-k, top-p, min-p, and what is left is
    renormalised.  At a cut, equal logits are taken by lowest id.

    temperature: divides the logits; 0 takes the most likely token, the lowest id of equals.
    top_k: keeps the k most likely tokens; 0 keeps all.
    top_p: keeps the fewest most likely tokens whose probabilities reach it; 0 keeps one, 1 all.
    min_p: keeps tokens at least this fraction as likely as the most likely one; 0 keeps all.
    seed: of the request's random stream; None draws one, and ``Sampler.seed`` tells which.
    stop: texts that end the answer, not part of it.
    ignore_end: go on past end tokens.
    grammar: what the answer must look like.  It ends where the grammar is complete and nothing may
        follow, or at an end token, which comes only where it is complete.  ``max_new_tokens`` and
        ``stop`` end it wherever it is, and JSON is then cut off.

    Raises UsageError naming the field that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check(self, "temperature", _number(self.temperature), "a number from 0 up")
        for field in ("top_p", "min_p"):
            _check(self, field, _number(getattr(self, field), 1.0), "a number from 0 to 1")
        _check(self, "top_k", _whole(self.top_k), "a whole number from 0 (off) up")
        _check(self, "seed", self.seed is None or _whole(self.seed), "a whole number from 0 up")
        texts = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        _check(self, "stop", texts, "a tuple of non-empty strings")
        _check(self, "ignore_end", isinstance(self.ignore_end, bool), "True or False")
        known = self.grammar is None or isinstance(self.grammar, Grammar)
        _check(self, "grammar", known, "a Grammar, as Grammar.of_schema(...) gives")
        if self.grammar is not None and self.ignore_end:
            raise UsageError("A grammar says where the answer ends.", "Leave out ignore_end.")

    @property
    def greedy(self) -> bool:
        """Whether every step takes the most likely token, without drawing a random number."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0


class Sampler:
    """Chooses the tokens of one request, one after another.

    ``seed`` is the seed in use (64-bit PCG64 stream), also when the request left it open.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self._step = 0

    def skip(self) -> None:
        """Pass over a step whose token is known: the next one draws what it would have drawn."""
        self._step += 1
        if not self.sampling.greedy:
            self._random.random()

    def choose(self, logits: Row, mask: Callable[[Row], Row] | None = None) -> int:
        """The next token from ``logits`` [vocab], float32; -inf marks a token that may not come.

        ``mask`` marks more of them.  Raises NumericError, naming the step, for NaN, +inf, or -inf
        everywhere; a broken forward pass must end the request instead of turning into token 0 for
        ever.
        """
        step, self._step = self._step, self._step + 1
        best = _sound(logits, step)
        if mask is not None:  # behind the check of all: it may hide a NaN
            logits = mask(logits)
            best = _sound(logits, step)
        s = self.sampling
        if s.greedy:
            return best
        # float64, and the largest logit subtracted first: no temperature can overflow.
        with np.errstate(over="ignore"):  # a tiny temperature may push the others to -inf
            scaled = (logits.astype(np.float64) - float(logits[best])) / s.temperature
        weights = np.exp(scaled)
        if 0 < s.top_k < len(weights) or s.top_p < 1:
            _keep_top(weights, s.top_k or len(weights), s.top_p)
        weights[weights < s.min_p] = 0.0  # the largest weight is exp(0) = 1
        # Inverse of the cumulated distribution, over ids in ascending order whatever was cut.
        # "right" steps over ids of weight 0.
        sums = np.cumsum(weights)
        at = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return min(at, int(np.flatnonzero(weights)[-1]))


def log_probability(logits: Row, token: int) -> float:
    """Natural logarithm of the probability that ``logits`` [vocab] give to ``token``."""
    wide = logits.astype(np.float64)
    return float(wide[token] - wide.max() - np.log(np.exp(wide - wide.max()).sum()))


def _keep_top(weights: NDArray[np.float64], top_k: int, top_p: float) -> None:
    """Sets to 0 all but the most likely ``top_k``, and of these all but the first ``top_p``."""
    order = np.argsort(-weights, kind="stable")  # stable: equals stay in order of id
    weights[order[top_k:]] = 0.0
    if top_p < 1:
        sums = np.cumsum(weights[order])
        # A token stays when those before it do not reach top_p yet; so the first always does
        # (top_p = 0 never comes here).
        before = np.concatenate(([0.0], sums[:-1]))
        weights[order[before >= top_p * sums[-1]]] = 0.0


def _sound(logits: Row, step: int) -> int:
    """The id of the largest logit, lowest of equals, after making sure that it means something."""
    if logits.ndim != 1 or logits.size == 0:
        raise UsageError(f"Logits have shape {logits.shape}.", "Pass one row, [vocab].")
    best = int(np.argmax(logits))  # NaN counts as largest here, so a NaN or +inf shows up
    top = float(logits[best])
    if math.isfinite(top):
        return best
    what = "are -inf everywhere" if top < 0 else f"hold {top:+f} at token id {best}"
    raise NumericError(
        f"Step {step}: the logits {what}, so no token can be chosen.",
        "Start the session afresh, and check the model's files if it happens again.",
    )


def _check(owner: Sampling, field: str, fine: bool, wanted: str) -> None:
    if not fine:
        raise UsageError(f"{field} is {getattr(owner, field)!r}.", f"It must be {wanted}.")


def _number(value: Any, largest: float = sys.float_info.max) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return bool(0 <= value <= largest)  # False for NaN


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
