"""The two rules that decide whether logits are right: they pass, and they fail."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.judge import judge

F64 = NDArray[np.float64]

RNG = np.random.default_rng(0)
REF: F64 = RNG.standard_normal((20, 50)) * 3
NOISE = RNG.standard_normal(REF.shape)


def noisy(size: float, tokens: slice = slice(None)) -> F64:
    """The reference with relative L2 error ``size`` on ``tokens``."""
    out: F64 = REF.copy()
    scale = size * np.linalg.norm(REF, axis=1) / np.linalg.norm(NOISE, axis=1)
    out[tokens] += (NOISE * scale[:, None])[tokens]
    return out


def test_float32_rule_is_every_token() -> None:
    assert judge(REF, noisy(1.9e-4))
    report = judge(REF, noisy(2.1e-4, slice(7, 8)))
    assert not report
    assert (report.worst_token, report.first_over) == (7, 7)
    assert report.worst == pytest.approx(2.1e-4)


def test_argmax_counts_where_the_margin_allows() -> None:
    """Two tokens swapped at the top: an error by itself where the lead was clear."""
    wrong = REF.copy()
    first, second = np.argsort(REF[3])[[-1, -2]]
    wrong[3, [first, second]] = REF[3, [second, first]]
    assert judge(REF, wrong, tol=1.0)  # a lead below 20 x tol says nothing
    lead = (REF[3, first] - REF[3, second]) / np.abs(REF[3]).max()
    report = judge(REF, wrong, tol=lead / 21)
    assert not report
    assert report.argmax_wrong == 1


def test_tokens_after_a_near_tie_are_not_judged() -> None:
    margin = np.full((3, 20), 0.1)
    margin[1, 12] = 1e-6
    bad = noisy(0.5, slice(12, None))
    assert not judge(REF, bad, margin)
    report = judge(REF, bad, margin, safe_router=1e-4)
    assert report
    assert report.judged == 12
    margin[:, 0] = 0  # nothing left to judge is no pass
    assert not judge(REF, REF, margin, safe_router=1e-4)


def test_bf16_rule_is_the_median_and_the_argmaxes() -> None:
    assert judge(REF, noisy(0.03), bf16=True)
    assert judge(REF, noisy(5.0, slice(0, 1)), bf16=True)
    assert not judge(REF, noisy(0.05), bf16=True)
    third = REF.copy()
    third[:3, 0] += 100  # 15 % of the arg-maxes
    assert not judge(REF, third, bf16=True)
    assert not judge(REF, noisy(0.03))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("bf16", [False, True])
def test_nothing_but_numbers(bad: float, bf16: bool) -> None:
    broken = REF.copy()
    broken[19, 49] = bad
    report = judge(REF, broken, bf16=bf16)
    assert not report
    assert not report.finite


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError):
        judge(REF, REF[:, :-1])
