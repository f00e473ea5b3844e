"""Documents that share sweeps against one after another: bytes, time, and the same answers.

Both engines are loaded anew for each repeat, with the same room for experts.  Some of the documents
are computed alone and scaled to all; their answers must be the batch's, token for token.  Bytes
also stand against what routing at random would read in the same sweeps, and time against the line.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from .batch_results import Result, Tally
from .bench_engine import (
    Accounts,
    about_model,
    cache_of,
    computed_by,
    digest,
    line_rate,
    model_of,
    must_have_room,
    room_to_read,
    tokens_of,
)
from .bench_frame import Frame
from .checkpoint import Checkpoint
from .documents import Document
from .engine import Engine
from .errors import K3Error, UsageError
from .forecast_sizes import distinct
from .loading import open_engine
from .paths import show_path
from .sampling import Sampling

SHARES: Final = ("25%",)
MEANINGS: Final = {
    "seconds": "s of all documents together",
    "times_quicker": "times the time of one after another",
    "times_fewer_bytes": "times the expert bytes of one after another",
    "expert_bytes": "bytes of experts read, together",
    "of_uniform": "of what routing at random would read in these sweeps",
    "line_used": "bytes over (time x line rate)",
    "line_used_decoding": "the same of sweeps without prompts",
    "line_rate": "bytes/s of whole pages, before and after",
    "at_a_time": "documents that could share a sweep",
    "sweeps": "sweeps",
    "experts_a_layer": "experts that a layer asked for in a sweep",
}


@dataclass(frozen=True)
class Work:
    """``documents`` of ``shortest`` to ``longest`` tokens of ``text``, answers of ``new`` tokens,
    at most ``sessions`` at a time; ``solo`` of them also one by one."""

    documents: int = 16
    solo: int = 4
    sessions: int = 16
    shortest: int = 40
    longest: int = 160
    new: int = 16
    text: str | None = None

    def __post_init__(self) -> None:
        for name in ("documents", "solo", "sessions", "shortest", "new"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} is {getattr(self, name)}.", "It must be at least 1.")
        if self.longest < self.shortest:
            raise UsageError(
                f"--longest {self.longest} is less than --shortest {self.shortest}.", "Swap them."
            )
        if self.solo > self.documents:
            raise UsageError(
                f"--solo {self.solo} is more than the {self.documents} documents.", "Give less."
            )


def batch(
    frame: Frame, model: str | Path, work: Work, *, shares: Sequence[float | None], **options: Any
) -> None:
    """Lines of all cases.  ``shares``: as in ``bench_decode.decode``; ``options`` are those of
    ``load`` but for ``context``, ``sessions`` and ``cache``.  Raises whatever loading raises, and
    ``K3Error`` where answers differ."""
    checkpoint = model_of(model, options)
    if not checkpoint.spec.expert_count:
        raise UsageError("The model has no routed experts to share.", "Name another model.")
    frame.about["path"] = show_path(checkpoint.folder)
    about = {
        **about_model(checkpoint, options), "documents": work.documents, "solo": work.solo,
        "sessions": work.sessions, "lengths": f"{work.shortest} to {work.longest}",
        "new": work.new, "text": digest(work.text),
    }  # fmt: skip
    for share in shares:
        cache, _ = cache_of(checkpoint, share)
        measure = partial(_measure, checkpoint, model, work, options, share)
        frame.case({**about, "cache": cache}, measure)


def documents(engine: Engine, work: Work, seed: int) -> list[Document]:
    """Texts of drawn lengths from drawn places, in tokens that the tokenizer makes of them."""
    drawn, made = random.Random(seed), []
    for i in range(work.documents):
        size = drawn.randint(work.shortest, work.longest)
        ids = tokens_of(engine.tokenizer, work.text, size, drawn.randrange(1 << 20))
        made.append(Document(str(i), engine.tokenizer.decode(ids)))
    return made


class _Seen:
    """What sweeps did, sweep by sweep."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.uniform, self.sweeps = engine, 0.0, 0
        self.experts: list[float] = []
        self.decode_seconds, self.decode_bytes = 0.0, 0  # of sweeps without a prompt

    def __call__(self, tally: Tally) -> None:
        spec, moe = self._engine.spec, self._engine.spec.moe
        assert moe is not None
        wanted = distinct(moe.experts, moe.top_k, tally.rows)
        missing = max(0, spec.expert_count - self._engine.plan.slots) / spec.expert_count
        self.uniform += wanted * len(spec.moe_layers) * spec.expert_bytes * missing
        self.experts.append(tally.experts)
        if not self._engine.last_rows[1]:
            self.decode_seconds += tally.seconds
            self.decode_bytes += tally.bytes
        self.sweeps = tally.sweeps


def _run(
    engine: Engine, given: Sequence[Document], new: int
) -> tuple[list[Result], float, _Seen, dict[str, Any]]:
    """Results, seconds, what sweeps did, and the accounts."""
    seen, accounts = _Seen(engine), Accounts(engine)
    begin = time.perf_counter()
    results = list(
        engine.batch(
            given, max_new_tokens=new, sampling=Sampling(ignore_end=True), watch=seen
        )
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    for result in results:
        if result.error is not None:
            raise result.error
    return results, seconds, seen, accounts.read()


def _measure(
    checkpoint: Checkpoint,
    model: str | Path,
    work: Work,
    options: dict[str, Any],
    share: float | None,
    seed: int,
) -> dict[str, Any]:
    """One comparison."""
    # decoded text may give more tokens than it was made of
    context = 2 * work.longest + work.new
    given = {**options, **cache_of(checkpoint, share)[1]}

    def opened(sessions: int) -> Engine:
        sizes = {
            "sessions": sessions, "context": context, "answer": work.new, "fewer": True,
            "extra": room_to_read(checkpoint),
        }  # fmt: skip
        return open_engine(model, lambda tokenizer, spec: sizes, **given)

    before = line_rate(checkpoint, seed)
    with opened(work.sessions) as engine:
        must_have_room(engine, share)
        every = documents(engine, work, seed)
        results, seconds, seen, read = _run(engine, every, work.new)
        facts = {
            "computed_by": computed_by(engine), "at_a_time": engine.options.sessions,
            "sweep_rows": engine.plan.sweep_rows, "slots": engine.plan.slots,
        }  # fmt: skip
    line = statistics.mean((before, line_rate(checkpoint, seed)))
    with opened(1) as engine:
        alone, solo, _, solo_read = _run(engine, every[: work.solo], work.new)
    same_answers(results, alone)
    share = sum(r.prompt_tokens + work.new for r in alone) / sum(
        r.prompt_tokens + work.new for r in results
    )
    solo_bytes = solo_read["expert_bytes"] / share
    return {
        "seconds": seconds, "seconds_alone": solo / share,
        "times_quicker": solo / share / seconds,
        "times_fewer_bytes": solo_bytes / max(1, read["expert_bytes"]),
        "expert_bytes_alone": solo_bytes,
        "uniform_bytes": seen.uniform,
        "of_uniform": read["expert_bytes"] / seen.uniform if seen.uniform else None,
        "line_rate": line, "line_used": read["bytes"] / seconds / line,
        "line_used_decoding": seen.decode_bytes / max(seen.decode_seconds, 1e-9) / line,
        "prompt_tokens": sum(r.prompt_tokens for r in results), "sweeps": seen.sweeps,
        "experts_a_layer": statistics.mean(seen.experts), **facts, **read,
    }  # fmt: skip


def same_answers(together: Sequence[Result], alone: Sequence[Result]) -> None:
    """Raise ``K3Error`` where a document has another answer in company."""
    for a, b in zip(alone, together, strict=False):
        if (a.id, a.tokens, a.text) != (b.id, b.tokens, b.text):
            raise K3Error(
                f"Document {a.id} has another answer alone than in a batch.",
                "Nothing was measured. This is a bug of k3offload: please report the command.",
            )
