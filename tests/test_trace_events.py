"""What stores tell a trace belongs to the sweep it happened in, whatever became of that."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zarr

import k3offload
from k3offload.errors import UsageError
from k3offload.report_tiers import timelines
from k3offload.scheduler.lease import Event
from k3offload.trace import Trace, read_trace
from k3offload.trace_record import record


def broken_trace(folder: Path) -> Trace:
    """Of three sweeps, the second of which is stopped before its last layer."""
    with k3offload.load("nano", context=64, cache="500k") as engine:
        record(engine, folder, ("tiers",))
        session = engine.session()
        session.append(list(range(40)))
        session.logits()
        last, before = engine.spec.moe_layers[-1], engine.hooks.before_layer

        def stop(layer: int) -> None:
            if layer == last:
                raise RuntimeError("enough")

        engine.hooks.before_layer = stop
        other = engine.session()
        other.append([5])
        with pytest.raises(RuntimeError, match="enough"):
            engine.sweep([other])
        engine.hooks.before_layer = before
        session.append([7])
        session.logits()
    return read_trace(folder)


def test_events_are_of_the_sweep_they_happened_in(tmp_path: Path) -> None:
    """Also those of a sweep that failed, which has no rows, and of the last layer of any."""
    t = broken_trace(tmp_path / "t")
    assert t.sweep.tolist() == [0] * 40 + [2]
    events = t.events
    asked = np.isin(events["event_kind"], (Event.HIT, Event.LATE, Event.MISS))
    of = zip(
        events["event_sweep"][asked].tolist(), events["event_layer"][asked].tolist(), strict=True
    )
    found = Counter(of)
    steps = {(int(t.sweep[s.at[0]]), s.layer): len(s.pages) for s in t.leases()}
    broken = {(sweep, layer): count for (sweep, layer), count in found.items() if sweep == 1}
    assert found == steps | broken
    assert [layer for _, layer in broken] == t.layers[:-1].tolist()
    one, other = timelines(t)
    assert (one.sweep, other.sweep) == (0, 2)
    with pytest.raises(UsageError, match="no events of sweep 1"):
        timelines(t, [1])


def test_events_of_an_earlier_version_are_put_right(tmp_path: Path) -> None:
    """It counted a sweep before the events of its last layer, and left no number out."""
    broken_trace(tmp_path / "t")
    group = zarr.open_group(tmp_path / "t", mode="a")
    number, layer = group["event_sweep"], group["event_layer"][:]
    now, last = number[:], group.attrs["layers"][-1]
    number[:] = now + (layer == last)
    group.attrs["version"] = 2
    assert (read_trace(tmp_path / "t").events["event_sweep"] == now).all()
