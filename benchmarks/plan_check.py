"""Predicted against measured: what ``k3offload plan`` says of six cases, and what they take.

    python -m benchmarks.plan_check [--io FOLDER] [--wide FOLDER] [--threads N]

Decode steps and one prompt sweep of: ``io-real`` with room for 10, 25 and 50 % of its experts,
``small`` all in memory, and ``wide`` all in memory with its trunk in bfloat16 and int8.  The rates
are measured in the same run: the machine's before and after each configuration, the disk's, which
moves within seconds, around the prompt and between the steps.  Where experts stream, the prompt is
the first one after loading, and the plan is told the mean hit rate of two other sequences before
(``plan --hit-rate``): that of uniform routing, which it would assume, stands beside it.  Models are
made where no folder is given (12 and 7 GB).  One line a configuration goes to
``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import k3offload
from benchmarks.run import ROOT, contention, machine
from k3offload.bench_read import read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.engine import Engine
from k3offload.forecast import Setup, decode, prefill
from k3offload.machine import default_threads
from k3offload.make_tiny import make_tiny
from k3offload.measure import measure
from k3offload.rates import Rates

PROMPT, WARM, STEPS, EACH = 512, 8, 24, 4
LIMIT = 0.15  #: of the measured time


@dataclass(frozen=True)
class Case:
    """One configuration: a size, the share of its experts that has room, the trunk."""

    size: str
    share: float
    trunk: str = "bfloat16"

    @property
    def name(self) -> str:
        room = "cached" if self.share >= 1 else f"{100 * self.share:.0f} % of experts"
        return f"{self.size}, {room}, {self.trunk} trunk"


CASES = (
    Case("io-real", 0.10),
    Case("io-real", 0.25),
    Case("io-real", 0.50),
    Case("small", 1),
    Case("wide", 1),
    Case("wide", 1, "int8"),
)


def sequence(engine: Engine, seed: int, rate: Callable[[], float]) -> dict[str, float]:
    """A prompt and decode steps after it, in seconds: the sweep, the median step, their hit rates;
    ``rate`` is asked for the disk's rate around the prompt and every few steps."""
    drawn = random.Random(seed)
    tokens = [drawn.randrange(engine.spec.vocab) for _ in range(PROMPT + WARM + STEPS)]
    with engine.session() as session:
        session.append(tokens[:PROMPT])
        rates = [rate()]
        begin = time.perf_counter()
        session.logits()
        prompt = time.perf_counter() - begin
        rates.append(rate())
        steps, between_steps = [], []
        for i, token in enumerate(tokens[PROMPT:]):
            if i == WARM:
                before = engine.counts()["experts"]
            if i >= WARM and (i - WARM) % EACH == 0:
                between_steps.append(rate())
            session.append_sampled(token)
            begin = time.perf_counter()
            session.logits()
            steps.append(time.perf_counter() - begin)
        after = engine.counts()["experts"]
    asked = after.requests - before.requests
    return {
        "prompt": prompt,
        "decode": statistics.median(steps[WARM:]),
        "hit_rate": (after.hits - before.hits) / asked if asked else 1.0,
        "prompt_disk": statistics.mean(rates),
        "decode_disk": statistics.mean(between_steps),
    }


def between(before: Rates, after: Rates) -> Rates:
    """The mean of two measurements, figure by figure: the machine's speed drifts."""
    mean: dict[str, Any] = {"source": before.source}
    for name, value in vars(before).items():
        other = getattr(after, name)
        if isinstance(value, float):
            mean[name] = (value + other) / 2
        elif name != "source":
            mean[name] = {kind: (value[kind] + other[kind]) / 2 for kind in value}
    return Rates(**mean)


def check(case: Case, folder: Path, threads: int, seed: int) -> dict[str, Any]:
    """Measured and predicted seconds of one configuration."""
    checkpoint = Checkpoint.open(folder)
    spec = checkpoint.spec
    cache = int(case.share * spec.expert_count * (spec.expert_bytes + 8192))

    def rates() -> Rates:
        return measure(spec, threads, "bfloat16", None).rates

    def disk() -> float:
        return read_rate(checkpoint, 0.4).rate if case.share < 1 else math.inf

    first = rates()
    options: dict[str, Any] = {"cache": cache} if case.share < 1 else {}
    if case.trunk != "bfloat16":
        options["trunk"] = case.trunk
    with k3offload.load(folder, threads=threads, sweep=PROMPT, context=1024, **options) as engine:
        cold = sequence(engine, seed + 2, disk)
        other = sequence(engine, seed + 1, disk)
        found = sequence(engine, seed, disk)
        plan = engine.plan
    whole = case.share >= 1  # then nothing is read once the first prompt has brought it all
    prompt = found if whole else cold
    own = between(first, rates())
    told = statistics.mean((cold["hit_rate"], other["hit_rate"]))
    step = decode(
        Setup(spec, plan, replace(own, disk=found["decode_disk"]), trunk=case.trunk,
              hit_rate=told), position=PROMPT,
    )  # fmt: skip
    sweep = prefill(
        Setup(spec, plan, replace(own, disk=prompt["prompt_disk"]), trunk=case.trunk),
        tokens=PROMPT,
    )
    predicted = {"decode": step.seconds, "prompt": sweep.seconds}
    measured = {"decode": found["decode"], "prompt": prompt["prompt"]}
    return {
        "case": case.name,
        "slots": plan.slots,
        "experts": plan.experts,
        "measured": measured,
        "predicted": predicted,
        "error": {k: predicted[k] / measured[k] - 1 for k in predicted},
        "hit_rate": {"measured": found["hit_rate"], "told": told,
                     "uniform": min(1.0, plan.slots / plan.experts)},
        "disk": {k: None if whole else v for k, v in
                 (("decode", found["decode_disk"]), ("prompt", prompt["prompt_disk"]))},
        "limit": {"decode": step.limit, "prompt": sweep.limit},
        "rates": own.to_dict(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--io", type=Path, help="an io-real model")
    parser.add_argument("--wide", type=Path, help="a wide model")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--dry", action="store_true", help="append nothing to the results")
    given = parser.parse_args()
    facts, lines = machine(), []
    with ExitStack() as stack:
        folders = {"io-real": given.io, "wide": given.wide}
        for case in CASES:
            if given.only not in case.name:
                continue
            if folders.get(case.size) is None:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="k3-plan-")))
                folders[case.size] = place / "model"
                make_tiny(folders[case.size], case.size)
            line = check(case, folders[case.size], given.threads, seed=7)
            lines.append({"benchmark": "plan_check", **facts, **line, **contention()})
            for kind, error in line["error"].items():
                verdict = "within" if abs(error) <= LIMIT else "MISSED"
                print(
                    f"{case.name}, {kind}: measured {line['measured'][kind]:.4f} s, predicted "
                    f"{line['predicted'][kind]:.4f} s ({100 * error:+.0f} %, {verdict})",
                    flush=True,
                )
    name = re.sub(r"[^a-z0-9]+", "-", facts["cpu"].lower()).strip("-")
    if given.dry:
        return
    (ROOT / "results").mkdir(exist_ok=True)
    with (ROOT / "results" / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
