"""What is recorded of an engine, beside what its routers said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import k3offload
from k3offload.model import Run
from k3offload.scheduler.hints import nearest, quantise
from k3offload.scheduler.sweep import Group
from k3offload.trace import read_trace
from k3offload.trace_record import record


def test_rows_are_what_the_routers_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In crowds and alone, large sweeps and small ones: row by row, by numpy alone."""
    monkeypatch.setattr("k3offload.trace_rows.LARGE", 300 << 10)  # 200 rows
    said: dict[tuple[int, int], tuple[Any, Any]] = {}  # of a row, counted from the first, and layer
    rows = [0, 0]  # before this sweep, of this sweep

    def on_sweep(runs: Sequence[Run]) -> None:
        rows[:] = sum(rows), sum(len(run.tokens) for run in runs)

    def on_route(layer: int, group: Group, experts: Any, weights: Any, scores: Any) -> None:
        for i in range(group.end - group.begin):
            key = rows[0] + group.begin + i, layer
            said[key] = scores[i].numpy().copy(), experts[i].numpy().copy()

    with k3offload.load("nano", context=256, sessions=4) as engine:
        engine.hooks.add(on_sweep=on_sweep, on_route=on_route)
        record(engine, tmp_path / "t", ("margin",))
        sessions = [engine.session() for _ in range(4)]
        sessions[0].append(list(range(200)))
        sessions[0].logits()
        for turn in range(24):
            some = sessions[: 1 + turn % 3]
            for i, session in enumerate(some):
                if turn > 2:
                    session.append_sampled(100 * i + turn)
                else:
                    session.append([i, turn])
            if turn in (5, 11):
                some.append(sessions[3])
                some[-1].append(list(range(190 if turn == 5 else 3)))
            engine.sweep(some)
        assert engine.spec.moe is not None
        layers, top_k = engine.spec.moe_layers, engine.spec.moe.top_k
    t = read_trace(tmp_path / "t")
    assert len(t.best) == sum(rows) > 400 and len(said) == len(t.best) * len(layers)
    for row in range(len(t.best)):
        for place, layer in enumerate(layers):
            scores, experts = said[row, layer]
            best, codes = nearest(quantise(scores[None], top_k), top_k, experts[None])
            assert (t.best[row, place] == best[0]).all(), (row, layer)
            assert (t.codes[row, place] == codes[0]).all(), (row, layer)
            rest = np.delete(scores, experts)
            margin = (scores[experts].min() - rest.max()).astype(np.float16)
            assert t.more["margin"][row, place] == margin, (row, layer)
