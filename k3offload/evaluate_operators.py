"""Every operator and every format of a checkpoint against its reference, as a run would compute it.

Weights are those of the checkpoint: of the first layer of each kind, some of its experts, and a
block of the head; rows are drawn.  An implementation is given activations in the model's type, its
reference the same numbers as float32, so that what a narrower type loses is part of the error.
``evaluate_operators_cases.py`` says what is called; here it is run, timed and judged.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from .config import ROW_TILE
from .engine import DTYPES, Engine
from .errors import UsageError
from .evaluate_operators_cases import ROUND, Case, Cases, Hand, Tensors
from .kernels.choose import MIXED, NATIVE, OPS, REFERENCE, Kernels
from .kernels.mixer import composed
from .kernels.workers import single_threaded
from .loading import open_engine
from .tiers.base import PageId

SLOW_ISA: Final = "portable"  #: an instruction set without vectors
REPEATS: Final = 3
LONG: Final = 0.2  #: seconds of a call
EXPERTS: Final = 4  #: of a layer, most


@dataclass(frozen=True)
class Checked:
    """A function of an operator on one format of weights and one kind of rows."""

    op: str
    part: str
    weights: str
    kind: str
    where: str
    served_by: str
    error: float  #: of the largest value of the reference
    tolerance: float
    seconds: float  #: of all weights of the format that were tried
    reference_seconds: float
    worst: str  #: the weight that gave the largest error

    @property
    def fine(self) -> bool:
        return self.error <= self.tolerance  # false for NaN

    @property
    def itself(self) -> bool:
        """The reference serves, and there was nothing to round: nothing was compared."""
        return self.served_by == REFERENCE and self.error == 0

    @property
    def speed(self) -> float:
        """How many times faster than the reference."""
        return self.reference_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "fine": self.fine, "itself": self.itself, "speed": self.speed}


@dataclass(frozen=True)
class Operators:
    """What was found; ``slow``: a line for everything that does not run on its fast path."""

    isa: str | None
    dtype: str
    rows: tuple[Checked, ...]
    slow: tuple[str, ...]

    @property
    def fine(self) -> bool:
        return all(row.fine for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        facts = {"isa": self.isa, "dtype": self.dtype, "fine": self.fine}
        return {**facts, "slow": list(self.slow), "rows": rows}


def operators(
    model: str | Path,
    *,
    seed: int = 0,
    show: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Operators:
    """Check what serves ``model`` when it is loaded with ``options`` (those of ``load`` but for
    sizes); with a device, what computes there too.  Raises whatever loading raises."""
    if seed < 0:
        raise UsageError(f"The seed is {seed}.", "Give 0 or more.")
    sizes = {"context": ROW_TILE, "sweep": ROW_TILE}
    with open_engine(model, lambda tokenizer, spec: sizes, **options) as engine, engine.lock:
        return _check(engine, seed, show)


def _check(engine: Engine, seed: int, show: Callable[[str], None]) -> Operators:
    dtype = DTYPES[engine.options.dtype]
    here = torch.device("cpu")
    references = Kernels(engine.kernels.workers, dict.fromkeys(OPS, REFERENCE))
    reference = Hand(REFERENCE, references, here, wide=True)
    hands = [Hand("cpu", engine.kernels, here)]
    if engine.accelerator is not None:
        there = engine.accelerator
        hands.append(Hand("gpu", there.kernels, there.device.where))
    found: dict[tuple[str, ...], Checked] = {}
    for case in _cases(engine, Cases(engine.spec, dtype, seed), show):
        for hand in hands:
            row = _run(case, hand, reference, dtype)
            key = (row.where, row.op, row.part, row.weights, row.kind)
            found[key] = row if key not in found else _both(found[key], row)
    order = {op: i for i, op in enumerate((*OPS, "mixer"))}
    rows = sorted(found.values(), key=lambda r: (r.where, order[r.op]))
    slow = tuple(line for hand in hands for line in slow_paths(hand))
    return Operators(engine.kernels.isa, engine.options.dtype, tuple(rows), slow)


def _cases(engine: Engine, cases: Cases, show: Callable[[str], None]) -> Iterator[Case]:
    """The cases of the first layer of each kind, and of the head; a case is over when the next one
    is asked for."""
    spec, weights, seen = engine.spec, engine.weights, set()
    for layer in spec.layers:
        kind = (layer.attention, layer.ffn)
        if kind in seen:
            continue
        seen.add(kind)
        show(f"layer {layer.index}: {kind[0]}, {kind[1]}")
        # with a device not every layer has a place in RAM
        held = weights.layer if engine.accelerator is None else weights.staged
        with held(layer.index) as w:
            yield from cases.layer(layer, w)
        if layer.ffn == "moe":
            yield from _experts(engine, cases, layer.index)
    show("head")
    blocks = weights.head_blocks()
    begin, end, block = next(blocks)
    what = f"rows {begin:,} to {end:,} of the head"
    yield from cases.linear(block, what, torch.float32, ", head")


def _experts(engine: Engine, cases: Cases, layer: int) -> Iterator[Case]:
    moe, store = engine.spec.moe, engine.store
    assert moe is not None and store is not None
    step = max(1, moe.experts // EXPERTS)
    pages = [PageId(layer, expert) for expert in range(0, moe.experts, step)][:EXPERTS]
    with store.lease(pages) as arrivals:
        for batch in arrivals:
            some = [engine.weights.expert(page, buffer) for page, buffer in batch]
            numbers = ", ".join(str(page.expert) for page, _ in batch)
            yield from cases.experts(some, f"layer {layer}, experts {numbers}", ", routed")


def _run(case: Case, hand: Hand, reference: Hand, dtype: torch.dtype) -> Checked:
    want, slowly = _timed(case, reference if case.wide else reference._replace(wide=False))
    got, quickly = _timed(case, hand)
    roundings = case.roundings if dtype == torch.bfloat16 else 0
    return Checked(
        case.op, case.part, case.weights, case.kind, hand.name,
        served_by(hand.kernels, case.op), relative_error(case.read(got), case.read(want)),
        case.exact + roundings * ROUND, quickly, slowly, case.what,
    )  # fmt: skip


def _timed(case: Case, hand: Hand) -> tuple[Tensors, float]:
    """The results of the first call, and the seconds of those behind it: their median.  A call that
    took long is not made again."""
    kernels = hand.kernels
    with single_threaded(), torch.inference_mode(), kernels.in_force():
        call = case.ready(hand)

        def once() -> tuple[Tensors, float]:
            begin = time.perf_counter()
            results = kernels.to_host(*call())
            return tuple(results), time.perf_counter() - begin

        results, first = once()
        if first > LONG:
            return results, first
        results = tuple(t.clone() for t in results)  # states that the next calls move on
        return results, statistics.median(once()[1] for _ in range(REPEATS))


def relative_error(got: Tensors, want: Tensors) -> float:
    """The largest difference of a result, of the largest value that it should have; NaN where it
    holds what is no number."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        difference = float((a.double() - b.double()).abs().max())
        if not difference < float("inf"):
            return float("nan")
        worst = max(worst, difference / (float(b.double().abs().max()) or 1.0))
    return worst


def _both(one: Checked, other: Checked) -> Checked:
    """Two weights of a format as one row: the larger error, and the seconds of both."""
    worst = one if not one.fine or other.error <= one.error else other
    return replace(
        worst,
        seconds=one.seconds + other.seconds,
        reference_seconds=one.reference_seconds + other.reference_seconds,
    )


def served_by(kernels: Kernels, op: str) -> str:
    """The backend of an operator; the mixer has one where its parts have the same fast one."""
    if op in kernels.chosen:
        return kernels.chosen[op]
    f = kernels.serving(op)
    is_composed = getattr(f, "func", None) is composed
    return REFERENCE if is_composed else kernels.chosen[MIXED[0]]


def slow_paths(hand: Hand) -> list[str]:
    """A line for everything that a faster implementation could serve and does not."""
    kernels, lines = hand.kernels, []
    fallen = [op for op in OPS if kernels.chosen[op] == REFERENCE]
    if fallen:
        why = kernels.why if kernels.isa is None else "they were asked for (--kernel)"
        names = "all operators" if len(fallen) == len(OPS) else ", ".join(fallen)
        lines.append(f"{names}: the torch path, which is slow: {why.rstrip('.')}")
    if served_by(kernels, "mixer") == REFERENCE and not set(MIXED) <= set(fallen):
        lines.append("mixer: put together from its parts, since these are not of one backend")
    if kernels.isa == SLOW_ISA and NATIVE in kernels.chosen.values():
        lines.append(f"native kernels run {SLOW_ISA} code, without vector instructions")
    return lines
