"""Predictors and their codes: what they learn, when they keep still, how they come back (R60)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3offload.errors import UsageError
from k3offload.scheduler import predict_combined, predict_latent, predict_router
from k3offload.scheduler.hints import CHOSEN, PAYS, Codes, Hints, Ranked, quantise, ranked
from k3offload.tiers.base import PageId

LAYERS, EXPERTS, TOP_K = (1, 2, 3), 32, 4
Sets = npt.NDArray[np.int64]


# ---- codes ----


def test_codes_keep_order_and_cut() -> None:
    scores = np.random.default_rng(0).normal(size=(50, 200)).astype(np.float32)
    codes = quantise(scores, 8)
    order = np.argsort(-scores, axis=1)
    sorted_codes = np.take_along_axis(codes, order, axis=1).astype(int)
    assert (np.diff(sorted_codes, axis=1) <= 0).all()
    assert (sorted_codes[:, 0] == 255).all() and (sorted_codes[:, 7] == CHOSEN).all()
    assert (sorted_codes[:, 8] < CHOSEN).all() and (sorted_codes[:, 100:] == 0).all()
    assert len(np.unique(sorted_codes[:, 8:40])) > 50  # near misses are told apart


def test_codes_do_not_depend_on_scale() -> None:
    scores = np.random.default_rng(1).integers(0, 1000, (20, 64)).astype(np.float32)
    assert (quantise(scores, 4) == quantise(scores * 0.25 - 64, 4)).all()


@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_codes_of_few_and_equal_scores(top_k: int) -> None:
    assert (quantise(np.zeros((2, 5)), top_k) == CHOSEN).all()
    codes = quantise([[1.0, 2.0, 3.0, 4.0, 5.0]], top_k)[0].tolist()
    assert codes == sorted(codes) and codes[5 - top_k] == CHOSEN


def test_codes_of_numbers_that_are_none() -> None:
    codes = quantise([[np.nan, np.inf, -np.inf, 2.0, 1.0, -1.0]], 2)[0].tolist()
    assert codes[3] == 255 and codes[4] == CHOSEN
    assert codes[0] == codes[1] == codes[2] < CHOSEN


def test_ranked_joins_rows() -> None:
    codes = np.array([[255, 128, 200, 0], [0, 255, 128, 200]], np.uint8)
    assert list(ranked(codes, 2)) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert list(ranked(codes[:1], 3)) == [(0, 0), (2, 1), (1, 2)]
    assert list(ranked(np.full((1, 6), 128, np.uint8), 2)) == [(0, 0), (1, 1)]


# ---- what the combiner does ----


def codes_of(experts: Sets) -> Codes:
    """Scores that rank ``experts`` [k], best first, above all others."""
    scores = np.zeros((1, EXPERTS))
    scores[0, experts] = 2 + np.arange(len(experts))[::-1]
    return quantise(scores, TOP_K)


class Drive:
    """Tokens through a predictor; nothing is ever in RAM unless ``resident`` says so."""

    def __init__(self, predictor: Ranked, seed: int = 0) -> None:
        self.predictor, self.rng = predictor, np.random.default_rng(seed)
        self.last: dict[int, Sets] = {}
        self.absent: Callable[[PageId], bool] = lambda page: True

    def draw(self) -> Sets:
        return self.rng.permutation(EXPERTS)[:TOP_K]

    def token(
        self, right: Callable[[int, int], float], repeats: float = 0.0
    ) -> dict[int, list[bool]]:
        """One sweep; by layer, whether each page that was guessed came.  ``right(layer, rank)``:
        how often the router's guess is true; ``repeats``: how often an expert stays."""
        outcome = {}
        for layer in LAYERS:
            chosen = self.draw()
            if layer in self.last:
                stay = self.rng.random(TOP_K) < repeats
                kept = self.last[layer][stay]
                chosen = np.concatenate([kept, np.setdiff1d(chosen, kept)])[:TOP_K]
            others = iter(
                np.setdiff1d(np.arange(EXPERTS), chosen)[self.rng.permutation(EXPERTS - TOP_K)]
            )
            true = self.rng.random(TOP_K) < [right(layer, rank) for rank in range(TOP_K)]
            guess = np.where(true, chosen, [next(others) for _ in range(TOP_K)])
            hints = Hints(layer - 1, layer, codes_of(guess), absent=self.absent)
            pages = self.predictor.guess(layer - 1, hints)
            outcome[layer] = [page.expert in chosen for page, _ in pages]
            self.predictor.learn(layer, np.sort(chosen)[None])
            self.last[layer] = chosen
        return outcome

    def run(self, tokens: int, *how: Any) -> dict[int, tuple[float, float]]:
        """By layer, guessed pages per token and the share of them that came, of the last half."""
        every = [self.token(*how) for _ in range(tokens)][tokens // 2 :]
        joined = {la: [hit for outcome in every for hit in outcome[la]] for la in LAYERS}
        return {la: (len(h) / len(every), sum(h) / max(len(h), 1)) for la, h in joined.items()}


@pytest.fixture
def drive() -> Drive:
    return Drive(predict_combined.Predictor(LAYERS, EXPERTS, TOP_K))


def test_covers_what_is_predictable(drive: Drive) -> None:
    for count, true in drive.run(60, lambda layer, rank: 1.0).values():
        assert count == TOP_K and true == 1.0


def test_learns_within_a_few_tokens(drive: Drive) -> None:
    named = [sum(map(len, drive.token(lambda layer, rank: 1.0).values())) for _ in range(8)]
    assert named[:3] == [0, 0, 0] and named[4:] == [len(LAYERS) * TOP_K] * 4


def test_uniform_routing_backs_off(drive: Drive) -> None:
    """R60: nothing can be foreseen, so nothing is read ahead."""
    pages = sum(count for count, _ in drive.run(600, lambda layer, rank: TOP_K / EXPERTS).values())
    assert pages / (TOP_K * len(LAYERS)) < 0.002


def test_by_layer_and_by_rank(drive: Drive) -> None:
    def right(layer: int, rank: int) -> float:
        return 0.05 if layer == 2 else (0.95, 0.9, 0.3, 0.1)[rank]

    result = drive.run(400, right)
    assert result[2][0] < 0.05
    for layer in (1, 3):
        count, true = result[layer]
        assert 1.9 < count < 2.2 and true > 0.85


def test_falls_back_to_repeats_where_the_router_is_bad(drive: Drive) -> None:
    """Every page is absent, as with a cache that is smaller than one sweep."""
    count, true = drive.run(300, lambda layer, rank: 0.05, 0.9)[2]
    assert count > 3 and true > 0.8


def test_comes_back_after_a_bad_phase(drive: Drive) -> None:
    for tokens, right in ((100, 0.95), (300, 0.05), (300, 0.95)):
        count, _ = drive.run(tokens, lambda layer, rank, right=right: right)[1]
        assert count > 3.5 if right > 0.5 else count < 0.1


def test_bar_rises_while_too_few_come_true(drive: Drive) -> None:
    """Seven in ten is over the bar at rest, but not the four in five that shall come true."""
    drive.run(600, lambda layer, rank: 0.7)
    bar = drive.predictor.bar
    assert bar > PAYS + 0.05
    drive.run(600, lambda layer, rank: 0.97)
    assert drive.predictor.bar == PAYS


def test_precision_is_of_absent_pages(drive: Drive) -> None:
    """A router that is right about what is in RAM and wrong about the rest is not believed."""
    for _ in range(200):
        for layer in LAYERS:
            chosen, missing = np.array([0, 1, 2, 3]), np.array([0, 1, 2, 9])
            codes = codes_of(missing)
            hints = Hints(layer - 1, layer, codes, absent=lambda page: page.expert > 3)
            assert drive.predictor.guess(layer - 1, hints) == []
            drive.predictor.learn(layer, chosen[None])


def test_router_names_all_ranks_with_their_precision() -> None:
    drive = Drive(predict_router.Predictor(LAYERS, EXPERTS, TOP_K))
    count, _ = drive.run(300, lambda layer, rank: (0.9, 0.6, 0.3, 0.1)[rank])[1]
    assert count == TOP_K
    guess = drive.predictor.guess(0, Hints(0, 1, codes_of(np.array([7, 5, 3, 1]))))
    assert [page.expert for page, _ in guess] == [7, 5, 3, 1]
    for (_, confidence), truth in zip(guess, (0.9, 0.6, 0.3, 0.1), strict=True):
        assert abs(confidence - truth) < 0.15


class Planned(Ranked):
    """Names what it is told to."""

    plan: Sequence[tuple[int, int]] = ()  # expert, kind

    def rank(self, hints: Hints) -> Iterator[tuple[PageId, tuple[int, ...]]]:
        return ((PageId(1, expert), (kind,)) for expert, kind in self.plan)


def test_a_page_named_twice_is_as_sure_as_the_surer_kind() -> None:
    predictor, hints = Planned(LAYERS, EXPERTS, TOP_K), Hints(0, 1)
    predictor.plan = [(5, 1), (6, 2)]
    for _ in range(20):
        predictor.guess(0, hints)
        predictor.learn(1, np.array([[0, 1, 2, 6]]))
    sure = predictor.precision.share
    assert sure[1,] == 0.0 and sure[2,] > 0.8
    for predictor.plan in ([(7, 1), (7, 2)], [(7, 2), (7, 1)]):
        assert predictor.guess(0, hints) == [(PageId(1, 7), sure[2,])]


def test_a_lesson_is_learned_once() -> None:
    predictor = Planned(LAYERS, EXPERTS, TOP_K)
    predictor.plan = [(5, 1)]
    predictor.guess(0, Hints(0, 1))
    predictor.learn(1, np.array([[5]]))
    learned = dict(predictor.precision.share)
    predictor.learn(1, np.array([[6]]))
    assert predictor.precision.share == learned and learned[1,] > 0


# ---- the latent map ----


def routing(tokens: int, seed: int) -> tuple[npt.NDArray[np.float32], Codes]:
    """Latents [T, 3, 20] and codes [T, 3, E] that the first latent decides, through 5 numbers."""
    rng = np.random.default_rng(7)
    down, up = rng.normal(size=(20, 5)), rng.normal(size=(2, 5, EXPERTS))
    latent = np.random.default_rng(seed).normal(1.0, size=(tokens, 3, 20)).astype(np.float32)
    codes = np.zeros((tokens, 3, EXPERTS), np.uint8)
    for ahead in range(2):
        codes[:, 1 + ahead] = quantise(latent[:, 0] @ down @ up[ahead], TOP_K)
    return latent, codes


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    path = tmp_path / "fit.npz"
    predict_latent.save_fit(path, predict_latent.fit(LAYERS, *routing(1500, 1), rank=8))
    return path


def test_latent_sees_two_layers_ahead(fitted: Path) -> None:
    predictor = predict_latent.Predictor(LAYERS, EXPERTS, TOP_K, fitted)
    latent, codes = routing(120, 2)
    hits: dict[int, list[bool]] = {2: [], 3: []}
    for row in range(len(latent)):
        chosen = {2 + a: set(np.flatnonzero(codes[row, 1 + a] >= CHOSEN).tolist()) for a in (0, 1)}
        guess = predictor.guess(1, Hints(1, 2, None, latent[row, 0, None]))
        for page, _ in guess:
            hits[page.layer].append(page.expert in chosen[page.layer])
        for layer, experts in chosen.items():
            predictor.learn(layer, np.array([sorted(experts)]))
    for layer in (2, 3):
        assert len(hits[layer]) > 150 and np.mean(hits[layer]) > 0.7


def test_latent_map_is_affine(fitted: Path) -> None:
    predictor = predict_latent.Predictor(LAYERS, EXPERTS, TOP_K, fitted)
    predictor.bar = 0.0
    bias = predict_latent.read_fit(fitted)["bias"]
    guess = predictor.guess(1, Hints(1, 2, None, np.zeros((1, 20), np.float32)))
    for ahead in range(2):
        best = np.argsort(-np.clip(bias[0, ahead], 0, 255).astype(int), kind="stable")[:TOP_K]
        named = {page.expert for page, _ in guess if page.layer == 2 + ahead}
        assert named == set(best.tolist()) and bias[0, ahead].std() > 5


def test_latent_fit_is_the_same_again_and_small() -> None:
    first, again = (predict_latent.fit(LAYERS, *routing(300, 1), rank=8) for _ in range(2))
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    assert first["down"].shape == (3, 8, 20) and first["up"].shape == (3, 2, EXPERTS, 8)


def test_latent_refuses_a_fit_of_another_model(fitted: Path) -> None:
    for layers, experts in (((1, 2), EXPERTS), (LAYERS, EXPERTS + 1)):
        with pytest.raises(UsageError, match="another model"):
            predict_latent.Predictor(layers, experts, TOP_K, fitted)


def broken_files(path: Path) -> Iterator[bytes]:
    good, arrays = path.read_bytes(), dict(np.load(path))
    yield b""
    yield good[: len(good) // 2]
    yield b"no fit at all"
    arrays["up"] = arrays["up"][:, :, :, :3]
    predict_latent.save_fit(path, arrays)
    yield path.read_bytes()


def test_latent_refuses_what_is_no_fit(fitted: Path) -> None:
    for content in broken_files(fitted):
        fitted.write_bytes(content)
        with pytest.raises(UsageError, match="no fit"):
            predict_latent.Predictor(LAYERS, EXPERTS, TOP_K, fitted)
    with pytest.raises(UsageError, match="no fit"):
        predict_latent.read_fit(fitted.with_name("missing.npz"))
