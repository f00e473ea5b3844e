"""Documents that share sweeps against one after another: bytes, time, and the same answers.

    python -m benchmarks.batch [--model FOLDER] [--documents 64] [--solo 8] [--ram 2G]
    python -m benchmarks.batch --short 1000 [--solo 50] [--bad 10]

First form: ``io-real`` (made and deleted again without ``--model``, 12 GB), documents of 100 to 400
tokens, 32 new tokens each.  ``--solo`` of them run alone under the same memory, one after another,
and are scaled to all; their answers must be the batch's to the bit.  Bytes also stand against what
uniform routing predicts for the same sweeps, and against time at the line rate, measured before and
after.  Second form: short documents with the embedded model, everything cached, where computing is
the limit.  Memory and open files are looked at every 100 documents: what they grow by once the
first 300 are done, and again where one document in ``--bad`` is wrong in one of several ways.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.run import machine, note
from benchmarks.stream import need_room
from k3offload.batch_results import Result, Tally
from k3offload.bench_read import read_rate
from k3offload.checkpoint import Checkpoint
from k3offload.documents import Document
from k3offload.engine import Engine
from k3offload.errors import DocumentError
from k3offload.forecast_sizes import distinct
from k3offload.loading import open_engine
from k3offload.make_tiny import make_tiny

NEW, SHORTEST, LONGEST = 32, 100, 400
WARM = 3  #: looks at memory that do not count

WORDS = "and it came to pass that the people of the city went up in those days"


def documents(engine: Engine, count: int, shortest: int, longest: int) -> list[Document]:
    """Texts of drawn words, each of a number of tokens drawn from ``shortest`` to ``longest``."""
    drawn, made, known = random.Random(5), [], WORDS.split()
    for i in range(count):
        size = drawn.randrange(shortest, longest)
        words = " ".join(drawn.choice(known) for _ in range(size))
        text = engine.tokenizer.decode(engine.encode(f"{i} {words}")[:size])
        made.append(Document(str(i), text))
    return made


def spoiled(given: list[Document], every: int) -> list[Document]:
    """``given``, one in ``every`` of them wrong: unreadable, empty, too long, with bad settings."""
    made = list(given)
    for i in range(every // 2, len(given), every):
        made[i] = (
            Document(str(i), error=DocumentError(f"Document {i} is damaged.", "Look at it.")),
            Document(str(i), ""),
            Document(str(i), "king " * 4000),
            Document(str(i), "And the king", settings={"top_p": 7}),
        )[i // every % 4]
    return made


def growth(seen: list[int], size: float = 1) -> float:
    """What ``seen``, taken every 100 documents, grew by from one to the next after the third."""
    later = np.array(seen[WARM:]) / size
    return float(np.polyfit(np.arange(len(later)), later, 1)[0]) if len(later) > 1 else 0.0


class Seen:
    """What sweeps did, sweep by sweep."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.uniform, self.sweeps = engine, 0.0, 0
        self.experts: list[float] = []
        self.rss: list[int] = []
        self.files: list[int] = []
        self._ended = 0
        self._me = psutil.Process()

    def __call__(self, tally: Tally) -> None:
        spec = self._engine.spec
        assert spec.moe is not None
        wanted = distinct(spec.moe.experts, spec.moe.top_k, tally.rows)
        missing = max(0, spec.expert_count - self._engine.plan.slots) / spec.expert_count
        self.uniform += wanted * len(spec.moe_layers) * spec.expert_bytes * missing
        self.experts.append(tally.experts)
        self.sweeps = tally.sweeps
        if tally.documents >= self._ended + 100:
            self._ended = tally.documents
            self.rss.append(self._me.memory_info().rss)
            self.files.append(self._me.num_fds())


def run(
    engine: Engine, given: list[Document], bad: int = 0
) -> tuple[list[Result], float, int, Seen]:
    """Results, seconds, bytes of experts read, and what sweeps did; ``bad`` of them must fail."""
    seen, before = Seen(engine), engine.counts()["experts"].bytes
    begin = time.perf_counter()
    results = list(engine.batch(given, max_new_tokens=NEW, watch=seen))
    seconds = time.perf_counter() - begin
    failed = [r for r in results if r.error is not None]
    if len(failed) != bad:
        raise SystemExit(f"{len(failed)} documents failed, not {bad}: {failed[:1]}")
    return results, seconds, engine.counts()["experts"].bytes - before, seen


def together(folder: str | Path, sessions: int, context: int, ram: str | None) -> Engine:
    """An engine for at most ``sessions`` documents at a time."""
    sizes = {"sessions": sessions, "context": context, "answer": NEW, "fewer": True}
    return open_engine(folder, lambda tokenizer, spec: sizes, ram=ram)


def same(batch: list[Result], alone: list[Result]) -> None:
    for a, b in zip(alone, batch, strict=False):
        if (a.tokens, a.text) != (b.tokens, b.text):
            raise SystemExit(f"Document {a.id} has another answer alone.")


def looked(seen: Seen, name: str) -> dict[str, Any]:
    """What was seen of memory and files."""
    files = seen.files[WARM:]
    return {
        f"rss_every_100{name}": seen.rss,
        f"mb_per_100_documents{name}": growth(seen.rss, 1e6),
        f"files_more{name}": max(files, default=0) - min(files, default=0),
    }


def measure(given: argparse.Namespace, folder: str | Path, short: bool) -> dict[str, Any]:
    """Figures of one comparison."""
    count = given.short or given.documents
    context = 128 if short else LONGEST + NEW + 64
    ram = None if short else given.ram
    rate = [] if short else [read_rate(Checkpoint.open(folder), 2.0).rate]
    with together(folder, given.sessions, context, ram) as engine:
        every = (
            documents(engine, count, 20, 60)
            if short
            else documents(engine, count, SHORTEST, LONGEST)
        )
        results, seconds, read, seen = run(engine, every)
        facts: dict[str, Any] = {
            "documents": count,
            "at_a_time": engine.options.sessions,
            "rows_of_a_sweep": engine.plan.sweep_rows,
            "slots": engine.plan.slots,
            "sweeps": seen.sweeps,
            "experts_a_layer": statistics.mean(seen.experts),
            "prompt_tokens": sum(r.prompt_tokens for r in results),
            "seconds": seconds,
            "expert_bytes": read,
            "uniform_bytes": seen.uniform,
        }
        if short:
            facts |= looked(seen, "")
            wrong = spoiled(every, given.bad)
            bad = sum(a is not b for a, b in zip(every, wrong, strict=True))
            facts |= {"bad": bad} | looked(run(engine, wrong, bad)[3], "_with_bad")
    with together(folder, 1, context, ram) as engine:
        alone, solo, solo_read, _ = run(engine, every[: given.solo])
    same(results, alone)
    scale = count / given.solo
    facts |= {
        "alone": given.solo,
        "seconds_alone": solo * scale,
        "expert_bytes_alone": solo_read * scale,
        "times_quicker": solo * scale / seconds,
    }
    if not short:
        rate.append(read_rate(Checkpoint.open(folder), 2.0).rate)
        facts |= {
            "times_fewer_bytes": solo_read * scale / read,
            "bytes_over_uniform": read / seen.uniform,
            "line_rate": statistics.mean(rate),
            "line_used": read / seconds / statistics.mean(rate),
        }
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--solo", type=int, default=8)
    parser.add_argument("--ram", default="2G")
    parser.add_argument("--short", type=int, default=0)
    parser.add_argument("--bad", type=int, default=10)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder: str | Path = given.model or "nano"
        if not given.short and given.model is None:
            need_room(13)
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="k3-batch-"))
            folder = Path(place) / "model"
            make_tiny(Path(folder), "io-real")
        facts = measure(given, folder, bool(given.short))
    line = {"benchmark": "batch", **machine(), **facts}
    note(line)
    for name, value in line.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
