"""What a decode step of few rows does not wait for, or does not copy, changes no bit: pages that
never leave, rows of latents written where they stay, a row of the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from k3offload import layer_mla
from k3offload.config import LATENT_BLOCK
from k3offload.engine import Engine
from k3offload.kernels import c_function, native
from k3offload.latents import Latents, SpilledLatents
from k3offload.loading import load
from k3offload.scheduler.store import ExpertStore
from tests.contract.test_kernel import same_bits as same_tensors
from tests.test_put_off_safe import FOLDER, at_once, decoded

pytestmark = pytest.mark.skipif(not native.isas(), reason="there is no native library")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(FOLDER(), sessions=8, threads=2) as made:
        yield made


def test_pages_that_never_leave_are_let_go_before_their_calls(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[bool] = []
    gone: list[Any] = []
    kept, evict = ExpertStore._unpin, ExpertStore._evict

    def unpin(store: ExpertStore, pages: Any) -> None:
        if pages:
            left.append(c_function.waiting())
        kept(store, pages)

    def evicted(store: ExpertStore, choice: Any) -> int:
        gone.append(choice)
        return evict(store, choice)

    monkeypatch.setattr(ExpertStore, "_unpin", unpin)
    monkeypatch.setattr(ExpertStore, "_evict", evicted)
    run = partial(decoded, engine, (70, 5))
    found = run()
    assert any(left) and not gone
    assert found == at_once(monkeypatch, run)


def test_one_slot_fewer_and_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []
    kept = ExpertStore._unpin

    def unpin(store: ExpertStore, pages: Any) -> None:
        if pages:
            left.append(c_function.waiting())
        kept(store, pages)

    with load(FOLDER(), sessions=2, threads=2) as engine:
        assert engine.store is not None
        room = engine.spec.expert_count
        assert engine.store.slots >= room
        monkeypatch.setattr(ExpertStore, "_unpin", unpin)
        monkeypatch.setattr(ExpertStore, "slots", room - 1)
        decoded(engine, (70,))
    assert left and not any(left)


def test_a_row_written_where_it_stays_is_the_one_that_is_appended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the end of a block, too."""
    written, own = list[int](), Latents.next_row

    def next_row(latents: Latents) -> torch.Tensor:
        written.append(latents.length)
        return own(latents)

    monkeypatch.setattr(Latents, "next_row", next_row)
    run = partial(decoded, engine, (LATENT_BLOCK - 2,), 5)
    found = run()
    assert {LATENT_BLOCK - 1, LATENT_BLOCK} <= set(written)
    monkeypatch.setattr(layer_mla, "Latents", SpilledLatents)  # there are none of these
    assert found == run()


def test_a_row_of_the_embedding_is_a_copy(engine: Engine) -> None:
    """The running sum is written to."""
    row = engine.weights.embed([3], torch.bfloat16)
    kept = row.clone()
    row.zero_()
    assert same_tensors(engine.weights.embed([3], torch.bfloat16), kept)
    assert same_tensors(engine.weights.embed([3, 5], torch.bfloat16)[:1], kept)
