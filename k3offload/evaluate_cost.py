"""What a token costs on this machine: one prompt and some decode steps, counted and timed.

Bytes from disk and over the bus are those that were read; bytes from memory and FLOPs follow from
the sizes.  The model is as it is after loading: what the prompt reads stays in the cache for the
steps behind it, of which the first few are not counted.  What is generated, greedily, is thrown
away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from .cost_table import (
    CostTable,
    Phase,
    Prices,
    by_watts,
    decode_flops,
    prefill_flops,
    request_memory,
    state_reads,
)
from .damage import held_out_text
from .energy import CPU, GPU, Energy, Meter
from .engine import Engine
from .forecast import Forecast, Setup, decode, prefill
from .loading import open_engine
from .paths import show_path
from .rates import assumed
from .spec import ModelSpec
from .tokenizer import Tokenizer

FIRST: Final = 2  #: decode steps that are not counted
ON_DEVICE: Final = " on the device"  #: what counts of copies to a GPU end with


@dataclass
class _Run:
    """What some tokens took."""

    seconds: float = 0.0
    bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    energy: Energy = field(default_factory=lambda: Energy({}, ()))


def cost(
    model: str | Path,
    prices: Prices,
    *,
    context: int = 512,
    new: int = 32,
    show: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> CostTable:
    """Measure a prompt of ``context`` tokens and ``new`` decode steps behind it.  ``options`` are
    those of ``load`` but for sizes.  Raises whatever loading raises."""
    tokens: list[int] = []

    def sizes(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int]:
        spec.check_context(context, FIRST + new)
        tokens[:] = islice(cycle(tokenizer.encode(held_out_text())), context)
        return {"context": context + FIRST + new}

    with open_engine(model, sizes, **options) as engine:
        return _measured(engine, tokens, new, prices, show, show_path(engine.checkpoint.folder))


def _measured(
    engine: Engine,
    tokens: list[int],
    new: int,
    prices: Prices,
    show: Callable[[str], None],
    name: str,
) -> CostTable:
    spec, options, context = engine.spec, engine.options, len(tokens)
    show(f"a prompt of {context:,} tokens")
    with engine.session() as session:
        session.append(tokens)
        with _counted(engine) as prompt:
            session.logits()
        show(f"{new:,} decode steps")
        for _ in range(FIRST):
            session.append_sampled(int(session.logits().argmax()))
            session.logits()
        with _counted(engine) as steps:
            for _ in range(new):
                session.append_sampled(int(session.logits().argmax()))
                session.logits()
    at = context + FIRST + new // 2  # the middle of the steps
    setup = Setup(
        spec, engine.plan, assumed(), options.dtype, engine.trunk,
        spec.trunk_precision != "bfloat16", latent_dtype=options.latent_dtype,
    )  # fmt: skip
    rows = min(engine.plan.sweep_rows, context)
    state = state_reads(spec, at, options.dtype, options.latent_dtype)
    device = engine.accelerator
    phases = (
        _phase("decode", f"{new} steps after {context + FIRST:,} tokens", steps, new,
               decode_flops(spec, at), decode(setup, position=at), prices, device is not None,
               {"state": state}),
        _phase("prefill", f"a prompt of {context:,} tokens", prompt, context,
               prefill_flops(spec, context), prefill(setup, tokens=rows), prices,
               device is not None, {}),
    )  # fmt: skip
    memory = request_memory(
        spec, engine.plan, context, dtype=options.dtype, latent_dtype=options.latent_dtype,
        device_layers=0 if device is None else device.placed.layers,
    )  # fmt: skip
    note = "bytes of memory follow from sizes; the energy is that of the whole machine"
    return CostTable(name, "measured", context, phases, memory, prices, (note,))


def _phase(
    name: str, what: str, run: _Run, tokens: int, flops: dict[str, float], forecast: Forecast,
    prices: Prices, device: bool, more: dict[str, float],
) -> Phase:  # fmt: skip
    seconds = run.seconds / tokens
    read = {
        tier: {kind: size / tokens for kind, size in kinds.items()}
        for tier, kinds in run.bytes.items()
    }
    read["memory"] = {"weights": forecast.weight_bytes / forecast.rows, **more}
    wanted = {CPU, GPU} if device else {CPU}
    joules: float | None
    if wanted <= set(run.energy.joules):
        joules, told = sum(run.energy.joules.values()) / tokens, "measured"
    else:
        joules, told = by_watts(seconds, prices, "; ".join(run.energy.missing))
    return Phase(name, what, flops, read, seconds, joules, told)


@contextmanager
def _counted(engine: Engine) -> Iterator[_Run]:
    """Fill in what the block took."""
    found, before = _Run(), _reads(engine)
    with Meter(_gpu(engine)) as meter:
        begin = time.perf_counter()
        yield found
        found.seconds, found.energy = time.perf_counter() - begin, meter.read()
    for tier, kinds in _reads(engine).items():
        used = {kind: size - before[tier].get(kind, 0) for kind, size in kinds.items()}
        found.bytes[tier] = {kind: size for kind, size in used.items() if size}


def _reads(engine: Engine) -> dict[str, dict[str, float]]:
    """Bytes so far that came from disk, and over the bus of a device."""
    found: dict[str, dict[str, float]] = {"disk": {}, "bus": {}}
    for kind, counts in engine.counts().items():
        on_device = kind.endswith(ON_DEVICE)
        tier = "bus" if on_device else "disk"
        found[tier][kind.removesuffix(ON_DEVICE)] = float(counts.bytes)
    if engine.spilling is not None:
        facts = engine.spilling.facts().values()
        found["disk"]["scratch"] = float(sum(one["read_bytes"] for one in facts))
    return found


def _gpu(engine: Engine) -> str | None:
    """The UUID of the card that computes; None without one."""
    if engine.accelerator is None or engine.accelerator.device.where.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_properties(engine.accelerator.device.where).uuid)
