"""``k3offload plan``: what a model needs and how fast it will be, before anything is loaded.

This file asks ``budget`` and ``scheduler.plan`` for the bytes and ``forecast`` for the seconds, of
a model folder or of ``config.json`` alone, and asks both again for variants: more memory, a faster
disk, a smaller trunk.  It reads no weight and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from .budget import demand_of
from .checkpoint import ExpertPage
from .config import align_up, show_size
from .config_fields import read_json
from .device_report import DeviceReport, device_report, setup_of
from .errors import DoesNotFit
from .forecast import Forecast, decode, prefill, prompt_seconds
from .forecast_device import Bus
from .inventory import EMBED, FINAL, HEAD, PROJECTOR, ROUTED, TOWER
from .layout import Layout
from .options import lossy_notes
from .paths import show_path
from .plan_text import lowered, plan_facts, plan_lines
from .precision import PRECISIONS
from .rates import Rates, scaled
from .scheduler.plan import Demand, Limits, Plan, make_plan, use_of
from .spec import ModelSpec, TensorSpec
from .survey import Tensor
from .tiers.base import Location

#: Interpreter and libraries, as measured where the engine runs; it measures again before it plans.
BASE: Final = 265_000_000
INDEX: Final = 180  #: bytes of the page index for each tensor, measured on the full size
RELEASED: Final = "released"  #: names the configuration that comes with the package
WORTH: Final = 0.03  #: part of the time that a change must save to be named


@dataclass(frozen=True)
class Ask:
    """How the model would be loaded; sizes in bytes.  As ``engine.Options``, for any machine."""

    ram: int
    cache: int | None = None
    dtype: str = "bfloat16"
    trunk: str = "bfloat16"
    context: int = 4096
    sessions: int = 1
    sweep: int | None = None
    threads: int = 1
    hit_rate: float | None = None
    packed: bool = False
    vram: int | None = None  #: None: no device
    experts_on: str | None = None
    trunk_on: str | None = None
    latents: int | None = None
    summaries: int | None = None
    latent_dtype: str | None = None


class Model(Layout, Protocol):
    """What a plan is made of: a ``Checkpoint``, or ``SpecLayout``."""

    @property
    def tensor_count(self) -> int: ...

    @property
    def bytes_by_group(self) -> Mapping[str, int]: ...


class SpecLayout:
    """A guess at the checkpoint of ``spec``: every tensor as the inventory predicts it, one behind
    the other and at no boundary of memory, every expert in one piece."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.expert_bytes = spec.expert_bytes
        self.tensor_count = spec.tensor_count
        self.bytes_by_group = spec.bytes_by_group()
        self._page = ExpertPage((Location(0, 0, spec.expert_bytes),), ())

    def _placed(self, tensors: Iterable[TensorSpec], prefix: str) -> list[Tensor]:
        """``tensors`` by local name; odd offsets are no boundary of anything."""
        placed, at = [], 1
        for t in tensors:
            name = t.name.removeprefix(self.spec.prefix).removeprefix(prefix)
            placed.append(Tensor(name, t.dtype, t.shape, Location(0, at, t.nbytes)))
            at += align_up(t.nbytes, 2)
        return placed

    def trunk(self, layer: int) -> list[Tensor]:
        """As ``Checkpoint.trunk``."""
        return self._placed(self.spec.layer_tensors(layer), f"model.layers.{layer}.")

    def globals(self) -> dict[str, Tensor]:
        """As ``Checkpoint.globals``."""
        return {t.name: t for t in self._placed(self.spec.global_tensors(), "model.")}

    def expert(self, layer: int, expert: int) -> ExpertPage:
        """As ``Checkpoint.expert``."""
        return self._page


def spec_of(place: Path) -> ModelSpec:
    """The spec of a configuration file, or of the folder that holds one.

    ``released`` names the one of the full model, unless there is such a file or folder.
    """
    if str(place) == RELEASED and not place.exists():
        place = Path(__file__).parent / RELEASED
    file = place / "config.json" if place.is_dir() else place
    return ModelSpec.from_config(read_json(file), show_path(file))


@dataclass(frozen=True)
class Help:
    """A change and the seconds a token, and of the prompt, that there would be with it."""

    what: str
    decode_seconds: float
    prompt_seconds: float
    decode_saved: float
    prompt_saved: float


@dataclass(frozen=True)
class PlanReport:
    """What ``k3offload plan`` prints."""

    model: str
    source: str
    ask: Ask
    spec: ModelSpec
    plan: Plan
    rates: Rates
    disk: Mapping[str, int]
    decode: Forecast
    together: Forecast  #: a step of all sessions at once
    sweep: Forecast
    prompt_seconds: float
    help: tuple[Help, ...]
    device: DeviceReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form ``plan --json`` prints: bytes and seconds."""
        notes = lowered(self.plan, self.ask.cache, self.ask.sweep)
        return {
            "model": self.model,
            "source": self.source,
            "device": None if self.device is None else self.device.to_dict(),
            "ask": vars(self.ask),
            "tiers": {
                "ram": plan_facts(self.plan, notes),
                "disk": {"purposes": dict(self.disk), "total": sum(self.disk.values())},
                "gpu": None if self.device is None else plan_facts(self.device.plan),
            },
            "rates": self.rates.to_dict(),
            "decode": self.decode.to_dict(),
            "decode_together": self.together.to_dict(),
            "prefill": {
                **self.sweep.to_dict(),
                "prompt_tokens": self.ask.context,
                "prompt_seconds": self.prompt_seconds,
            },
            "help": [vars(one) for one in self.help],
        }


def report(
    model: str, layout: Model, source: str, ask: Ask, rates: Rates, bus: Bus | None = None
) -> PlanReport:
    """The plan, the forecast and the advice; raises ``DoesNotFit`` with the missing bytes.  With
    ``ask.vram`` also those of a device as ``bus`` describes it."""
    setup = setup_of(layout.spec, ask, rates, plan_of(layout, ask))
    step = decode(setup, position=ask.context)
    seconds = prompt_seconds(setup, ask.context)
    return PlanReport(
        model=model,
        source=source,
        ask=ask,
        spec=layout.spec,
        plan=setup.plan,
        rates=rates,
        disk=disk_purposes(layout),
        decode=step,
        together=decode(setup, rows=ask.sessions, position=ask.context),
        sweep=prefill(setup, tokens=min(setup.plan.sweep_rows, ask.context)),
        prompt_seconds=seconds,
        help=advice(layout, ask, rates, step.seconds, seconds),
        device=device_report(layout, ask, rates, _demand(layout, ask), bus or Bus()),
    )


def disk_purposes(layout: Model) -> dict[str, int]:
    """Bytes on disk by what they are for; vision weights lie there and are never read."""
    groups = layout.bytes_by_group
    named = {
        "routed experts": (ROUTED,),
        "embedding": (EMBED,),
        "head": (HEAD,),
        "final norm and output mix": (FINAL,),
        "vision, never read": (TOWER, PROJECTOR),
    }
    sizes = {name: sum(groups.get(g, 0) for g in own) for name, own in named.items()}
    sizes["trunk of the layers"] = sum(groups.values()) - sum(sizes.values())
    return {name: size for name, size in sizes.items() if size}


def _demand(layout: Model, ask: Ask) -> Demand:
    return demand_of(
        layout,
        ask.dtype,
        trunk=ask.trunk,
        base=BASE + INDEX * layout.tensor_count,
        threads=ask.threads,
        context=ask.context,
        sessions=ask.sessions,
        latent_dtype=ask.latent_dtype,
    )


def limits_of(ask: Ask) -> Limits:
    """What the plan has to keep to."""
    use = use_of(ask.sweep, ask.context, ask.sessions)
    return Limits(
        ask.ram,
        ask.cache,
        ask.sweep,
        lossy_notes(ask.latent_dtype),
        ask.latents,
        ask.summaries,
        use,
    )


def plan_of(layout: Model, ask: Ask) -> Plan:
    """The memory plan; raises ``DoesNotFit`` with the missing bytes."""
    return make_plan(_demand(layout, ask), limits_of(ask))


def advice(
    layout: Model, ask: Ask, rates: Rates, decode_seconds: float, prompt: float
) -> tuple[Help, ...]:
    """Changes that would save at least ``WORTH`` of the time of a token or of the prompt, the most
    helpful first: the same arithmetic again for each."""
    found = []
    demands = {trunk: _demand(layout, replace(ask, trunk=trunk)) for trunk in _smaller(ask.trunk)}
    for what, other, faster in _variants(demands[ask.trunk], ask, rates):
        try:
            plan = make_plan(demands[other.trunk], limits_of(other))
            setup = setup_of(layout.spec, other, faster, plan)
        except DoesNotFit:
            continue
        step = decode(setup, position=ask.context).seconds
        whole = prompt_seconds(setup, ask.context)
        found.append(Help(what, step, whole, decode_seconds - step, prompt - whole))

    def share(one: Help) -> float:
        return max(one.decode_saved / decode_seconds, one.prompt_saved / prompt)

    return tuple(sorted((one for one in found if share(one) >= WORTH), key=lambda x: -share(x)))


def _smaller(trunk: str) -> tuple[str, ...]:
    """``trunk`` and the precisions that are smaller."""
    return PRECISIONS[PRECISIONS.index(trunk) :]


def _variants(demand: Demand, ask: Ask, rates: Rates) -> list[tuple[str, Ask, Rates]]:
    """Changes that may help: what, and with which options and rates."""
    plan = make_plan(demand, limits_of(ask))
    found: list[tuple[str, Ask, Rates]] = []

    def memory(what: str, ram: int, **changes: Any) -> None:
        if ram > ask.ram:
            more = show_size(ram - ask.ram)
            found.append((f"+{more} RAM {what}", replace(ask, ram=ram, **changes), rates))

    token = demand.top_k * demand.slot
    if len(plan.resident_layers) < len(plan.layer_sizes) or not plan.head_resident:
        whole = make_plan(demand, limits_of(replace(ask, ram=1 << 62, cache=token or None))).total
        memory("makes the trunk resident", whole)
    if plan.slots < plan.experts:
        every = make_plan(demand, limits_of(replace(ask, ram=1 << 62, cache=None))).total
        double = 2 * ask.ram
        if double < every:
            memory("(twice as much)", double)
        memory("holds every expert", every, cache=None)
    for name in _smaller(ask.trunk)[1:]:
        what = f"a pack with the trunk in {name} (changes results a little)"
        found.append((what, replace(ask, trunk=name, packed=True), rates))
    found.append(("a disk twice as fast", ask, scaled(rates, disk=2)))
    found.append(("memory twice as fast", ask, scaled(rates, ram=2)))
    found.append(("arithmetic twice as fast", ask, scaled(rates, macs=2)))
    wider = min(8 * plan.sweep_rows, ask.context)
    if ask.sweep is not None and wider > plan.sweep_rows:
        found.append((f"sweeps of {wider:,} tokens", replace(ask, sweep=wider), rates))
    return found


def render(report: PlanReport) -> str:
    """Text for a terminal."""
    ask, spec = report.ask, report.spec
    lines = [f"{report.model}: {spec.family}, {len(spec.layers)} layers, from {report.source}"]
    lines.append("disk:")
    lines += [f"  {name:26}  {show_size(size):>8}" for name, size in report.disk.items()]
    lines += plan_lines(report.plan, lowered(report.plan, ask.cache, ask.sweep))
    if report.device is None:
        lines.append("gpu: none (--vram adds one to the plan)")
    r = report.rates
    lines.append(
        f"rates ({r.source}): disk {r.disk / 1e9:.3g} GB/s, memory {r.ram / 1e9:.3g} GB/s, "
        f"products {r.macs['bfloat16'] / 1e9:.3g} GMAC/s"
    )
    lines += _step_lines(f"decode after {ask.context:,} tokens", "a token", report.decode)
    if report.together.rows > 1:
        lines += _step_lines(
            f"decode of {ask.sessions} sessions together", "a step", report.together
        )
    lines += _step_lines(f"prompt, sweep of {report.sweep.rows:,} tokens", "a sweep", report.sweep)
    lines.append(
        f"  a prompt of {ask.context:,} tokens takes {_seconds(report.prompt_seconds)}, "
        f"{_seconds(report.prompt_seconds / ask.context)} a token"
    )
    if report.device is not None:
        lines += report.device.lines()
    if report.help:
        lines.append("what would help most, without a gpu:")
    for one in report.help:
        lines.append(
            f"  {one.what}: {_seconds(one.decode_seconds)} a token "
            f"({_change(one.decode_saved)}), prompt {_seconds(one.prompt_seconds)} "
            f"({_change(one.prompt_saved)})"
        )
    return "\n".join(lines)


def _step_lines(what: str, unit: str, step: Forecast) -> list[str]:
    read = f"{show_size(step.expert_bytes)} of experts"
    if step.trunk_bytes:
        read += f" and {show_size(step.trunk_bytes)} of trunk"
    if step.scratch_bytes:
        read += f" and {show_size(step.scratch_bytes)} of scratch files"
    return [
        f"{what}: {_seconds(step.seconds)} {unit}, limited by {step.limit}",
        f"  disk {_seconds(step.disk_seconds)} ({read}), memory {_seconds(step.memory_seconds)}, "
        f"arithmetic {_seconds(step.arithmetic_seconds)}, rest {_seconds(step.overhead_seconds)}",
        f"  {step.experts:,.0f} experts asked for, {100 * step.hit_rate:.3g} % of them in RAM",
    ]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _change(saved: float) -> str:
    return f"{_seconds(saved)} less" if saved > 0 else "no less"
