"""Budgets, caches, threads, sweep sizes, companions and arrival order never change a bit.

Every test compares the float32 logits bit by bit with one engine that has all it wants
(R61, R72); both precisions of the activations.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import k3offload.layout
from k3offload.engine import Engine
from k3offload.loading import load
from k3offload.model import Run
from k3offload.options import Watch
from k3offload.tiers.base import Buffer, PageId, Ticket
from k3offload.tiers.tier_disk import DiskTier
from tests.helpers_engine import (
    BRIEF,
    Logits,
    checkpoint,
    expert_bytes,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
    starve,
    with_companions,
)

TOKENS = some_tokens(150, 1)
OTHERS = (some_tokens(70, 2), some_tokens(1, 3), some_tokens(129, 4))
DECODE = 146  # the last four tokens are decoded where a test decodes


class Base:
    """The engine with everything resident, and its logits."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.engine = load(checkpoint(**BRIEF), dtype=dtype)
        self.prefill = logits_of(self.engine, TOKENS)
        self.decode = logits_of(self.engine, TOKENS, decode_from=DECODE)

    def check(self, engine: Engine, sweep: int = 512) -> None:
        """``engine`` gives the same bits in prefill and in decode."""
        assert same_bits(logits_of(engine, TOKENS, sweep), self.prefill)
        assert same_bits(logits_of(engine, TOKENS, sweep, DECODE), self.decode)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest) -> Iterator[Base]:
    made = Base(request.param)
    assert made.engine.plan.slots == made.engine.plan.experts
    assert len(made.engine.plan.resident_layers) == 5
    yield made
    made.engine.close()


def test_rows_differ_and_decode_differs_from_prefill(base: Base) -> None:
    """The comparison could fail: the forms of prefill and decode do round differently."""
    assert len(np.unique(base.prefill[:, 0])) > 100
    assert not same_bits(base.prefill, base.decode)
    assert same_bits(base.prefill[:DECODE], base.decode[:DECODE])


@pytest.mark.parametrize("slots", [1, 3, 4, 20])
def test_expert_slots(base: Base, slots: int) -> None:
    cache = slots * base.engine.plan.slot_bytes
    with load(checkpoint(**BRIEF), dtype=base.dtype, cache=cache) as engine:
        assert engine.plan.slots == slots
        base.check(engine)
        count = engine.counts()["experts"]
        assert count.misses > 64
        assert count.hits + count.late + count.misses == count.requests
        read = count.misses + count.prefetches  # a few of a prompt's pages are read ahead
        assert count.bytes == read * expert_bytes(checkpoint(**BRIEF))


@pytest.mark.parametrize("extra", [0, 150_000, 700_000])
def test_budget_from_the_least_up(base: Base, extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk streams, wholly or in part, from the smallest plan that fits."""
    starve(monkeypatch, extra)
    with load(checkpoint(**BRIEF), dtype=base.dtype) as engine:
        assert len(engine.plan.resident_layers) < 5
        assert extra or engine.plan.slots == 1
        base.check(engine)
        streamed = [
            engine.plan.layer_sizes[i] for i in range(5) if i not in engine.plan.resident_layers
        ]
        assert engine.counts()["trunk"].bytes > 5 * min(streamed)


@pytest.mark.parametrize("trunk", ["int8", "mxfp4"])
def test_a_quantised_trunk_streams_like_a_resident_one(
    trunk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, and a word about the work that is done again in every sweep."""
    warnings: list[str] = []
    with load(checkpoint(**BRIEF), trunk=trunk, watch=Watch(warn=warnings.append)) as engine:
        wanted = logits_of(engine, TOKENS[:70], decode_from=66)
    assert not warnings
    starve(monkeypatch)
    with load(checkpoint(**BRIEF), trunk=trunk, watch=Watch(warn=warnings.append)) as engine:
        assert same_bits(logits_of(engine, TOKENS[:70], decode_from=66), wanted)
    assert [text for text in warnings if "quantised anew in every sweep" in text]


def test_streamed_head_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(vocab=20_000, layers=2, vision=False)
    monkeypatch.setattr(k3offload.layout, "HEAD_BUFFER", 3 << 20)
    with load(folder) as engine:
        wanted = logits_of(engine, TOKENS[:40])
    starve(monkeypatch)
    with load(folder) as engine:
        assert not engine.plan.head_resident
        assert len(list(engine.weights.head_blocks())) == 3
        assert same_bits(logits_of(engine, TOKENS[:40]), wanted)


@pytest.mark.parametrize("sweep", [64, 128])
def test_sweep_size(base: Base, sweep: int) -> None:
    base.check(base.engine, sweep)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_r72(base: Base, threads: int) -> None:
    with load(checkpoint(**BRIEF), dtype=base.dtype, threads=threads) as engine:
        base.check(engine)


def test_threads_of_the_caller_are_left_alone(base: Base) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        base.check(base.engine)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_companions(base: Base, place: int) -> None:
    for count in range(max(1, place), 4):
        got = with_companions(base.engine, TOKENS, OTHERS[:count], place)
        assert same_bits(got, base.prefill), count


def test_cold_and_warm_with_companions(base: Base) -> None:
    with load(checkpoint(**BRIEF), dtype=base.dtype) as engine:
        cold = with_companions(engine, TOKENS, OTHERS)
        read = engine.counts()["experts"]
        warm = with_companions(engine, TOKENS, OTHERS)
        assert engine.counts()["experts"].misses == read.misses > 32 > read.hits
    assert same_bits(cold, base.prefill)
    assert same_bits(warm, base.prefill)


def _emitted(engine: Engine, runs: list[Run]) -> dict[int, Logits]:
    """The last row of each run of a sweep."""
    found: dict[int, Logits] = {}

    def emit(i: int, position: int, row: torch.Tensor) -> None:
        found[i] = row.numpy().copy()

    engine.run(runs, emit)
    return found


def test_decode_with_companions_r72(base: Base) -> None:
    """A decode row beside decode rows and prefills, at any place of the sweep."""
    engine = base.engine
    for place in range(3):
        mine, second = engine.new_state(), engine.new_state()
        engine.run([Run(mine, TOKENS[:DECODE])], lambda *_: None)
        engine.run([Run(second, OTHERS[0])], lambda *_: None)
        rows: list[Logits] = []
        for token in TOKENS[DECODE:]:
            runs = [Run(second, [7], 1, True), Run(engine.new_state(), OTHERS[2], 2)]
            runs.insert(place, Run(mine, [token], 1, True))

            rows.append(_emitted(engine, runs)[place])
        assert same_bits(np.concatenate(rows), base.decode[DECODE:]), place


@pytest.mark.parametrize("budget", [64, 128])
def test_sessions_share_sweeps_too_small_for_all(base: Base, budget: int) -> None:
    """Prompts of several sessions are cut at chunks only, whatever their companions leave."""
    with load(checkpoint(**BRIEF), dtype=base.dtype, sweep=budget, sessions=4) as engine:
        assert engine.plan.sweep_rows == budget
        sessions = [session_with(engine, tokens) for tokens in (OTHERS[1], *OTHERS, TOKENS)]
        engine.advance(sessions)
        assert same_bits(sessions[-1].logits()[None], base.prefill[-1:])


@pytest.mark.parametrize("moment", ["open", "read"])
def test_buffered_reads(base: Base, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses direct reads, at open or at the first read."""
    real_open, real_preadv, refused = os.open, os.preadv, 0

    def refuse(flags: int) -> None:
        nonlocal refused
        if flags & os.O_DIRECT:
            refused += 1
            raise OSError(errno.EINVAL, "no direct reads here")

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        refuse(flags)
        return real_open(path, flags, *rest, **named)

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        import fcntl

        refuse(fcntl.fcntl(fd, fcntl.F_GETFL))
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, *(("open", open_) if moment == "open" else ("preadv", preadv)))
    warnings: list[str] = []
    watch = Watch(warn=warnings.append)
    cache = 3 * base.engine.plan.slot_bytes
    with load(checkpoint(**BRIEF), dtype=base.dtype, cache=cache, watch=watch) as engine:
        base.check(engine)
        assert set(engine.disk.counts.modes.values()) == {"buffered"}
    assert refused or moment == "read"  # where the file system has no direct reads at all
    assert len(warnings) == 1


@pytest.mark.parametrize("slots", [1, 3, 4, 64])
def test_random_arrival_order_r61(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come late and out of order; whatever lay in a slot before never reaches a result."""
    delays = random.Random(slots)
    read, fill = DiskTier.read, DiskTier._read_window
    canaries = 0

    def poisoned(tier: DiskTier, page: PageId, into: Buffer, *rest: Any) -> Ticket:
        nonlocal canaries
        canaries += 1
        into[:] = 0xFF  # NaN scales, should they ever be used
        return read(tier, page, into, *rest)

    def late(tier: DiskTier, *rest: Any) -> None:
        time.sleep(delays.random() * 0.002)
        fill(tier, *rest)

    folder, tokens = checkpoint(**BRIEF), TOKENS[:70]
    with load(folder, dtype="float32") as engine:
        wanted = logits_of(engine, tokens)
    monkeypatch.setattr(DiskTier, "read", poisoned)
    monkeypatch.setattr(DiskTier, "_read_window", late)
    for _ in range(2):
        with load(folder, dtype="float32", cache=slots * engine.plan.slot_bytes) as slow:
            assert same_bits(logits_of(slow, tokens), wanted)
            assert same_bits(logits_of(slow, tokens), wanted)
    assert canaries >= 2 * 60
