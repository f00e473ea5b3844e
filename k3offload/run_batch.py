"""The ``batch`` command: documents in, one durable line for each of them out, figures at the end.

A line is on the drive before the next sweep begins, and answers under way are saved every few
minutes: that much a kill costs.  What decides an answer (the text, the prompt around it, the
settings, the model and its precision) is hashed into its line; a resumed run computes what has no
line, or one of another hash.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .batch import Batch
from .batch_lines import digest
from .batch_meter import BatchMeter
from .batch_openai import NAME as OPENAI
from .batch_openai import openai_line
from .batch_records import SAVE_EVERY, Records
from .batch_results import Going, Result
from .batch_states import State
from .documents import Document
from .engine import Engine
from .errors import (
    BatchError,
    CheckpointError,
    DoesNotFit,
    K3Error,
    ReadError,
    ScratchError,
    SessionError,
    TooLong,
    UsageError,
)
from .progress import Progress
from .sampling import Sampling
from .session_manifest import need_zarr

#: errors that another machine, other options or a repair may cure; a resumed run tries these again
AGAIN = (CheckpointError, DoesNotFit, ReadError, ScratchError, TooLong)


@dataclass(frozen=True)
class Task:
    """What to do with every document."""

    prompt: str
    max_new_tokens: int | None = None
    sampling: Sampling | None = None
    labels: tuple[str, ...] = ()  # instead of both: nothing is generated
    label_end: str = ""
    openai: str = ""  # lines are those of OpenAI's Batch API, with this name of the model

    def options(self) -> dict[str, Any]:
        """What decides an answer beside the document, the prompt and the model, and a line."""
        shape = {"output_format": OPENAI} if self.openai else {}
        if self.labels:
            return {"labels": list(self.labels), "label_end": self.label_end, **shape}
        sampling = asdict(self.sampling or Sampling())
        return {"max_new_tokens": self.max_new_tokens, **sampling, **shape}

    def line(self, result: Result, digest: str) -> dict[str, Any]:
        """The line of ``result``."""
        made = {**record(result), "digest": digest}
        return openai_line(made, self.openai, int(time.time())) if self.openai else made


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
    ``ReadError`` where more of the model than an expert cannot be read.  What was flushed before is
    done, and what was under way goes on from where it was saved last.
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
        return None if state is None else _going(state)

    def pause() -> None:
        records.flush()
        saves.maybe(batch, records, hashes)

    saves = _Saves(save_every, progress, meter)
    batch = Batch(
        engine, new(), prompt=task.prompt, max_new_tokens=task.max_new_tokens,
        sampling=task.sampling, labels=task.labels or None, label_end=task.label_end,
        order="completed", watch=meter.swept, pause=pause, going=going,
    )  # fmt: skip
    progress.say(f"{batch.places} documents at a time")
    meter.begins(batch.tally, batch.left)
    try:
        for result in batch:
            if result.error is not None:
                progress.say(f"{result.id}: {result.error}")
            records.add(task.line(result, hashes.pop(result.id)))
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

    def __init__(self, every: float, progress: Progress, meter: BatchMeter) -> None:
        self._every, self._last = every, time.monotonic()
        self._progress, self._meter = progress, meter
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
                extra = where._asdict()
                del extra["folder"]
                records.keep_state(document.id, hashes[document.id], extra)
            self._meter.saved()
        except (SessionError, UsageError, BatchError) as error:
            self._progress.say(f"warning: answers under way are not saved: {error}")
        self._last = time.monotonic()


def _going(state: State) -> Going:
    """What ``_Saves`` kept of a document."""
    known = Going._fields[1:]
    return Going(state.folder, **{name: state.extra[name] for name in known if name in state.extra})


def digest_of(decides: str, document: Document) -> str:
    """What the line of ``document`` is known by; ``decides``: of what they have in common."""
    wrong = "" if document.error is None else str(document.error)
    chat = () if document.chat is None else (dict(document.chat),)
    return digest(decides, document.text, dict(document.settings), wrong, *chat)


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
    if result.message is not None:
        facts["message"] = dict(result.message)
    if result.scores:
        facts["label"] = result.text
        facts["scores"] = [
            {
                "label": score.label,
                "log_likelihood": score.log_likelihood,
                "probability": score.probability,
            }
            for score in result.scores
        ]
    if isinstance(result.error, AGAIN):
        facts["retry"] = True
    return facts


def _error(error: K3Error) -> dict[str, str]:
    return {"type": type(error).__name__, "problem": error.problem, "remedy": error.remedy}
