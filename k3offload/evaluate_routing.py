"""How evenly a model uses its experts, for texts of several kinds, and what skew costs.

Every text is prefilled once, and the beginning of it is gone on with by sampling, once for each
seed.  What the routers chose is recorded (``trace_rows.py``); the figures are those of
``routing_figures.py``.  Only routing is looked at: what the model says is thrown away.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .damage import held_out_text
from .engine import Engine
from .errors import UsageError
from .generate import Done
from .loading import open_engine
from .routing_figures import (
    Balance,
    Choices,
    Counts,
    Latency,
    balance,
    divergence,
    histogram,
    latency,
    most_used,
    shared_top,
    uniform_balance,
)
from .sampling import Sampling
from .spec import ModelSpec
from .tokenizer import Tokenizer
from .trace import Trace, read_trace
from .trace_rows import Recorder

EVEN_LAYERS: Final = 8  #: layers whose routers choose at random, for comparison
PREFIX: Final = 64  #: tokens of a text that sampling goes on from, at most
WORDS: Final = ("count", "total", "index", "value", "left", "right", "rows", "size")


@dataclass(frozen=True)
class Kind:
    """One kind of text."""

    name: str
    tokens: int
    counts: Counts  #: [L, E], of the whole text
    balance: Balance
    uniform: Balance  #: of as many tokens that choose at random
    latency: Latency
    halves: float  #: divergence of the first half of the text from the second
    sampled: tuple[Balance, ...]  #: of what each seed sampled

    def spread(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds of a figure of ``Balance``."""
        values = [float(getattr(one, name)) for one in self.sampled]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        figures = ("entropy", "top_1", "top_10", "overload")
        spread = {
            name: dict(zip(("mean", "deviation"), self.spread(name), strict=True))
            for name in figures
        }
        return {**asdict(self), "counts": self.counts.tolist(), "spread": spread}


@dataclass(frozen=True)
class Routing:
    """What was found.  ``divergence`` and ``shared``: of kinds by number, in order."""

    layers: tuple[int, ...]
    experts: int
    top_k: int
    held: (
        float  #: part of all experts that ``latency`` has in RAM: the most used, all kinds together
    )
    disk: float
    kinds: tuple[Kind, ...]
    divergence: tuple[tuple[float, ...], ...]
    shared: tuple[tuple[float, ...], ...]
    even_sampled: Balance  #: what the sampled tokens of a seed would show, choosing at random

    def to_dict(self) -> dict[str, Any]:
        even = asdict(self.even_sampled)
        return {
            **self.__dict__,
            "even_sampled": even,
            "kinds": [kind.to_dict() for kind in self.kinds],
        }


def made_up_texts(seed: int = 0) -> dict[str, str]:
    """Texts of several kinds: two parts of the held-out text, and generated ones."""
    draw = np.random.default_rng(seed)
    text = held_out_text()
    half = len(text) // 2

    def word() -> str:
        return WORDS[draw.integers(len(WORDS))]

    code = "".join(
        f"def {word()}_{i}({word()}, {word()}2):\n    if {word()} < {draw.integers(100)}:\n"
        f"        return {word()} * {draw.integers(10)}\n    return [{word()} in {word()}]\n\n"
        for i in range(200)
    )
    digits = "\n".join(" ".join(map(str, row)) for row in draw.integers(0, 10**6, (600, 6)))
    return {
        "text": text[:half], "later text": text[half:], "code": code, "digits": digits,
        "repeated": text[:100] * 100,
    }  # fmt: skip


def routing(
    model: str | Path,
    texts: Mapping[str, str] | None = None,
    *,
    tokens: int = 512,
    new: int = 32,
    seeds: int = 3,
    held: float = 0.1,
    disk: float = 7e9,
    seed: int = 0,
    show: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Routing:
    """Measure ``model`` on the first ``tokens`` tokens of each of ``texts`` (made up if None) and
    on ``new`` (two or more) sampled tokens behind its beginning, for ``seeds`` seeds from ``seed``
    on.

    ``held``: the part of all experts that the latency figures take as being in RAM; ``disk``: bytes
    read a second.  ``options`` are those of ``load`` but for sizes.  Raises ``UsageError`` for a
    text of fewer than two tokens or a model without routed experts, and whatever loading raises.
    """
    given = made_up_texts(seed) if texts is None else texts
    ids: dict[str, list[int]] = {}

    def sizes(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int]:
        if spec.moe is None:
            raise UsageError("This model has no routed experts.", "Give one that has.")
        for name, text in given.items():
            ids[name] = tokenizer.encode(text)[:tokens]
            if len(ids[name]) < 2:
                raise UsageError(
                    f"The text {name} has fewer than two tokens.", "Give a longer one."
                )
        longest = max(max(map(len, ids.values())), PREFIX + new)
        spec.check_context(longest)
        return {"context": longest, "sessions": 2}

    with open_engine(model, sizes, **options) as engine:
        trace = _record(engine, list(ids.values()), new, range(seed, seed + seeds), show)
        page = engine.checkpoint.expert_bytes
    return _figures(trace, list(ids), seeds, held, page, disk, seed)


def _record(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    new: int,
    seeds: Sequence[int],
    show: Callable[[str], None],
) -> Trace:
    """Sequence i is text i as a prompt; then come the sampled ones, seed by seed, of each text."""
    moe = engine.spec.moe
    assert moe is not None
    with tempfile.TemporaryDirectory(prefix="k3-routing-") as folder:
        recorder = Recorder(folder, engine.spec.moe_layers, moe.experts, moe.top_k)
        engine.hooks.add(on_sweep=recorder.on_sweep, on_route=recorder.on_route)
        for number, text in enumerate(texts):
            show(f"text {number + 1} of {len(texts)}")
            with engine.session() as session:
                session.append(text)
                session.logits()
        number = len(texts)
        for text in texts:
            for drawn in seeds:
                show(f"sampled text {number - len(texts) + 1} of {len(texts) * len(seeds)}")
                number += 1
                sampling = Sampling(temperature=1.0, seed=drawn, ignore_end=True)
                with engine.session() as session:
                    session.append(text[:PREFIX])
                    for event in session.generate(new, sampling):
                        if isinstance(event, Done) and event.error is not None:
                            raise event.error
        recorder.close()
        return read_trace(folder)


def _figures(
    trace: Trace, names: Sequence[str], seeds: int, held: float, page: int, disk: float, seed: int
) -> Routing:
    chosen = [trace.chosen[trace.sequence == i] for i in range(len(names))]
    counts = [histogram(own, trace.experts) for own in chosen]
    kept = most_used(np.sum(counts, axis=0), held)
    kinds, rows = [], []

    def even(size: int) -> Balance:
        layers = min(EVEN_LAYERS, len(trace.layers))
        return uniform_balance(size, trace.experts, trace.top_k, layers, seed)

    for i, name in enumerate(names):
        first = len(names) + i * seeds
        rows = [
            trace.chosen[(trace.sequence == number) & trace.decode]
            for number in range(first, first + seeds)
        ]
        sampled = tuple(balance(histogram(own, trace.experts)) for own in rows)
        size = len(chosen[i])
        uniform = even(size)
        fast = latency(chosen[i], kept, page, disk)
        halves = _halves(chosen[i], trace.experts)
        own = balance(counts[i])
        kinds.append(Kind(name, size, counts[i], own, uniform, fast, halves, sampled))
    return Routing(
        layers=tuple(map(int, trace.layers)),
        experts=trace.experts,
        top_k=trace.top_k,
        held=held,
        disk=disk,
        kinds=tuple(kinds),
        divergence=_square(counts, divergence),
        shared=_square(counts, shared_top),
        even_sampled=even(len(rows[0])),
    )


def _halves(chosen: Choices, experts: int) -> float:
    """What two parts of one text differ by: less than that between kinds is no difference."""
    middle = len(chosen) // 2
    return divergence(histogram(chosen[:middle], experts), histogram(chosen[middle:], experts))


def _square(
    counts: Sequence[Counts], f: Callable[[Counts, Counts], float]
) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(f(one, other) for other in counts) for one in counts)
