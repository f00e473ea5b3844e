"""Verdict on logits against a reference: the float32 rule and the bfloat16 rule.

A router near-tie may honestly flip in other arithmetic and, through the state, move every later
token.  So tokens from the first one whose smallest router margin is under ``safe_router`` are
not judged by the float32 rule.  An arg-max is judged only where the reference's best token leads
by more than 20 times the allowed error.  The bfloat16 rule is meant for models that do not
amplify rounding (the "calm" ones): elsewhere a correct bfloat16 engine fails it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

TOL: Final = 2e-4  # relative L2 error of one token's logits
LEAD: Final = 20  # times the allowed error, before an arg-max counts
BF16_MEDIAN: Final = 0.04  # relative L2 error of the median token
BF16_ARGMAX: Final = 0.9  # share of tokens with the reference's arg-max


@dataclass(frozen=True)
class Report:
    """What the comparison found; true when it passed."""

    passed: bool
    tokens: int
    judged: int  # tokens before the first router near-tie
    finite: bool
    worst: float  # largest relative L2 error of a token (inf when not finite)
    worst_token: int
    median: float
    argmax_equal: float  # share of all tokens
    argmax_wrong: int  # judged tokens whose arg-max differs
    first_over: int | None  # first token over the tolerance

    def __bool__(self) -> bool:
        return self.passed


def judge(
    ref_logits: NDArray[Any],
    cand: NDArray[Any],
    margin: NDArray[Any] | None = None,
    tol: float = TOL,
    safe_router: float = 0.0,
    bf16: bool = False,
) -> Report:
    """Judge ``cand`` [T, V] against ``ref_logits`` [T, V].

    ``margin`` [layers, T] is the reference's router margin (None: every token is judged).
    """
    ref, got = np.asarray(ref_logits, np.float64), np.asarray(cand, np.float64)
    assert ref.shape == got.shape, (ref.shape, got.shape)
    assert ref.ndim == 2, ref.shape
    near = np.zeros(len(ref), bool) if margin is None else np.min(margin, axis=0) < safe_router
    judged = int(near.argmax()) if near.any() else len(ref)
    finite = bool(np.isfinite(got).all())
    with np.errstate(invalid="ignore"):
        error = np.linalg.norm(ref - got, axis=1) / np.linalg.norm(ref, axis=1)
    error = np.where(np.isfinite(error), error, np.inf)
    ranked = np.sort(ref, axis=1)
    clear = ranked[:, -1] - ranked[:, -2] > LEAD * tol * np.abs(ref).max(axis=1)
    equal = ref.argmax(axis=1) == got.argmax(axis=1)
    wrong = int((clear & ~equal)[:judged].sum())
    if bf16:
        fine = float(np.median(error)) <= BF16_MEDIAN and float(equal.mean()) >= BF16_ARGMAX
    else:
        fine = bool((error[:judged] <= tol).all()) and wrong == 0
    over = np.flatnonzero(error > tol)
    return Report(
        passed=finite and judged > 0 and fine,
        tokens=len(ref),
        judged=judged,
        finite=finite,
        worst=float(error.max()),
        worst_token=int(error.argmax()),
        median=float(np.median(error)),
        argmax_equal=float(equal.mean()),
        argmax_wrong=wrong,
        first_over=int(over[0]) if len(over) else None,
    )
