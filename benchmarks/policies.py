"""Cache policies on recorded and made routing: misses, and how much of LRU's gap to Belady closes.

    python benchmarks/policies.py [TRACE ...] [--made] [--greedy TOKENS] [--policy ...] [--json]

TRACE is a folder or file of ``k3offload/trace.py``; each of its rows is one decode sweep.  Without
one, ``traces/nano_held_out.zip``: the embedded model decoding eight chapters that it was not
trained on.  ``--made`` adds routings that no model made, uniform and adversarial ones;
``--greedy`` adds what the embedded model itself routes while it goes on greedily after eight
prompts, TOKENS tokens each.  One global budget over all layers; Belady's MIN has the same
requests and leases.  Pages are alike, so misses stand for bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from k3offload import registry
from k3offload.scheduler.belady import Belady
from k3offload.scheduler.replay import Step, replay
from k3offload.tiers.base import CachePolicy
from k3offload.trace import read_trace
from k3offload.trace_made import NANO, patterns, trace_of
from k3offload.trace_record import record

HELD_OUT = Path(__file__).with_name("traces") / "nano_held_out.zip"
CAPACITIES = (0.12, 0.25, 0.5)
PROMPTS = (
    "In the beginning God",
    "And Jesus said unto him,",
    "The LORD is my",
    "And it came to pass in those days, that",
    "Blessed are they that",
    "Now these are the names of the children of",
    "Hear, O Israel:",
    "And the priest shall",
)


def greedy(tokens: int) -> list[Step]:
    """The embedded model goes on after each prompt."""
    import k3offload

    with tempfile.TemporaryDirectory() as folder:
        with k3offload.load("nano", context=tokens + 64) as engine:
            record(engine, Path(folder) / "t")
            sampling = k3offload.Sampling(temperature=0, ignore_end=True)
            for prompt in PROMPTS:
                with engine.session() as session:
                    session.append(prompt)
                    for _ in session.generate(tokens, sampling):
                        pass
        trace = read_trace(Path(folder) / "t")
    return list(trace.rows(trace.decode).leases())


def _belady(run: Iterable[Step], slots: int) -> CachePolicy:
    return Belady(run)


def compare(
    run: Iterable[Step], pages: int, policies: dict[str, Callable[[int], CachePolicy]]
) -> dict[str, Any]:
    """For each capacity: misses of each policy, share of the gap closed, microseconds a request."""
    result: dict[str, Any] = {}
    makers: dict[str, Callable[[int], CachePolicy]] = {**policies, "belady": partial(_belady, run)}
    for capacity in CAPACITIES:
        slots = max(1, round(capacity * pages))
        misses, cost = {}, {}
        for name, make in makers.items():
            begin = time.process_time()
            counts = replay(run, make(slots), slots)
            misses[name] = counts.misses
            cost[name] = round((time.process_time() - begin) / counts.requests * 1e6, 1)
        gap = misses["lru"] - misses["belady"]
        closed = {n: round((misses["lru"] - m) / gap, 4) if gap else 0.0 for n, m in misses.items()}
        result[str(capacity)] = {
            "requests": counts.requests,
            "misses": misses,
            "closed": closed,
            "us_per_request": cost,
        }
    return result


def table(name: str, figures: dict[str, Any]) -> Iterator[str]:
    """Lines: one for each policy, misses and share of the gap for each capacity."""
    columns = [(c, figures[c]) for c in figures]
    heads = "".join(f"{float(c):>12.0%} ({f['requests']})" for c, f in columns)
    yield f"{name:<22}{heads}"
    for policy in columns[0][1]["misses"]:
        cells = "".join(f"{f['misses'][policy]:>12}{f['closed'][policy]:>8.1%}" for _, f in columns)
        yield f"  {policy:<18}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    modules = registry.implementations("scheduler", "policy")
    parser.add_argument("trace", nargs="*", type=Path)
    parser.add_argument("--made", action="store_true")
    parser.add_argument("--greedy", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--policy", nargs="+", choices=modules, default=list(modules))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    policies = {name: modules[name].Policy for name in dict.fromkeys(["lru", *given.policy])}
    pages = NANO.layers * NANO.experts
    runs: list[tuple[str, int, Callable[[], Iterable[Step]]]] = []
    for path in given.trace or [HELD_OUT]:
        trace = read_trace(path)
        runs.append((path.stem, len(trace.layers) * trace.experts, trace.leases))
    if given.greedy:
        runs.append(("greedy", pages, partial(greedy, given.greedy)))
    if given.made:
        made = {name: trace_of(run, NANO.experts) for name, run in patterns(2000).items()}
        runs += [(name, pages, trace.leases) for name, trace in made.items()]
    for name, count, make in runs:
        figures = compare(make(), count, policies)
        print(json.dumps({name: figures}) if given.json else "\n".join(table(name, figures)))


if __name__ == "__main__":
    main()
