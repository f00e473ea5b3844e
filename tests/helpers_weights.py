"""The trunk of a small model under made plans, and a disk that can be slow or broken on purpose.

The tier, its threads and the files are real; only ``os.preadv`` is watched and held up.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from k3offload.arena import LayerWeights
from k3offload.budget import demand_of
from k3offload.checkpoint import Checkpoint
from k3offload.kernels.workers import Workers
from k3offload.layout import arena_size, head_buffers
from k3offload.scheduler.plan import Limits, Plan, make_plan
from k3offload.tiers.base import Buffer, Location, Priority, Ticket
from k3offload.tiers.tier_disk import DiskTier
from k3offload.weights import Weights

PATIENCE = 20.0  #: seconds that a test waits for another thread


class Asked(DiskTier):
    """A disk tier that remembers what it was asked for: (first byte's file, priority)."""

    def __init__(self, checkpoint: Checkpoint, readers: int = 8) -> None:
        super().__init__(
            checkpoint.files, lambda page: checkpoint.expert(*page).extents, readers=readers
        )
        self.asked: list[tuple[int, Priority]] = []
        self.raised: list[int] = []

    def read_scatter(
        self, pieces: Sequence[tuple[Location, Buffer]], priority: Priority = Priority.DEMAND
    ) -> Ticket:
        ticket = super().read_scatter(pieces, priority)
        if pieces:
            file = pieces[0][0].file
            self.asked.append((file, priority))
            plain = ticket.raise_to

            def raise_to(to: Priority) -> None:
                self.raised.append(file)
                plain(to)

            ticket.raise_to = raise_to  # type: ignore[method-assign,assignment]
        return ticket


class Reads:
    """Stands before ``os.preadv``: reads of ``held`` files wait, those of ``broken`` ones fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._preadv = os.preadv
        self._change = threading.Condition()
        self.held: set[str] = set()
        self.broken: set[str] = set()
        self.begun: list[str] = []
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, views: list[Any], offset: int) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        broken = name in self.broken
        with self._change:
            self.begun.append(name)
            self._change.notify_all()
            assert self._change.wait_for(lambda: name not in self.held, PATIENCE)
        if broken:
            raise OSError(6, "No such device or address")  # nothing that is tried again
        return self._preadv(fd, views, offset)

    def hold(self, path: Path) -> None:
        self.held.add(path.name)

    def release(self) -> None:
        with self._change:
            self.held.clear()
            self._change.notify_all()

    def mend(self) -> None:
        """Nothing is held or broken any more."""
        self.broken.clear()
        self.release()

    def wait_for(self, path: Path) -> None:
        """Until a read of ``path`` has begun."""
        with self._change:
            assert self._change.wait_for(lambda: path.name in self.begun, PATIENCE)


def plan_of(
    checkpoint: Checkpoint,
    resident: Collection[int],
    buffers: int,
    precision: str = "bfloat16",
    head: bool = True,
) -> Plan:
    """A plan that keeps the layers ``resident`` and streams the others through ``buffers``."""
    demand = demand_of(checkpoint, "bfloat16", base=0, threads=1, context=64, sessions=1)
    layers = [la.index for la in checkpoint.spec.layers]
    streamed = [la for la in layers if la not in resident]
    return dataclasses.replace(
        make_plan(demand, Limits(1 << 40)),
        resident_layers=frozenset(resident),
        embed_resident=head,
        head_resident=head,
        ring_bytes=max((arena_size(checkpoint.trunk(la), precision) for la in streamed), default=0),
        ring_buffers=buffers,
    )


def weights_of(
    checkpoint: Checkpoint,
    disk: DiskTier,
    resident: Collection[int] = (),
    buffers: int = 2,
    precision: str = "bfloat16",
    head: bool = True,
    workers: Workers | None = None,
) -> Weights:
    """Loaded weights under such a plan."""
    plan = plan_of(checkpoint, resident, buffers, precision, head)
    weights = Weights(checkpoint, disk, plan, precision, workers)
    weights.load(lambda done, total: None)
    return weights


def all_resident(checkpoint: Checkpoint, disk: DiskTier, precision: str = "bfloat16") -> Weights:
    return weights_of(checkpoint, disk, [la.index for la in checkpoint.spec.layers], 0, precision)


def shard_of(checkpoint: Checkpoint, layer: int) -> Path:
    """The file of a layer's trunk."""
    return checkpoint.files[checkpoint.trunk(layer)[0].location.file]


def bytes_of(weights: LayerWeights) -> dict[str, bytes]:
    """Every array of a layer as it lies in memory."""
    return {
        part.name: weights.tensor(part.name).contiguous().view(torch.uint8).numpy().tobytes()
        for item in weights.items
        for part in item.parts
    }


def visit(weights: Weights, layer: int) -> dict[str, bytes]:
    """Every array of a layer, asked for as a sweep does."""
    with weights.layer(layer) as w:
        assert w.layer == layer
        return bytes_of(w)


def head_of(weights: Weights) -> torch.Tensor:
    """[vocab, hidden] float32: one pass over the head, decoded."""
    alone = Workers(1)
    rows: list[torch.Tensor] = []
    for begin, end, weight in weights.head_blocks():
        assert begin == sum(len(block) for block in rows) and weight.shape[0] == end - begin
        rows.append(weight.rows(0, end - begin, torch.float32, alone).clone())
    return torch.cat(rows)


def buffers_of_head(checkpoint: Checkpoint, precision: str) -> int:
    return len(head_buffers(checkpoint, precision))


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another thread will bring about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
