"""Latents that spill: the bits of a run that keeps them all, whatever the memory; copies, failures,
refusals (R16, R32, R58, R75)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from k3offload.config import LATENT_BLOCK
from k3offload.engine import Engine
from k3offload.errors import DoesNotFit, ScratchError, SessionError, UsageError
from k3offload.generate import Done, Request, generate
from k3offload.latents import Home, Ledger, SpilledLatents
from k3offload.loading import load
from k3offload.sampling import Sampling
from k3offload.session import Session
from k3offload.spilling import as_block
from k3offload.tiers import scratch as scratch_module
from k3offload.tiers.scratch import MARK
from k3offload.tiers.spill import Spill
from k3offload.tiers.spill_room import Room
from tests.contract.test_kernel import generator, poisoned
from tests.contract.test_kernel import same_bits as same_tensors
from tests.helpers_engine import (
    BRIEF,
    Logits,
    checkpoint,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
)
from tests.helpers_ops import randn
from tests.helpers_spilled import damage_first_file, fork_story
from tests.test_spill import WIDE, Case

pytest.importorskip("zarr")
LENGTH = 5 * LATENT_BLOCK + 70
TOKENS = some_tokens(LENGTH)
HOW: dict[str, Any] = {"context": LENGTH + 600, "sessions": 3, "sweep": 512, "threads": 2}


def small(**how: Any) -> Engine:
    return load(checkpoint(**BRIEF), **{**HOW, **how})


def least(**how: Any) -> int:
    """The smallest ``latents`` that is not refused, as the refusal says."""
    with pytest.raises(DoesNotFit, match=r"^1 bytes of latents .*Give --latents") as refusal:
        small(latents=1, **how)
    return refusal.value.missing + 1


@pytest.fixture(scope="module")
def resident() -> Iterator[Engine]:
    with small() as engine:
        assert engine.spilling is None
        yield engine


@pytest.fixture(scope="module")
def expected(resident: Engine) -> tuple[Logits, Logits]:
    """All rows of the prompt; then the last rows as decode runs."""
    return logits_of(resident, TOKENS), logits_of(resident, TOKENS, decode_from=LENGTH - 6, keep=6)


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Engine]:
    """An engine with the least memory for latents."""
    with small(latents=least(), scratch=tmp_path) as engine:
        yield engine


def spill(engine: Engine) -> Spill[torch.Tensor]:
    assert engine.spilling is not None and engine.spilling.latents is not None
    return engine.spilling.latents


def moved(engine: Engine) -> bool:
    """Whether bytes went to disk and came back."""
    counts = spill(engine).counts
    return counts.written_bytes > 0 and counts.read_bytes > 0


# ---- bits ----


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("sweep", [64, 512])
def test_bits_do_not_depend_on_the_memory(
    expected: tuple[Logits, Logits], tmp_path: Path, blocks: int, sweep: int
) -> None:
    """Prefill and decode, with ``blocks`` blocks more than the least."""
    with small(latents=least() + blocks * 40_960, scratch=tmp_path, sweep=sweep) as engine:
        assert engine.plan.latents is not None
        assert same_bits(logits_of(engine, TOKENS, sweep), expected[0])
        assert same_bits(logits_of(engine, TOKENS, sweep, LENGTH - 6, keep=6), expected[1])
        assert moved(engine)


@pytest.mark.parametrize("how", [{"dtype": "float32"}, {"kernels": {"mla_decode": "reference"}}])
def test_bits_in_other_forms(tmp_path: Path, how: dict[str, Any]) -> None:
    with small(**how) as engine:
        base = logits_of(engine, TOKENS, decode_from=LENGTH - 3, keep=6)
    with small(latents=least(**how), scratch=tmp_path, **how) as engine:
        assert same_bits(logits_of(engine, TOKENS, decode_from=LENGTH - 3, keep=6), base)
        assert moved(engine)


def test_memory_is_poisoned_and_used_again_r75(
    expected: tuple[Logits, Logits], tight: Engine
) -> None:
    """Requests of falling length through memory that is full of NaN before each of them."""
    nan = torch.tensor([float("nan")], dtype=torch.bfloat16).view(torch.uint8).numpy()
    memory = spill(tight)._memory
    for count in (LENGTH, 1100, 700, 300, 257, 256, 100, 1):
        memory.reshape(-1, 2)[:] = nan
        with poisoned(), session_with(tight, TOKENS[:count]) as session:
            got = session.logits()[None]
            assert same_bits(got, expected[0][count - 1 : count]), count
            blocks = [
                la._open.data
                for la in session.state.latents.values()
                if isinstance(la, SpilledLatents)
            ]
            assert all(b[count % LATENT_BLOCK :].isnan().all() for b in blocks if count < 256)


def test_forks_and_snapshots_share_blocks(resident: Engine, tight: Engine) -> None:
    """A copy, a copy of it, going back: all as in memory; shared blocks are written once."""
    for a, b in zip(fork_story(resident, TOKENS), fork_story(tight, TOKENS), strict=True):
        assert same_bits(a, b)
    assert moved(tight)
    layers = len(tight.spec.mla_layers)
    ever = layers * (LENGTH + 600 + LENGTH - 900) // LATENT_BLOCK * spill(tight).layout.block
    assert spill(tight).counts.written_bytes <= ever


def test_a_sequence_of_blocks_keeps_its_rows(tmp_path: Path) -> None:
    """``rows``, ``pieces`` and copies against the rows that were appended."""
    case = Case(tmp_path, WIDE, Room(2, 1), as_block(torch.bfloat16, 40))
    home = Home(torch.device("cpu"), Ledger(3 * WIDE.block), case.spill)
    rows = randn(generator(0), 1500, 40, dtype=torch.bfloat16)
    one = SpilledLatents(home, 40, torch.bfloat16)
    for begin in range(0, 1300, 100):
        one.append(rows[begin : begin + 100])
    other = one.copy(home, one.length)
    other.append(rows[1300:])
    for latents, length in ((one, 1300), (other, 1500)):
        got = torch.cat([latents.rows(b) for b in range(latents.blocks)])[:length]
        assert same_tensors(got, rows[:length])
        got = torch.cat([torch.cat(tuple(p)) for p in latents.pieces()])[:length]
        assert latents.length == length and same_tensors(got, rows[:length])
    assert home.ledger.used == 2 * WIDE.block  # the open ones
    with pytest.raises(DoesNotFit):
        [other.copy(home, other.length) for _ in range(2)]
    case.close()


# ---- failures ----


def decode(engine: Engine, *sessions: Session) -> list[Done]:
    """What becomes of three more tokens for each."""
    requests = [Request(s, 3, Sampling(ignore_end=True)) for s in sessions]
    return [event for event in generate(engine, requests) if isinstance(event, Done)]


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 0)])
def test_lost_files_end_their_session_alone_r58(
    tight: Engine, resident: Engine, damage: Callable[[Path], None]
) -> None:
    lost, fine = session_with(tight, TOKENS), session_with(tight, TOKENS[:300])
    snapshot = fine.snapshot()
    lost.logits()
    fine.logits()
    path = damage_first_file(tight, damage)
    ends = {end.request: end for end in decode(tight, lost, fine)}
    assert isinstance(ends[0].error, ScratchError) and str(path) in str(ends[0].error)
    assert ends[1].finish_reason == "length" and ends[1].error is None
    with session_with(resident, TOKENS[:300]) as same:
        decode(resident, same)
        assert same.tokens == fine.tokens and same_bits(same.logits()[None], fine.logits()[None])
    with pytest.raises(SessionError, match="lost"):
        lost.logits()
    lost.rewind(snapshot)
    lost.append(TOKENS)
    assert lost.logits().shape  # the same session goes on
    for session in (lost, fine):
        session.close()


def test_a_full_disk_ends_who_needs_it_r32(
    expected: tuple[Logits, Logits], tight: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is computed; the session goes on when there is room again."""
    with session_with(tight, TOKENS[:100]) as short, session_with(tight, TOKENS) as long:
        monkeypatch.setattr(scratch_module, "SPARE", 1 << 60)
        ends = {end.request: end for end in decode(tight, long, short)}
        assert isinstance(ends[0].error, ScratchError)
        assert "are free" in str(ends[0].error) and "--scratch" in str(ends[0].error)
        assert ends[1].finish_reason == "length"
        monkeypatch.undo()
        assert same_bits(long.logits()[None], expected[0][-1:])


def test_writes_that_fail_end_who_made_them_r32(tight: Engine) -> None:
    """The folder is taken away under a running prompt; a short session needs none of it."""
    assert tight.spilling is not None
    with session_with(tight, TOKENS) as long, session_with(tight, TOKENS[:20]) as short:
        short.logits()
        os.chmod(tight.spilling.scratch.folder, 0o700)
        folder = tight.spilling.scratch.folder
        moved_to = folder.with_name("elsewhere")
        folder.rename(moved_to)
        folder.write_text("no folder")
        ends = {end.request: end for end in decode(tight, long, short)}
        assert isinstance(ends[0].error, (ScratchError, OSError)), ends[0]
        assert ends[1].finish_reason == "length"
        folder.unlink()
        moved_to.rename(folder)


def test_closing_deletes_the_files(tmp_path: Path) -> None:
    with small(latents=least(), scratch=tmp_path) as engine:
        session = session_with(engine, TOKENS)
        session.logits()
        assert engine.spilling is not None
        folder = engine.spilling.scratch.folder
        assert len(list(folder.iterdir())) > 1
        session.close()
        spill(engine).flush()
        assert [p.name for p in folder.iterdir()] == [MARK]
        other = session_with(engine, TOKENS)
        other.logits()
        held = spill(engine)
    assert not list(tmp_path.iterdir())
    assert not held._memory.size and not held._views
    with pytest.raises(ScratchError, match="closed"):
        other.state.latents[3].rows(0)
    other.append([1])
    with pytest.raises(SessionError, match="closed"):
        other.logits()


# ---- the plan ----


def test_a_million_tokens_in_little_ram_r16(tmp_path: Path) -> None:
    """nano at its full context would take 336 MB of latents; it plans to spill, and says so."""
    said: list[str] = []
    context = 1_000_000
    with pytest.raises(DoesNotFit) as refusal:
        load("nano", context=context, ram=1)
    ram = refusal.value.missing + 40_000_000
    with load("nano", context=context, ram=ram, scratch=tmp_path) as engine:
        plan = engine.plan
        assert plan.latents is not None and plan.all_latents > 300e6
        assert plan.latents < 60e6 and plan.total <= plan.limit
        said = [name for name, size in plan.purposes if size]
        assert "latents, the newest, and buffers" in said
        with session_with(engine, TOKENS[:600]) as session:
            session.logits()
    with load("nano", context=context, ram="2G") as engine:
        assert engine.plan.latents is None and engine.spilling is None


def test_memory_that_suffices_needs_no_folder(resident: Engine) -> None:
    with small(latents="1G", scratch="/dev/null/none") as engine:
        assert engine.plan.latents is None and engine.plan.state_bytes == resident.plan.state_bytes


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_a_scratch_folder_in_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="lies in memory"):
        small(latents=least(), scratch="/dev/shm/k3-scratch")
