"""Runs that leave a sweep between two layers: the others have the bits that they have alone, and
nothing of those that left is computed further, or kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from k3offload.engine import Engine
from k3offload.errors import SessionError
from k3offload.loading import load
from k3offload.model import Run
from k3offload.scheduler.sweep import Span, pack, without
from k3offload.state import SequenceState
from k3offload.stream import kept
from k3offload.tiers.device_fake import FakeDevice
from k3offload.trace import read_trace
from k3offload.trace_record import record
from tests.helpers_engine import Logits, checkpoint, same_bits, some_tokens
from tests.test_summaries import least

HOW: dict[str, Any] = {"context": 1024, "sessions": 14, "sweep": 2048, "threads": 2}


class Own(NamedTuple):
    """A sequence: what it has, what its run brings."""

    before: list[int]
    tokens: list[int]
    decode: bool


def own(before: int, count: int, seed: int, decode: bool = False) -> Own:
    drawn = some_tokens(before + count, seed)
    return Own(drawn[:before], drawn[before:], decode)


#: a sweep of several groups: prompts that go on inside a latent block, and rows that decode
COMPANY = [
    own(0, 330, 1), own(70, 1, 2, True), own(192, 620, 3), own(300, 1, 4, True), own(0, 130, 5)
]  # fmt: skip
NEXT = 7  #: the token that is decoded after it
#: of each layer who leaves before it, and who does two layers later
LEAVING = [({0}, set()), ({1, 2}, {4}), ({3}, {0}), ({0, 1, 4}, {2}), ({2}, {1, 3}), ({4}, {3})]


@contextmanager
def resident(tmp_path: Path) -> Iterator[Engine]:
    with load("nano", **HOW) as engine:
        yield engine


@contextmanager
def missing(tmp_path: Path) -> Iterator[Engine]:
    """Most experts come from disk."""
    with load("nano", cache="1M", predict="combined", **HOW) as engine:
        yield engine


@contextmanager
def spilled(tmp_path: Path) -> Iterator[Engine]:
    """Latents and block summaries on disk."""
    pytest.importorskip("zarr")
    how = {**HOW, "latents": "3M", "scratch": tmp_path}
    summaries = least(**{k: v for k, v in how.items() if k in ("context", "sessions", "sweep")})
    with load(checkpoint(vision=False), summaries=summaries, **how) as engine:
        assert engine.spilling is not None and engine.spilling.latents is not None
        yield engine
        written = engine.spilling.facts()
        assert written["block summaries"]["read_bytes"] and written["latents"]["written_bytes"]


@contextmanager
def split(tmp_path: Path) -> Iterator[Engine]:
    """The last layers on a device that delays and poisons."""
    device = FakeDevice(400 << 20, seed=3)
    with load("nano", device=device, trunk_on="split:4", experts_on="gpu", **HOW) as engine:
        yield engine


Rows = dict[int, list[Logits]]  #: of each run


def swept(engine: Engine, runs: Sequence[Run]) -> Rows:
    rows: Rows = {}

    def emit(i: int, position: int, row: torch.Tensor) -> None:
        rows.setdefault(i, []).append(row.numpy().copy())

    engine.run(runs, emit)
    return rows


def run_of(state: SequenceState, sequence: Own) -> Run:
    return Run(state, sequence.tokens, len(sequence.tokens), sequence.decode)


def after(engine: Engine, state: SequenceState) -> Logits:
    """The logits behind one more decoded token."""
    return swept(engine, [Run(state, [NEXT], 1, True)])[0][0]


@contextmanager
def hooked(engine: Engine, **watches: Any) -> Iterator[None]:
    before = {name: getattr(engine.hooks, name) for name in watches}
    engine.hooks.add(**watches)
    try:
        yield
    finally:
        for name, watch in before.items():
            setattr(engine.hooks, name, watch)


def leaving(engine: Engine, states: Sequence[SequenceState], whom: dict[int, set[int]]) -> Rows:
    """A sweep of the company, of which some leave before each layer of ``whom``."""
    runs = [run_of(state, sequence) for state, sequence in zip(states, COMPANY, strict=True)]
    rows = {layer.index: 0 for layer in engine.spec.layers}

    def before_layer(layer: int) -> None:
        for i in whom.get(layer, ()):
            runs[i].error = SessionError("Nobody wants it.")

    def on_route(layer: int, group: Any, experts: torch.Tensor, *_: Any) -> None:
        assert group.end - group.begin == len(experts)
        rows[layer] += len(experts)

    with hooked(engine, before_layer=before_layer, on_route=on_route):
        got = swept(engine, runs)
    for layer in engine.spec.moe_layers:
        gone = {i for at, some in whom.items() if at <= layer for i in some}
        stay = [s for i, s in enumerate(COMPANY) if i not in gone]
        assert rows[layer] == sum(len(s.tokens) for s in stay), layer
    for i, run in enumerate(runs):
        lost = any(i in some for at, some in whom.items() if at in rows)
        assert (run.error is not None) == (i not in got) == lost
        assert (run.state.broken is not None) == lost
    return got


@pytest.mark.parametrize("make", [resident, missing, spilled, split])
def test_who_stays_has_the_bits_that_it_has_alone(make: Any, tmp_path: Path) -> None:
    """Before every layer, prompts and decode rows, also some after others have left already."""
    with make(tmp_path) as engine:
        bases, alone, then = [], [], []
        for sequence in COMPANY:
            base = engine.new_state()
            if sequence.before:
                engine.run([Run(base, sequence.before)], lambda *row: None)
            bases.append(base)
            state = engine.new_state(base)
            (rows,) = swept(engine, [run_of(state, sequence)]).values()
            alone.append(rows)
            then.append(after(engine, state))
        for layer in range(0, len(engine.spec.layers), 1 if make is resident else 2):
            first, second = LEAVING[layer % len(LEAVING)]
            states = [engine.new_state(base) for base in bases]
            got = leaving(engine, states, {layer: first, layer + 2: second})
            assert got
            for i, rows in got.items():
                pairs = zip(rows, alone[i], strict=True)
                assert all(same_bits(a, b) for a, b in pairs), (layer, i)
                assert same_bits(after(engine, states[i]), then[i]), (layer, i)
            del states


def test_a_sweep_that_all_have_left_ends_there(tmp_path: Path) -> None:
    with resident(tmp_path) as engine:
        runs = [Run(engine.new_state(), some_tokens(90, i)) for i in range(2)]
        seen = []

        def before_layer(layer: int) -> None:
            seen.append(layer)
            if layer in (2, 4):
                runs[layer // 2 - 1].error = SessionError("Nobody wants it.")

        with hooked(engine, before_layer=before_layer):
            assert swept(engine, runs) == {}
        assert seen == [0, 1, 2, 3, 4]
        assert all(run.state.broken for run in runs)


def test_numbers_that_fail_are_of_who_stays_and_has_them(tmp_path: Path) -> None:
    """What earlier layers gave is told of the same rows when others have left."""
    with resident(tmp_path) as engine:
        for layer in range(1, len(engine.spec.layers)):
            states = [engine.new_state() for _ in COMPANY]
            for state, sequence in zip(states, COMPANY, strict=True):
                if sequence.before:
                    engine.run([Run(state, sequence.before)], lambda *row: None)
            runs = [run_of(state, own) for state, own in zip(states, COMPANY, strict=True)]
            states[2].kda[engine.spec.kda_layers[0]].fill_(float("nan"))

            def before_layer(at: int, layer: int = layer, runs: list[Run] = runs) -> None:
                if at == layer:
                    runs[0].error = runs[1].error = SessionError("Nobody wants it.")

            with hooked(engine, before_layer=before_layer):
                got = swept(engine, runs)
            assert set(got) == {3, 4} and runs[3].error is runs[4].error is None
            assert str(runs[2].error).startswith(f"Layer {engine.spec.kda_layers[0]} gave NaN")
            del states, runs, before_layer


# ---- what is kept ----


def marked(engine: Engine, leave: Callable[[int, Sequence[Run]], None]) -> list[list[int]]:
    """Two prompts in a sweep that shared snapshots are taken of; ``leave`` is called before each
    layer."""
    prompts = [some_tokens(200, 11), some_tokens(150, 12)]
    runs: list[Run] = []
    with engine.session() as a, engine.session() as b:
        for session, prompt in zip((a, b), prompts, strict=True):
            session.append(prompt)
        with hooked(engine, on_sweep=runs.extend,
                    before_layer=lambda layer: leave(layer, runs)):  # fmt: skip
            failed = engine.sweep([a, b])
        assert list(failed) == [a] and b.position == 150
    return prompts


@pytest.mark.parametrize("layer", [0, 3, 4, 7])
def test_nothing_half_computed_is_shared(layer: int, tmp_path: Path) -> None:
    def leave(at: int, runs: Sequence[Run]) -> None:
        if at == layer:
            runs[0].error = SessionError("Nobody wants it.")

    with load("nano", prefix_cache="16M", prefix_dir=str(tmp_path), **HOW) as engine:
        assert engine.prefixes is not None and engine.prefixes._below is not None
        first, second = marked(engine, leave)
        below = engine.prefixes._below
        assert len(engine.prefixes) == len(list(below.keys())) == 1
        assert engine.prefixes.has(second[:128])
        with engine.session() as again:
            again.append(first)
            got = again.logits()
            assert again.reused == 0
    with load("nano", **HOW) as engine, engine.session() as fresh:
        fresh.append(first)
        assert same_bits(got, fresh.logits())


# ---- who watches ----


PARTS = ("ahead", "latent", "margin", "mixing", "tiers")


@pytest.mark.parametrize("layer", [None, 0, 1, 4, 7])
def test_a_trace_has_whole_sweeps_alone(layer: int | None, tmp_path: Path) -> None:
    """Three sweeps of two that decode; one leaves in the second."""
    with load("nano", cache="1M", predict="combined", **HOW) as engine:
        record(engine, tmp_path / "trace", PARTS)
        states = [engine.new_state() for _ in range(2)]
        runs: list[Run] = []

        def before_layer(at: int) -> None:
            if at == layer and runs[0].decode and len(runs) == 2 and runs[0].tokens == [NEXT]:
                runs[1].error = SessionError("Nobody wants it.")

        with hooked(engine, before_layer=before_layer):
            for tokens in ([3, 4, 5], [NEXT], [9]):
                some = [s for s in states if s.broken is None]
                runs = [Run(s, tokens, 1, len(tokens) == 1) for s in some]
                swept(engine, runs)
    trace = read_trace(tmp_path / "trace")
    positions = sorted(zip(trace.sequence.tolist(), trace.position.tolist(), strict=True))
    prompts = [(s, p) for s in range(2) for p in range(3)]
    if layer is None:
        assert positions == sorted([*prompts, (0, 3), (1, 3), (0, 4), (1, 4)])
    else:
        assert positions == sorted([*prompts, (0, 4)])


# ---- numbers of rows ----


def test_groups_without_some_runs_are_those_of_the_others() -> None:
    """But for where groups are cut, which no bit depends on."""
    spans = [Span(70, 1, True), Span(30, 900, False), Span(64, 1, True), Span(0, 300, False)]
    groups = pack(spans)
    whole = [part for group in groups for part in group.parts]
    for gone in ({0}, {1}, {0, 2}, {1, 3}, {0, 1, 3}, set[int]()):
        left, rows = without(groups, gone)
        parts = [part for group in left for part in group.parts]
        assert [p._replace(row=0) for p in parts] == [
            p._replace(row=0) for p in whole if p.run not in gone
        ]
        at = 0
        for group in left:
            assert group.begin == at and group.parts
            for part in group.parts:
                assert part.row == at
                at += part.count
            assert group.end == at
            assert group.decode == all(spans[part.run].decode for part in group.parts)
        assert rows == [
            r for p in whole if p.run not in gone for r in range(p.row, p.row + p.count)
        ]
    assert without(groups, {0, 1, 2, 3}) == ([], [])


def test_rows_that_stay_move_up_in_their_memory() -> None:
    sums = torch.arange(1000.0)[:, None].repeat(1, 3)
    for rows in (list(range(1000)), list(range(1, 1000)), [0, *range(500, 1000, 7)], [999]):
        held = sums.clone()
        got = kept(held, torch.tensor(rows))
        assert got[:, 0].tolist() == rows and got.data_ptr() == held.data_ptr()
