"""Decode steps of a model with all experts in RAM, and with room for a part of them.

The bound of a step that streams is the larger of its bytes over the line rate, measured before and
after each repeat, and computing alone, which is the same steps with everything in RAM.  Where not
all of it has room, only the former is known.  Steps are teacher-forced over a text, so that all
cases ask for the same experts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from .bench_engine import (
    NOT_ALONE,
    Accounts,
    Clock,
    about_model,
    bounded,
    cache_of,
    computed_by,
    digest,
    everything_in_ram,
    in_ram,
    line_rate,
    model_of,
    must_have_room,
    opener,
    room_to_read,
    scan_rate,
    tokens_of,
)
from .bench_frame import Frame, median
from .bench_policies import NOTHING
from .engine import Engine
from .machine import default_threads
from .options import PREDICT
from .paths import show_path
from .registry import short
from .scheduler.schedule import predictor_named
from .session import Session

SHARES: Final = ("10%", "25%", "50%")
PREDICTORS: Final = (NOTHING, PREDICT)
WARM: Final = 8  #: steps behind the prompt that are not measured: they fill the cache
MEANINGS: Final = {
    "seconds": "s a step",
    "seconds_median": "s of the median step",
    "of_bound": "time over the larger of reading at the line rate and computing alone",
    "line_used": "useful bytes over (time x line rate)",
    "hits_share": "of requests that were in RAM in time",
    "late_share": "of requests that joined a read under way",
    "miss_share": "of requests that began a read",
    "bytes_a_step": "bytes read from disk a step",
    "wasted_share": "of bytes read that nobody asked for",
    "waited_share": "of the time that experts were waited for",
    "line_rate": "bytes/s of whole pages, before and after",
    "share_of_memory": "weights' bytes a second over a scan of memory",
    "outside_kernels": "of the time that the calling thread computes outside kernels",
}


@dataclass(frozen=True)
class Steps:
    """What a repeat does: a prompt of ``context`` tokens of ``text``, ``WARM`` steps that are not
    measured, and ``tokens`` that are."""

    tokens: int = 24
    context: int = 64
    text: str | None = None


def decode(
    frame: Frame,
    model: str | Path,
    steps: Steps,
    *,
    shares: Sequence[float | None],
    predictors: Sequence[str] = PREDICTORS,
    alone_ram: int | None = None,
    **options: Any,
) -> None:
    """Lines of all cases.  ``shares`` of the experts, None as the plan has it; ``alone_ram``: bytes
    of the process that computes alone; ``options`` are those of ``load`` but for sizes, ``cache``
    and ``predict``.  Raises whatever loading raises."""
    for name in predictors:
        predictor_named(name)  # refuses what there is not
    checkpoint = model_of(model, options)
    frame.about["path"] = show_path(checkpoint.folder)
    frame.show("scanning memory")
    scan = scan_rate(options.get("threads") or default_threads())
    count = WARM + steps.tokens
    sizes = {"context": steps.context + count, "answer": count, "extra": room_to_read(checkpoint)}

    opened = opener(model, sizes, options)
    about = {
        **about_model(checkpoint, options), "tokens": steps.tokens, "context": steps.context,
        "text": digest(steps.text),
    }  # fmt: skip

    alone: float | None = None
    with opened(predict=NOTHING, **({"ram": alone_ram} if alone_ram else {})) as engine:
        if everything_in_ram(engine):
            measure = partial(_whole, engine, Clock(engine.kernels), steps, scan)
            case = {**about, "cache": "all", "predictor": NOTHING}
            alone = median(frame.case(case, measure), "seconds")
        else:
            frame.notes.append(NOT_ALONE)
    for share in shares if checkpoint.spec.expert_count else ():
        cache, given = cache_of(checkpoint, share)
        for predictor in predictors:
            with opened(predict=predictor, **given) as engine:
                must_have_room(engine, share)
                measure = partial(_streamed, engine, Clock(engine.kernels), steps, alone)
                case = {**about, "cache": cache, "predictor": short(predictor)}
                frame.case(case, measure)


def _whole(engine: Engine, clock: Clock, steps: Steps, scan: float, seed: int) -> dict[str, Any]:
    """Figures of one repeat whose weights lie in RAM all of them."""
    moe, spec = engine.spec.moe, engine.spec
    found = in_ram(lambda: run_steps(engine, clock, steps, seed))
    touched = engine.weights.trunk_bytes
    if moe is not None:
        touched += len(spec.moe_layers) * moe.top_k * engine.checkpoint.expert_bytes
    share = None if engine.accelerator else touched / found["seconds"] / scan
    return {**found, "step_bytes": touched, "memory_rate": scan, "share_of_memory": share}


def _streamed(
    engine: Engine, clock: Clock, steps: Steps, alone: float | None, seed: int
) -> dict[str, Any]:
    """Figures of one repeat that reads, beside what bounds it."""
    before = line_rate(engine.checkpoint, seed)
    found = run_steps(engine, clock, steps, seed)
    line = statistics.mean((before, line_rate(engine.checkpoint, seed)))
    return {**found, **bounded(found, line, alone, steps.tokens)}


def run_steps(engine: Engine, clock: Clock, steps: Steps, seed: int) -> dict[str, Any]:
    """A sequence of its own, and its accounts; the prompt is no part of them."""
    count = steps.context + WARM + steps.tokens
    tokens = tokens_of(engine.tokenizer, steps.text, count, seed)
    measured = tokens[steps.context + WARM :]
    with engine.session() as session:
        session.append(tokens[: steps.context])
        session.logits()
        walk(session, tokens[steps.context : steps.context + WARM])
        accounts = Accounts(engine)
        clock.seconds, processor = 0.0, time.thread_time()
        seconds = walk(session, measured)
        outside = time.thread_time() - processor - clock.seconds
        read = accounts.read()
    total, asked = sum(seconds), max(1, read["requests"])
    return {
        "seconds": total / len(seconds),
        "seconds_median": statistics.median(seconds),
        "computed_by": computed_by(engine),
        "slots": engine.plan.slots,
        "bytes_a_step": read["bytes"] / len(seconds),
        "hits_share": read["hits"] / asked,
        "late_share": read["late"] / asked,
        "miss_share": read["misses"] / asked,
        "wasted_share": read["wasted_bytes"] / max(1, read["bytes"]),
        "waited_share": read["waited_seconds"] / total,
        "outside_kernels": outside / total,
        **read,
    }


def walk(session: Session, tokens: Sequence[int]) -> list[float]:
    """Seconds of each decode step over ``tokens``."""
    seconds = []
    for token in tokens:
        begin = time.perf_counter()
        session.append_sampled(token)
        session.logits()
        seconds.append(time.perf_counter() - begin)
    return seconds
