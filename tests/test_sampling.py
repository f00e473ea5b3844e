"""Sampling: ties, seeds, cuts, distribution, broken logits, settings out of range (R43 R71)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from k3offload.errors import NumericError, UsageError
from k3offload.sampling import Sampler, Sampling


def row(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def draws(sampling: Sampling, logits: NDArray[np.float32], count: int) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.choose(logits) for _ in range(count)]


def chi_square(seen: list[int], expected: NDArray[np.float64]) -> float:
    counts = np.bincount(seen, minlength=len(expected))
    wanted = expected * len(seen)
    return float(((counts - wanted) ** 2 / wanted).sum())


GREEDY = [
    Sampling(),
    Sampling(temperature=1.0, top_k=1, seed=1),
    Sampling(temperature=1.0, top_p=0.0, seed=2),
]


@pytest.mark.parametrize("sampling", GREEDY)
def test_ties_go_to_the_lowest_id(sampling: Sampling) -> None:
    """R71: temperature 0, top-k 1 and top-p 0 take the largest logit, lowest id of equals."""
    assert sampling.greedy
    assert draws(sampling, row(0, 3, 1, 3, 3), 20) == [1] * 20
    assert draws(sampling, row(*[7.0] * 50), 5) == [0] * 5
    assert draws(sampling, row(-math.inf, -5, -5), 3) == [1] * 3


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_same_seed_same_tokens_whatever_runs_beside(settings: dict[str, Any]) -> None:
    """R71: a request's tokens depend on its seed; another request in between changes nothing."""
    logits = np.random.default_rng(0).normal(size=200).astype(np.float32)
    alone = draws(Sampling(temperature=1.0, seed=7, **settings), logits, 50)
    one = Sampler(Sampling(temperature=1.0, seed=7, **settings))
    two = Sampler(Sampling(temperature=0.7, seed=8, **settings))
    beside = []
    for _ in range(50):
        beside.append(one.choose(logits))
        two.choose(logits)
        np.random.default_rng().random()
    assert alone == beside
    assert alone != draws(Sampling(temperature=1.0, seed=9, **settings), logits, 50)
    assert len(set(alone)) > 1


def test_open_seed_is_drawn_and_told() -> None:
    """R71: without a seed two requests differ, and the seed in use reproduces the request."""
    logits = np.zeros(1000, dtype=np.float32)
    first, second = (Sampler(Sampling(temperature=1.0)) for _ in range(2))
    tokens = [first.choose(logits) for _ in range(10)]
    assert tokens != [second.choose(logits) for _ in range(10)]
    assert tokens == draws(Sampling(temperature=1.0, seed=first.seed), logits, 10)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature: float) -> None:
    """R71: 2,000 draws fit softmax(logits / temperature), and not a neighbouring temperature.

    29.9 is the chi-square with 8 degrees of freedom that chance exceeds once in 5,000.
    """
    logits = row(2.0, 1.5, 1.0, 0.5, 0.0, -0.5, 1.2, 0.3, -1.0)
    seen = draws(Sampling(temperature=temperature, seed=11), logits, 2000)

    def expected(t: float) -> NDArray[np.float64]:
        weights = np.exp(logits.astype(np.float64) / t)
        return np.asarray(weights / weights.sum(), dtype=np.float64)

    assert chi_square(seen, expected(temperature)) < 29.9
    assert chi_square(seen, expected(temperature * 1.5)) > 29.9


def kept(sampling: Sampling, logits: NDArray[np.float32]) -> set[int]:
    return set(draws(sampling, logits, 400))


def test_top_k_keeps_the_lowest_ids_at_a_tie() -> None:
    logits = row(1, 2, 2, 2, 0)
    assert kept(Sampling(temperature=1.0, top_k=2, seed=0), logits) == {1, 2}
    assert kept(Sampling(temperature=1.0, top_k=4, seed=0), logits) == {0, 1, 2, 3}


@pytest.mark.parametrize("settings", [{"top_k": 7}, {"top_p": 6.9 / 350}])
def test_cuts_through_many_equals_keep_the_lowest_ids(settings: dict[str, Any]) -> None:
    """7 of 350 equals among others, by count and by share; an unstable sort would pick any."""
    ids = np.random.default_rng(1).permutation(1000)[:350]
    logits = np.full(1000, -100, dtype=np.float32)
    logits[ids] = 3.0
    lowest = set(np.sort(ids)[:7].tolist())
    assert kept(Sampling(temperature=1.0, seed=0, **settings), logits) == lowest


@pytest.mark.parametrize(("drawn", "token"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_ends_of_the_random_range(
    drawn: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0, a value exactly at a border, and the largest below 1 never choose an impossible token."""

    class Fixed:
        def random(self) -> float:
            return drawn

    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    monkeypatch.setattr(sampler, "_random", Fixed())
    assert sampler.choose(row(-math.inf, 0, -math.inf, 0, -math.inf)) == token


@pytest.mark.parametrize("top_k", [0, 5, 6, 10**9])
def test_top_k_off_and_beyond_the_vocabulary_are_the_same(top_k: int) -> None:
    """R71: 0 and anything from the vocabulary up cut nothing and draw the same tokens."""
    logits = row(1, 2, 2, 2, 0)
    plain = draws(Sampling(temperature=1.0, seed=3), logits, 100)
    assert draws(Sampling(temperature=1.0, top_k=top_k, seed=3), logits, 100) == plain


def test_top_p() -> None:
    """R71: the fewest tokens that reach p; the one that crosses it stays; equals by lowest id."""
    logits = np.log(row(0.1, 0.4, 0.2, 0.2, 0.1))
    for top_p, ids in [(1e-9, {1}), (0.39, {1}), (0.41, {1, 2}), (0.7, {1, 2, 3})]:
        assert kept(Sampling(temperature=1.0, top_p=top_p, seed=0), logits) == ids
    assert kept(Sampling(temperature=1.0, top_p=0.85, seed=0), logits) == {0, 1, 2, 3}
    assert kept(Sampling(temperature=1.0, top_p=1.0, seed=0), logits) == {0, 1, 2, 3, 4}


def test_top_p_works_on_what_top_k_left() -> None:
    """Order of the cuts: after top-k 2 the best holds 0.4 / 0.7, which reaches 0.55."""
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    assert kept(Sampling(temperature=1.0, top_p=0.55, seed=0), logits) == {0, 1}
    assert kept(Sampling(temperature=1.0, top_k=2, top_p=0.55, seed=0), logits) == {0}


def test_temperature_comes_before_the_cuts() -> None:
    """At temperature 2 the ratio 0.16 becomes 0.4, so min-p 0.3 keeps what it drops at 1."""
    logits = np.log(row(1.0, 0.16))
    assert kept(Sampling(temperature=1.0, min_p=0.3, seed=0), logits) == {0}
    assert kept(Sampling(temperature=2.0, min_p=0.3, seed=0), logits) == {0, 1}


def test_min_p() -> None:
    logits = np.log(row(0.5, 0.3, 0.1, 0.1))
    assert kept(Sampling(temperature=1.0, min_p=0.19, seed=0), logits) == {0, 1, 2, 3}
    assert kept(Sampling(temperature=1.0, min_p=0.25, seed=0), logits) == {0, 1}
    assert kept(Sampling(temperature=1.0, min_p=1.0, seed=0), logits) == {0}


def test_what_is_left_keeps_its_proportions() -> None:
    """Renormalised after the cuts; 17.0 is the limit for 3 degrees of freedom, once in 1,400."""
    p = np.array([0.30, 0.25, 0.20, 0.15, 0.06, 0.04])
    logits = np.log(p).astype(np.float32)
    seen = draws(Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.3, seed=4), logits, 2000)
    assert chi_square(seen, p[:4] / p[:4].sum()) < 17.0


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = row(0.0, 1e30, -1e30, 1e30)
    seen = kept(Sampling(temperature=temperature, seed=0), logits)
    assert seen == ({1, 3} if temperature < 1 else {0, 1, 2, 3})


def test_minus_infinity_is_never_chosen() -> None:
    logits = row(-math.inf, 0, -math.inf, 0, -math.inf)
    for settings in ({}, {"top_k": 4}, {"top_p": 0.999}):
        assert kept(Sampling(temperature=5.0, seed=0, **settings), logits) == {1, 3}


BROKEN = [
    (row(0, math.nan, 1), r"hold \+?nan at token id 1"),
    (row(math.inf, 0, math.nan), r"hold (\+inf at token id 0|\+?nan at token id 2)"),
    (row(0, 0, math.inf), r"hold \+inf at token id 2"),
    (row(-math.inf, -math.inf), r"are -inf everywhere"),
    (row(*[math.nan] * 4), r"hold \+?nan at token id 0"),
]


@pytest.mark.parametrize("sampling", [*GREEDY, Sampling(temperature=1.0, seed=0)])
@pytest.mark.parametrize(("logits", "message"), BROKEN)
def test_broken_logits_end_the_request(
    sampling: Sampling, logits: NDArray[np.float32], message: str
) -> None:
    """R43: NaN, +inf or nothing but -inf is an error naming the step, never token 0."""
    sampler = Sampler(sampling)
    sampler.choose(row(1, 2))
    sampler.choose(row(1, 2))
    with pytest.raises(NumericError, match=r"Step 2: the logits " + message):
        sampler.choose(logits)


@pytest.mark.parametrize("at", [0, 999, 2303])
def test_one_nan_anywhere_is_seen(at: int) -> None:
    """R43: also beside a larger number in front of it."""
    logits = np.linspace(5, -5, 2304, dtype=np.float32)
    logits[at] = math.nan
    with pytest.raises(NumericError, match=f"at token id {at}"):
        Sampler(Sampling()).choose(logits)


def test_wrong_shape() -> None:
    for logits in (np.zeros((2, 3), np.float32), np.zeros(0, np.float32)):
        with pytest.raises(UsageError, match=r"Pass one row, \[vocab\]"):
            Sampler(Sampling()).choose(logits)


WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_p", None),
    ("min_p", -1),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", True),
    ("seed", -1),
    ("seed", 0.5),
    ("stop", "text"),
    ("stop", ["a"]),
    ("stop", ("a", "")),
    ("stop", (1,)),
    ("ignore_end", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    """R71: no setting is accepted and ignored."""
    with pytest.raises(UsageError, match=rf"^{field} is "):
        Sampling(**{field: value})


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    st.floats(0.01, 5),
    st.integers(0, 40),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**64),
)
def test_any_settings_choose_a_token_that_they_allow(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = row(*values)
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    token = Sampler(sampling).choose(logits)
    rank = int((logits > logits[token]).sum() + (logits[:token] == logits[token]).sum())
    assert 0 <= token < len(values)
    assert top_k == 0 or rank < top_k
    ratio = math.exp((float(logits[token]) - float(logits.max())) / temperature)
    assert ratio >= min_p - 1e-12
