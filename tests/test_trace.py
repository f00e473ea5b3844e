"""Recorded routing: every row of every whole sweep, once, with scores that say what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import k3offload
from k3offload import trace
from k3offload.errors import UsageError
from k3offload.scheduler.hints import CHOSEN, quantise
from k3offload.scheduler.sweep import Group, Span, pack
from k3offload.trace import Recorder, read_trace

LAYERS, EXPERTS, TOP_K = (1, 2, 4), 12, 2


def recorder(folder: Path, latent: int = 0) -> Recorder:
    return Recorder(folder, LAYERS, EXPERTS, TOP_K, latent)


def scores_of(layer: int, positions: Sequence[int]) -> torch.Tensor:
    rng = [np.random.default_rng([layer, position]) for position in positions]
    return torch.tensor(np.stack([r.random(EXPERTS, np.float32) for r in rng]))


def positions(group: Group) -> list[int]:
    return [part.start + i for part in group.parts for i in range(part.count)]


def sweep(r: Recorder, spans: Sequence[Span], stop: int | None = None, ahead: bool = False) -> None:
    """One sweep through the hooks, layer by layer, up to layer ``stop``."""
    groups = pack(spans)
    for layer in LAYERS:
        if layer == stop:
            return
        if ahead:
            every = [p for group in groups for p in positions(group)]
            latent = np.full((len(every), 3), layer - 1, np.float32)
            r.on_ahead(layer - 1, layer, scores_of(layer + 100, every).numpy(), latent)
        for group in groups:
            scores = scores_of(layer, positions(group))
            experts = torch.sort(torch.topk(scores, TOP_K).indices).values
            r.on_route(layer, group, experts, torch.ones(experts.shape), scores)


def test_what_is_recorded(tmp_path: Path) -> None:
    r = recorder(tmp_path / "t")
    r.sequences = [7, 8, 9]
    sweep(r, [Span(0, 600, False), Span(30, 1, True), Span(5, 20, False)])  # three groups
    r.sequences = [8]
    sweep(r, [Span(31, 1, True)], ahead=True)
    sweep(r, [Span(32, 1, True)])  # nobody asked the routers: what they said before is no guess
    r.close()
    t = read_trace(tmp_path / "t")
    assert t.layers.tolist() == list(LAYERS) and (t.experts, t.top_k) == (EXPERTS, TOP_K)
    assert t.position.tolist() == [30, *range(600), *range(5, 25), 31, 32]
    assert t.sequence.tolist() == [8, *[7] * 600, *[9] * 20, 8, 8]
    assert t.sweep.tolist() == [0] * 621 + [1, 2]
    assert t.decode.tolist() == [True, *[False] * 620, True, True]
    assert (np.take_along_axis(t.dense(), t.best.astype(int), 2) == t.codes).all()
    assert ((t.dense() > 0).sum(2) <= 2 * TOP_K).all()
    for place, layer in enumerate(LAYERS):
        codes = quantise(scores_of(layer, t.position.tolist()), TOP_K)
        assert (
            np.take_along_axis(codes, t.best[:, place].astype(int), 1) == t.codes[:, place]
        ).all()
        assert (np.sort(t.best[:, place, :TOP_K]) == t.chosen[:, place]).all()
        assert (t.codes[:, place, :TOP_K] >= CHOSEN).all()
        assert t.ahead(0, place) is None and t.ahead(622, place) is None
        said = t.ahead(621, place)
        assert said is not None
        truth = quantise(scores_of(layer + 100, [31]), TOP_K)
        known = t.ahead_best[621, place]
        assert (said[0, known] == truth[0, known]).all() and (said > 0).sum() <= 2 * TOP_K


def test_latents_only_when_wanted(tmp_path: Path) -> None:
    for width, wanted in ((3, [1.0, 0.0, 0.0]), (0, [])):
        r = recorder(tmp_path / str(width), width)
        sweep(r, [Span(3, 1, True)], ahead=True)
        r.close()
        latent = read_trace(tmp_path / str(width)).latent
        assert latent.shape == (1, 3, width)
        assert latent[0, :, :1].ravel().tolist() == wanted  # of layer 1, told at its end


def test_broken_sweeps_are_left_out(tmp_path: Path) -> None:
    r = recorder(tmp_path / "t")
    sweep(r, [Span(0, 10, False)], stop=4)
    sweep(r, [Span(0, 12, False)])
    sweep(r, [Span(12, 1, True)], stop=2, ahead=True)
    r.close()
    t = read_trace(tmp_path / "t")
    assert t.position.tolist() == list(range(12)) and t.sweep.tolist() == [0] * 12


def test_recording_may_begin_within_a_sweep(tmp_path: Path) -> None:
    r = recorder(tmp_path / "t")
    group = pack([Span(0, 3, False)])[0]
    scores = scores_of(4, range(3))
    r.on_route(4, group, torch.zeros(3, TOP_K, dtype=torch.int64), torch.ones(3, TOP_K), scores)
    sweep(r, [Span(3, 2, False)])
    r.close()
    assert read_trace(tmp_path / "t").position.tolist() == [3, 4]


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "CHUNK", 2000)
    r = recorder(tmp_path / "t")
    for position in range(40):
        sweep(r, [Span(position, 1, True)])
        assert r._bytes < 2000
    r.close()
    assert len(list((tmp_path / "t").iterdir())) > 1
    t = read_trace(tmp_path / "t")
    assert t.position.tolist() == t.sweep.tolist() == list(range(40))
    assert len(t.head(5).chosen) == 5 and len(t.head(None).chosen) == 40


def test_refusals(tmp_path: Path) -> None:
    r = recorder(tmp_path / "t")
    sweep(r, [Span(0, 5, False)])
    r.close()
    with pytest.raises(UsageError, match="not empty"):
        recorder(tmp_path / "t")
    file = tmp_path / "t" / "trace-000001.npz"
    good = file.read_bytes()
    for content in (b"", b"text", good[: len(good) // 2], good[:300] + b"\xff" * 40 + good[340:]):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="no routing trace"):
            read_trace(file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no routing trace"):
        read_trace(tmp_path / "empty")


def test_of_an_engine(tmp_path: Path) -> None:
    """The hook of a real engine gives what the recorder takes."""
    with k3offload.load("nano", context=128) as engine:
        moe = engine.spec.moe
        assert moe is not None
        r = Recorder(tmp_path / "t", engine.spec.moe_layers, moe.experts, moe.top_k)
        engine.hooks.on_route = r.on_route
        with engine.session() as session:
            session.append(list(range(70)))
            session.logits()
            session.append_sampled(70)
            session.logits()
        r.close()
    t = read_trace(tmp_path / "t")
    assert t.position.tolist() == list(range(71)) and t.decode.tolist() == [False] * 70 + [True]
    assert (np.sort(t.best[:, :, : moe.top_k]) == t.chosen).all()
