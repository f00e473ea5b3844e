"""What a token costs: arithmetic, bytes by tier, seconds, joules and money, in one table.

Sizes come from the spec; seconds and reads from a run (``evaluate_cost.py``) or from the forecast
(``of_report``).  A multiply-add is two FLOPs.  Of attention and of the recurrence the definition is
counted, not what an implementation computes beside it (keys expanded again, tiles filled up).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from .budget import latent_form
from .config import LATENT_BLOCK, align_up
from .forecast import Forecast
from .forecast_sizes import token_macs
from .plan_report import PlanReport
from .scheduler.plan import Plan
from .spec import ModelSpec

MILLION: Final = 1e6
JOULES_PER_KWH: Final = 3.6e6
YEAR: Final = 365.25 * 86400  #: seconds
_STATE_FLOPS: Final = 7  #: of a number of a KDA state a token: decay, two products, an update

Tiers = Mapping[str, Mapping[str, float]]  #: tier -> kind -> bytes


@dataclass(frozen=True)
class Prices:
    """What power and hardware cost, in any one currency.  ``watts``: of the whole machine, where
    joules cannot be read; ``years``: in which the hardware is written off, busy all the time."""

    kwh: float | None = None
    watts: float | None = None
    hardware: float | None = None
    years: float = 4.0


@dataclass(frozen=True)
class Phase:
    """One kind of work, for one token of it."""

    name: str  #: decode or prefill
    what: str
    flops: Mapping[str, float]  #: by what they are for
    bytes: Tiers  #: read, or copied
    seconds: float
    joules: float | None
    energy: str  #: where ``joules`` come from, or why there are none

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds

    def money(self, prices: Prices) -> dict[str, float]:
        """Of a million tokens: power, hardware and both, as far as prices and joules are known."""
        found = {}
        if prices.kwh is not None and self.joules is not None:
            found["power"] = self.joules * MILLION / JOULES_PER_KWH * prices.kwh
        if prices.hardware is not None:
            found["hardware"] = self.seconds * MILLION / (prices.years * YEAR) * prices.hardware
        if len(found) == 2:
            found["sum"] = sum(found.values())
        return found


@dataclass(frozen=True)
class CostTable:
    """``memory``: bytes of one request by tier and kind, at ``context`` tokens."""

    model: str
    source: str
    context: int
    phases: tuple[Phase, ...]
    memory: Tiers
    prices: Prices
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        phases = [
            {
                **asdict(phase),
                "tokens_per_second": phase.tokens_per_second,
                "money_per_million": phase.money(self.prices),
            }
            for phase in self.phases
        ]
        return {**self.__dict__, "prices": asdict(self.prices), "phases": phases}


def decode_flops(spec: ModelSpec, position: int) -> dict[str, float]:
    """Of the token behind ``position`` others."""
    m, seen = spec.mla, position + 1
    pairs = seen * m.heads * (m.latent + m.kv_lora)  # in the latent space, as decoding computes it
    return _flops(spec, token_macs(spec), pairs)


def prefill_flops(spec: ModelSpec, tokens: int) -> dict[str, float]:
    """Of a token of a prompt of ``tokens``, in the mean.  The head is computed for the last one."""
    m, head = spec.mla, spec.vocab * spec.hidden
    pairs = (tokens + 1) / 2 * m.heads * (m.nope + m.rope + m.v)
    return _flops(spec, token_macs(spec) - head + head / tokens, pairs)


def _flops(spec: ModelSpec, weights: float, pairs: float) -> dict[str, float]:
    kda = spec.kda
    state = kda.heads * kda.head_dim**2 * _STATE_FLOPS + 3 * kda.width * kda.conv * 2
    return {
        "weights": 2.0 * weights,
        "attention": 2.0 * pairs * len(spec.mla_layers),
        "recurrence": float(state * len(spec.kda_layers)),
    }


def request_memory(
    spec: ModelSpec,
    plan: Plan,
    context: int,
    *,
    dtype: str,
    latent_dtype: str | None = None,
    sessions: int = 1,
    device_layers: int = 0,
) -> dict[str, dict[str, float]]:
    """Bytes that one of ``sessions`` requests of ``context`` tokens holds: latents in whole blocks.

    The first ``device_layers`` layers keep theirs on the GPU.  What ``plan`` has no room for is on
    disk, all requests alike.
    """
    form = latent_form(spec, dtype, latent_dtype)
    found: dict[str, dict[str, float]] = {}

    def add(tier: str, kind: str, size: float) -> None:
        if size:
            own = found.setdefault(tier, {})
            own[kind] = own.get(kind, 0) + size

    kda = spec.kda
    matrix = kda.heads * kda.head_dim**2 * 4
    tails = 3 * kda.width * (kda.conv - 1) * form.item
    for layer in spec.kda_layers:
        tier = "gpu" if layer < device_layers else "ram"
        add(tier, "KDA state", matrix)
        add(tier, "convolutions", tails)
    each = align_up(context, LATENT_BLOCK) * form.row
    here = sum(layer >= device_layers for layer in spec.mla_layers)
    add("gpu", "latents", each * (len(spec.mla_layers) - here))
    held = each * here if plan.latents is None else min(each * here, plan.latents / sessions)
    add("ram", "latents", held)
    add("disk", "latents", each * here - held)
    add("ram", "logits", spec.vocab * 4)
    return found


def state_reads(spec: ModelSpec, position: int, dtype: str, latent_dtype: str | None) -> float:
    """Bytes of its own state that a decode step moves: latents once, KDA states there and back."""
    kda, form = spec.kda, latent_form(spec, dtype, latent_dtype)
    matrices = 2 * len(spec.kda_layers) * kda.heads * kda.head_dim**2 * 4
    return float((position + 1) * len(spec.mla_layers) * form.row + matrices)


def of_report(report: PlanReport, prices: Prices) -> CostTable:
    """The table of a plan and its forecast, with nothing run.  Sessions that were asked for decode
    together; with a GPU, the way of sharing that was asked for."""
    spec, ask = report.spec, report.ask
    step = report.together if report.device is None else report.decode
    sweep, rows = report.sweep, step.rows
    decode_bytes, prefill_bytes = _forecast_bytes(step), _forecast_bytes(sweep)
    decode_bytes["memory"]["state"] = state_reads(spec, ask.context, ask.dtype, ask.latent_dtype)
    decode, prefill, plan, layers = step.seconds / rows, report.prompt_seconds, report.plan, 0
    notes = [f"seconds and bytes are forecast; rates {report.rates.source}"]
    if report.device is not None:
        way, plan, layers = report.device.way, report.device.ram, report.device.placed.layers
        decode_bytes |= _device_bytes(way.decode.disk_bytes, way.decode.bus_bytes, 1)
        size = way.prefill.rows
        prefill_bytes |= _device_bytes(way.prefill.disk_bytes, way.prefill.bus_bytes, size)
        decode, prefill = way.decode.seconds, way.prefill.seconds / size * ask.context
        if ask.sessions > 1:
            notes.append("with a GPU the forecast is of one session at a time")
    memory = request_memory(
        spec, plan, ask.context, dtype=ask.dtype, latent_dtype=ask.latent_dtype,
        sessions=ask.sessions, device_layers=layers,
    )  # fmt: skip
    together = f" of {rows} sessions together" if rows > 1 else ""
    phases = tuple(
        Phase(name, what, flops, found, seconds, *by_watts(seconds, prices, "nothing was run"))
        for name, what, flops, found, seconds in (
            ("decode", f"after {ask.context:,} tokens{together}",
             decode_flops(spec, ask.context), decode_bytes, decode),
            ("prefill", f"a prompt of {ask.context:,} tokens",
             prefill_flops(spec, ask.context), prefill_bytes, prefill / ask.context),
        )
    )  # fmt: skip
    return CostTable(report.model, report.source, ask.context, phases, memory, prices, tuple(notes))


def by_watts(seconds: float, prices: Prices, why: str) -> tuple[float | None, str]:
    """Joules of ``seconds`` where they cannot be read, for the reason ``why``; and what to say."""
    if prices.watts is None:
        return None, f"unreadable: {why}"
    return prices.watts * seconds, f"{prices.watts:g} W given ({why})"


def _forecast_bytes(step: Forecast) -> dict[str, dict[str, float]]:
    """Of a token of a sweep."""
    disk = {
        "experts": step.expert_bytes, "trunk": step.trunk_bytes, "scratch": step.scratch_bytes,
    }  # fmt: skip
    return {
        "disk": {kind: size / step.rows for kind, size in disk.items() if size},
        "memory": {"weights": step.weight_bytes / step.rows},
    }


def _device_bytes(disk: float, bus: float, rows: int) -> dict[str, dict[str, float]]:
    return {"disk": {"all": disk / rows}, "bus": {"all": bus / rows}}
