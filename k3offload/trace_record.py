"""Recording a trace of an engine: what is listened to, what it takes, and what ends it.

Where the trace cannot be written (a full disk), recording ends with a warning and the run goes on.
This file knows engines; ``trace_rows.py`` makes rows of what it hears.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .errors import UsageError
from .paths import show_path
from .registry import short
from .scheduler.hints import NEAR
from .scheduler.lease import Watch
from .tiers.base import PageId
from .trace import PARTS, Array
from .trace_rows import Recorder

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduler.store import ExpertStore
    from .spec import ModelSpec

MEMORY: Final = 48 << 20  #: bytes that recording takes beside what it keeps of a sweep, about
LONG: Final = 1 << 15  #: rows of a sweep that memory is planned for, at most


def check_parts(parts: Collection[str]) -> None:
    """Raise ``UsageError`` for parts of a trace that are not known."""
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"A trace has no part {part!r}.", f"Use {', '.join(PARTS)}.")


def needed(spec: ModelSpec, parts: Collection[str], rows: int, decoding: int) -> int:
    """Bytes that recording takes at most, about: a sweep is written when all its layers have
    passed.  ``rows`` of the longest sweep, ``decoding`` of the longest that only decodes."""
    if spec.moe is None:
        return 0
    layers, codes = len(spec.moe_layers), 3 * min(spec.moe.top_k + NEAR, spec.moe.experts)
    row = layers * (codes + 2 * ("margin" in parts))
    if "mixing" in parts:
        row += math.prod(_mixing(spec))
    guess = layers * codes * ("ahead" in parts)
    if "latent" in parts:
        guess += 2 * layers * (spec.moe.latent or spec.hidden)
    return MEMORY + min(rows, LONG) * row + decoding * guess


def record(
    engine: Engine,
    folder: Path,
    parts: Collection[str] = (),
    about: Mapping[str, Any] | None = None,
) -> Recorder:
    """Record what ``engine`` does from now on, until it is closed.  Raises ``UsageError``."""
    check_parts(parts)
    moe, spec = engine.spec.moe, engine.spec
    if moe is None or engine.store is None:
        raise UsageError("This model has no routed experts to trace.", "Leave --trace out.")
    watched: list[tuple[ExpertStore, Watch]] = []  # and who watched before

    def failed(error: OSError) -> None:
        for store, before in watched:
            store.watch = before
        name = show_path(recorder.writer.folder)
        engine.warn(f"the trace {name} ends here: {error.strerror}")

    recorder = Recorder(
        folder, spec.moe_layers, moe.experts, moe.top_k,
        ahead="ahead" in parts, margin="margin" in parts, tiers="tiers" in parts,
        latent=(moe.latent or spec.hidden) if "latent" in parts else 0,
        mixing=_mixing(spec) if "mixing" in parts else None,
        workers=engine.kernels.workers, failed=failed,
        order=_order(engine), page_bytes=engine.checkpoint.expert_bytes,
        source="k3offload",
        about={"slots": engine.store.slots, "policy": short(engine.options.policy),
               "predict": short(engine.options.predict), **(about or {})},
    )  # fmt: skip
    engine.hooks.add(on_sweep=recorder.on_sweep, on_route=recorder.on_route)
    if "ahead" in parts or "latent" in parts:
        engine.hooks.add(on_ahead=recorder.on_ahead)
    engine.hooks.wants = {"router" if part == "ahead" else part for part in parts}
    if "mixing" in parts:
        engine.hooks.on_mix = recorder.on_mix
    if "tiers" in parts:
        stores: list[ExpertStore | None] = [engine.store]
        if engine.accelerator is not None:
            stores.append(engine.accelerator.store)
        for tier, store in enumerate(stores):
            if store is not None:
                watched.append((store, store.watch))
                store.watch = recorder.watch(tier)
    engine.closing.append(recorder.close)
    return recorder


def _order(engine: Engine) -> Array:
    """[L, E]: places of experts in the files."""
    moe = engine.spec.moe
    assert moe is not None
    order = np.zeros((len(engine.spec.moe_layers), moe.experts), np.uint16)
    for place, layer in enumerate(engine.spec.moe_layers):
        pages = sorted((PageId(layer, e) for e in range(moe.experts)), key=engine.disk.order)
        order[place, [page.expert for page in pages]] = np.arange(moe.experts)
    return order


def _mixing(spec: ModelSpec) -> tuple[int, int]:
    """Sublayers, and most entries of a mix."""
    layers, block = len(spec.layers), spec.attnres_block
    if block is None:
        raise UsageError("This model has no residual attention to trace.", "Leave mixing out.")
    return 2 * layers, -(-layers // block) + 1
