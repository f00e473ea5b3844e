"""The ``generate`` command: prompt in, text out as it comes, figures at the end."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from .engine import Engine
from .errors import K3Error, UsageError
from .generate import Done, Prefill, Token
from .plan_text import lowered, plan_facts
from .progress import Meter, Progress, write_out
from .report import (
    kernel_facts,
    kernel_line,
    kernel_read_bytes,
    memory_facts,
    tier_facts,
    tier_lines,
)
from .sampling import Sampling


@dataclass(frozen=True)
class Job:
    """What to generate, and how to report it."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    as_json: bool


@dataclass
class _Answer:
    """What came out so far, and when; times in seconds of ``time.perf_counter``."""

    begin: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    done: Done | None = None


def run_generate(engine: Engine, job: Job, progress: Progress, meter: Meter) -> bool:
    """Write the text (or one JSON object) to stdout; False if the request ended with an error.

    An error on the way ends the answer and is reported after it: what was written stays.
    """
    read_before = kernel_read_bytes()
    answer = _Answer()
    answer.first = answer.begin
    try:
        _collect(engine, job, progress, meter, answer)
    except UsageError:
        raise
    except K3Error as error:
        answer.done = Done(0, "error", "", len(answer.tokens), error)
    done, end = answer.done, time.perf_counter()
    assert done is not None
    progress.clear()
    made, decode = len(answer.tokens), end - answer.first
    rates = {
        "prefill_seconds": answer.first - answer.begin,
        "decode_seconds": decode,
        "tokens_per_second": (made - 1) / decode if made > 1 and decode > 0 else None,
    }
    if job.as_json:
        read = kernel_read_bytes() - read_before
        write_out(json.dumps({**_facts(job, answer, done), **rates, **_use(engine, read)}))
    else:
        write_out("")
        progress.text_ends()
        _say_figures(engine, job, made, done, rates, progress)
    if done.error is not None:
        progress.say(f"error: {done.error}")
    return done.error is None


def _collect(engine: Engine, job: Job, progress: Progress, meter: Meter, answer: _Answer) -> None:
    rows, total = engine.plan.sweep_rows, len(job.prompt)
    meter.prompt(0, total, min(rows, total))
    with engine.session() as session:
        session.append(job.prompt)
        for event in session.generate(job.max_new_tokens, job.sampling):
            if isinstance(event, Prefill):
                meter.prompt(event.done, event.total, min(rows, event.total - event.done))
                answer.first = time.perf_counter()
                continue
            if isinstance(event, Token):
                answer.tokens.append(event.token)
                meter.token(len(answer.tokens))
            if isinstance(event, Done):
                answer.done = event
            if isinstance(event, Token | Done) and event.text:
                answer.pieces.append(event.text)
                if not job.as_json:
                    progress.text_begins()
                    write_out(event.text, end="")


def _facts(job: Job, answer: _Answer, done: Done) -> dict[str, Any]:
    return {
        "text": "".join(answer.pieces),
        "tokens": answer.tokens,
        "prompt_tokens": len(job.prompt),
        "seed": job.sampling.seed,
        "finish_reason": done.finish_reason,
        "error": str(done.error) if done.error else None,
    }


def _use(engine: Engine, kernel_read: int) -> dict[str, Any]:
    options = engine.options
    return {
        "kernels": kernel_facts(engine),
        "tiers": tier_facts(engine),
        "kernel_read_bytes": kernel_read,
        "memory": memory_facts(engine),
        "plan": plan_facts(engine.plan, lowered(engine.plan, options.cache, options.sweep)),
    }


def _say_figures(
    engine: Engine,
    job: Job,
    made: int,
    done: Done,
    rates: dict[str, float | None],
    progress: Progress,
) -> None:
    rate = rates["tokens_per_second"]
    speed = f"at {rate:.3g} tokens/s" if rate else f"in {rates['decode_seconds']:.2f} s"
    progress.say(
        f"{len(job.prompt):,} prompt tokens in {rates['prefill_seconds']:.2f} s, {made:,} "
        f"new tokens {speed}, finished: {done.finish_reason}"
    )
    for line in [kernel_line(engine), *tier_lines(engine)]:
        progress.say(line)
