"""Cache policies on recorded and made routing: misses, and how much of LRU's gap to Belady closes.

    python benchmarks/policies.py [TRACE ...] [--made] [--greedy TOKENS] [--policy ...] [--json]

TRACE is a folder or file of ``k3offload/trace.py``; each of its rows is one decode sweep.  Without
one, ``traces/nano_held_out.npz``: the embedded model decoding eight chapters that it was not
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3offload import registry
from k3offload.scheduler.belady import Belady
from k3offload.scheduler.replay import Step, replay, steps
from k3offload.tiers.base import CachePolicy
from k3offload.trace import Recorder, Trace, read_trace

HELD_OUT = Path(__file__).with_name("traces") / "nano_held_out.npz"
CAPACITIES = (0.12, 0.25, 0.5)
LAYERS, EXPERTS, TOP_K = 7, 48, 4  #: of made routings: those of the embedded model
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
Chosen = npt.NDArray[np.int64]


def made(tokens: int, seed: int = 0) -> dict[str, Chosen]:
    """Routings [tokens, layers, k] by name: without structure, or made to hurt some policy."""
    rng = np.random.default_rng(seed)
    turn, place = np.arange(tokens)[:, None, None], np.arange(TOP_K)
    result = {
        "uniform": _draw(rng, tokens, EXPERTS),
        "scan": np.tile((turn * TOP_K + place) % EXPERTS, (1, LAYERS, 1)),
        "flips": np.tile(turn % 2 * TOP_K + place, (1, LAYERS, 1)),
        "skewed": _skewed(rng, tokens),
        "stack": _stack(rng, tokens),
    }
    for period in (3, 9, 20):
        result[f"loop of {period}"] = _draw(rng, period, EXPERTS)[np.arange(tokens) % period]
    for period, wide in ((20, 6), (100, 6), (20, 14), (100, 14)):  # a working set that changes
        count = -(-tokens // period)
        sets = np.stack([_shuffled(rng)[:, :wide] for _ in range(count)])
        inside = _draw(rng, tokens, wide)
        phases = np.take_along_axis(sets[np.arange(tokens) // period], inside, axis=2)
        result[f"{wide} for {period}"] = phases
    fifth = tokens // 5
    parts = ("loop of 9", "6 for 20", "uniform", "stack", "flips")
    result["one after the other"] = np.concatenate([result[name][:fifth] for name in parts])
    return {name: np.sort(chosen, axis=2) for name, chosen in result.items()}


def _draw(rng: np.random.Generator, tokens: int, among: int) -> Chosen:
    return np.argsort(rng.random((tokens, LAYERS, among)), axis=2)[..., :TOP_K]


def _shuffled(rng: np.random.Generator) -> Chosen:
    return np.argsort(rng.random((LAYERS, EXPERTS)), axis=1)


def _skewed(rng: np.random.Generator, tokens: int) -> Chosen:
    """Expert number r of a layer is about 1/r as likely as its first."""
    keys = rng.gumbel(size=(tokens, LAYERS, EXPERTS)) - np.log(np.arange(1, EXPERTS + 1))
    ranks = np.argsort(-keys, axis=2)[..., :TOP_K]
    return np.take_along_axis(np.tile(_shuffled(rng), (tokens, 1, 1)), ranks, axis=2)


def _stack(rng: np.random.Generator, tokens: int) -> Chosen:
    """Recency is all there is: the longer unused, the less likely.  LRU is the best there is."""
    result = np.empty((tokens, LAYERS, TOP_K), np.int64)
    for layer in range(LAYERS):
        stack = rng.permutation(EXPERTS).tolist()
        for token in range(tokens):
            depths = np.unique(np.minimum(rng.geometric(0.3, 3 * TOP_K) - 1, EXPERTS - 1))
            spare = np.setdiff1d(np.arange(EXPERTS), depths)
            chosen = [stack[depth] for depth in [*depths, *spare][:TOP_K]]
            stack = chosen + [expert for expert in stack if expert not in chosen]
            result[token, layer] = chosen
    return result


def made_steps(chosen: Chosen, seed: int = 0) -> list[Step]:
    """With scores as a router would give them; the near misses mean nothing."""
    rng = np.random.default_rng(seed)
    keys = rng.random((*chosen.shape[:2], EXPERTS))
    np.put_along_axis(keys, chosen, 2 + rng.random(chosen.shape), axis=2)
    best = np.argsort(-keys, axis=2)[..., : 2 * TOP_K]
    codes = np.sort(rng.integers(0, 128, best.shape), axis=2)[..., ::-1].astype(np.uint8)
    codes[..., :TOP_K] += 128
    return steps(range(1, LAYERS + 1), chosen, best, codes)


def recorded(trace: Trace) -> list[Step]:
    return steps(trace.layers.tolist(), trace.chosen, trace.best, trace.codes)


def greedy(tokens: int) -> list[Step]:
    """The embedded model goes on after each prompt."""
    import k3offload

    with tempfile.TemporaryDirectory() as folder:
        with k3offload.load("nano", context=tokens + 64) as engine:
            moe = engine.spec.moe
            assert moe is not None
            recorder = Recorder(Path(folder) / "t", engine.spec.moe_layers, moe.experts, moe.top_k)
            engine.hooks.on_route = recorder.on_route
            sampling = k3offload.Sampling(temperature=0, ignore_end=True)
            for number, prompt in enumerate(PROMPTS):
                recorder.sequences = [number]
                with engine.session() as session:
                    session.append(prompt)
                    for _ in session.generate(tokens, sampling):
                        pass
            recorder.close()
        trace = read_trace(Path(folder) / "t")
    rows = np.flatnonzero(trace.decode)
    return steps(trace.layers.tolist(), trace.chosen[rows], trace.best[rows], trace.codes[rows])


def _belady(run: Sequence[Step], slots: int) -> CachePolicy:
    return Belady(run)


def compare(
    run: Sequence[Step], pages: int, policies: dict[str, Callable[[int], CachePolicy]]
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
    pages = LAYERS * EXPERTS
    runs: list[tuple[str, int, Callable[[], list[Step]]]] = []
    for path in given.trace or [HELD_OUT]:
        trace = read_trace(path)
        runs.append((path.stem, len(trace.layers) * trace.experts, partial(recorded, trace)))
    if given.greedy:
        runs.append(("greedy", pages, partial(greedy, given.greedy)))
    if given.made:
        runs += [(name, pages, partial(made_steps, run)) for name, run in made(2000).items()]
    for name, count, make in runs:
        figures = compare(make(), count, policies)
        print(json.dumps({name: figures}) if given.json else "\n".join(table(name, figures)))


if __name__ == "__main__":
    main()
