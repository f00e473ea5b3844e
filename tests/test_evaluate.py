"""``k3offload evaluate``: what is counted, what is compared, and what the curves are made of."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.damage import held_out_text
from k3offload.engine import Engine
from k3offload.evaluate_append import WAYS
from k3offload.evaluate_recall import NAMES, PLACES, WHO, Recall, _context, _scores, knee, recall
from k3offload.loading import load
from k3offload.plot_svg import line_chart
from tests.helpers_engine import call, logits_of

pytest.importorskip("zarr")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    with load("nano", context=700, sessions=12) as engine:
        yield engine


def test_turns_cost_what_is_new(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Live: the user's tokens and the reply's last. Shared: from the last multiple of 64."""
    plot = tmp_path / "a.svg"
    arguments = ["--turns", 3, "--user", 150, "--reply", 4, "--json", "--plot", plot]
    code, out, err = call(["evaluate", "append", "nano", *arguments], capsys)
    assert code == 0, err
    turns = json.loads(out)
    assert [t["context"] for t in turns] == [150, 304, 458]
    assert [t["computed"]["live"] for t in turns] == [150, 151, 151]
    assert [t["computed"]["shared"] for t in turns] == [150, 304 - 128, 458 - 256]
    assert [t["computed"]["cold"] for t in turns] == [150, 304, 458]
    for turn in turns:
        assert set(turn["first_token"]) == set(WAYS)
        assert all(seconds > 0 for seconds in turn["first_token"].values())
        assert turn["save_seconds"] > 0
    last = turns[-1]["expert_bytes"]
    assert 0 < last["live"] <= last["shared"] <= last["cold"]
    with load("nano") as engine:
        state = engine.spec.kda_state_bytes(2) + engine.spec.vocab * 4
        rows = 154 * (engine.spec.latent_bytes_per_token(2) + 4)
    assert 0 < turns[2]["save_bytes"] - state - rows < 4000  # a manifest and a few small files
    lines = ElementTree.fromstring(plot.read_text()).findall(f"{SVG}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3, 3]


def test_the_append_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--turns", 1, "--user", 20, "--reply", 1]
    code, out, _ = call(["evaluate", "append", "nano", *arguments], capsys)
    cells = out.split("\n")[2].split()
    assert code == 0 and cells[0] == "20" and cells[4:7] == ["20", "20", "20"]


def test_facts_stand_in_their_places(nano: Engine) -> None:
    filler = nano.encode(held_out_text())
    made = _context(nano, filler, len(filler) - 5, 600, [4, 0, 7])
    assert len(made) == 600
    text = nano.tokenizer.decode(made)
    for who, name, (low, high) in zip(
        WHO, ("Hezekiah", "Zebulun", "Barnabas"), ((0, 0.15), (0.35, 0.65), (0.85, 1)), strict=True
    ):
        assert low <= text.index(f"And {who} was called {NAMES[NAMES.index(name)]}.") / len(text)
        assert text.index(f"{who} was called {name}.") / len(text) <= high


def test_scores_are_log_probabilities_of_whole_names(nano: Engine) -> None:
    """Against rows of one sequence each: question and name computed in one go."""
    context = nano.encode("And it came to pass, that")
    with nano.session() as session:
        session.append(context)
        scores = _scores(nano, session, WHO[0])
    asked = [*context, *nano.encode(f" And {WHO[0]} was called")]
    assert max(len(nano.encode(f" {name}")) for name in NAMES) > 1
    for name, score in zip(NAMES, scores, strict=True):
        tokens = nano.encode(f" {name}")
        rows = logits_of(nano, [*asked, *tokens]).astype(np.float64)
        wanted = 0.0
        for i, token in enumerate(tokens):
            row = rows[len(asked) - 1 + i]
            wanted += row[token] - row.max() - math.log(np.exp(row - row.max()).sum())
        assert score == pytest.approx(wanted, abs=0.15)  # bfloat16, cut elsewhere


def test_recall_takes_the_difference_of_two_tellings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever names and texts are worth, only what was told counts: here the tail, and the middle
    of short contexts, of a model that likes some names and places better than others."""
    import k3offload.evaluate_recall as module

    real, seen = module._ask, []

    def knows(engine: Engine, context: Any) -> np.ndarray[Any, Any]:
        assert np.isfinite(real(engine, context[-64:])).all()
        seen.append(len(context))
        text = engine.tokenizer.decode(context)
        likes = np.arange(8) * 3.0 + np.arange(3)[:, None] * 5
        for place, worth in enumerate((0, 2.0 if len(context) < 500 else 0, 1.0)):
            told = [i for i, name in enumerate(NAMES) if f"{WHO[place]} was called {name}." in text]
            assert len(told) == 1
            likes[place, told] += worth
        return likes

    monkeypatch.setattr(module, "_ask", knows)
    found = recall("nano", longest=1100, trials=2)
    assert seen == [256] * 4 + [512] * 4 + [1024] * 4
    assert [r.context for r in found] == [256] * 3 + [512] * 3 + [1024] * 3
    assert tuple(r.place for r in found) == PLACES * 3
    assert [r.known for r in found] == [0, 1, 1, 0, 0, 1, 0, 0, 1]
    assert [r.lead for r in found] == [0, 2, 1, 0, 0, 1, 0, 0, 1]


def test_the_embedded_model_knows_what_it_was_just_told(nano: Engine) -> None:
    """Right behind the fact the difference is no accident."""
    filler = nano.encode(held_out_text())
    known = []
    for trial in range(16):
        rows = []
        for name in (NAMES[trial % 8], NAMES[(trial + 3) % 8]):
            with nano.session() as session:
                session.append(filler[trial * 50 : trial * 50 + 30])
                session.append(f" And {WHO[0]} was called {name}.")
                rows.append(_scores(nano, session, WHO[0]))
        change = rows[0] - rows[1]
        known.append(change[trial % 8] > change[(trial + 3) % 8])
    assert sum(known) >= 13


def test_recall_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same seed gives the same curve, also with little memory; another deals other names."""
    base = ["evaluate", "recall", "nano", "--longest", 256, "--trials", 2]
    plot = tmp_path / "r.svg"
    code, out, err = call([*base, "--json", "--plot", plot], capsys)
    assert code == 0, err
    facts = json.loads(out)
    assert facts["knee"] is None and [r["place"] for r in facts["rows"]] == list(PLACES)
    assert "Recall" in plot.read_text()
    assert json.loads(call([*base, "--json", "--cache", "200k"], capsys)[1]) == facts
    assert json.loads(call([*base, "--json", "--seed", 1], capsys)[1]) != facts
    code, out, _ = call(base, capsys)
    assert code == 0 and "none up to here" in out and out.split("\n")[1].split()[0] == "256"


def rows(*shares: tuple[float, float, float], trials: int = 10) -> list[Recall]:
    return [
        Recall(256 << i, place, trials, share, 0.0)
        for i, some in enumerate(shares)
        for place, share in zip(PLACES, some, strict=True)
    ]


def test_the_knee() -> None:
    assert knee(rows((0.9, 1, 1), (0.9, 0.8, 1), (0.6, 0.6, 0.9), (0.5, 0.4, 0.6))) == 1024
    assert knee(rows((1, 1, 1), (1, 0.9, 1))) is None
    assert knee(rows((0.6, 0.7, 0.6), (0.4, 0.5, 0.5))) is None  # guessing explains it
    assert knee(rows((0.5, 0.5, 0.5), (1, 1, 1), (0.6, 0.6, 0.6))) == 1024


def test_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\xff")
    (tmp_path / "short").write_text("a word")
    (tmp_path / "long").write_text("and he went up. " * 700_000)
    for arguments, words in (
        (["recall", "nano", "--longest", 100], "Give 256 or more"),
        (["recall", "nano", "--trials", 0], "--trials is 0"),
        (["recall", "nano", "--seed", "-1"], "The seed is -1"),
        (["recall", "nano", "--longest", 1 << 20], "exceed the model's context"),
        (
            ["append", "nano", "--turns", 9000, "--user", 200, "--text", tmp_path / "long"],
            "exceed the model's context",
        ),
        (["append", "nano", "--text", tmp_path / "short"], "8 turns of 200 are wanted"),
        (["append", "nano", "--text", tmp_path / "bad"], "not UTF-8: byte 0"),
        (["append", "nano", "--plot", tmp_path / "no" / "x.svg"], "no is not a folder"),
    ):
        code, _, err = call(["evaluate", *arguments], capsys)
        assert code == 2 and words in err


def test_a_chart_places_its_points() -> None:
    chart = line_chart("a < b", "x", "y", {"one": [(1, 0), (2, 5), (4, 10)]}, doublings=True)
    root = ElementTree.fromstring(chart)
    (line,) = root.findall(f"{SVG}polyline")
    xs, ys = zip(*(map(float, p.split(",")) for p in line.attrib["points"].split()), strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1]) and ys[0] > ys[1] > ys[2]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2])
    assert "a < b" in [text.text for text in root.findall(f"{SVG}text")]
    ElementTree.fromstring(line_chart("flat", "x", "y", {"one": [(3, 2)]}))
