"""What ``batch --ray`` runs elsewhere: documents read once more, and an engine that answers them.

Knows documents, engines and what is sent between processes; nothing of Ray, of the output or of
other workers.  Both ends are plain iterators, and the same each time they run: when a process is
lost, they run again from their beginning, and what had arrived already is passed over by its
number.  So answers leave a worker in the order of its block, never in that of their end, and
nothing but a document makes it send something.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .batch import Batch
from .batch_results import Tally
from .documents import Document, read_documents
from .errors import K3Error, ReadError, UsageError
from .loading import open_engine
from .options import Watch
from .paths import show_path
from .plan_text import lowered, plan_lines
from .run_batch import Task, digest_of
from .session_identity import computed_by, identity

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduler.plan import Plan

BLOCK: Final = "block"  #: the one column of what goes to a worker: pickled lists of ``Asked``
ROW: Final = "row"  #: the one column of what comes back: a pickled ``Row``
TEXT: Final = 32 * 1024**2  #: bytes of text after which a block ends


class Asked(NamedTuple):
    """A document that has no record, and its digest."""

    document: Document
    digest: str


@dataclass(frozen=True)
class Work:
    """What every worker is to do.  ``loading``, ``sizes``: the options of ``open_engine``;
    ``identity``: of the model as it lies where the run was started."""

    model: str
    loading: Mapping[str, Any]
    sizes: Mapping[str, int | None]
    task: Task
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class Opened:
    """A worker that has loaded its engine.  ``by``: what bits depend on beside the model."""

    who: str
    sessions: int
    threads: int
    plan: str
    by: Mapping[str, Any]


class Row(NamedTuple):
    """One thing that comes back: the line of a document, or the error that ends the run.

    ``tally``: the document, and sweeps and bytes since the row before; what is of the last sweep
    there is so here.  ``error``: the document's; ``opened``: who sends it; ``warnings``: since the
    row before.
    """

    record: Mapping[str, Any] | None
    fatal: K3Error | None = None
    tally: Tally = Tally()
    error: K3Error | None = None
    opened: Opened | None = None
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Reading:
    """The input of a run, read again where its files are.

    ``how``: the other arguments of ``read_documents``; ``folder``: what names are relative to;
    ``decides``: what all digests cover; ``wanted``: a byte for each document, 1 if it is to be
    computed; ``most``: of them in a block.
    """

    inputs: str
    how: Mapping[str, Any]
    folder: str
    decides: str = ""
    wanted: bytes = b""
    most: int = 1

    def blocks(self) -> Iterator[bytes]:
        """Blocks of documents in the order of the input, each a pickled list of ``Asked``."""
        os.chdir(self.folder)
        block: list[Asked] = []
        held = 0
        for wanted, document in zip(
            self.wanted, read_documents(self.inputs, **self.how), strict=False
        ):
            if not wanted:
                continue
            if block and (len(block) >= self.most or held + document.size > TEXT):
                yield pickle.dumps(block)
                block, held = [], 0
            sent = replace(document, settings=dict(document.settings))  # a view cannot be
            block.append(Asked(sent, digest_of(self.decides, document)))
            held += document.size
        if block:
            yield pickle.dumps(block)


class Answers:
    """A worker: opens its engine with the first block, and keeps it."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._who = f"process {os.getpid()} on {socket.gethostname()}"
        self._engine: Engine | None = None
        self._opened: Opened | None = None
        self._plan = ""
        self._warnings: list[str] = []

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> Iterator[dict[str, list[bytes]]]:
        """The answers to the blocks of ``batch``, each as soon as those before it are there."""
        for block in batch[BLOCK]:
            for row in self._rows(pickle.loads(block)):
                yield {ROW: [pickle.dumps(row)]}

    def _rows(self, block: list[Asked]) -> Iterator[Row]:
        try:
            if self._engine is None:
                self._engine = self._open()
            yield from self._answers(self._engine, block)
        except K3Error as error:
            yield Row(None, type(error)(f"{self._who}: {error.problem}", error.remedy))
        except OSError as error:
            path = f"{show_path(error.filename)}: " if error.filename else ""
            problem = f"{self._who}: {path}{error.strerror or error}."
            yield Row(None, ReadError(problem, "Check the path on that machine."))

    def _answers(self, engine: Engine, block: list[Asked]) -> Iterator[Row]:
        task, digests = self._work.task, {asked.document.id: asked.digest for asked in block}
        batch = Batch(
            engine, [asked.document for asked in block], prompt=task.prompt,
            max_new_tokens=task.max_new_tokens, sampling=task.sampling,
            labels=task.labels or None, label_end=task.label_end,
        )  # fmt: skip
        if self._opened is None:
            self._opened = self._told(engine, batch.places)
        before = deepcopy(batch.tally)
        try:
            for result in batch:
                line, tally = task.line(result, digests[result.id]), _since(before, batch.tally)
                tally.documents, tally.failed = 1, int(result.error is not None)
                tally.prompt_tokens, tally.new_tokens = result.prompt_tokens, len(result.tokens)
                warnings, self._warnings[:] = tuple(self._warnings), ()
                yield Row(line, None, tally, result.error, self._opened, warnings)
                before = deepcopy(batch.tally)
        finally:
            batch.close()

    def _open(self) -> Engine:
        """The engine; ``UsageError`` if its model is another one than where the run began."""
        work, said = self._work, list[str]()

        def plan(made: Plan) -> None:
            said.extend(plan_lines(made, lowered(made, work.loading["cache"], None)))

        watch = Watch(plan=plan, warn=self._warnings.append)
        engine = open_engine(work.model, lambda *_: work.sizes, watch=watch, **work.loading)
        found = identity(engine)
        if differ := [name for name in found if found[name] != work.identity[name]]:
            engine.close()
            raise UsageError(
                f"the model {work.model} is another one there; what differs: {', '.join(differ)}.",
                "Give every machine the same files.",
            )
        self._plan = "\n".join(said)
        return engine

    def _told(self, engine: Engine, places: int) -> Opened:
        threads = engine.options.threads
        return Opened(self._who, places, threads, self._plan, computed_by(engine))


def _since(before: Tally, now: Tally) -> Tally:
    """``now`` with what has grown since ``before``."""
    sweeps, read, copied = (
        now.sweeps - before.sweeps,
        now.read - before.read,
        now.copied - before.copied,
    )
    return replace(now, sweeps=sweeps, read=read, copied=copied)
