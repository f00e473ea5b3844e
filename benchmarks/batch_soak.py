"""A thousand short documents: memory, open files, and what wrong documents change of that.

    python -m benchmarks.batch_soak [--model FOLDER] [--documents 1000] [--solo 50] [--bad 10]

Documents of 20 to 60 tokens with the embedded model, everything cached, where computing is the
limit.  Memory and open files are looked at every 100 documents: what they grow by once the first
300 are done, and again where one document in ``--bad`` is wrong in one of several ways.  ``--solo``
of them run alone, one after another, are scaled to all, and must have the batch's answers.
``k3offload bench batch`` compares bytes and time where experts stream.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import numpy as np
import psutil

from benchmarks.run import machine, some_words, tell
from k3offload.batch_results import Result, Tally
from k3offload.bench_batch import same_answers
from k3offload.documents import Document
from k3offload.engine import Engine
from k3offload.errors import DocumentError
from k3offload.loading import open_engine

NEW, SHORTEST, LONGEST, CONTEXT = 32, 20, 60, 128
EVERY = 100  #: documents between two looks at memory
WARM = 3  #: looks that do not count


def documents(engine: Engine, count: int) -> list[Document]:
    """Texts of drawn words, each of a drawn number of tokens."""
    drawn, made = random.Random(5), []
    for i in range(count):
        size = drawn.randrange(SHORTEST, LONGEST)
        text = engine.tokenizer.decode(engine.encode(f"{i} {some_words(drawn, size)}")[:size])
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
    """What ``seen``, one value a look, grew by from one to the next after the third."""
    later = np.array(seen[WARM:]) / size
    return float(np.polyfit(np.arange(len(later)), later, 1)[0]) if len(later) > 1 else 0.0


class Seen:
    """Memory and open files, every so many documents."""

    def __init__(self) -> None:
        self.rss: list[int] = []
        self.files: list[int] = []
        self.experts: list[float] = []
        self._ended, self._me = 0, psutil.Process()

    def __call__(self, tally: Tally) -> None:
        self.experts.append(tally.experts)
        if tally.documents >= self._ended + EVERY:
            self._ended = tally.documents
            self.rss.append(self._me.memory_info().rss)
            self.files.append(self._me.num_fds())

    def facts(self, name: str = "") -> dict[str, Any]:
        files = self.files[WARM:]
        return {
            f"rss_every_{EVERY}{name}": self.rss,
            f"mb_per_{EVERY}_documents{name}": growth(self.rss, 1e6),
            f"files_more{name}": max(files, default=0) - min(files, default=0),
        }


def run(engine: Engine, given: list[Document], bad: int = 0) -> tuple[list[Result], float, Seen]:
    """Results, seconds, and what was seen; ``bad`` of them must fail."""
    seen, begin = Seen(), time.perf_counter()
    results = list(engine.batch(given, max_new_tokens=NEW, watch=seen))
    seconds = time.perf_counter() - begin
    failed = [r for r in results if r.error is not None]
    if len(failed) != bad:
        raise SystemExit(f"{len(failed)} documents failed, not {bad}: {failed[:1]}")
    return results, seconds, seen


def opened(model: str, sessions: int) -> Engine:
    """An engine for at most ``sessions`` documents at a time."""
    sizes = {"sessions": sessions, "context": CONTEXT, "answer": NEW, "fewer": True}
    return open_engine(model, lambda tokenizer, spec: sizes)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    with opened(given.model, given.sessions) as engine:
        every = documents(engine, given.documents)
        results, seconds, seen = run(engine, every)
        wrong = spoiled(every, given.bad)
        bad = sum(a is not b for a, b in zip(every, wrong, strict=True))
        facts = {
            "documents": given.documents, "at_a_time": engine.options.sessions, "bad": bad,
            "experts_a_layer": statistics.mean(seen.experts), "seconds": seconds,
            **seen.facts(), **run(engine, wrong, bad)[2].facts("_with_bad"),
        }  # fmt: skip
    with opened(given.model, 1) as engine:
        alone, solo, _ = run(engine, every[: given.solo])
    same_answers(results, alone)
    scaled = solo * given.documents / given.solo
    return {
        **facts,
        "alone": given.solo,
        "seconds_alone": scaled,
        "times_quicker": scaled / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--solo", type=int, default=50)
    parser.add_argument("--bad", type=int, default=10)
    line = {"benchmark": "batch_soak", **machine(), **measure(parser.parse_args())}
    tell(line)


if __name__ == "__main__":
    main()
