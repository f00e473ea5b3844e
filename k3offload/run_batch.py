"""The ``batch`` command: documents in, one durable line for each of them out, figures at the end.

A line is on the drive before the next sweep begins, and answers under way are saved every few
minutes: that much a kill costs.  What decides an answer (the text, the prompt around it, the
settings, the model and its precision) is hashed into its line; a resumed run computes what has no
line, or one of another hash.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .batch import Batch, Going, Result, Tally
from .batch_lines import digest
from .batch_records import SAVE_EVERY, Records
from .config import show_size
from .documents import Document
from .engine import Engine
from .errors import (
    BatchError,
    DoesNotFit,
    K3Error,
    ScratchError,
    SessionError,
    TooLong,
    UsageError,
)
from .progress import Progress, show_seconds, write_out
from .sampling import Sampling
from .session_manifest import need_zarr

#: errors that another machine or other options may cure; a resumed run tries these again
AGAIN = (DoesNotFit, ScratchError, TooLong)
EVERY: float = 1.0  #: seconds between two lines of progress for machines


@dataclass(frozen=True)
class Task:
    """What to do with every document."""

    prompt: str
    max_new_tokens: int
    sampling: Sampling

    def options(self) -> dict[str, Any]:
        """What decides an answer beside the document, the prompt and the model."""
        return {"max_new_tokens": self.max_new_tokens, **asdict(self.sampling)}


class BatchMeter:
    """What is going on, for people in one line, for machines as lines of JSON on stdout."""

    def __init__(
        self,
        progress: Progress,
        total: int | None,
        as_json: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._total, self._json, self._clock = progress, total, as_json, clock
        self._tally, self._place = Tally(), ""
        self._skipped = 0
        self._begin, self._out = clock(), sys.stdout
        self._said = float("-inf")

    def begins(self, tally: Tally) -> None:
        """The model is loaded; ``tally`` goes on changing."""
        self._tally, self._begin = tally, self._clock()

    def skipped(self) -> None:
        """A document of the input has its record already."""
        self._skipped += 1

    def layer(self, layer: int, layers: int) -> None:
        """Layer ``layer`` (from 0) of ``layers`` begins."""
        self._place = f"layer {layer + 1} of {layers}"
        self._show(layer, layers)

    def swept(self, tally: Tally) -> None:
        """A sweep has ended."""
        self._tally = tally
        self._place = ""
        self._show(0, 1)

    def left(self) -> float | None:
        """Seconds until all are done, from how long those took that are; None if nobody knows."""
        done = self._tally.documents
        if self._total is None or not done:
            return None
        return (self._total - self._skipped - done) * (self._clock() - self._begin) / done

    def facts(self) -> dict[str, Any]:
        """The figures so far."""
        tally, seconds = self._tally, self._clock() - self._begin
        return {
            "documents": tally.documents + self._skipped,
            "of": self._total,
            "found_done": self._skipped,
            "failed": tally.failed,
            "running": tally.running,
            "prompt_tokens": tally.prompt_tokens,
            "new_tokens": tally.new_tokens,
            "tokens_per_second": tally.new_tokens / seconds if seconds else None,
            "sweep": tally.sweeps,
            "rows": tally.rows,
            "experts_a_layer": tally.experts,
            "bytes_per_token": tally.bytes / tally.rows if tally.rows else None,
            "bytes_read": tally.read,
            "seconds": seconds,
            "seconds_left": self.left(),
        }

    def _show(self, layer: int, layers: int) -> None:
        if not self._json:
            self._progress.show(self.line())
            return
        now = self._clock()
        if now - self._said >= EVERY:
            self._said = now
            write_out(json.dumps({**self.facts(), "layer": layer, "layers": layers}), to=self._out)

    def line(self) -> str:
        """The figures so far in words."""
        f = self.facts()
        of = "" if self._total is None else f" of {self._total:,}"
        parts = [f"{f['documents']:,}{of} documents"]
        if f["failed"]:
            parts.append(f"{f['failed']:,} failed")
        parts.append(f"{f['running']:,} running")
        if f["new_tokens"]:
            parts.append(f"{f['tokens_per_second']:.3g} tokens/s")
        if f["rows"]:
            read = f"{show_size(int(f['bytes_per_token']))} a token"
            parts.append(f"{f['rows']:,} rows a sweep, {f['experts_a_layer']:.3g} experts, {read}")
        if f["seconds_left"] is not None:
            parts.append(f"{show_seconds(f['seconds_left'])} left")
        parts.append(f"sweep {f['sweep'] + 1:,} {self._place}".rstrip())
        return ", ".join(parts)


def run_batch(
    engine: Engine,
    documents: Iterator[Document],
    task: Task,
    records: Records,
    progress: Progress,
    meter: BatchMeter,
    model: Mapping[str, Any],
    save_every: float = SAVE_EVERY,
) -> dict[str, int]:
    """Compute what has no record yet; returns the counts of ``Records.finish``.

    ``model``: its identity; ``save_every``: seconds between two saves of what is under way, 0 is
    never.

    Raises what ends the whole run: ``BatchError`` where the output cannot be written,
    ``ReadError`` where the model cannot be read.  What was flushed before is done.
    """
    decides = digest(model, task.prompt, task.options())
    hashes: dict[str, str] = {}

    def new() -> Iterator[Document]:
        for document, known, done in ask(documents, decides, records, progress, meter):
            if not done:
                hashes[document.id] = known
                yield document

    def going(document: Document) -> Going | None:
        state = records.state(document.id)
        return None if state is None else Going(state.folder, state.extra.get("reused", 0))

    def pause() -> None:
        records.flush()
        saves.maybe(batch, records, hashes)

    saves = _Saves(save_every, progress)
    batch = Batch(
        engine, new(), prompt=task.prompt, max_new_tokens=task.max_new_tokens,
        sampling=task.sampling, order="completed", watch=meter.swept, pause=pause,
        going=going,
    )  # fmt: skip
    meter.begins(batch.tally)
    try:
        for result in batch:
            if result.error is not None:
                progress.say(f"{result.id}: {result.error}")
            records.add({**record(result), "digest": hashes.pop(result.id)})
    finally:
        batch.close()
    return records.finish()


def ask(
    documents: Iterable[Document],
    decides: str,
    records: Records,
    progress: Progress,
    meter: BatchMeter,
) -> Iterator[tuple[Document, str, bool]]:
    """Each document with its digest, and whether it has its record; the order is the input's."""
    for document in documents:
        known = digest_of(decides, document)
        done = records.done(document.id, known)
        if done:
            meter.skipped()
        elif document.note:
            progress.say(f"{document.source}: {document.note}")
        yield document, known, done


class _Saves:
    """When what is under way is saved: ``every`` so many seconds, 0 is never."""

    def __init__(self, every: float, progress: Progress) -> None:
        self._every, self._last, self._progress = every, time.monotonic(), progress
        if every:
            try:
                need_zarr()
            except SessionError as error:
                progress.say(f"warning: answers under way are not saved: {error}")
                self._every = 0.0

    def maybe(self, batch: Batch, records: Records, hashes: Mapping[str, str]) -> None:
        """Save what is under way if it is time to; one that fails ends nothing."""
        if not self._every or time.monotonic() - self._last < self._every:
            return
        try:
            for document, where in batch.save(lambda document: records.state_folder(document.id)):
                records.keep_state(document.id, hashes[document.id], {"reused": where.reused})
        except (SessionError, UsageError, BatchError) as error:
            self._progress.say(f"warning: answers under way are not saved: {error}")
        self._last = time.monotonic()


def digest_of(decides: str, document: Document) -> str:
    """What the line of ``document`` is known by; ``decides``: of what they have in common."""
    wrong = "" if document.error is None else str(document.error)
    return digest(decides, document.text, dict(document.settings), wrong)


def record(result: Result) -> dict[str, Any]:
    """The line of a result, all but its hash."""
    facts: dict[str, Any] = {
        "id": result.id,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": None if result.error is None else _error(result.error),
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "new_tokens": len(result.tokens),
            "reused_tokens": result.reused,
        },
        "timing": {
            "seconds": round(result.seconds, 3),
            "first_token": None if result.first_token is None else round(result.first_token, 3),
            "sweeps": result.sweeps,
        },
    }
    if isinstance(result.error, AGAIN):
        facts["retry"] = True
    return facts


def _error(error: K3Error) -> dict[str, str]:
    return {"type": type(error).__name__, "problem": error.problem, "remedy": error.remedy}
