"""The part of ``k3offload plan`` that is about a device: its memory, and the seconds with it for
every way to share the work out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .config import show_size
from .devices import (
    RESERVE,
    Placement,
    beside_device,
    device_demand,
    device_plan,
    placement,
)
from .errors import DoesNotFit, UsageError
from .forecast import Setup
from .forecast_device import Bus, DeviceForecast, forecast
from .layout import Layout
from .plan_text import plan_lines
from .rates import Rates
from .scheduler.plan import Demand, Limits, Plan, make_plan, use_of
from .spec import ModelSpec

if TYPE_CHECKING:
    from .plan_report import Ask

WAYS = (("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu"))  #: trunk and experts


@dataclass(frozen=True)
class Way:
    """The work shared out one way: what a decode step and a sweep of a prompt take."""

    trunk_on: str
    experts_on: str
    decode: DeviceForecast
    prefill: DeviceForecast


@dataclass(frozen=True)
class DeviceReport:
    """The device's plan, the RAM beside it, and the forecasts of the way that was asked for and
    of the others that fit."""

    plan: Plan
    ram: Plan
    placed: Placement
    bus: Bus
    way: Way
    others: tuple[Way, ...]

    def to_dict(self) -> dict[str, Any]:
        """Bytes and seconds."""
        return {
            "placed": self.placed._asdict(),
            "rates": asdict(self.bus),
            "ways": [
                {
                    "trunk_on": way.trunk_on,
                    "experts_on": way.experts_on,
                    "decode": way.decode.to_dict(),
                    "prefill": way.prefill.to_dict(),
                }
                for way in (self.way, *self.others)
            ],
        }

    def lines(self) -> list[str]:
        """Text for a terminal."""
        b = self.bus
        lines = [
            "with a gpu:",
            *plan_lines(self.plan),
            *plan_lines(self.ram),
            f"rates: memory of the gpu {b.memory / 1e9:.4g} GB/s, bus {b.pcie / 1e9:.3g} GB/s, "
            f"products {b.macs / 1e9:,.0f} GMAC/s",
        ]
        for way in (self.way, *self.others):
            d, p = way.decode, way.prefill
            lines += [
                f"--trunk-on {way.trunk_on} --experts-on {way.experts_on}: {d.seconds:.3g} s a "
                f"token, limited by {d.limit}; prompt {p.seconds / p.rows:.3g} s a token",
                f"  a token: gpu {d.device_seconds:.3g} s, cpu {d.cpu_seconds:.3g} s, bus "
                f"{d.bus_seconds:.3g} s ({show_size(d.bus_bytes)}), disk {d.disk_seconds:.3g} s "
                f"({show_size(d.disk_bytes)}); {100 * d.vram_hit_rate:.3g} % of experts in VRAM, "
                f"{100 * d.ram_hit_rate:.3g} % of the others in RAM",
            ]
        return lines


def setup_of(spec: ModelSpec, ask: Ask, rates: Rates, plan: Plan) -> Setup:
    """What a forecast is made of."""
    return Setup(
        spec, plan, rates, ask.dtype, ask.trunk, ask.packed, ask.hit_rate,
        latent_dtype=ask.latent_dtype,
    )  # fmt: skip


def device_report(
    layout: Layout, ask: Ask, rates: Rates, demand: Demand, bus: Bus
) -> DeviceReport | None:
    """None without ``ask.vram``; raises ``DoesNotFit`` if what was asked for does not fit."""
    if ask.vram is None:
        return None
    placed = placement(ask, layout.spec)
    plan, ram, way = _way(layout, ask, rates, demand, bus, placed, ask.trunk_on, ask.experts_on)
    others = []
    for trunk_on, experts_on in WAYS:
        if (trunk_on, experts_on) == (way.trunk_on, way.experts_on):
            continue
        other = Placement(
            len(layout.spec.layers) if trunk_on == "gpu" else 0,
            trunk_on == "gpu",
            experts_on == "gpu" and bool(layout.spec.moe_layers),
        )
        try:
            found = _way(layout, ask, rates, demand, bus, other, trunk_on, experts_on)
        except (DoesNotFit, UsageError):  # or --latents means nothing that way
            continue
        others.append(found[2])
    return DeviceReport(plan, ram, placed, bus, way, tuple(others))


def _way(
    layout: Layout, ask: Ask, rates: Rates, demand: Demand, bus: Bus, placed: Placement,
    trunk_on: str | None, experts_on: str | None,
) -> tuple[Plan, Plan, Way]:  # fmt: skip
    assert ask.vram is not None
    own = device_demand(layout, ask, ask.trunk, placed, demand.slot, RESERVE)
    use = use_of(ask.sweep, ask.context, ask.sessions)
    plan = device_plan(own, ask.vram, ask.sweep, "VRAM", use)
    rest = beside_device(demand, plan, placed, ask, layout.spec)
    rows = min(ask.sweep or plan.sweep_rows, plan.sweep_rows)
    ram = make_plan(rest, Limits(ask.ram, ask.cache, rows, latents=ask.latents, use=use))
    setup = setup_of(layout.spec, ask, rates, ram)
    step = forecast(setup, plan, placed, bus, rows=1, position=ask.context, decode=True)
    rows = min(ram.sweep_rows, ask.context)
    sweep = forecast(setup, plan, placed, bus, rows=rows, position=0, decode=False)
    return plan, ram, Way(trunk_on or "gpu", experts_on or "gpu", step, sweep)
