"""The ``generate`` command: prompt in, text out as it comes, figures at the end."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from .engine import Engine
from .generate import Done, Prefill, Token
from .progress import Progress
from .report import kernel_read_bytes, memory_facts, plan_facts, tier_facts, tier_lines
from .sampling import Sampling


@dataclass(frozen=True)
class Job:
    """What to generate, and how to report it."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    as_json: bool


def run_generate(engine: Engine, job: Job, progress: Progress) -> bool:
    """Write the text (or one JSON object) to stdout; False if the request ended with an error."""
    pieces: list[str] = []
    tokens: list[int] = []
    done: Done | None = None
    read_before = kernel_read_bytes()
    begin = time.perf_counter()
    first = begin
    with engine.session() as session:
        session.append(job.prompt)
        for event in session.generate(job.max_new_tokens, job.sampling):
            if isinstance(event, Prefill):
                progress.show(f"prompt: {event.done:,} of {event.total:,} tokens")
                first = time.perf_counter()
            elif isinstance(event, Token):
                tokens.append(event.token)
                _show(event.text, pieces, job.as_json, progress)
            elif isinstance(event, Done):
                done = event
                _show(event.text, pieces, job.as_json, progress)
    assert done is not None
    end = time.perf_counter()
    progress.clear()
    rates = {
        "prefill_seconds": first - begin,
        "decode_seconds": end - first,
        "tokens_per_second": (len(tokens) - 1) / (end - first) if len(tokens) > 1 else None,
    }
    if job.as_json:
        facts: dict[str, Any] = {
            "text": "".join(pieces),
            "tokens": tokens,
            "prompt_tokens": len(job.prompt),
            "finish_reason": done.finish_reason,
            "error": str(done.error) if done.error else None,
            **rates,
            "tiers": tier_facts(engine),
            "kernel_read_bytes": kernel_read_bytes() - read_before,
            "memory": memory_facts(engine),
            "plan": plan_facts(engine.plan),
        }
        print(json.dumps(facts), flush=True)
    else:
        print(flush=True)
        _say_figures(engine, job, tokens, done, rates, progress)
    if done.error is not None:
        progress.say(f"error: {done.error}")
    return done.error is None


def _show(text: str, pieces: list[str], as_json: bool, progress: Progress) -> None:
    pieces.append(text)
    if text and not as_json:
        progress.clear()
        sys.stdout.write(text)
        sys.stdout.flush()


def _say_figures(
    engine: Engine,
    job: Job,
    tokens: list[int],
    done: Done,
    rates: dict[str, float | None],
    progress: Progress,
) -> None:
    rate = rates["tokens_per_second"]
    speed = f"{rate:.3g} tokens/s" if rate else f"{rates['decode_seconds']:.2f} s"
    progress.say(
        f"{len(job.prompt):,} prompt tokens in {rates['prefill_seconds']:.2f} s, {len(tokens):,} "
        f"new tokens at {speed}, finished: {done.finish_reason}"
    )
    for line in tier_lines(engine):
        progress.say(line)
