"""Prompts with all experts in RAM, and over a cold cache with room for a part of them.

Over a cold cache the model is loaded anew for each repeat, and its account must be exact: the
experts that the prompt's rows chose, each read once a sweep but for those that an earlier sweep
left in RAM.  The bound is the larger of the bytes over the line rate and computing alone, as in
``bench_decode.py``; the arithmetic stands beside one large torch product of the same types of
operands, measured before each repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from .bench_engine import (
    NOT_ALONE,
    Accounts,
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
    tokens_of,
)
from .bench_frame import Frame, median, must_be
from .engine import Engine
from .forecast_sizes import token_macs
from .measure import products
from .paths import show_path
from .scheduler.sweep import Group
from .spec import ModelSpec

SHARES: Final = ("10%",)
PROMPT: Final = 512
PRODUCT: Final = 160 << 20  #: bytes that the large torch product takes
MEANINGS: Final = {
    "seconds": "s",
    "tokens_per_second": "tokens/s",
    "macs_per_second": "multiply-adds/s of the weights",
    "of_torch": "of those of one large torch product of these types",
    "of_bound": "time over the larger of reading at the line rate and computing alone",
    "line_used": "useful bytes over (time x line rate)",
    "line_rate": "bytes/s of whole pages, before and after",
    "bytes": "bytes read from disk",
    "distinct_experts": "experts that were chosen, each sweep by itself",
    "waited_share": "of the time that experts were waited for",
}


def prefill(
    frame: Frame,
    model: str | Path,
    *,
    shares: Sequence[float | None],
    tokens: Sequence[int] = (PROMPT,),
    chunk: int | None = None,
    text: str | None = None,
    alone_ram: int | None = None,
    **options: Any,
) -> None:
    """Lines of all cases.  ``shares``, ``alone_ram``: as in ``bench_decode.decode``; ``chunk``: the
    prompt is computed so many tokens at a time, as by an engine without longer sweeps; ``options``
    are those of ``load`` but for ``context``, ``sessions`` and ``cache``.  Raises whatever loading
    raises."""
    checkpoint = model_of(model, options)
    frame.about["path"] = show_path(checkpoint.folder)
    sweep = options.pop("sweep", None)
    sizes: dict[str, int | None] = {
        "context": max(tokens), "answer": 0, "sweep": sweep,
        "extra": max(PRODUCT, room_to_read(checkpoint)),
    }  # fmt: skip

    opened = opener(model, sizes, options)
    about = {
        **about_model(checkpoint, options), "sweep": sweep, "chunk": chunk, "text": digest(text),
    }  # fmt: skip
    alone: dict[int, float] = {}
    with opened(**({"ram": alone_ram} if alone_ram else {})) as engine:
        if everything_in_ram(engine):
            touched = Touched(engine)
            for count in tokens:
                case = {**about, "tokens": count, "cache": "all"}
                measure = partial(_warm, engine, touched, text, chunk, count)
                alone[count] = median(frame.case(case, measure), "seconds")
        else:
            frame.notes.append(NOT_ALONE)

    def cold(share: float | None, count: int, seed: int) -> dict[str, Any]:
        before = line_rate(checkpoint, seed)
        with opened(**cache_of(checkpoint, share)[1]) as engine:
            must_have_room(engine, share)
            found = _prompt(engine, Touched(engine), text, chunk, count, seed)
        line = statistics.mean((before, line_rate(checkpoint, seed)))
        return {**found, **bounded(found, line, alone.get(count))}

    for share in shares if checkpoint.spec.expert_count else ():
        for count in tokens:
            case = {**about, "tokens": count, "cache": cache_of(checkpoint, share)[0]}
            frame.case(case, partial(cold, share, count))


def _warm(
    engine: Engine, touched: Touched, text: str | None, chunk: int | None, count: int, seed: int
) -> dict[str, Any]:
    """``_prompt`` with every expert that it needs in RAM."""
    return in_ram(lambda: _prompt(engine, touched, text, chunk, count, seed))


def _prompt(
    engine: Engine, touched: Touched, text: str | None, chunk: int | None, count: int, seed: int
) -> dict[str, Any]:
    """One prompt in a session of its own, and its accounts."""
    options, spec = engine.options, engine.spec
    torch_rate = products(options.threads)[options.dtype]
    tokens = tokens_of(engine.tokenizer, text, count, seed)
    touched.sweeps.clear()
    cold = not engine.counts()["experts"].requests
    with engine.session() as session:
        accounts = Accounts(engine)
        begin = time.perf_counter()
        for first in range(0, count, chunk or count):
            session.append(tokens[first : first + (chunk or count)])
            session.logits()
        seconds = time.perf_counter() - begin
        read = accounts.read()
    if engine.accelerator is None:
        c = accounts.experts
        must_be("experts asked for", c.requests, touched.count)
        if cold and len(touched.sweeps) == 1:
            must_be("experts that a cold cache had", c.hits - (c.useful - c.late), 0)
    macs = prompt_macs(spec, count) / seconds
    return {
        "seconds": seconds, "tokens_per_second": count / seconds,
        "macs_per_second": macs, "torch_rate": torch_rate, "of_torch": macs / torch_rate,
        "sweeps": len(touched.sweeps), "sweep_rows": engine.plan.sweep_rows,
        "slots": engine.plan.slots, "distinct_experts": touched.count,
        "waited_share": read["waited_seconds"] / seconds, "computed_by": computed_by(engine),
        **read,
    }  # fmt: skip


def prompt_macs(spec: ModelSpec, count: int) -> int:
    """Multiply-adds of a prompt's rows with all weights that they use; the head has one row."""
    head = spec.vocab * spec.hidden
    return count * (token_macs(spec) - head) + head


class Touched:
    """Distinct experts of each sweep, as the routers chose them."""

    def __init__(self, engine: Engine) -> None:
        self.sweeps: list[set[tuple[int, int]]] = []
        self._first = engine.spec.moe_layers[0] if engine.spec.moe_layers else -1
        engine.hooks.add(on_route=self._on_route)

    def _on_route(
        self,
        layer: int,
        group: Group,
        experts: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        if layer == self._first and group.begin == 0:
            self.sweeps.append(set())
        self.sweeps[-1] |= {(layer, expert) for expert in set(experts.view(-1).tolist())}

    @property
    def count(self) -> int:
        """Experts to be asked for in all sweeps."""
        return sum(map(len, self.sweeps))
