"""A device in the service of an engine: its plan, kernels, trunk, expert slots, and their end.

Layers that it does not compute, and everything it holds no copy of, stay with the engine's RAM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch

from .adaptive import Adaptive, Outbox
from .checkpoint import Checkpoint
from .config import CALL_ROWS, show_size
from .device_latents import DeviceLatents
from .device_trunk import DeviceTrunk
from .device_warmup import Made
from .devices import (
    RESERVE,
    beside_device,
    device_demand,
    device_plan,
    placement,
)
from .errors import UsageError
from .kernels.choose import TRITON, Kernels
from .kernels.experts_reference import Job
from .kernels.workers import single_threaded
from .latents import Home, HomeOf, Ledger
from .layer_moe import Side, activation
from .model import Sides
from .open_device import vram_limit
from .options import Options
from .registry import chosen
from .scheduler.plan import Demand, Plan
from .scheduler.store import ExpertStore
from .tiers.base import Buffer, PageId, Ticket
from .tiers.device import Device, blamed
from .tiers.device_spill import DeviceSpill
from .tiers.spill import Spill
from .tiers.spill_room import room_for
from .tiers.tier_device import DeviceTier
from .tiers.tier_disk import DiskTier
from .tiers.tier_ram import Slab
from .weights import Weights

PIN_REFUSED = (
    "The system refuses to lock {size} of memory for copies to the GPU, so they are slower. Raise "
    "the limit (ulimit -l unlimited, or memlock in /etc/security/limits.conf)."
)


def for_cpu(kernels: Mapping[str, str]) -> dict[str, str]:
    """What of ``--kernel`` is meant for the CPU."""
    return {op: backend for op, backend in kernels.items() if backend != TRITON}


class Accelerator:
    """``device`` under a plan of its own, beside the kernels ``cpu``.  ``warn`` is told what is
    slower than it could be."""

    def __init__(
        self, device: Device, checkpoint: Checkpoint, options: Options, cpu: Kernels,
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.device, self.placed = device, placement(options, checkpoint.spec)
        self._checkpoint, self._options, self._warn, self._cpu = checkpoint, options, warn, cpu
        on_gpu = device.where.type == "cuda"
        wanted = {
            op: backend
            for op, backend in options.kernels.items()
            if not on_gpu or backend == TRITON
        }
        self.kernels = Kernels(cpu.workers, wanted, options.isa, device.where)
        self._reserve = RESERVE if on_gpu else 0
        self.plan: Plan
        self.trunk: DeviceTrunk
        self.store: ExpertStore | None = None
        self.tier: DeviceTier | None = None  #: below that store
        self.adaptive: Adaptive | None = None
        self.latents: DeviceSpill | None = None  #: where not all latents have room there
        self._spill: Spill[torch.Tensor] | None = None  # where they go then, and the CPU's
        self.compile_seconds = 0.0  #: before the first sweep
        self._told = False  # that memory cannot be locked
        if options.adaptive and not self.placed.experts:
            raise UsageError(
                "--adaptive-backend chooses for experts that the GPU computes.",
                "Leave --experts-on at gpu.",
            )
        self._ends = ExitStack()
        self._ledger: Ledger

    @classmethod
    def over(
        cls,
        device: Device,
        checkpoint: Checkpoint,
        options: Options,
        cpu: Kernels,
        warn: Callable[[str], None],
    ) -> Accelerator:
        """``device`` in our service; closed again if it cannot be."""
        try:
            return cls(device, checkpoint, options, cpu, warn)
        except BaseException:
            device.close()
            raise

    def make_plan(self, demand: Demand, trunk: str, options: Options) -> Demand:
        """Decide what the device holds; returns what is left for RAM of ``demand``.  ``options``
        count from now on: they may be for fewer sessions than before."""
        self._options, spec = options, self._checkpoint.spec
        limit = vram_limit(self.device, options.vram, self._reserve)
        own = device_demand(
            self._checkpoint, options, trunk, self.placed, demand.slot, self._reserve
        )
        self.plan = device_plan(own, limit, options.sweep, self.device.name, options.use)
        self._ledger = Ledger(self.plan.state_bytes, self.plan.limit - self.plan.total)
        return beside_device(demand, self.plan, self.placed, options, spec)

    @property
    def elsewhere(self) -> frozenset[int]:
        """Layers that RAM need not hold, since the device does."""
        return frozenset(i for i in self.plan.resident_layers if i < self.placed.layers)

    def compile(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Let Triton compile what sweeps will need, where it compiles at all."""
        if self.device.where.type == "cuda":
            begin = time.perf_counter()
            how = self._options
            made = Made(weights, self.plan, self.placed, self.sides(), how.dtype, how.latent_dtype)
            made.sweeps(progress)
            torch.cuda.synchronize(self.device.where)
            self.compile_seconds = time.perf_counter() - begin

    def load_trunk(self, weights: Weights) -> None:
        """Bring the device's layers there; ``weights`` has loaded its own.  A layer passes through
        RAM that the expert slots take later."""
        layers = range(self.placed.layers)
        streams = len(self.elsewhere) < self.placed.layers
        head = self.placed.head and not self.plan.head_resident
        self._lock(weights.memory(self.placed.layers if streams else 0, head))
        self.trunk = DeviceTrunk(weights, self.device, self.plan, layers, self.placed.head)
        self._ends.callback(self.trunk.close)

    def load_latents(self, below: Spill[torch.Tensor]) -> None:
        """Latents without room go ``below``, those that lie on the device by way of its slots."""
        self._spill = below
        if self.plan.latents is None:
            return
        self._lock([below.memory])
        room = room_for(self.plan.latents, below.layout.block)
        assert room is not None, self.plan
        self.latents = DeviceSpill(below, self.device, room)
        self._ends.callback(self.latents.close)

    def load_experts(
        self, weights: Weights, host: ExpertStore, slots: Buffer, disk: DiskTier, rows: int
    ) -> None:
        """Make the slots of the device, over those of ``host``, which lie in ``slots``, for sweeps
        of ``rows`` rows."""
        if not self.placed.experts:
            return
        self._lock([slots])
        tier = DeviceTier(host, disk, self.device, weights.device_pieces)
        self.tier = tier
        self._ends.callback(tier.close)
        size, count = self.plan.slot_bytes, self.plan.slots
        memory = self.device.allocate(size * count).view(count, size)
        policy = chosen("policy", self._options.policy)(count)
        self.store = ExpertStore(tier, list(memory), policy)
        if self._options.adaptive:
            times = self._copy_seconds(slots, memory[0]), self._cpu_seconds(weights, slots)
            self.adaptive = Adaptive(self.store, host, self._cpu, self._outbox(rows), *times)

    def _outbox(self, rows: int) -> Outbox:
        """Room for results of the CPU in sweeps of ``rows`` rows: of two calls, or of all where
        that is less.  RAM's plan has room for all of them, though they lie on the device."""
        moe, kind = self._checkpoint.spec.moe, getattr(torch, self._options.dtype)
        assert moe is not None
        rows = min(2 * CALL_ROWS, rows * moe.top_k)
        memory = Slab(rows * moe.io * kind.itemsize).bytes
        self._lock([memory])
        return Outbox(self.device, memory, kind, moe.io)

    def _copy_seconds(self, source: Buffer, slot: torch.Tensor) -> float:
        """Seconds that an expert takes over the bus."""
        begin, landed = time.perf_counter(), Ticket(1)
        self.device.copy(source[: slot.nbytes], slot, None, landed.finish)
        landed.wait()
        return time.perf_counter() - begin

    def _cpu_seconds(self, weights: Weights, source: Buffer) -> float:
        """Seconds that an expert takes on the CPU: a slot that holds zeros yet."""
        spec = self._checkpoint.spec
        assert spec.moe is not None
        job = Job(*weights.expert(PageId(spec.moe_layers[0], 0), source), [0])
        x = torch.zeros(1, spec.moe.io, dtype=getattr(torch, self._options.dtype))
        with single_threaded(), self._cpu.in_force():
            self._cpu.experts(x, [job], activation(spec), True)
            begin = time.perf_counter()
            self._cpu.experts(x, [job], activation(spec), True)
        weights.forget(source)
        return time.perf_counter() - begin

    def _lock(self, memory: Sequence[Buffer]) -> None:
        """Lock host memory that copies come from, as far as the system allows; one warning."""
        for some in memory:
            if not self._told and not self.device.pin(some):
                self._told = True
                self._warn(PIN_REFUSED.format(size=show_size(sum(m.nbytes for m in memory))))

    def sides(self) -> Sides:
        """Who computes what."""
        here, there = Side(self._cpu, torch.device("cpu")), Side(self.kernels, self.device.where)
        count = len(self._checkpoint.spec.layers)
        layers = tuple(there if i < self.placed.layers else here for i in range(count))
        return Sides(
            layers,
            there if self.placed.experts else here,
            there if self.placed.head else here,
            (self._cpu, self.kernels),
            self.blamed,
        )

    def blamed(self) -> AbstractContextManager[None]:
        """Errors of torch and Triton inside the block name this device and what to do."""
        return blamed(self.device.name)

    def homes(self, ledger: Ledger, shared: bool = False) -> HomeOf:
        """Where each layer's state lives; with ``shared`` that of snapshots, which lie in RAM."""
        here = Home(torch.device("cpu"), ledger, self._spill)
        there = Home(here.where, ledger) if shared else Home(self.device.where, self._ledger)
        if self.latents is not None:
            there = there._replace(spill=self._spill, kind=partial(DeviceLatents, self.latents))
        return lambda layer: there if layer < self.placed.layers else here

    def close(self) -> None:
        """End copies under way, then the device."""
        with ExitStack() as last:
            last.callback(self.device.close)
            last.callback(self._ends.close)
            for name in ("store", "tier", "adaptive", "latents", "trunk", "kernels"):
                self.__dict__.pop(name, None)  # and with them the device's memory
