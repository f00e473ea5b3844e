"""The command ``evaluate cost``: parse, call, print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from . import cli_plan
from .cli_options import AsJson, How, at_least_one, loading_options, takes_how
from .config import show_size
from .errors import UsageError
from .progress import Progress, loading_libraries, write_out

if TYPE_CHECKING:
    from .cost_table import CostTable, Prices, Tiers

MEASURED_CONTEXT = 512
#: options of loading that a forecast knows as well; what else is given says nothing to it
_FORECAST = (
    "ram", "cache", "sweep", "dtype", "trunk", "latent_dtype", "threads", "vram", "experts_on",
    "trunk_on", "latents", "summaries",
)  # fmt: skip


class Charges(NamedTuple):
    """Prices, as they are typed."""

    price_kwh: Annotated[float | None, typer.Option(help="Of a kWh, in any currency.")] = None
    watts: Annotated[
        float | None, typer.Option(help="Of the whole machine, where joules cannot be read.")
    ] = None
    hardware_price: Annotated[
        float | None, typer.Option(help="Of the machine, in that currency.")
    ] = None
    hardware_years: Annotated[float, typer.Option(help="It is used for, all the time.")] = 4.0

    def prices(self) -> Prices:
        """Raises ``UsageError`` naming what is out of range."""
        from .cost_table import Prices

        for name, value in self._asdict().items():
            option = f"--{name.replace('_', '-')}"
            if value is not None and not 0 <= value < 1e15:
                raise UsageError(f"{option} is {value}.", "Give 0 or more.")
        if not self.hardware_years:
            raise UsageError("--hardware-years is 0.", "Give more than 0.")
        return Prices(self.price_kwh, self.watts, self.hardware_price, self.hardware_years)


class Machine(NamedTuple):
    """What a forecast is told of a machine, as it is typed."""

    disk_gbps: cli_plan.DiskRate = None
    ram_gbps: cli_plan.RamRate = None
    gmacs: cli_plan.Macs = None
    hit_rate: cli_plan.HitRate = None
    vram_gbps: cli_plan.VramRate = None
    pcie_gbps: cli_plan.BusRate = None
    gpu_gmacs: cli_plan.DeviceMacs = None
    sessions: Annotated[int | None, typer.Option(help="Sessions that decode together.")] = None


def add_to(group: typer.Typer) -> None:
    """Register the command."""
    group.command("cost")(cost)


@takes_how("prefix_dir", "prefix_disk", "trace", "trace_with", charges=Charges, machine=Machine)
def cost(
    how: How,
    charges: Charges,
    machine: Machine,
    model: Annotated[
        str | None, typer.Argument(help="Folder, hub id in the local cache, or 'nano': is run.")
    ] = None,
    config_only: Annotated[
        Path | None,
        typer.Option(help="A config.json (or its folder) instead: is forecast, nothing runs."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens before the answer; 512 in a run, else 4,096.")
    ] = None,
    new: Annotated[int | None, typer.Option(help="Decode steps of a run; 32 if unset.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a token costs: FLOPs, bytes by tier, seconds, joules and money, in one table."""
    if (model is None) == (config_only is None):
        raise UsageError(
            "cost wants a model or --config-only.", "Give one of them: a run, or a forecast."
        )
    prices = charges.prices()
    if config_only is not None:
        usual = {**How._field_defaults, "new": None}
        for name, value in {**how._asdict(), "new": new}.items():
            variable = f"K3_{name.upper()}" in os.environ  # meant for other commands
            if name not in _FORECAST and value != usual[name] and not variable:
                _refuse(name, "a run, and --config-only runs nothing")
        found = _forecast(config_only, how, machine, context, prices)
    else:
        for name, value in machine._asdict().items():
            if value is not None:
                _refuse(name, "a forecast, and a model is run")
        found = _run(str(model), how, context, new, prices)
    write_out(json.dumps(found.to_dict()) if as_json else render(found))


def _refuse(name: str, why: str) -> None:
    raise UsageError(f"--{name.replace('_', '-')} is about {why}.", "Leave it out.")


def _forecast(
    place: Path, how: How, machine: Machine, context: int | None, prices: Prices
) -> CostTable:
    from .cost_table import of_report
    from .plan_report import report

    name, source, layout = cli_plan.layout_of(None, place)
    given = {option: getattr(how, option) for option in _FORECAST}
    sessions = 1 if machine.sessions is None else machine.sessions
    ask = cli_plan.ask_of(
        layout, **given, context=context, sessions=sessions, hit_rate=machine.hit_rate
    )
    cli_plan.check_rates(machine._asdict(), ask)
    rates = cli_plan.rates_of(
        layout, ask, False, machine.disk_gbps, machine.ram_gbps, machine.gmacs
    )
    bus = cli_plan.bus_of(machine.vram_gbps, machine.pcie_gbps, machine.gpu_gmacs)
    return of_report(report(name, layout, source, ask, rates, bus), prices)


def _run(model: str, how: How, context: int | None, new: int | None, prices: Prices) -> CostTable:
    at_least_one(("--context", context), ("--new", new))
    with Progress() as progress:
        with loading_libraries(progress):
            from .evaluate_cost import cost as measure
            from .options import Watch
        watch = Watch(warn=lambda line: progress.say(f"warning: {line}"))
        return measure(
            model, prices, context=context or MEASURED_CONTEXT, new=new or 32,
            show=progress.show, watch=watch, **loading_options(how),
        )  # fmt: skip


def render(found: CostTable) -> str:
    """One table; a column for decode and one for prefill."""
    phases, rows = found.phases, []

    def row(name: str, *cells: str) -> None:
        rows.append(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells))

    row("a token", *(phase.name for phase in phases))
    for kind in phases[0].flops:
        row(f"FLOPs, {kind}", *(_flops(phase.flops[kind]) for phase in phases))
    row("FLOPs", *(_flops(sum(phase.flops.values())) for phase in phases))
    for tier in ("disk", "bus", "memory"):
        for kind in dict.fromkeys(k for phase in phases for k in phase.bytes.get(tier, {})):
            sizes = (phase.bytes.get(tier, {}).get(kind, 0) for phase in phases)
            row(f"bytes from {tier}, {kind}", *map(show_size, sizes))
    row("seconds", *(f"{phase.seconds:.4g}" for phase in phases))
    row("tokens a second", *(f"{phase.tokens_per_second:.4g}" for phase in phases))
    row("joules", *("-" if p.joules is None else f"{p.joules:.4g}" for p in phases))
    money = [phase.money(found.prices) for phase in phases]
    for kind in money[0]:
        row(f"a million tokens, {kind}", *(f"{one[kind]:.4g}" for one in money))
    lines = [f"{found.model}, {found.source}", *(f"{p.name}: {p.what}" for p in phases), *rows]
    lines.append(f"a request of {found.context:,} tokens holds: {_memory(found.memory)}")
    lines += dict.fromkeys(f"joules: {phase.energy}" for phase in phases)
    if not money[0]:
        lines.append("money: give --price-kwh and --watts, or --hardware-price")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _flops(value: float) -> str:
    """Like 12.3G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _memory(tiers: Tiers) -> str:
    return "; ".join(
        f"{show_size(int(sum(kinds.values())))} in {tier} ("
        + ", ".join(f"{kind} {show_size(int(size))}" for kind, size in kinds.items())
        + ")"
        for tier, kinds in tiers.items()
    )
