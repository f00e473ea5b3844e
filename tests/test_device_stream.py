"""What streams through a device: copied ahead from locked memory, read ahead without haste."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import k3offload.layout
from k3offload.arena import LayerWeights
from k3offload.engine import Engine
from k3offload.loading import load
from k3offload.ring import Urgency, demand
from k3offload.tiers.base import Priority
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import BRIEF, checkpoint, least_vram, logits_of, same_bits, starve

TOKENS = [(7 * i) % 300 for i in range(40)]


@contextmanager
def tight(folder: Any, **given: Any) -> Iterator[tuple[Engine, FakeDevice]]:
    """An engine with the least device memory there can be."""
    least = least_vram(folder, **given)
    device = FakeDevice(least, seed=5)
    with load(folder, device=device, vram=least, **given) as engine:
        yield engine, device


@pytest.mark.parametrize("trunk", ["bfloat16", "int8", "mxfp4"])
@pytest.mark.parametrize("little_ram", [False, True])
def test_a_head_streams_in_blocks_that_are_copied_ahead(
    little_ram: bool, trunk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(vocab=20_000, layers=2, vision=False)
    monkeypatch.setattr(
        k3offload.layout, "HEAD_BUFFER", 1 << 20 if trunk != "bfloat16" else 3 << 20
    )
    given: dict[str, Any] = {"context": 64, "trunk": trunk}
    with load(folder, device="cpu", **given) as engine:
        wanted = logits_of(engine, TOKENS, decode_from=36)
    if little_ram:
        starve(monkeypatch)
    with tight(folder, **given) as (engine, device):
        assert engine.accelerator is not None and not engine.accelerator.plan.head_resident
        assert engine.plan.head_resident != little_ram
        loaded = device.unpinned
        assert same_bits(logits_of(engine, TOKENS, decode_from=36), wanted)
        assert device.unpinned == loaded
        blocks = len(engine.weights.head_cuts)
        counts, passes = engine.counts()["head on the device"], engine.counts()["head"]
    assert blocks > 2 and counts.requests == blocks * passes.requests
    assert counts.misses == 1  # the very first
    assert (passes.misses if little_ram else passes.hits) == passes.requests == 5


@pytest.mark.parametrize("trunk_on", ["gpu", "split:3"])
def test_what_is_copied_ahead_is_read_without_haste(
    trunk_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the layer is waited for; then its read under way hurries."""
    folder = checkpoint(**BRIEF)
    starve(monkeypatch)
    with tight(folder, context=64, trunk_on=trunk_on) as (engine, _):
        host, end = engine.weights, threading.Event()
        read, hasten = host.layer, host.hasten
        late, hurried = set[int](), set[int]()

        @contextmanager
        def slow(index: int, urgency: Urgency = demand) -> Iterator[LayerWeights]:
            ahead = urgency() is Priority.TRUNK
            for _ in range(20_000):
                if urgency() is Priority.DEMAND or end.wait(0.001):
                    break
            if ahead and not end.is_set():
                late.add(index)
            with read(index, urgency) as weights:
                yield weights

        def hurry(index: int) -> None:
            hurried.add(index)
            hasten(index)

        monkeypatch.setattr(host, "layer", slow)
        monkeypatch.setattr(host, "hasten", hurry)
        try:
            logits_of(engine, TOKENS[:4], decode_from=2)
        finally:
            end.set()
        assert late and late <= hurried


def test_a_read_under_way_hurries_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hasten`` reaches the read of that layer and no other."""
    starve(monkeypatch, 1 << 20)
    with load(checkpoint(**BRIEF), context=64, sweep=512, device="cpu") as engine:
        ring = engine.weights._ring
        assert ring is not None
        with engine.weights.layer(0):
            pass
        following = next(f for f in ring._fetches if f is not None and f.asked is Priority.TRUNK)
        for key, want in ((99, Priority.TRUNK), (following.weights.layer, Priority.DEMAND)):
            engine.weights.hasten(key)
            assert following._priority is want
