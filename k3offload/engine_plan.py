"""The plan of an engine: what this machine has now, what the model wants, and a device's part.

Where ``Options.fewer`` allows it, the number of sessions is part of the answer: as many as let a
session read least.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .accelerator import Accelerator
from .budget import demand_of
from .budget_kernels import Backend
from .checkpoint import Checkpoint
from .errors import DoesNotFit
from .kernels import native
from .kernels.choose import NATIVE, Kernels
from .machine import Machine, read_machine, trim_allocator
from .options import Options, limits_of
from .scheduler.plan import Demand, Plan, make_plan

if TYPE_CHECKING:
    from .engine import Engine


def backend_of(kernels: Kernels) -> Backend:
    """What the memory plan has to know about the kernels."""
    # prompt attention is counted by itself, whatever computes the rest
    backends = {backend for op, backend in kernels.chosen.items() if op != "mla_prefill"}
    tiles = kernels.isa in native.TILES
    attends = tiles and kernels.chosen["mla_prefill"] == NATIVE
    return Backend(NATIVE in backends, tiles, backends != {NATIVE}, attends)


def plan_engine(engine: Engine, checkpoint: Checkpoint) -> tuple[Plan, Accelerator | None]:
    """The plan for the machine as it is now, and the device that has its part in it.

    With ``Options.fewer`` it is for ``engine.options.sessions`` sessions or for a half, a quarter,
    ... of them, whichever lets a session read least, and the options then say how many.  Where
    nothing else fits, ``Options.prefix_head`` is given up.
    Raises ``DoesNotFit`` with the missing bytes.
    """
    trim_allocator()
    machine = read_machine()
    most, device = engine.options.sessions, engine.accelerator
    halves = [most >> i for i in range(most.bit_length()) if most >> i >= engine.options.fewest]
    counts = halves if engine.options.fewer else [most]
    found: list[tuple[float, int]] = []
    for count in counts:
        try:
            plan, _ = _plan(engine, checkpoint, machine, count)
        except DoesNotFit:
            if count == counts[-1] and not found:
                if engine.options.prefix_head:  # it saves work, and nothing depends on it
                    engine.options = replace(engine.options, prefix_head=0)
                    return plan_engine(engine, checkpoint)
                raise
            continue
        found.append((plan.reads / count, -count))
    if engine.options.fewer and device is not None and engine.accelerator is None:
        return plan_engine(engine, checkpoint)  # without it there may be room for all of them
    count = -min(found)[1]
    engine.options = replace(engine.options, sessions=count)
    return _plan(engine, checkpoint, machine, count)


def _plan(
    engine: Engine, checkpoint: Checkpoint, machine: Machine, sessions: int
) -> tuple[Plan, Accelerator | None]:
    options = replace(engine.options, sessions=sessions)
    demand = demand_of(
        checkpoint,
        options.dtype,
        trunk=engine.trunk,
        base=machine.rss,
        threads=options.threads,
        context=options.context,
        sessions=sessions,
        extra=options.extra,
        policy=options.policy,
        backend=backend_of(engine.kernels),
        prefixes=options.prefix_bytes(checkpoint.spec),
        latent_dtype=options.latent_dtype,
    )
    limits = limits_of(machine, options)
    demand, there = _beside(engine, demand, options)
    if there is None:
        return make_plan(demand, limits), None
    rows = there.plan.sweep_rows
    limits = replace(limits, rows=min(limits.rows or rows, rows))
    return replace(make_plan(demand, limits), device=there.plan), there


def _beside(engine: Engine, demand: Demand, options: Options) -> tuple[Demand, Accelerator | None]:
    """What RAM has to hold beside the device, and the device; without it if nobody asked for it by
    name and it is too small for a single session."""
    there = engine.accelerator
    try:
        if there is None:
            return demand, None
        return there.make_plan(demand, engine.trunk, options), there
    except DoesNotFit as error:
        if not engine.any_device or there is None or (options.fewer and options.sessions > 1):
            raise
        engine.device_line = f"device: cpu ({error.problem})"
        engine.warn(f"{there.device.name} is not used: {error.problem}")
        there.close()
        engine.accelerator = None
        return demand, None
