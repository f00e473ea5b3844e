"""The ``generate`` command: prompt in, text out as it comes, figures at the end."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .config import show_size
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
from .session import Session


@dataclass(frozen=True)
class Job:
    """What to generate, and how to report it."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    as_json: bool
    session: Path | None = None  # where it is saved afterwards
    goes_on: bool = False  # and was saved before


@dataclass
class _Answer:
    """What came out so far, and when; times in seconds of ``time.perf_counter``."""

    begin: float = field(default_factory=time.perf_counter)
    prefilled: float = 0.0
    first: float = 0.0  # token, or the end
    computed: int = 0  # prompt tokens that were not known
    state_bytes: int = 0
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    done: Done | None = None


def run_generate(engine: Engine, job: Job, progress: Progress, meter: Meter) -> bool:
    """Write the text (or one JSON object) to stdout; False if the request ended with an error.

    An error on the way ends the answer and is reported after it: what was written stays.
    """
    read_before = kernel_read_bytes()
    answer = _Answer()
    answer.prefilled = answer.begin
    try:
        with _session(engine, job) as session:
            _collect(engine, session, job, progress, meter, answer)
            answer.state_bytes = session.state.nbytes
            if job.session is not None and answer.done and answer.done.error is None:
                _save(session, job.session, answer)
    except UsageError:
        raise
    except K3Error as error:
        answer.done = Done(0, "error", "", len(answer.tokens), error)
    done, end = answer.done, time.perf_counter()
    assert done is not None
    progress.clear()
    rates = _rates(answer, end)
    if job.as_json:
        read = kernel_read_bytes() - read_before
        write_out(json.dumps({**_facts(job, answer, done), **rates, **_use(engine, read)}))
    else:
        write_out("")
        progress.text_ends()
        _say_figures(engine, job, answer, done, rates, progress)
    if done.error is not None:
        progress.say(f"error: {done.error}")
    return done.error is None


def _save(session: Session, place: Path, answer: _Answer) -> None:
    """Save ``session``; an error is told behind the answer, which is not lost."""
    assert answer.done is not None
    try:
        session.save(place)
    except K3Error as error:
        answer.done = replace(answer.done, error=error)


def _session(engine: Engine, job: Job) -> Session:
    """The session to go on with, with the prompt."""
    if job.session is not None and job.goes_on:
        session = engine.load_session(job.session)
    else:
        session = engine.session()
    session.append(job.prompt)
    if engine.prefixes is not None:  # now, so that what is to be computed is known
        engine.prefixes.jump(session)
    return session


def _rates(answer: _Answer, end: float) -> dict[str, float | None]:
    """Seconds and rates; ``end`` in seconds of ``time.perf_counter``."""
    made, decode = len(answer.tokens), end - answer.prefilled
    prefill = answer.prefilled - answer.begin
    return {
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "seconds_to_first_token": answer.first - answer.begin if answer.first else None,
        "prefill_tokens_per_second": answer.computed / prefill if prefill > 0 else None,
        "tokens_per_second": (made - 1) / decode if made > 1 and decode > 0 else None,
    }


def _collect(
    engine: Engine, session: Session, job: Job, progress: Progress, meter: Meter, answer: _Answer
) -> None:
    rows, total = engine.plan.sweep_rows, len(session.waiting())
    answer.computed = total
    meter.prompt(0, total, min(rows, total))
    for event in session.generate(job.max_new_tokens, job.sampling):
        if isinstance(event, Prefill):
            meter.prompt(event.done, event.total, min(rows, event.total - event.done))
            answer.prefilled = time.perf_counter()
            continue
        answer.first = answer.first or time.perf_counter()
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
        "reused_tokens": done.reused,
        "computed_tokens": answer.computed,
        "state_bytes": answer.state_bytes,
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
    answer: _Answer,
    done: Done,
    rates: dict[str, float | None],
    progress: Progress,
) -> None:
    rate, prefill = rates["tokens_per_second"], rates["prefill_tokens_per_second"]
    speed = f"at {rate:.3g} tokens/s" if rate else f"in {rates['decode_seconds']:.2f} s"
    fast = f" ({prefill:.3g} tokens/s)" if prefill and answer.computed else ""
    progress.say(
        f"{len(job.prompt):,} prompt tokens in {rates['prefill_seconds']:.2f} s{fast}, "
        f"{len(answer.tokens):,} new tokens {speed}, finished: {done.finish_reason}"
    )
    if (first := rates["seconds_to_first_token"]) is not None:
        progress.say(
            f"first token after {first:.2f} s, {done.reused:,} tokens reused, "
            f"{show_size(answer.state_bytes)} of session state at the end"
        )
    for line in [kernel_line(engine), *tier_lines(engine)]:
        progress.say(line)
