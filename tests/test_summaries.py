"""Block summaries that spill: the bits of a sweep that keeps them all, whatever the memory, the
sweep and the company; more rows fit; a full disk is said before any state moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from k3offload.config import LATENT_BLOCK
from k3offload.engine import Engine
from k3offload.errors import DoesNotFit, ScratchError, UsageError
from k3offload.loading import load
from k3offload.model import Run
from k3offload.plan_report import Ask, SpecLayout, _demand, plan_of, spec_of
from k3offload.scheduler.plan import Limits, make_plan
from k3offload.scheduler.sweep import Span, pack
from k3offload.spilling import as_block
from k3offload.stream import Resident, Spilled
from k3offload.tiers import scratch as scratch_module
from k3offload.tiers.spill import Spill
from k3offload.tiers.spill_files import Layout
from k3offload.tiers.spill_room import Room
from tests.contract.test_kernel import generator
from tests.contract.test_kernel import same_bits as same_tensors
from tests.helpers_engine import (
    Logits,
    checkpoint,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
    with_companions,
)
from tests.helpers_ops import randn
from tests.test_spill import Case

pytest.importorskip("zarr")
LENGTH = 5 * LATENT_BLOCK + 70
TOKENS = some_tokens(LENGTH)
HOW: dict[str, Any] = {"context": LENGTH + 64, "sessions": 4, "sweep": 4096, "threads": 2}


def small(**how: Any) -> Engine:
    return load(checkpoint(vision=False), **{**HOW, **how})


def least(**how: Any) -> int:
    with pytest.raises(DoesNotFit, match=r"^1 bytes of block .*Give --summaries") as refusal:
        small(summaries=1, **how)
    return refusal.value.missing + 1


@pytest.fixture(scope="module")
def expected() -> Iterator[Logits]:
    """Every row of one sweep over the whole prompt, all in memory."""
    with small() as engine:
        assert engine.spilling is None
        yield logits_of(engine, TOKENS, LENGTH)


def spill(engine: Engine) -> Spill[torch.Tensor]:
    assert engine.spilling is not None and engine.spilling.summaries is not None
    return engine.spilling.summaries


# ---- the mix alone ----


@pytest.mark.parametrize("room", [Room(2, 3), Room(40, 4)])
def test_both_forms_give_the_same_rows(tmp_path: Path, room: Room) -> None:
    """Sums of all sealed rows, group by group and row by row; groups do not begin at tiles."""
    width, rows = 40, 1000
    case = Case(tmp_path, Layout(width, 4, "float32"), room, as_block(torch.float32, width))
    groups = pack([Span(0, 1, True), Span(70, 1, True), Span(30, rows - 2, False)])
    assert groups[-1].end == rows and groups[1].begin % 256
    g = generator(0)
    spilled, resident = Spilled(case.spill), Resident()
    with torch.inference_mode():
        for _ in range(3):
            p = randn(g, rows, width)
            spilled.seal(p.clone()).fill_(float("nan"))  # the next running sum takes its place
            resident.seal(p)
            for own in (None, p):
                pairs = zip(
                    spilled.mixed(groups, own, lambda e: torch.stack(list(e)).sum(0)),
                    resident.mixed(groups, own, lambda e: torch.stack(list(e)).sum(0)),
                    strict=True,
                )
                assert all(same_tensors(a, b) for a, b in pairs)
            picked = torch.tensor([5, 700, 3, 999, 256, 255])
            pairs = zip(spilled.picked(picked), resident.picked(picked), strict=True)
            assert all(same_tensors(a, b) for a, b in pairs)
    if room.slots < 12:
        assert case.spill.counts.read_bytes
    case.close()


# ---- bits ----


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("sweep", [LENGTH, 640])
def test_bits_do_not_depend_on_the_memory(
    expected: Logits, tmp_path: Path, more: int, sweep: int
) -> None:
    """With ``more`` tiles than the least; in one sweep and in three, all rows kept."""
    with small(summaries=least() + more * 98_304, scratch=tmp_path) as engine:
        assert engine.plan.summaries is not None
        assert same_bits(logits_of(engine, TOKENS, sweep), expected)
        counts = spill(engine).counts
        assert counts.written_bytes and counts.read_bytes
        spill(engine).flush()
        assert len(list(tmp_path.glob("*/*"))) == 1  # nothing outlives its sweep


def test_bits_with_latents_on_disk_too(expected: Logits, tmp_path: Path) -> None:
    how = {"summaries": least(), "latents": "2M", "scratch": tmp_path}
    with small(**how) as engine:
        assert same_bits(logits_of(engine, TOKENS, 640), expected)
        assert engine.spilling is not None and set(engine.spilling.facts()) == {
            "latents", "block summaries"
        }  # fmt: skip


def test_bits_in_company(expected: Logits, tmp_path: Path) -> None:
    """Decode rows and other prompts in the same sweep; groups then begin anywhere in a tile."""
    others = [some_tokens(77, 1), some_tokens(130, 2)]
    with small(summaries=least(), scratch=tmp_path, sweep=8192, sessions=5) as engine:
        got = with_companions(engine, TOKENS, others, 1)
        assert same_bits(got, expected)
        state = engine.new_state()
        engine.run([Run(state, TOKENS[:-1])], lambda *row: None)
        rows: dict[int, Logits] = {}
        runs = [Run(state, TOKENS[-1:], 1, True), Run(engine.new_state(), TOKENS, LENGTH)]
        kept: list[Logits] = []

        def emit(i: int, position: int, row: torch.Tensor) -> None:
            if i:
                kept.append(row.numpy().copy())
            else:
                rows[position] = row.numpy().copy()

        engine.run(runs, emit)
        assert len(kept) == LENGTH
        assert all(same_bits(kept[i], expected[i : i + 1]) for i in range(LENGTH))
        with session_with(engine, TOKENS[:-1]) as alone:
            alone.logits()
            alone.append_sampled(TOKENS[-1])
            assert same_bits(alone.logits()[None], rows[LENGTH - 1])


# ---- plan and failures ----


def test_a_sweep_that_fits_stays_in_memory(tmp_path: Path) -> None:
    with small(summaries="100M", scratch=tmp_path) as engine:
        assert engine.plan.summaries is None and engine.spilling is None


def test_more_rows_fit_into_the_same_memory() -> None:
    """K3: what a sweep of 16,384 tokens takes is little more than half."""
    layout = SpecLayout(spec_of(Path("released")))
    ask = Ask(ram=12 * 10**9, sweep=65_536, threads=2)
    resident = plan_of(layout, ask)
    moved = plan_of(layout, replace(ask, summaries=200_000_000))
    assert moved.summaries == 200_000_000 and moved.total <= moved.limit
    assert moved.sweep_rows > 1.5 * resident.sweep_rows


def test_a_full_disk_is_said_before_any_state_moves(
    expected: Logits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small(summaries=least(), scratch=tmp_path) as engine:
        with session_with(engine, TOKENS) as long, session_with(engine, TOKENS[:30]) as short:
            monkeypatch.setattr(scratch_module, "SPARE", 1 << 60)
            with pytest.raises(ScratchError, match="are free there"):
                long.logits()
            assert short.logits().shape  # rows that are few need no files
            monkeypatch.undo()
            assert same_bits(long.logits()[None], expected[-1:])


def test_a_model_without_summaries_refuses_the_option() -> None:
    layout = SpecLayout(spec_of(Path("released")))
    demand = _demand(layout, Ask(ram=10**12))
    with pytest.raises(UsageError, match="--summaries has nothing"):
        make_plan(replace(demand, summaries=None), Limits(10**12, summaries=10**9))
