"""Decode and prefill with everything cached and with most experts streaming, as ratios of one run.

    python -m benchmarks.run [--size small]

Makes a seeded checkpoint, measures, appends one line per figure to ``benchmarks/results/`` (named
after the processor, with commit and date) and deletes the checkpoint.  Absolute times hold for one
machine and one moment; the ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import k3offload
from benchmarks.contention import Background, limits
from k3offload.engine import Engine
from k3offload.machine import facts, peak_rss
from k3offload.make_tiny import make_tiny

PROMPT, NEW = 192, 24
ROOT = Path(__file__).parent
_background = Background()  #: since the process began, or the last line


def measure(engine: Engine) -> dict[str, float]:
    """Seconds of a prompt of ``PROMPT`` tokens and of ``NEW`` decode sweeps, and bytes of each."""
    tokens = [(7 * i) % 250 for i in range(PROMPT)]
    with engine.session() as session:
        session.append(tokens)
        begin = time.perf_counter()
        session.logits()
        prefilled, after = time.perf_counter(), engine.counts()["experts"]
        for token in range(NEW):
            session.append_sampled(token)
            session.logits()
        end, last = time.perf_counter(), engine.counts()["experts"]
    return {
        "prefill_tokens_per_second": PROMPT / (prefilled - begin),
        "decode_tokens_per_second": NEW / (end - prefilled),
        "decode_bytes_per_token": (last.bytes - after.bytes) / NEW,
        "decode_wait_share": (last.wait_seconds - after.wait_seconds) / (end - prefilled),
    }


def machine() -> dict[str, Any]:
    """What a result line says of the machine: ``facts``, and the limits of this process."""
    return {**facts(), **limits()}


def contention() -> dict[str, Any]:
    """Whether the machine was this process's alone since the process began, or since the last
    call: ``clean``, and why not."""
    global _background
    found, _background = _background.read(), Background()
    return found


def run(size: str, folder: Path) -> dict[str, Any]:
    """Figures of one checkpoint: cached, and with room for a quarter of the experts."""
    made = make_tiny(folder / "model", size)
    with k3offload.load(folder / "model", context=512, sweep=PROMPT) as engine:
        measure(engine)  # brings every expert it needs into RAM
        cached = measure(engine)
        experts = engine.plan.experts * engine.plan.slot_bytes
    with k3offload.load(folder / "model", context=512, sweep=PROMPT, cache=experts // 4) as engine:
        streamed = measure(engine)
    return {
        "size": size,
        "tensor_bytes": made["bytes"],
        "cached": cached,
        "quarter_cached": streamed,
        "decode_ratio_streamed_to_cached": streamed["decode_tokens_per_second"]
        / cached["decode_tokens_per_second"],
        "peak_rss": peak_rss(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="small")
    size = parser.parse_args().size
    with tempfile.TemporaryDirectory(prefix="k3-bench-") as folder:
        facts = {**machine(), **run(size, Path(folder))}
    print(json.dumps(facts, indent=2))
    note(facts)


def note(facts: dict[str, Any]) -> None:
    """Append one line to the results of this processor, marked if others used the machine while it
    was measured."""
    facts = {**facts, **contention()}
    name = re.sub(r"[^a-z0-9]+", "-", facts["cpu"].lower()).strip("-")
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    with (results / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
