"""Latents that a device has no room for, where something goes wrong: whose it is loses its state,
and nobody else (R32, R58)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3offload.engine import Engine
from k3offload.errors import ScratchError, SessionError
from k3offload.generate import Done, Request, generate
from k3offload.sampling import Sampling
from k3offload.session import Session
from k3offload.tiers import scratch as scratch_module
from k3offload.tiers.device_fake import FakeDevice
from k3offload.tiers.device_spill import DeviceSpill
from tests.helpers_device_latents import (
    TOKENS,
    everything,
    resident,
    tightly,
    window,
)
from tests.helpers_engine import same_bits, session_with
from tests.helpers_spilled import damage_first_file

pytest.importorskip("zarr")


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Engine]:
    with tightly(tmp_path) as engine:
        yield engine


def decode(engine: Engine, *sessions: Session) -> list[Done]:
    """What becomes of three more tokens for each."""
    requests = [Request(s, 3, Sampling(ignore_end=True)) for s in sessions]
    return [event for event in generate(engine, requests) if isinstance(event, Done)]


@pytest.mark.parametrize("layer", range(5))
def test_an_interruption_at_any_layer_leaves_nothing(tight: Engine, layer: int) -> None:
    def stop(at: int) -> None:
        if at == layer and engine_runs:
            raise KeyboardInterrupt

    engine_runs = [True]
    tight.hooks.before_layer = stop
    with session_with(tight, TOKENS) as session:
        with pytest.raises(KeyboardInterrupt):
            session.logits()
        engine_runs.clear()
        with pytest.raises(SessionError, match="lost"):
            session.logits()
        session.reset()
        session.append(TOKENS)
        assert same_bits(session.logits()[None], everything()[0][-1:])


def test_an_interruption_between_two_pieces(tight: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are under way into one buffer while kernels read the other one."""
    handed_out, left = DeviceSpill._handed_out, [5]

    def stop(self: DeviceSpill, *given: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return handed_out(self, *given)

    with session_with(tight, TOKENS) as session, session_with(tight, TOKENS[:20]) as other:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceSpill, "_handed_out", stop)
            with pytest.raises(KeyboardInterrupt):
                session.logits()
        session.reset()
        session.append(TOKENS)
        assert same_bits(session.logits()[None], everything()[0][-1:])
        assert same_bits(other.logits()[None], everything()[0][19:20])


@pytest.mark.parametrize("at_once", [True, False])
def test_a_copy_that_fails_ends_its_session_alone(
    tight: Engine, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """The copy of a piece to the device, of one session out of two in a sweep."""
    lost, fine = session_with(tight, TOKENS), session_with(tight, TOKENS[:300])
    snapshot = lost.snapshot()
    lost.logits()
    fine.logits()
    device, copy_all, failed = window(tight)._device, FakeDevice.copy_all, [False]
    assert isinstance(device, FakeDevice)

    def fail(self: FakeDevice, pairs: Any, after: Any, landed: Any) -> None:
        if not failed[0]:
            failed[0] = True
            self.fail_next(at_once)
        copy_all(self, pairs, after, landed)

    monkeypatch.setattr(FakeDevice, "copy_all", fail)
    ends = {end.request: end for end in decode(tight, lost, fine)}
    assert isinstance(ends[0].error, ScratchError) and "copy to or from" in str(ends[0].error)
    assert ends[1].finish_reason == "length" and ends[1].error is None
    with pytest.raises(SessionError, match="lost"):
        lost.logits()
    lost.rewind(snapshot)
    lost.append(TOKENS[:10])
    assert lost.logits().shape
    for session in (lost, fine):
        session.close()


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 0)])
def test_lost_files_end_their_session_alone_r58(
    tight: Engine, damage: Callable[[Path], None]
) -> None:
    lost, fine = session_with(tight, TOKENS), session_with(tight, TOKENS[:300])
    lost.logits()
    fine.logits()
    path = damage_first_file(tight, damage)
    ends = {end.request: end for end in decode(tight, lost, fine)}
    assert isinstance(ends[0].error, ScratchError) and str(path) in str(ends[0].error)
    assert ends[1].finish_reason == "length" and ends[1].error is None
    with resident() as roomy, session_with(roomy, TOKENS[:300]) as same:
        decode(roomy, same)
        assert same.tokens == fine.tokens and same_bits(same.logits()[None], fine.logits()[None])
    for session in (lost, fine):
        session.close()


def test_a_full_disk_ends_who_needs_it_r32(tight: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is computed; the session goes on when there is room again."""
    with session_with(tight, TOKENS[:100]) as short, session_with(tight, TOKENS) as long:
        monkeypatch.setattr(scratch_module, "SPARE", 1 << 60)
        ends = {end.request: end for end in decode(tight, long, short)}
        assert isinstance(ends[0].error, ScratchError) and "are free" in str(ends[0].error)
        assert ends[1].finish_reason == "length"
        monkeypatch.undo()
        assert same_bits(long.logits()[None], everything()[0][-1:])
