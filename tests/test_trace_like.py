"""Drawn routing: each strength does what it says, and a fit comes close to what was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3offload import trace_like
from k3offload.scheduler.hints import CHOSEN
from k3offload.trace import Trace, read_trace
from k3offload.trace_like import (
    Likeness,
    drawn,
    drawn_like,
    linked,
    miss_curve,
    popularity,
    split,
)
from k3offload.trace_made import Size
from tests.helpers_engine import call

SIZE, LENGTHS = Size(4, 24, 3), [80, 80, 80]


def made(seed: int = 0, **strengths: float) -> Trace:
    return drawn(Likeness(**strengths), SIZE, LENGTHS, seed)


def test_a_drawn_trace_is_a_trace() -> None:
    trace = made(skew=0.5, topic=0.5, short=1, long=1, link=1)
    assert trace.best.shape == (240, 4, 7) and trace.digest != made(seed=1).digest
    assert trace.digest == made(skew=0.5, topic=0.5, short=1, long=1, link=1).digest
    assert (np.bincount(trace.sequence) == LENGTHS).all() and trace.position.max() == 79
    assert (trace.codes[..., :3] >= CHOSEN).all() and (np.diff(trace.chosen.astype(int)) > 0).all()


def test_each_strength_does_what_it_says() -> None:
    plain = made()
    slots = [round(share * 96) / 96 for share in trace_like.SHARES[2:]]
    expected = [1 - share for share in slots]  # of what was used of late a share is there
    assert np.allclose(miss_curve(plain)[2:], expected, atol=0.06)
    assert popularity(made(skew=1.5)) > popularity(plain) + 0.15
    assert linked(made(link=2)) > linked(plain) + 0.1
    few = miss_curve(plain, [0.25])[0]
    assert miss_curve(made(short=6), [0.25])[0] < few - 0.1
    assert miss_curve(made(long=15), [0.25])[0] < few - 0.1
    own = [popularity(part) for part in (made(topic=1.5), made(topic=1.5).rows(slice(80)))]
    assert own[1] > own[0] + 0.1  # a sequence has favourites, all together fewer


def test_split_is_by_sequence() -> None:
    first, other = split(made())
    assert set(first.sequence) == {0, 1} and set(other.sequence) == {2}
    assert len(first.best) + len(other.best) == 240


def test_a_fit_comes_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_like, "ROWS", 160)
    recorded = made(seed=5, skew=0.8, short=2, long=2, link=1)
    found, report = drawn_like(recorded, seed=0)
    assert report["farthest"] < 0.06 and report["held_out_farthest"] < 0.1
    begun = drawn(trace_like.START, SIZE, LENGTHS, 3)
    far = [max(np.abs(np.subtract(miss_curve(recorded), miss_curve(t)))) for t in (found, begun)]
    assert far[0] < 0.12 < far[1]
    assert len(found.best) == 240


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t"
    make = [
        "trace",
        "make",
        "drawn",
        "-o",
        out,
        "-n",
        60,
        "--experts",
        24,
        "--link",
        1,
        "--skew",
        1,
    ]
    assert call(make, capsys)[0] == 0
    trace = read_trace(out)
    assert len(trace.best) == 60 and trace.about["likeness"]["link"] == 1
    code, text, _ = call(["trace", "like", out, "-o", tmp_path / "u", "-n", 40], capsys)
    assert code == 0 and "held-out half" in text and len(read_trace(tmp_path / "u").best) == 40
    assert call(["trace", "make", "scan", "-o", tmp_path / "v", "--skew", 1], capsys)[0] == 2
