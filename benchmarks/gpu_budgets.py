"""Part 3 of ``gpu_suite.py``: a model under budgets of a GPU's memory, and what each tier reached.

Rates of the bus and of the disk are measured in the same run; what a sweep moved stands beside them
as a share.  Copies are hidden as far as the engine computed while they were on their way: overlap
is the part of the time with copies under way in which nobody waited for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3offload.bench_read import read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.engine import Engine
from k3offload.loading import load
from k3offload.tiers.base import Buffer, Ticket
from k3offload.tiers.device import Device, Landed, Mark, Watch

ON_DEVICE = ("experts on the device", "trunk on the device", "head on the device")


class Timed:
    """``device``, which counts bytes copied to it and the seconds with copies under way."""

    def __init__(self, device: Device) -> None:
        self.watch: Watch | None = None
        self.device, self.name, self.where = device, device.name, device.where
        self.free_bytes, self.allocate, self.pin = device.free_bytes, device.allocate, device.pin
        self.mark, self.handed_out, self.close = device.mark, device.handed_out, device.close
        self.fetch = device.fetch  # the other way, which the bus has for itself
        self._lock, self._under_way, self._since = threading.Lock(), 0, 0.0
        self._bytes, self._seconds = 0, 0.0

    def copy(
        self,
        source: Buffer,
        to: torch.Tensor,
        after: Mark | None,
        landed: Landed,
        urgent: bool = True,
    ) -> None:
        self.device.copy(source, to, after, self._timed(source.nbytes, landed), urgent)

    def copy_all(
        self, pairs: Sequence[tuple[Buffer, torch.Tensor]], after: Mark, landed: Landed
    ) -> None:
        size = sum(source.nbytes for source, _ in pairs)
        self.device.copy_all(pairs, after, self._timed(size, landed))

    def _timed(self, size: int, landed: Landed) -> Landed:
        """``landed`` of a copy of ``size`` bytes that begins now."""

        def ended(error: BaseException | None) -> None:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._seconds += time.perf_counter() - self._since
            landed(error)

        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
            self._bytes += size
        return ended

    def so_far(self) -> tuple[int, float]:
        """Bytes asked for, and seconds with copies under way."""
        with self._lock:
            now = time.perf_counter() - self._since if self._under_way else 0.0
            return self._bytes, self._seconds + now


def bus_rate(device: Device, size: int, rounds: int = 4) -> float:
    """Bytes a second from locked memory to the device, the best of ``rounds`` copies."""
    source, to = np.ones(size, np.uint8), device.allocate(size)
    device.pin(source)
    best = 0.0
    for _ in range(rounds):
        landed, begin = Ticket(1), time.perf_counter()
        device.copy(source, to, None, landed.finish)
        landed.wait()
        best = max(best, size / (time.perf_counter() - begin))
    device.close()  # and lets go of what was locked
    return best


def disk_rate(folder: Path, seconds: float) -> float:
    """Bytes a second of the model's pages, read as the engine reads them."""
    return read_rate(Checkpoint.open(folder), seconds).rate


def shares(
    seconds: float, copied: int, busy: float, waited: float, read: int, bus: float, disk: float
) -> dict[str, float | None]:
    """What ``seconds`` of decoding made of the line rates ``bus`` and ``disk`` (bytes a second):
    ``copied`` bytes in ``busy`` seconds with copies under way, for which the engine ``waited``;
    ``read`` bytes from disk.  None where nothing was copied."""
    return {
        "bus_share": copied / (seconds * bus),
        "bus_share_while_copying": copied / (busy * bus) if busy else None,
        "disk_share": read / (seconds * disk),
        "overlap": max(0.0, 1.0 - waited / busy) if busy else None,
    }


class _Account:
    """Bytes and seconds of an engine at one moment."""

    def __init__(self, engine: Engine, device: Timed) -> None:
        self.counts, self.time = engine.counts(), time.perf_counter()
        self.read = engine.disk.counts.bytes
        self.copied, self.busy = device.so_far()
        there = engine.accelerator
        self.stops = 0 if there is None else there.kernels.waits


def decode(
    folder: Path, bare: Device, rates: tuple[float, float], prompt: int, steps: int, **given: Any
) -> dict[str, Any]:
    """A prompt and decode steps under a budget; ``rates`` of bus and disk in bytes a second."""
    device = Timed(bare)
    with load(folder, device=device, context=prompt + 64, sweep=prompt, **given) as engine:
        vocab = min(4000, engine.spec.vocab)
        with engine.session() as session:
            session.append([(7 * i) % vocab for i in range(prompt)])
            begin = time.perf_counter()
            session.logits()
            took = time.perf_counter() - begin
            for step in range(4):
                session.append_sampled(83 * step % vocab)
                session.logits()
            a = _Account(engine, device)
            for step in range(steps):
                session.append_sampled(37 * step % vocab)
                session.logits()
            b = _Account(engine, device)
        compiled = engine.accelerator.compile_seconds if engine.accelerator else 0.0
    seconds = b.time - a.time
    moved = {kind: b.counts[kind].bytes - a.counts[kind].bytes for kind in b.counts}
    waited = {kind: b.counts[kind].wait_seconds - a.counts[kind].wait_seconds for kind in b.counts}
    hidden = shares(
        seconds, b.copied - a.copied, b.busy - a.busy, sum(waited.get(k, 0) for k in ON_DEVICE),
        b.read - a.read, *rates,
    )  # fmt: skip
    return {
        "part": "budgets", "prompt_tokens_a_second": prompt / took,
        "tokens_a_second": steps / seconds, "compile_seconds": compiled,
        "bytes": moved, "bytes_a_second": {kind: n / seconds for kind, n in moved.items()},
        "waited": waited, "host_waits_a_step": (b.stops - a.stops) / steps,
        "bus_bytes": b.copied - a.copied, "disk_bytes": b.read - a.read, **hidden,
    }  # fmt: skip
