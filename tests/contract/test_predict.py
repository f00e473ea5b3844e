"""What every predictor must pass.  Predictors are found by file name; this file needs no edit.

Each check takes a way to make a predictor, so that planted wrong ones show that it can fail.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3offload import registry
from k3offload.scheduler.hints import Guess, Hints, Predictor, quantise
from k3offload.tiers.base import PageId

LAYERS, EXPERTS, TOP_K = (2, 3, 5, 8), 24, 3  # dense layers lie between
Make = Callable[[Sequence[int], int, int], Predictor]
Learned = tuple[int, npt.NDArray[np.int64]]

PREDICTORS: dict[str, Make] = {
    name: module.Predictor
    for name, module in registry.implementations("scheduler", "predict").items()
}


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


def steps(seed: int, tokens: int, rows: int = 1) -> Iterator[tuple[Hints, Learned]]:
    """Hints and what the layer then chose.  The router's hints are right half of the time, and the
    latent is what the layer will choose by."""
    rng = np.random.default_rng(seed)
    for _ in range(tokens):
        for before, layer in zip((1, *LAYERS), LAYERS, strict=False):
            scores = rng.random((rows, EXPERTS))
            chosen = np.sort(np.argsort(-scores, axis=1)[:, :TOP_K], axis=1)
            latent = scores.astype(np.float32)
            if rng.random() < 0.5:
                scores = rng.random((rows, EXPERTS))
            resident = set(rng.permutation(EXPERTS)[: EXPERTS // 3].tolist())
            yield (
                Hints(
                    before,
                    layer,
                    frozen(quantise(scores, TOP_K)),
                    frozen(latent),
                    lambda page, resident=resident: page.expert not in resident,  # type: ignore[misc]
                ),
                (layer, frozen(chosen)),
            )


def drive(predictor: Predictor, seed: int, tokens: int, rows: int = 1) -> list[list[Guess]]:
    """The guesses over a seeded workload; each is checked for what all guesses must be."""
    guesses = []
    for hints, (layer, chosen) in steps(seed, tokens, rows):
        guess = predictor.guess(hints.layer, hints)
        check_guess(guess, hints)
        guesses.append(guess)
        predictor.learn(layer, chosen)
    return guesses


def check_guess(guess: list[Guess], hints: Hints) -> None:
    pages, sure = [page for page, _ in guess], [confidence for _, confidence in guess]
    assert len(set(pages)) == len(pages), "a page is named twice"
    assert sure == sorted(sure, reverse=True), "the most likely page does not come first"
    assert all(0 <= c <= 1 for c in sure), "a confidence is no probability"
    for page in pages:
        assert page.layer in LAYERS and page.layer > hints.layer, f"{page} is of no later layer"
        assert 0 <= page.expert < EXPERTS, f"{page} does not exist"
        assert hints.absent(page), f"{page} is there already"


def check_guesses(make: Make) -> None:
    for rows in (1, 5):
        drive(make(LAYERS, EXPERTS, TOP_K), 3, 60, rows)


def check_no_layer(make: Make) -> None:
    """After the last layer, and of a layer that it was not made for, it says nothing."""
    predictor = make(LAYERS, EXPERTS, TOP_K)
    drive(predictor, 4, 30)
    codes = np.full((1, EXPERTS), 255, np.uint8)
    for following in (None, 4, 9):
        assert predictor.guess(8, Hints(8, following, codes)) == []
    predictor.learn(4, np.array([[0, 1, 2]]))


def check_no_hints(make: Make) -> None:
    """Without scores and latent it says what it can, or nothing."""
    predictor = make(LAYERS, EXPERTS, TOP_K)
    for _ in range(2):
        for before, layer in zip((1, *LAYERS), LAYERS, strict=False):
            hints = Hints(before, layer)
            check_guess(predictor.guess(before, hints), hints)
            predictor.learn(layer, np.array([[0, 1, 2]]))


def check_same_again(make: Make) -> None:
    """The same calls, the same answers, and no look at a clock."""

    def clock(*_: object) -> float:
        raise AssertionError("a predictor looked at the clock")

    names = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(time, name, clock)
        first, again = (drive(make(LAYERS, EXPERTS, TOP_K), 5, 80) for _ in range(2))
    assert first == again


def check_broken_sweeps(make: Make) -> None:
    """Guesses that nothing is learned from, and lessons that were not guessed, do no harm."""
    predictor = make(LAYERS, EXPERTS, TOP_K)
    for hints, (layer, chosen) in steps(6, 20):
        predictor.guess(hints.layer, hints)
        if layer % 2:
            predictor.learn(layer, chosen)
            predictor.learn(layer, chosen)
    drive(predictor, 7, 20)


def check_bounded(make: Make) -> None:
    """What it remembers does not grow with the number of tokens."""
    predictor, sizes = make(LAYERS, EXPERTS, TOP_K), []
    for _ in range(2):
        drive(predictor, 8, 120)
        sizes.append(len(pickle.dumps(predictor)))
    assert sizes[1] < 1.02 * sizes[0] + 200


CHECKS = (
    check_guesses,
    check_no_layer,
    check_no_hints,
    check_same_again,
    check_broken_sweeps,
    check_bounded,
)


@pytest.fixture
def fitted(tmp_path: Path) -> Make:
    """The latent predictor with a fit; the registry makes it without, and then it is silent."""
    from k3offload.scheduler import predict_latent

    rng = np.random.default_rng(0)
    latent = rng.random((300, len(LAYERS), EXPERTS))
    codes = np.zeros(latent.shape, np.uint8)
    for place in range(1, len(LAYERS)):
        codes[:, place] = quantise(latent[:, place - 1], TOP_K)
    predict_latent.save_fit(tmp_path / "fit.npz", predict_latent.fit(LAYERS, latent, codes))
    return partial(predict_latent.Predictor, path=tmp_path / "fit.npz")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", PREDICTORS)
def test_contract(name: str, check: Callable[[Make], None]) -> None:
    check(PREDICTORS[name])


@pytest.mark.parametrize("check", CHECKS)
def test_contract_with_a_fit(fitted: Make, check: Callable[[Make], None]) -> None:
    check(fitted)


def test_what_guesses(fitted: Make) -> None:
    """The workload makes predictors speak, so that the checks above check something."""
    speak = {name for name, make in PREDICTORS.items() if any(said(make))}
    assert speak >= {"repeat", "router"} and "none" not in speak
    assert any(said(fitted))


def said(make: Make) -> list[list[Guess]]:
    return drive(make(LAYERS, EXPERTS, TOP_K), 9, 60)


def test_every_file_is_found() -> None:
    files = Path(registry.__file__).with_name("scheduler").glob("predict_*.py")
    assert {f.stem.removeprefix("predict_") for f in files} == set(PREDICTORS)


@pytest.mark.parametrize("name", PREDICTORS)
def test_says_what_it_wants(name: str) -> None:
    predictor = PREDICTORS[name](LAYERS, EXPERTS, TOP_K)
    assert isinstance(predictor.asks_router, bool) and isinstance(predictor.asks_latent, bool)


# ---- planted wrong predictors ----


class Plain:
    """Guesses one page, right in form."""

    asks_router = asks_latent = False

    def __init__(self, layers: Sequence[int], experts: int, top_k: int) -> None:
        self.calls = 0
        self.past: list[object] = []

    def pages(self, hints: Hints) -> list[Guess]:
        layer = hints.next_layer
        if layer not in LAYERS:
            return []
        pages = (PageId(layer, e) for e in range(EXPERTS))
        return [(page, 0.5) for page in pages if hints.absent(page)][:1]

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        self.calls += 1
        return self.pages(hints)

    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        pass


class Twice(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        return super().pages(hints) * 2


class Unsorted(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        found = [PageId(hints.layer + 1, e) for e in range(EXPERTS)]
        found = [p for p in found if p.layer in LAYERS and hints.absent(p)]
        return [(page, i / EXPERTS) for i, page in enumerate(found)]


class TooSure(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        return [(page, 1.5) for page, _ in super().pages(hints)]


class Backwards(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        return [(PageId(2, 0), 0.5)] if hints.absent(PageId(2, 0)) else []


class NoSuchExpert(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        return [(PageId(page.layer, EXPERTS), c) for page, c in super().pages(hints)]


class Resident(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        return [] if hints.next_layer not in LAYERS else [(PageId(hints.next_layer, 0), 0.5)]


class AnyLayer(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        return [] if hints.next_layer is None else [(PageId(hints.next_layer, 0), 0.5)]


class NeedsScores(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        assert hints.next_scores is not None
        return []


class Clock(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        return super().pages(hints) if time.monotonic() else []


class Dice(Plain):
    rng = np.random.default_rng(1)

    def pages(self, hints: Hints) -> list[Guess]:
        return super().pages(hints) if self.rng.random() < 0.5 else []


class WritesHints(Plain):
    def pages(self, hints: Hints) -> list[Guess]:
        if hints.next_scores is not None:
            hints.next_scores[:] = 0
        return []


class NeedsGuess(Plain):
    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        assert self.calls, "learn without a guess before it"
        self.calls -= 1


class Hoards(Plain):
    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        self.past.append(experts.tolist())


PLANTED: list[tuple[type[Plain], Callable[[Make], None]]] = [
    (Twice, check_guesses),
    (Unsorted, check_guesses),
    (TooSure, check_guesses),
    (Backwards, check_guesses),
    (NoSuchExpert, check_guesses),
    (Resident, check_guesses),
    (AnyLayer, check_no_layer),
    (NeedsScores, check_no_hints),
    (Clock, check_same_again),
    (Dice, check_same_again),
    (WritesHints, check_guesses),
    (NeedsGuess, check_broken_sweeps),
    (Hoards, check_bounded),
]


@pytest.mark.parametrize("check", CHECKS)
def test_plain_passes(check: Callable[[Make], None]) -> None:
    check(Plain)


@pytest.mark.parametrize(("wrong", "check"), PLANTED)
def test_planted(wrong: type[Plain], check: Callable[[Make], None]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(wrong)
