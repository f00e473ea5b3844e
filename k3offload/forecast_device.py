"""How long a sweep takes with a device: what VRAM, the bus, RAM and the disk each contribute.

As ``forecast.py``, with these additions: a layer's weights are read from the memory of whoever
computes it; what the device computes and does not hold comes over the bus (PCIe); an expert that is
not in VRAM comes from RAM over the bus, or first from disk.  Transfers of one layer's experts and
the work after its router overlap, and the trunk of the next layer is copied meanwhile, so a sweep
takes the sum of its layers or the whole time of the bus or of the disk, whichever is longest.
With uniform routing a cache of s of S experts answers s/S of the requests of decode rows, and RAM
(s' - s)/(S - s) of those that VRAM of s < s' leaves, since what is in VRAM came through RAM.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from .devices import Placement
from .forecast import Cost, Setup, _Sweep, _Work
from .rates import ASSUMED_TILE, KINDS, Rates
from .scheduler.plan import Plan
from .spec import LayerSpec

#: An RTX 4090 behind PCIe 4 x16: bytes a second of memory and bus, multiply-adds a second.
ASSUMED: Final = (1008e9, 25e9, 82e12)
READ_SHARE: Final = 0.7  #: of the memory's bandwidth, by weights of a decode row
MACS_SHARE: Final = 0.4  #: of the tensor cores' multiply-adds
LAUNCHES: Final = 120e-6  #: seconds of launches and hand-overs a layer
EDGE: Final = 0.25  #: part of the multiply-adds that attention and the recurrence reach


@dataclass(frozen=True)
class Bus:
    """A device: bytes a second of its memory and of the bus to it, multiply-adds a second."""

    memory: float = ASSUMED[0]
    pcie: float = ASSUMED[1]
    macs: float = ASSUMED[2]

    def rates(self, disk: float) -> Rates:
        """As ``forecast.py`` wants them."""
        read, macs = self.memory * READ_SHARE, self.macs * MACS_SHARE
        return Rates(
            disk=disk,
            ram=self.memory,
            stream=dict.fromkeys(KINDS, read),
            extra=dict.fromkeys(KINDS, macs),
            ready=dict.fromkeys(KINDS, read),
            macs=dict.fromkeys(KINDS, macs),
            tile=ASSUMED_TILE,
            macs32=macs * EDGE,
            attention=macs * EDGE,
            recurrence=macs * EDGE * EDGE,
            numbers=self.memory / 12,
            layer=LAUNCHES,
            chunk=LAUNCHES / 4,
            source="assumed",
        )


@dataclass(frozen=True)
class DeviceForecast:
    """One sweep of ``rows`` tokens.  The seconds of each tier overlap one another."""

    rows: int
    seconds: float
    device_seconds: float
    cpu_seconds: float
    bus_seconds: float
    disk_seconds: float
    bus_bytes: float
    disk_bytes: float
    vram_hit_rate: float
    ram_hit_rate: float  #: of the experts that VRAM has not

    @property
    def limit(self) -> str:
        """What most of the time is spent on."""
        parts = {
            "the device": self.device_seconds,
            "the cpu": self.cpu_seconds,
            "the bus": self.bus_seconds,
            "disk": self.disk_seconds,
        }
        return max(parts, key=lambda name: parts[name])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds_per_token": self.seconds / self.rows, "limit": self.limit}


def forecast(
    setup: Setup, plan: Plan, placed: Placement, bus: Bus, *, rows: int, position: int, decode: bool
) -> DeviceForecast:
    """A sweep of ``rows`` rows: decode steps of as many sequences, or the next of one prompt.
    ``setup``: of RAM, disk and CPU beside the device, whose own memory has ``plan``."""
    return _DeviceSweep(setup, plan, placed, bus, rows, position, decode).of_all()


class _DeviceSweep(_Sweep):
    def __init__(
        self, setup: Setup, plan: Plan, placed: Placement, bus: Bus, rows: int, position: int,
        decode: bool,
    ) -> None:  # fmt: skip
        super().__init__(setup, rows, position, decode)
        self._plan, self._placed, self._bus = plan, placed, bus
        self._cpu, self._device = setup.rates, bus.rates(setup.rates.disk)
        self.vram_hits, self.ram_hits = self._hits()

    def _hits(self) -> tuple[float, float]:
        """Shares of requests that VRAM answers, and RAM of the others."""
        every = self.spec.expert_count
        held = self._plan.slots if self._placed.experts else 0
        if not every or held >= every:
            return 1.0, 1.0
        if self.setup.plan.slots >= every:
            return (held / every if self.decode else 0.0), 1.0
        if not self.decode:
            return 0.0, 0.0
        given = self.setup.hit_rate
        if given is not None:
            # of all requests; VRAM has its share of the pages that RAM has
            vram = given * min(1.0, held / max(1, self.setup.plan.slots))
            return vram, (given - vram) / (1 - vram) if vram < 1 else 1.0
        return held / every, max(0.0, self.setup.plan.slots - held) / (every - held)

    def _routed(self) -> Cost:
        before, self.rates = self.rates, self._device if self._placed.experts else self._cpu
        cost = super()._routed()
        self.rates = before
        return cost

    def _one(self, layer: LayerSpec) -> tuple[_Work, bool]:
        """A layer's work and whether the device does it."""
        there = layer.index < self._placed.layers
        self.rates = self._device if there else self._cpu
        return self._layer(layer), there

    def _latents(self) -> float:
        held = self.setup.plan.latents  # those on the device never come from disk
        return 0.0 if held is None else self._beyond(held + (self._plan.latents or 0))

    def of_all(self) -> DeviceForecast:
        bus, disk = self._bus.pcie, self._cpu.disk
        one = self.spec.expert_bytes
        missed = self.wanted * (1 - self.vram_hits)
        read = missed * (1 - self.ram_hits) * one  # a layer's, from disk
        moved = missed * one if self._placed.experts else 0.0  # and over the bus
        seconds = device = cpu = bus_bytes = disk_bytes = 0.0
        for layer in self.spec.layers:
            work, there = self._one(layer)
            sparse = layer.ffn == "moe"
            routed = self._routed().seconds if sparse else 0.0
            own = work.before.seconds + work.after.seconds - routed
            on_device = routed if self._placed.experts else 0.0
            device += on_device + (own if there else 0.0)
            cpu += routed - on_device + (0.0 if there else own)
            waits = max(moved / bus, read / disk) if sparse else 0.0
            seconds += work.before.seconds + max(work.after.seconds, waits)
            bus_bytes += moved if sparse else 0.0
            disk_bytes += read if sparse else 0.0
            if there and layer.attention != "kda" and self._plan.latents is not None:
                bus_bytes += self._beyond(self._plan.latents)
            disk_bytes += work.scratch
            if there and layer.index not in self._plan.resident_layers:
                bus_bytes += self._plan.layer_sizes[layer.index]
            held = there and layer.index in self._plan.resident_layers
            if not held and layer.index not in self.setup.plan.resident_layers:
                disk_bytes += work.trunk
        self.rates = self._device if self._placed.head else self._cpu
        head, kept = self._head()
        if self._placed.head:
            device += head.seconds
            bus_bytes += 0 if self._plan.head_resident else kept
        else:
            cpu += head.seconds
        if not self._plan.head_resident and not self.setup.plan.head_resident:
            disk_bytes += kept if self.setup.packed else self.spec.vocab * self.spec.hidden * 2
        seconds = max(seconds + head.seconds, bus_bytes / bus, disk_bytes / disk)
        return DeviceForecast(
            self.n, seconds, device, cpu, bus_bytes / bus, disk_bytes / disk, bus_bytes,
            disk_bytes, self.vram_hits, self.ram_hits,
        )  # fmt: skip
