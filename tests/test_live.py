"""What an engine says of itself while somebody watches: figures that agree, at any moment."""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.engine import Engine
from k3offload.live import BIN, SPAN, Live, Pace, prompt_ends, shares, turns
from k3offload.loading import load
from k3offload.scheduler.remaining import Remaining
from k3offload.session import Session
from k3offload.tiers.base import PageId
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_device_latents import small
from tests.helpers_engine import BRIEF, checkpoint, session_with, some_tokens


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("nano", context=512, sessions=3, sweep=128, cache="500k") as engine:
        yield engine


@contextmanager
def watching(engine: Engine) -> Iterator[Live]:
    before = vars(engine.hooks).copy()
    live = Live(engine)
    live.start()
    try:
        yield live
    finally:
        live.stop()
        vars(engine.hooks).update(before)


def decode(session: Session, count: int) -> None:
    """Its prompt, and so many tokens more."""
    session.logits()
    for token in some_tokens(count):
        session.append_sampled(token)
        session.logits()


def bits(packed: str, engine: Engine) -> Any:
    """[MoE layers, experts] bool."""
    assert engine.spec.moe is not None
    shape = len(engine.spec.moe_layers), engine.spec.moe.experts
    flat = np.unpackbits(np.frombuffer(b64decode(packed), np.uint8))[: shape[0] * shape[1]]
    return flat.reshape(shape).astype(bool)


def pages(packed: str, engine: Engine) -> set[PageId]:
    places = np.argwhere(bits(packed, engine)).tolist()
    return {PageId(engine.spec.moe_layers[row], expert) for row, expert in places}


def check(facts: dict[str, Any], engine: Engine) -> None:
    """What holds at any moment."""
    for kind, n in facts["tiers"].items():
        assert n["requests"] == n["hits"] + n["late"] + n["misses"], (kind, n)
        assert n["useful"] + n["wasted"] <= n["prefetches"]
    for tier, packed in facts["resident"].items():
        assert len(pages(packed, engine)) == facts["held"][tier]
    experts = facts["tiers"]["experts"]
    most = (experts["misses"] + experts["prefetches"]) * engine.checkpoint.expert_bytes
    assert 0 <= experts["bytes"] <= most
    for lane in ("asked_for", "ahead", "compute", "waiting"):
        values = facts["lanes"][lane]
        assert len(values) == round(SPAN / BIN) and 0 <= min(values) <= max(values) <= 100
    both = zip(facts["lanes"]["compute"], facts["lanes"]["waiting"], strict=True)
    assert all(a + b <= 102 for a, b in both)  # each is rounded


def test_figures_agree_while_sweeps_run(engine: Engine) -> None:
    with watching(engine) as live, session_with(engine, some_tokens(200)) as session:
        work = threading.Thread(target=decode, args=(session, 25))
        work.start()
        seen = []
        while work.is_alive():
            seen.append(live.facts())
            time.sleep(0.005)
        work.join()
        for facts in seen:
            check(facts, engine)
        assert any(facts["sweep"]["busy"] for facts in seen)
        counted = [facts["tiers"]["experts"]["requests"] for facts in seen]
        assert counted == sorted(counted) and counted[-1] > counted[0]


def test_at_rest_it_is_what_the_engine_says(engine: Engine) -> None:
    chosen = set[PageId]()
    with watching(engine) as live, session_with(engine, some_tokens(150)) as session:
        live.facts()
        engine.hooks.add(
            on_route=lambda layer, group, experts, weights, scores: chosen.update(
                PageId(layer, e) for e in experts.reshape(-1).tolist()
            )
        )
        decode(session, 3)
        facts = live.facts()
        check(facts, engine)
        counts = engine.counts()
        for kind, own in facts["tiers"].items():
            assert own == vars(counts[kind])
        held = pages(facts["resident"]["ram"], engine)
        moe = engine.spec.moe
        assert moe is not None
        every = {PageId(layer, e) for layer in engine.spec.moe_layers for e in range(moe.experts)}
        assert held == {page for page in every if engine.holds(page)} and held
        assert pages(facts["asked"], engine) == chosen
        assert not pages(live.facts()["asked"], engine)  # told once
        assert facts["disk"]["bytes"] == engine.disk.counts.bytes
        assert facts["disk"]["bytes"] >= facts["tiers"]["experts"]["bytes"] > 0
        about = live.about()
        assert about["slots"]["ram"] == len(held) and about["experts"] == moe.experts
        assert not facts["sweep"]["busy"] and facts["sweep"]["number"] == 5


def test_bytes_are_those_of_the_misses_where_nothing_is_guessed() -> None:
    with load(checkpoint(**BRIEF), context=256, cache="200k", predict="none") as engine:
        with watching(engine) as live, session_with(engine, some_tokens(40)) as session:
            decode(session, 4)
            facts = live.facts()
            experts = facts["tiers"]["experts"]
            assert experts["bytes"] == experts["misses"] * engine.checkpoint.expert_bytes > 0
            assert sum(facts["lanes"]["asked_for"]) > 0 == sum(facts["lanes"]["ahead"])


def test_rates_are_of_the_last_seconds(engine: Engine) -> None:
    now = [100.0]
    live = Live(engine, lambda: now[0])
    live.start()
    assert live.facts()["rates"] is None
    with session_with(engine, some_tokens(128)) as session:
        before = engine.counts()["experts"]
        read = engine.disk.counts.bytes
        session.logits()
        now[0] += 2.0
        facts = live.facts()
        after = engine.counts()["experts"]
        assert facts["rates"]["experts"]["requests"] == (after.requests - before.requests) / 2
        assert facts["rates"]["experts"]["bytes"] == (after.bytes - before.bytes) / 2 > 0
        assert facts["rates"]["disk"]["bytes"] == (engine.disk.counts.bytes - read) / 2
        for _ in range(3):
            now[0] += 1.0
            facts = live.facts()
        assert facts["rates"]["experts"]["requests"] == 0
    live.stop()


def test_lanes_last_as_long_as_what_they_show(engine: Engine) -> None:
    """Computing and waiting are all of the sweeps; waiting is what the tiers say."""
    lasted = []
    begun = [0.0]
    with watching(engine) as live, session_with(engine, some_tokens(300)) as session:
        engine.hooks.add(
            on_sweep=lambda runs: begun.__setitem__(0, time.perf_counter()),
            on_swept=lambda: lasted.append(time.perf_counter() - begun[0]),
            before_layer=lambda layer: time.sleep(0.005),
        )
        before = sum(c.wait_seconds for c in engine.counts().values())
        decode(session, 6)
        waited = sum(c.wait_seconds for c in engine.counts().values()) - before
        time.sleep(BIN)  # the last bin is whole
        lanes = live.facts()["lanes"]
    compute, waiting = (BIN * sum(lanes[name]) / 100 for name in ("compute", "waiting"))
    assert compute + waiting == pytest.approx(sum(lasted), abs=0.03, rel=0.03)
    assert waiting == pytest.approx(waited, abs=0.03)
    assert sum(lanes["asked_for"]) > 0


def test_pages_on_a_device_and_their_copies() -> None:
    device = FakeDevice(1 << 28, delay=0.002)
    with load(checkpoint(**BRIEF), context=256, device=device, vram="3M") as engine:
        there = engine.accelerator
        assert there is not None and there.store is not None and there.tier is not None
        with watching(engine) as live, session_with(engine, some_tokens(70)) as session:
            decode(session, 3)
            time.sleep(BIN)
            facts = live.facts()
            check(facts, engine)
            held = pages(facts["resident"]["device"], engine)
            assert held and all(map(there.store.has, held)) and len(held) <= there.store.slots
            assert sum(facts["lanes"]["copy"]) > 0
            assert facts["tiers"]["experts on the device"] == vars(there.store.counts)
            assert live.about()["device"] == "fake"
        assert device.watch is None


def test_all_that_goes_to_a_device_is_in_its_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of layers and blocks of latents, where no expert goes there."""
    latents, heard = list[int](), list[int]()
    copy_all = FakeDevice.copy_all

    def counted(self: FakeDevice, pairs: Sequence[Any], *rest: Any) -> None:
        before = heard.count(1)
        copy_all(self, pairs, *rest)
        latents.append(heard.count(1) - before == len(pairs))

    monkeypatch.setattr(FakeDevice, "copy_all", counted)
    with small(scratch=tmp_path, experts_on="cpu") as engine:
        there = engine.accelerator
        assert there is not None and there.tier is None
        with watching(engine) as live, session_with(engine, some_tokens(600)) as session:
            change = there.device.watch
            assert change is not None

            def hear(by: int) -> None:
                heard.append(by)
                change(by)

            there.device.watch = hear
            decode(session, 2)
            time.sleep(BIN)
            assert sum(live.facts()["lanes"]["copy"]) > 0
        engine.close()  # whatever is under way has landed
        assert latents and all(latents)
        assert heard.count(1) == heard.count(-1) > sum(latents)


def test_nobody_watches_and_nothing_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[object]()
    monkeypatch.setattr(engine.disk, "watch", heard.append)
    live = Live(engine)
    with session_with(engine, some_tokens(64)) as session:
        decode(session, 3)
        assert not heard and not live.watched
        facts = live.facts()
        assert not sum(facts["lanes"]["compute"]) and not sum(facts["lanes"]["waiting"])
        assert not pages(facts["asked"], engine)
        assert live.left([64], 0)[0] is not None  # but how long sweeps take is known
        live.start()
        live.stop()
        assert heard[1] is None and len(heard) == 2


def test_shares_of_bins() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    found = shares([(-1.0, 0.5, 1.5), (0.75, 1.5, 0.75), (1.5, 2.5, 0.25)], edges)
    assert found.tolist() == [0.75, 0.625, 0.125]
    assert shares([], edges).tolist() == [0, 0, 0]


LENGTHS = [[128], [64, 320], [320, 64], [192, 192, 192], [448, 64, 128], [64, 64, 64]]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_prompts_end_in_the_sweeps_that_were_said(engine: Engine, lengths: Sequence[int]) -> None:
    sessions = [session_with(engine, some_tokens(n, seed=i)) for i, n in enumerate(lengths)]
    sizes, ends = turns(lengths, engine.plan.sweep_rows)
    number, took, ended = 0, list[int](), dict[int, int]()
    while waiting := [s for s in sessions if s.needs_work]:
        assert not engine.sweep(waiting)
        took.append(engine.last_rows[1])
        ended |= {sessions.index(s): number for s in waiting if not s.needs_work}
        number += 1
    for session in sessions:
        session.close()
    assert took == sizes and [ended[i] for i in range(len(lengths))] == ends


def test_time_left_follows_from_what_sweeps_took() -> None:
    known = Remaining(100)
    assert prompt_ends(known, [50], 0, 100, None, 10) == [None]
    for decoding, prompts in ((0, 100), (0, 50), (2, 0), (4, 0), (2, 60), (1, 80)):
        known.swept(1.0 + 0.1 * decoding + 0.02 * prompts, decoding, prompts)
    # three sweeps of 98 rows and one of 6, beside two answers
    assert prompt_ends(known, [300], 2, 100, None, 10) == [pytest.approx(4 * 1.2 + 0.02 * 300)]
    two = prompt_ends(known, [98, 98], 2, 100, None, 10)
    assert two == [pytest.approx(1.2 + 1.96), pytest.approx(2 * (1.2 + 1.96))]
    # half of a sweep has passed, slower than usual: half is believed of each
    own = prompt_ends(known, [98], 2, 100, Pace(2, 98, 5, 3.16), 10)
    assert own == [pytest.approx((0.5 * 6.32 + 0.5 * 3.16) - 3.16)]
    # a sweep of answers alone is in the way
    after = prompt_ends(known, [98], 2, 100, Pace(2, 0, 5, 0.6), 10)
    assert after == [pytest.approx(0.6 + 1.2 + 1.96)]
    # nothing is known but the sweep under way itself
    first = prompt_ends(Remaining(100), [150], 0, 100, Pace(0, 100, 2, 1.0), 10)
    assert first == [pytest.approx(4.0 + 5.0)]
    assert prompt_ends(Remaining(100), [150], 0, 100, Pace(0, 100, 0, 1.0), 10) == [None]
