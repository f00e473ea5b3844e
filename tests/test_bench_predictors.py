"""``bench predictors``: guesses by rank and layer, misses that are gone, recorded routing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.bench_predictors import Watched, equal_parts
from k3offload.bench_routing import record_routing
from k3offload.errors import UsageError
from k3offload.scheduler.hints import Guess, Hints
from k3offload.scheduler.policy_lru import Policy as Lru
from k3offload.scheduler.replay_tiers import Link, ModelTier
from k3offload.scheduler.replay_timed import Pace, replay_timed
from k3offload.tiers.base import PageId
from k3offload.trace import Trace, read_trace
from k3offload.trace_made import NANO, pattern, trace_of, write_trace
from tests.helpers_engine import BRIEF, call, checkpoint

GOLDEN = Path(__file__).parents[1] / "benchmarks" / "traces" / "nano_held_out.zip"


EXAMPLES = Path(__file__).parents[1] / "examples"


class Knows:
    """Guesses what the next layer of a trace will choose, and as many others before or behind."""

    asks_router = asks_latent = False

    def __init__(self, trace: Trace, wrong_first: int = 0) -> None:
        self._trace, self._wrong, self._asked = trace, wrong_first, 0

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        assert hints.next_layer is not None
        row, place = divmod(self._asked, len(self._trace.layers))
        self._asked += 1
        chosen = self._trace.chosen[row, place].tolist()
        wrong = [e for e in range(self._trace.experts) if e not in chosen][: self._wrong]
        pages = [PageId(hints.next_layer, e) for e in [*wrong, *chosen]]
        return [(page, 1.0) for page in pages if page.expert in wrong or hints.absent(page)]

    def learn(self, layer: int, experts: Any) -> None:
        """It knows."""


def watched(wrong: int, slots: int = 84) -> tuple[Watched, Any, Trace]:
    trace = trace_of(pattern("skewed", 60), NANO.experts, page_bytes=1000)
    seen = Watched(Knows(trace, wrong), trace.layers.tolist(), trace.top_k)
    counts = replay_timed(
        trace.leases(), Lru(slots), seen, slots, ModelTier(1000, Link(float("inf"))), pace=Pace(1.0)
    )
    return seen, counts, trace


def test_who_knows_everything_is_always_right() -> None:
    seen, counts, trace = watched(0, 336)
    found = seen.figures()
    assert counts.misses == counts.late == 0 and counts.useful == counts.prefetches > 0
    assert found["covered_by_rank"][-1] == 1.0 and found["covered_by_layer"] == [1.0] * 7
    assert found["useful_by_layer"] == [1.0] * 7 and found["first_useful"] == 1.0
    assert sum(found["guesses_by_rank"]) == int(seen.wanted.sum()) == counts.prefetches
    assert found["guesses_by_rank"][trace.top_k] == 0
    assert found["guesses_by_rank"] == sorted(found["guesses_by_rank"], reverse=True)


@pytest.mark.parametrize("wrong", [0, 2])
def test_what_was_wanted_and_not_guessed_is_missed(wrong: int) -> None:
    """Where reads take no time, the store counts as a miss what we count as not covered."""
    seen, counts, _ = watched(wrong)
    assert counts.misses == int(seen.wanted.sum()) - int(seen.right.sum())
    assert wrong or counts.misses  # what was brought can push out what will be asked for
    later = counts.useful - int(seen.right.sum())  # asked for, but by a later sweep
    assert (later > 0) == bool(wrong) and counts.late == 0


def test_the_rank_of_wrong_guesses_is_seen() -> None:
    found = watched(2)[0].figures()
    assert found["useful_by_rank"][:2] == [0.0, 0.0]
    assert found["useful_by_rank"][2:] == [1.0] * 3
    assert found["covered_by_rank"][1] == 0.0 and found["covered_by_rank"][-1] > 0.9
    assert all(0 < share < 0.8 for share in found["useful_by_layer"])


def lines_of(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    code, out, err = call(["bench", *arguments, "--json"], capsys)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_over_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a predictor bytes are those of ``bench policies``, part by part."""
    common = ["--repeats", 2, "--rows", 120, "--capacity", "25%"]
    lines = lines_of(
        ["predictors", "--from-trace", GOLDEN, *common, "--policy", "lru", "--predictor", "repeat",
         "--predictor", "router"], capsys,
    )  # fmt: skip
    plain = lines_of(["policies", GOLDEN, *common, "--policy", "lru"], capsys)
    assert [line["predictor"] for line in lines] == ["repeat", "repeat", "router", "router"]
    assert [line["bytes_without"] for line in lines] == 2 * [line["bytes"] for line in plain]
    for line in lines:
        assert line["tokens"] == 60 and line["counts"] and line["trace"] == plain[0]["trace"]
        assert len(line["useful_by_rank"]) == 5 and len(line["covered_by_layer"]) == 7
        assert line["covered_in_time"] <= 1 and (line["useful"] is None) == (not line["issued"])
    router = lines[2]
    assert router["first_useful"] > 0.7 and router["covered"] > 0.5  # what the guess is worth
    assert router["covered_by_rank"] == sorted(router["covered_by_rank"])
    slow = lines_of(
        ["predictors", "--from-trace", GOLDEN, *common, "--policy", "lru", "--predictor", "router",
         "--rate", "3M"], capsys,
    )  # fmt: skip
    assert slow[0]["covered"] == router["covered"]  # reads that take no time
    assert slow[0]["covered_in_time"] < router["covered_in_time"]
    near, sure = EXAMPLES / "policy_near.py", EXAMPLES / "predict_sure.py"
    own = lines_of(
        ["predictors", "--from-trace", GOLDEN, *common, "--policy", near, "--predictor", sure,
         "--predictor", sure], capsys,
    )  # fmt: skip
    assert [(line["policy"], line["predictor"]) for line in own] == 2 * [("near", "sure")]
    code, out, _ = call(["bench", "predictors", "--from-trace", GOLDEN, *common], capsys)
    assert code == 0 and "useful by rank" in out and "counted, not timed" in out


def test_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its routing is recorded; a fit from another trace serves the latent predictor."""
    model = checkpoint(**BRIEF)
    fitted = record_routing(model, tmp_path / "fit", [None], 24, ("latent",))
    assert len(fitted.best) == 24 and "latent" in fitted.more
    lines = lines_of(
        ["predictors", model, "-n", 12, "--repeats", 2, "--capacity", "25%", "--fit",
         tmp_path / "fit"], capsys,
    )  # fmt: skip
    assert {line["predictor"] for line in lines} >= {"combined", "latent", "repeat", "router"}
    assert "none" not in {line["predictor"] for line in lines}
    assert all(line["tokens"] == 12 and line["misses_without"] for line in lines)
    assert all(line["fit"] == fitted.digest and "fit" in line["settings"] for line in lines)
    assert [line["seed"] for line in lines[:2]] == [0, 1]
    assert lines[0]["bytes_without"] != lines[1]["bytes_without"]  # another place of the text


def test_parts_are_equal() -> None:
    trace = read_trace(GOLDEN).rows(slice(50))
    parts = equal_parts(trace, 3)
    assert [len(part.best) for part in parts] == [16, 16, 16]
    assert np.array_equal(parts[2].best, trace.best[32:48])
    with pytest.raises(UsageError, match="50 tokens and cannot be cut into 51"):
        equal_parts(trace, 51)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nano", "--from-trace", GOLDEN], "MODEL does nothing with --from-trace"),
        (["--from-trace", GOLDEN, "-n", 5], "--tokens does nothing with --from-trace"),
        (["--from-trace", GOLDEN, "--dtype", "float32"], "--dtype does nothing with --from-trace"),
        (["--from-trace", GOLDEN, "--seed", 3], "--seed does nothing with --from-trace"),
        (["--rows", 5], "--rows is about a trace"),
        (["--from-trace", GOLDEN, "--capacity", "6%+40%"], "two tiers"),
        (["--from-trace", GOLDEN, "--predictor", "latent"], "does not say what to predict from"),
        (["--from-trace", GOLDEN, "--fit", GOLDEN], "holds no latents"),
        (
            ["--from-trace", "made", "--predictor", "router"],
            "does not hold what the predictor router",
        ),
    ],
)
def test_refused(
    given: list[Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(Path("made"), trace_of(pattern("skewed", 20), NANO.experts, page_bytes=1000))
    code, out, err = call(["bench", "predictors", *given], capsys)
    assert code == 2 and said in err and not out
