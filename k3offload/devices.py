"""What a device computes, and how much of its memory goes to what.  Numbers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from .budget import (
    HEAP_SLACK,
    asked_bytes,
    latent_form,
    latents_of,
    state_bytes,
    working_set,
)
from .budget_kernels import Backend, device_scratch
from .config import EXPANDED, LATENT_BLOCK, align_up
from .errors import DoesNotFit, UsageError
from .kernels.latent_format import DEVICE_ROOM
from .layout import Layout, arena_size, head_buffers, head_tensors
from .scheduler.plan import Demand, Latents, Limits, Plan, Use, make_plan
from .spec import ModelSpec
from .tiers.spill_room import GOOD, PIECE

#: Bytes of a GPU that its driver's context, compiled kernels and the allocator's rounding take.
RESERVE = 600 << 20
NAMES = {
    "interpreter, libraries, page index": "context, kernels, rounding",
    "decoding tables and weight tiles": "sums that attention carries",
    "read buffers": "",
    "kept for the caller": "",
    "cache policy": "",
    "block summaries, a part of them": "",
}


class Placement(NamedTuple):
    """What the device computes: the first ``layers`` layers, the head, the routed experts."""

    layers: int
    head: bool
    experts: bool

    @property
    def idle(self) -> bool:
        return not (self.layers or self.experts)


class Wish(Protocol):
    """What is asked of a device: ``options.Options``, or a plan's ``Ask``."""

    @property
    def dtype(self) -> str: ...

    @property
    def context(self) -> int: ...

    @property
    def sessions(self) -> int: ...

    @property
    def latent_dtype(self) -> str | None: ...

    @property
    def experts_on(self) -> str | None: ...

    @property
    def trunk_on(self) -> str | None: ...


def placement(options: Wish, spec: ModelSpec) -> Placement:
    """What ``--trunk-on`` and ``--experts-on`` say; the device computes all by default."""
    every, text = len(spec.layers), options.trunk_on or "gpu"
    if text == "gpu":
        layers = every
    elif text == "cpu":
        layers = 0
    else:
        kind, _, number = text.partition(":")
        if kind != "split" or not number.isdigit() or not 0 < int(number) < every:
            raise UsageError(
                f"--trunk-on {text!r} is not known.",
                f"Use gpu, cpu, or split:N with N from 1 to {every - 1}: the first N layers.",
            )
        layers = int(number)
    where = options.experts_on or "gpu"
    if where not in ("gpu", "cpu"):
        raise UsageError(f"--experts-on {where!r} is not known.", "Use gpu or cpu.")
    made = Placement(layers, layers == every, where == "gpu" and bool(spec.moe_layers))
    if made.idle:
        raise UsageError("Nothing is left for the device to compute.", "Use --device cpu.")
    return made


def device_demand(
    layout: Layout, options: Wish, trunk: str, placed: Placement, slot: int, reserve: int
) -> Demand:
    """Bytes of device memory that ``placed`` needs; ``slot``: of an expert slot."""
    spec = layout.spec
    layers = [arena_size(layout.trunk(i), trunk) for i in range(placed.layers)]
    every = layout.globals()
    head = head_tensors(layout) or [every["embed_tokens.weight"]]
    small = [t for t in every.values() if t not in head and t.name != "embed_tokens.weight"]
    quiet = Backend(native=False, tiles=False, torch=False)
    return Demand(
        base=reserve,
        tiles=0,
        staging=0,
        layers=layers,
        small=arena_size(small) if placed.head else 0,
        embed=0,
        head=arena_size(head, trunk) if placed.head else 0,
        head_block=sum(head_buffers(layout, trunk)) if placed.head else 0,
        state=options.sessions * state_of(spec, options, range(placed.layers)),
        working=lambda rows: (
            working_set(spec, options.dtype, rows, options.sessions, quiet)
            - HEAP_SLACK
            + device_scratch(spec, options.dtype, rows, options.context)
            + latent_form(spec, options.dtype, options.latent_dtype).room(
                options.context, DEVICE_ROOM
            )
        ),
        slot=slot if placed.experts else 0,
        experts=spec.expert_count if placed.experts else 0,
        top_k=spec.moe.top_k if spec.moe and placed.experts else 0,
        asked=lambda rows: asked_bytes(spec, rows) if placed.experts else 0.0,
        latents=_own_latents(spec, options, placed, True),
    )


def _own_latents(spec: ModelSpec, options: Wish, placed: Placement, there: bool) -> Latents | None:
    """The latents of layers that the device computes, or of those that it does not."""
    every = latents_of(spec, options.dtype, options.context, options.sessions, options.latent_dtype)
    own = sum((layer < placed.layers) == there for layer in spec.mla_layers)
    if every is None or not own:
        return None
    whole = every.whole * own // len(spec.mla_layers)
    # longer contexts have what their sums take in the working set
    counted = there and options.context > EXPANDED * LATENT_BLOCK
    return replace(
        every,
        whole=whole,
        open=every.open * own // len(spec.mla_layers),
        carried=0 if counted else every.carried,
        good=min(GOOD, max(every.least, whole // 8)),
    )


def state_of(spec: ModelSpec, options: Wish, layers: Sequence[int]) -> int:
    """Bytes of one sequence's state in ``layers``."""
    own = set(layers)
    size = 2 if options.dtype == "bfloat16" else 4
    kda = spec.kda_state_bytes(size) // max(1, len(spec.kda_layers))
    tokens = align_up(options.context, LATENT_BLOCK)
    row = latent_form(spec, options.dtype, options.latent_dtype).row
    return sum(kda for layer in spec.kda_layers if layer in own) + sum(
        tokens * row for layer in spec.mla_layers if layer in own
    )


def device_plan(
    demand: Demand, limit: int, rows: int | None, name: str, use: Use | None = None
) -> Plan:
    """How ``limit`` bytes of the device are shared out; ``DoesNotFit`` names what is missing."""
    try:
        plan = make_plan(demand, Limits(limit, None, rows, use=use))
    except DoesNotFit as error:
        raise DoesNotFit(
            error.problem.replace("smallest plan", "smallest plan for the device"),
            f"Give --vram {-(-(limit + error.missing) // 10**6)}M or more, place less on the "
            "device (--trunk-on, --experts-on), or use --device cpu.",
            missing=error.missing,
        ) from error
    purposes = [(NAMES.get(name, name), size) for name, size in plan.purposes]
    return replace(plan, purposes=tuple(p for p in purposes if p[0]), place=name)


def beside_device(
    demand: Demand, plan: Plan, placed: Placement, options: Wish, spec: ModelSpec
) -> Demand:
    """What is left for RAM to hold once the device has its part."""
    layers = [0 if i < placed.layers and i in plan.resident_layers else size
              for i, size in enumerate(demand.layers)]  # fmt: skip
    here = state_bytes(spec, options.dtype, options.context, options.latent_dtype)
    there = state_of(spec, options, range(placed.layers))
    own, away = (_own_latents(spec, options, placed, there) for there in (False, True))
    beyond, prefixes = 0, demand.prefixes
    if away is not None and plan.latents is not None:
        beyond, prefixes = max(0, away.whole - plan.latents), demand.prefixes_spilled
        beyond = max(away.least, beyond + min(2 * PIECE, beyond // 3))  # buffers beside them
        whole = beyond + (own.whole if own else 0)
        own = replace(
            own or replace(away, open=0, carried=0),
            whole=whole,
            good=min(GOOD, max(away.least, whole // 8)),
            must=True,
        )
    return replace(
        demand,
        layers=layers,
        state=options.sessions * (here - there) + beyond,
        head_away=placed.head and plan.head_resident,
        longest=None,
        latents=own,
        prefixes_spilled=prefixes,
        summaries=None,  # those that a device computes with lie there
    )
