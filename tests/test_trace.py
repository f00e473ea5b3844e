"""Recorded routing: every row of every whole sweep, once, with scores that say what was chosen."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import k3offload
from k3offload import trace
from k3offload.errors import UsageError
from k3offload.find import find_model
from k3offload.kernels.attnres_reference import attnres
from k3offload.model import Run
from k3offload.scheduler.hints import CHOSEN, NEAR, nearest, quantise
from k3offload.scheduler.lease import Event
from k3offload.scheduler.sweep import Group, Span, pack
from k3offload.spec import ModelSpec
from k3offload.trace import Trace, Writer, read_trace
from k3offload.trace_made import plain, write_trace
from k3offload.trace_record import needed, record
from k3offload.trace_rows import Recorder

LAYERS, EXPERTS, TOP_K = (1, 2, 4), 12, 2
SPARE = 10 << 20  #: of what is planned for recording, for what is not counted by Python


def recorder(folder: Path, **parts: Any) -> Recorder:
    return Recorder(folder, LAYERS, EXPERTS, TOP_K, **parts)


def scores_of(layer: int, positions: Sequence[int]) -> torch.Tensor:
    rng = [np.random.default_rng([layer, position]) for position in positions]
    return torch.tensor(np.stack([r.random(EXPERTS, np.float32) for r in rng]))


def positions(group: Group) -> list[int]:
    return [part.start + i for part in group.parts for i in range(part.count)]


class State:
    """Of a sequence."""


STATES = [State() for _ in range(400)]


def runs_of(spans: Sequence[Span]) -> Any:
    """Of the same sequences each time."""
    return [Run(STATES[i], range(span.count)) for i, span in enumerate(spans)]  # type: ignore[arg-type]


def sweep(r: Recorder, spans: Sequence[Span], stop: int | None = None, ahead: bool = False) -> None:
    """One sweep through the hooks, layer by layer, up to layer ``stop``."""
    groups = pack(spans)
    r.on_sweep(runs_of(spans))
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
    r = recorder(tmp_path / "t", ahead=True, margin=True)
    sweep(r, [Span(0, 600, False), Span(30, 1, True), Span(5, 20, False)])  # three groups
    sweep(r, [Span(31, 1, True)], ahead=True)
    sweep(r, [Span(32, 1, True)])  # nobody asked the routers: what they said before is no guess
    r.close()
    t = read_trace(tmp_path / "t")
    assert t.layers.tolist() == list(LAYERS) and (t.experts, t.top_k) == (EXPERTS, TOP_K)
    assert t.position.tolist() == [30, *range(600), *range(5, 25), 31, 32]
    assert t.sequence.tolist() == [1, *[0] * 600, *[2] * 20, 0, 0]  # as they came
    assert t.sweep.tolist() == [0] * 621 + [1, 2]
    assert t.decode.tolist() == [True, *[False] * 620, True, True]
    assert (np.take_along_axis(t.dense(), t.best.astype(int), 2) == t.codes).all()
    assert ((t.dense() > 0).sum(2) <= TOP_K + NEAR).all()
    for place, layer in enumerate(LAYERS):
        scores = scores_of(layer, t.position.tolist()).numpy()
        codes = quantise(scores, TOP_K)
        assert (
            np.take_along_axis(codes, t.best[:, place].astype(int), 1) == t.codes[:, place]
        ).all()
        assert (np.sort(t.best[:, place, :TOP_K]) == t.chosen[:, place]).all()
        assert (t.codes[:, place, :TOP_K] >= CHOSEN).all()
        ranked = -np.sort(-scores, axis=1)
        assert np.allclose(
            t.more["margin"][:, place], ranked[:, TOP_K - 1] - ranked[:, TOP_K], atol=1e-3
        )
        assert t.ahead(0, place) is None and t.ahead(622, place) is None
        said = t.ahead(621, place)
        assert said is not None
        truth = quantise(scores_of(layer + 100, [31]), TOP_K)
        known = t.more["ahead_best"][621, place]
        assert (said[0, known] == truth[0, known]).all() and (said > 0).sum() <= TOP_K + NEAR
    some = read_trace(tmp_path / "t", parts=["margin"])
    assert list(some.more) == ["margin"] and some.digest == t.digest
    assert t.rows(slice(5)).digest != t.digest


def test_a_row_gets_the_same_bytes_in_any_company(tmp_path: Path) -> None:
    """However many rows are put into 8 bits at a time."""
    for name, spans in (("one", [(i, 1) for i in range(90)]), ("all", [(0, 90)])):
        r = recorder(tmp_path / name)
        for begin, count in spans:
            sweep(r, [Span(begin, count, False)])
        r.close()
    one, all_ = (read_trace(tmp_path / name) for name in ("one", "all"))
    assert (one.best == all_.best).all() and (one.codes == all_.codes).all()


def test_without_the_native_library_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("native", "numpy"):
        if name == "numpy":
            monkeypatch.setattr("k3offload.router_codes.native.available", lambda: False)
        r = recorder(tmp_path / name, ahead=True, margin=True)
        sweep(r, [Span(0, 3000, False), Span(9, 1, True)])  # put into 8 bits layer by layer
        sweep(r, [Span(9, 1, True)], ahead=True)
        r.close()
    native, numpy = (read_trace(tmp_path / name) for name in ("native", "numpy"))
    assert native.digest == numpy.digest and len(native.best) == 3002
    for name in native.more:
        assert native.more[name].any() and (native.more[name] == numpy.more[name]).all()


def test_latents_only_when_wanted(tmp_path: Path) -> None:
    for width, wanted in ((3, [1.0, 0.0, 0.0]), (0, [])):
        r = recorder(tmp_path / str(width), latent=width)
        sweep(r, [Span(3, 1, True)], ahead=True)
        r.close()
        more = read_trace(tmp_path / str(width)).more
        assert set(more) == ({"latent"} if width else set())
        if width:  # of layer 1, told at its end
            assert more["latent"].shape == (1, 3, width)
            assert more["latent"][0, :, :1].ravel().tolist() == wanted


def test_broken_sweeps_are_left_out(tmp_path: Path) -> None:
    r = recorder(tmp_path / "t")
    sweep(r, [Span(0, 10, False)], stop=4)
    sweep(r, [Span(0, 12, False)])
    sweep(r, [Span(12, 1, True)], stop=2, ahead=True)
    r.close()
    t = read_trace(tmp_path / "t")
    assert t.position.tolist() == list(range(12)) and t.sweep.tolist() == [1] * 12


def test_recording_may_begin_within_a_sweep(tmp_path: Path) -> None:
    r = recorder(tmp_path / "t")
    group = pack([Span(0, 3, False)])[0]
    scores = scores_of(4, range(3))
    r.on_route(4, group, torch.zeros(3, TOP_K, dtype=torch.int64), torch.ones(3, TOP_K), scores)
    sweep(r, [Span(3, 2, False)])
    r.close()
    assert read_trace(tmp_path / "t").position.tolist() == [3, 4]


def test_memory_is_bounded_and_a_kill_loses_one_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the disk is readable at any time: here after every sweep, nothing closed."""
    row = 3 * (TOP_K + NEAR) * len(LAYERS) + 3 * 4 + 1
    monkeypatch.setattr(trace, "CHUNKS", 8 * row)
    monkeypatch.setattr("k3offload.trace_rows.RAW", 600)
    r = recorder(tmp_path / "t")
    for position in range(40):
        sweep(r, [Span(position, 1, True)])
        assert r._bytes < 600
        found = read_trace(tmp_path / "t").position.tolist()
        assert found == list(range(len(found))) and position - len(found) < 12
    r.close()
    t = read_trace(tmp_path / "t")
    assert t.position.tolist() == t.sweep.tolist() == list(range(40))
    assert len(t.rows(slice(5)).chosen) == 5


def test_ten_thousand_tokens_of_k3_are_less_than_80_mb(tmp_path: Path) -> None:
    """A fiftieth of them, of random routing, which cannot be made small."""
    rng = np.random.default_rng(0)
    scores = rng.random((200 * 92, 896), np.float32)
    best, codes = nearest(quantise(scores, 16), 16)
    t = plain(
        np.arange(1, 93), 896, 16, best.reshape(200, 92, 20).astype(np.uint16),
        codes.reshape(200, 92, 20),
    )  # fmt: skip
    write_trace(tmp_path / "t", t)
    stored = sum(p.stat().st_size for p in (tmp_path / "t").rglob("*") if p.is_file())
    assert stored < 80e6 / 50
    assert read_trace(tmp_path / "t").digest == t.digest


def test_refusals(tmp_path: Path) -> None:
    r = recorder(tmp_path / "t")
    sweep(r, [Span(0, 5, False)])
    r.close()
    with pytest.raises(UsageError, match="not an empty folder"):
        recorder(tmp_path / "t")
    chunk = next(p for p in (tmp_path / "t" / "codes" / "c").rglob("*") if p.is_file())
    good = chunk.read_bytes()
    for content in (b"", b"text", good[: len(good) // 2], None):
        chunk.unlink() if content is None else chunk.write_bytes(content)
        with pytest.raises(UsageError, match="no routing trace"):
            read_trace(tmp_path / "t")
    chunk.write_bytes(good)
    assert len(read_trace(tmp_path / "t").best) == 5
    about = tmp_path / "t" / "zarr.json"
    about.write_text(about.read_text().replace('"version": 4', '"version": 5'))
    with pytest.raises(UsageError, match="k3offload trace' 5"):
        read_trace(tmp_path / "t")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing", about):
        with pytest.raises(UsageError, match="no routing trace"):
            read_trace(path)


def recorded(folder: Path, parts: Sequence[str], **how: Any) -> tuple[Trace, k3offload.Engine]:
    """Of a prompt and three tokens."""
    with k3offload.load("nano", context=128, **how) as engine:
        record(engine, folder, parts)
        with engine.session() as session:
            session.append(list(range(70)))
            session.logits()
            for token in (70, 71, 72):
                session.append_sampled(token)
                session.logits()
    return read_trace(folder), engine


def test_routers_are_asked_ahead_also_where_no_page_is_missing(tmp_path: Path) -> None:
    few, _ = recorded(tmp_path / "few", ("ahead", "latent"), cache="500k", predict="none")
    t, engine = recorded(tmp_path / "t", ("ahead", "latent"))
    assert engine.plan.slots == engine.plan.experts
    for name in ("ahead_best", "ahead_codes", "latent"):
        assert t.more[name][70:].any() and not t.more[name][:70].any()
        assert (t.more[name] == few.more[name]).all(), name


def test_of_an_engine(tmp_path: Path) -> None:
    t, engine = recorded(tmp_path / "t", ("ahead", "mixing", "tiers", "latent"), cache="500k")
    moe = engine.spec.moe
    assert moe is not None
    assert t.position.tolist() == list(range(73)) and t.decode.tolist() == [False] * 70 + [True] * 3
    assert (t.page_bytes, t.about["policy"]) == (engine.checkpoint.expert_bytes, "reuse")
    assert t.more["latent"][71, :-1].any(axis=1).all() and not t.more["latent"][:70].any()
    guesses = [t.ahead(71, place) is not None for place in range(len(t.layers))]
    assert sum(guesses) >= len(guesses) - 1
    mixing = t.more["mixing"].astype(int)
    assert mixing.shape[:2] == (73, 2 * len(engine.spec.layers))
    total = mixing.sum(2)  # of shares that add up to 255, rounded
    assert ((total == 0) | (abs(total - 255) <= 2)).all() and (total[:, 3:] > 0).all()
    kinds = np.bincount(t.events["event_kind"], minlength=len(Event))
    requests = kinds[Event.HIT] + kinds[Event.LATE] + kinds[Event.MISS]
    asked = sum(len(step.pages) for step in t.leases())
    assert requests == asked and kinds[Event.LEASE] == 4 * len(t.layers)
    assert kinds[Event.MISS] + kinds[Event.PREFETCH] == kinds[Event.ENDED] + kinds[Event.FAILED]
    assert (np.diff(t.events["event_time"]) >= 0).all()


def test_shares_are_those_of_the_mix() -> None:
    from k3offload.kernels.attnres_reference import shares

    torch.manual_seed(0)
    entries = [torch.randn(5, 8) for _ in range(3)]
    norm, query = torch.randn(8), torch.randn(8)
    share = shares(entries, norm, query, 1e-6)
    mixed = sum(share[:, i, None] * entry for i, entry in enumerate(entries))
    assert torch.allclose(torch.as_tensor(mixed), attnres(entries, norm, query, 1e-6), atol=1e-6)


def test_a_full_disk_ends_the_trace_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def full(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    with k3offload.load("nano", context=128) as engine:
        engine.warn = said.append
        record(engine, tmp_path / "t")
        monkeypatch.setattr(Writer, "append", full)
        with engine.session() as session:
            session.append([1, 2, 3])
            assert session.logits().shape
    assert len(said) == 1 and "ends here: No space left" in said[0]
    assert len(read_trace(tmp_path / "t").best) == 0


def test_a_full_disk_ends_what_hears_the_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3offload.trace_rows.RAW", 1)  # every sweep is written

    def full(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    with k3offload.load("nano", context=128, cache="500k") as engine:
        assert engine.store is not None
        before = engine.store.watch
        engine.warn = lambda text: None
        heard = record(engine, tmp_path / "t", ["tiers"])
        assert engine.store.watch is not before
        monkeypatch.setattr(Writer, "append", full)
        with engine.session() as session:
            session.append([1, 2, 3])
            session.logits()
            assert engine.store.watch is before and not heard._events
            requests = engine.store.counts.requests
            session.append([4, 5])
            session.logits()
            assert engine.store.counts.requests > requests
            assert not heard._events and not heard._waiting


@pytest.mark.parametrize("how", ["a prompt", "a few", "a crowd"])
def test_recording_takes_no_more_than_is_planned(how: str, tmp_path: Path) -> None:
    """Two sweeps: of a long prompt, of a few rows that decode, whose many scores wait, and of more
    of them than that."""
    deep, experts, top_k, latent = 24, 4096 if how == "a few" else 96, 8, 512
    spans = {
        "a prompt": [Span(0, 3000, False)],
        "a few": [Span(7, 1, True)] * 63,
        "a crowd": [Span(7, 1, True)] * 400,
    }[how]
    nano = ModelSpec.load(find_model("nano"))
    assert nano.moe is not None
    moe = dataclasses.replace(nano.moe, experts=experts, top_k=top_k, latent=latent)
    layers = [dataclasses.replace(nano.layers[1], index=i, ffn="moe") for i in range(deep)]
    spec = dataclasses.replace(nano, moe=moe, layers=tuple(layers))
    assert len(spec.moe_layers) == deep
    parts, groups = ("ahead", "latent", "margin"), pack(spans)
    rows = groups[-1].end
    scores = torch.rand(rows, experts, generator=torch.Generator().manual_seed(0))
    chosen = torch.topk(scores, top_k).indices
    decoding = 1 if how == "a prompt" else rows
    planned = needed(spec, parts, rows, decoding)
    r = Recorder(
        tmp_path / "t", range(deep), experts, top_k, ahead=True, latent=latent, margin=True
    )
    tracemalloc.start()
    try:
        for _ in range(2):
            r.on_sweep(runs_of(spans))
            for layer in range(deep):
                if how != "a prompt":
                    r.on_ahead(
                        layer - 1, layer, scores.numpy(), np.ones((rows, latent), np.float32)
                    )
                for group in groups:
                    own = group.rows
                    r.on_route(layer, group, chosen[own], torch.ones(1), scores[own])
        r.close()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < planned - SPARE, f"{most / 1e6:.0f} MB of {planned / 1e6:.0f}"
    found = read_trace(tmp_path / "t", ["ahead", "margin"])
    assert len(found.best) == 2 * rows
    assert (found.chosen == np.sort(chosen.numpy()).astype(np.uint16)[None, :, None].repeat(
        2, 0).reshape(2 * rows, 1, top_k)).all()  # fmt: skip
