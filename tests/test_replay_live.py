"""Replay of a recorded run is the run: the engine's counts, to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import k3offload
from k3offload import registry
from k3offload.errors import UsageError
from k3offload.scheduler.counts import Counts
from k3offload.scheduler.lease import Event
from k3offload.scheduler.replay import replay
from k3offload.scheduler.replay_tiers import Link, LoggedTier, ModelTier, Sleep, log_of
from k3offload.scheduler.replay_timed import Pace, replay_timed
from k3offload.scheduler.store import ExpertStore
from k3offload.tiers.base import PageId, Priority, Ticket
from k3offload.trace import Trace, read_trace
from k3offload.trace_record import record

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form."
PAGE = 14688  #: bytes of an expert of the embedded model


def policy(name: str, slots: int) -> Any:
    return registry.implementation("scheduler", "policy", name).Policy(slots)


def predictor(name: str, trace: Trace) -> Any:
    made = registry.implementation("scheduler", "predict", name).Predictor
    return made(trace.layers.tolist(), trace.experts, trace.top_k)


def live(
    folder: Path,
    policy: str,
    slots: int,
    predict: str = "none",
    parts: tuple[str, ...] = (),
    *,
    context: int = 256,
    sweep: int = 64,
    text: str = TEXT,
    times: int = 2,
) -> tuple[Counts, int, Trace]:
    """Two sequences side by side: prompts, rows that decode alone and together."""
    how: dict[str, Any] = {"cache": slots * PAGE, "policy": policy, "predict": predict}
    with k3offload.load("nano", context=context, sweep=sweep, sessions=2, **how) as engine:
        record(engine, folder, parts)
        with engine.session() as one, engine.session() as two:
            one.append(text * times)
            two.append("And Jesus said unto him,")
            engine.advance([one, two])
            for i in range(24):
                for session in (one, two) if i % 3 else (one,):
                    session.append_sampled(int(session.logits().argmax()))
                engine.advance([one, two])
        assert engine.store is not None
        counts, slots = engine.store.counts.copy(), engine.store.slots
    counts.wait_seconds = 0
    return counts, slots, read_trace(folder)


@pytest.mark.parametrize("slots", [20, 84])  # fewer than a prompt asks a layer for, and more
@pytest.mark.parametrize("name", registry.names("scheduler", "policy"))
def test_without_predictor_replay_is_the_engine(name: str, slots: int, tmp_path: Path) -> None:
    counts, slots, trace = live(tmp_path / "t", name, slots)
    assert replay(trace.leases(), policy(name, slots), slots, trace.page_bytes) == counts
    assert counts.bytes == counts.misses * PAGE > 0
    tier = ModelTier(PAGE, Link(1e9, 1e-3))
    timed = replay_timed(trace.leases(), policy(name, slots), predictor("none", trace), slots, tier)
    assert timed.wait_seconds > 0
    timed.wait_seconds = 0
    assert timed == counts
    other = trace.rows(trace.sweep != 5)
    assert replay(other.leases(), policy(name, slots), slots, PAGE) != counts


@pytest.mark.parametrize(
    ("name", "predict", "slots", "near", "at_once"),
    [("lru", "router", 84, 0, 9999), ("reuse", "combined", 120, 0.02, 2),
     ("lfru", "repeat", 40, 0, 1)],
)  # fmt: skip
def test_with_a_log_of_arrivals_replay_is_the_engine(
    name: str, predict: str, slots: int, near: float, at_once: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Hits, late pages, guesses and bytes; in modelled time bytes come ``near``, but for
    guesses in vain: how much of those is read before they are cancelled is the machine's."""
    monkeypatch.setattr("k3offload.scheduler.store.BESIDE_GUESSES", at_once * PAGE)
    counts, slots, trace = live(tmp_path / "t", name, slots, predict, ("tiers", "ahead"))
    assert counts.prefetches and counts.useful

    def logged(slots: int, without: tuple[Event, ...] = ()) -> Counts:
        log = [event for event in log_of(trace.events) if event[0] not in without]
        tier = LoggedTier(PAGE, log)
        made = policy(name, slots), predictor(predict, trace)
        return replay_timed(trace.leases(), *made, slots, tier, guessed=trace.guessed)

    assert logged(slots) == counts
    with pytest.raises(UsageError, match="at event"):
        logged(slots - 1)
    if at_once == 9999:  # as when all guesses began at once, and nobody told of these
        monkeypatch.setattr("k3offload.scheduler.store.BESIDE_GUESSES", PAGE)
        assert logged(slots, (Event.LEFT, Event.NOTE)) == counts
    made = policy(name, slots), predictor(predict, trace)
    tier, pace = ModelTier(PAGE, Link(1e9, 1e-4)), Pace(1e-4, 1e-5)
    model = replay_timed(trace.leases(), *made, slots, tier, guessed=trace.guessed, pace=pace)
    assert model.requests == counts.requests
    if near:
        assert abs(model.bytes - counts.bytes) < near * counts.bytes


class _OnTime(ModelTier):
    """A disk whose bytes are there when the model says so: what an engine reads from it in vain
    does not depend on this machine."""

    def __init__(self, disk: Any, link: Link) -> None:
        super().__init__(PAGE, link)
        self._disk, self.cut = disk, 0

    def cancel(self, read: Any) -> bool:
        self.cut += 0 < read.left < read.parts
        return super().cancel(read)

    def order(self, page: PageId) -> int:
        place: int = self._disk.order(page)
        return place

    def read(self, page: PageId, into: Any, priority: Priority = Priority.DEMAND) -> Ticket:
        self._disk.read(page, into).wait()
        return super().read(page, into, priority)


@pytest.mark.parametrize(
    ("name", "predict", "slots", "link", "at_once"),
    [("lru", "router", 84, Link(1e9, 1e-4), 9999), ("lru", "router", 84, Link(1e7, 0, 2), 1),
     ("lru", "router", 84, Link(2e6, 0, 2, PAGE // 3), 9999),
     ("reuse", "router", 40, Link(1e7, 0, 2), 2),
     ("lfru", "repeat", 40, Link(2e6, 0, 2, PAGE // 3), 2)],
)  # fmt: skip
def test_an_engine_whose_disk_keeps_time_has_the_model_s_counts(
    name: str, predict: str, slots: int, link: Link, at_once: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Guesses in vain included: all that sets a run apart from the model is when reads end."""
    monkeypatch.setattr("k3offload.scheduler.store.BESIDE_GUESSES", at_once * PAGE)
    tiers = []

    def store(disk: Any, memory: Any, policy: Any) -> ExpertStore:
        tiers.append(_OnTime(disk, link))
        return ExpertStore(tiers[0], memory, policy, change=Sleep(tiers[0]))

    monkeypatch.setattr("k3offload.engine.ExpertStore", store)
    parts = ("ahead",)
    counts, slots, trace = live(tmp_path / "t", name, slots, predict, parts, text="Why? ", times=1)
    assert counts.prefetches and counts.wasted
    tier = ModelTier(PAGE, link)
    made = policy(name, slots), predictor(predict, trace)
    model = replay_timed(trace.leases(), *made, slots, tier, guessed=trace.guessed)
    assert tier.waited == tiers[0].waited > 0
    assert replace(model, wait_seconds=0) == counts
    if link.depth < min(8, at_once):
        assert counts.prefetch_bytes < counts.prefetches * PAGE
    assert (tiers[0].cut > 0) == (link.piece < PAGE)  # given up between two of its pieces


def test_a_long_sweep_that_reads_on_replays_to_the_engine_s_counts(tmp_path: Path) -> None:
    """What a prompt is sure of has twice the room of a guess."""
    counts, slots, trace = live(
        tmp_path / "t", "lru", 40, "router", ("tiers", "ahead"), context=512, sweep=512, times=14
    )
    assert (trace.sweep == 0).sum() > 300
    calls = np.flatnonzero(trace.events["event_kind"] == Event.GUESS)
    begun = [g.tolist().count(Event.PREFETCH)
             for g in np.split(trace.events["event_kind"], calls)]  # fmt: skip
    assert max(begun) > slots // 4  # more than a guess may
    tier = LoggedTier(PAGE, log_of(trace.events))
    made = policy("lru", slots), predictor("router", trace)
    replayed = replay_timed(trace.leases(), *made, slots, tier, guessed=trace.guessed)
    assert replayed == counts
