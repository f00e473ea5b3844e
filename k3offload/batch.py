"""Many documents, each with an answer of its own, sharing every sweep.

Documents are taken from their iterable as places become free, as many at a time as the engine was
loaded for (``sessions``).  Prompts of new ones ride in the sweeps in which the others decode; a
beginning that the prompts have in common is computed once, where the engine keeps prefixes.  What
is wrong with a document, or an expert that it needs and that cannot be read, ends in its result,
and the others go on.  The answer to a document does not depend on the others, on their order, or on
how many run at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .batch_prompt import PLACE
from .batch_request import Asking
from .batch_results import Going, Job, Result, Tally, bare
from .choose_label import Chosen, LabelLoop, Labels
from .constrain import constraint
from .documents import Document
from .errors import (
    CheckpointError,
    DoesNotFit,
    K3Error,
    ReadError,
    ScratchError,
    SessionError,
    TokenizerError,
    UsageError,
)
from .generate import Done, Loop, Prefill, Token
from .sampling import Sampling
from .scheduler.admission import Admission
from .scheduler.remaining import Remaining, UnderWay

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

READY, HELD = 64, 4096  #: results that wait at most before more documents are looked at
LOST = 16  #: documents in a row that could not be read and end the batch; twice the places at least
NEW_TOKENS = 256  #: of an answer, where nobody says how many

Order = Literal["input", "completed"]
OnError = Literal["record", "raise"]


def _nothing(**given: object) -> None:
    """Refuse what means nothing beside labels."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} means nothing beside labels.", "Leave it out.")


class Batch(Iterator[Result]):
    """An iterator over the results of ``documents``; made by ``Engine.batch``."""

    def __init__(
        self,
        engine: Engine,
        documents: Iterable[Document | str],
        *,
        prompt: str = PLACE,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        labels: Sequence[str] | None = None,
        label_end: str | Sequence[int] = "",
        on_error: OnError = "record",
        order: Order = "input",
        watch: Callable[[Tally], None] = lambda tally: None,
        pause: Callable[[], None] = lambda: None,
        going: Callable[[Document], Going | None] = lambda document: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """See ``Engine.batch``.  ``pause``: called before every sweep, when all results have been
        handed out.  ``going``: where to go on with a document, if anywhere; a session that cannot
        be loaded, or is not of this document, is begun anew."""
        for name, value, known in (
            ("on_error", on_error, ("record", "raise")),
            ("order", order, ("input", "completed")),
        ):
            if value not in known:
                raise UsageError(f"{name} is {value!r}.", f"It must be {' or '.join(known)}.")
        most = NEW_TOKENS if max_new_tokens is None else max_new_tokens
        if most < 1:
            raise UsageError(f"max_new_tokens is {most}.", "Ask for at least one token.")
        self.tally = Tally()
        self._engine = engine
        if sampling is not None and sampling.grammar is not None:
            constraint(engine.tokenizer, sampling.grammar)  # refused now, and not by each document
        self._raises, self._in_order = on_error == "raise", order == "input"
        self._watch, self._pause, self._clock = watch, pause, clock
        self._documents: Iterator[tuple[int, Document | str]] = enumerate(documents)
        self._lock = threading.RLock()  # closing waits for the sweep under way
        self._more = True
        self._loop: Loop | LabelLoop = Loop(engine)
        self._labels = None if labels is None else Labels(engine.tokenizer, labels, label_end)
        places = engine.options.sessions
        if self._labels is not None:
            _nothing(max_new_tokens=max_new_tokens, sampling=sampling)
            self._loop = LabelLoop(engine, self._labels)
            most, places = self._labels.longest, self._loop.places
        elif label_end:
            raise UsageError("label_end means nothing without labels.", "Leave it out.")
        self._most = most
        self._asking = Asking(
            engine, prompt, most, sampling or Sampling(), self._labels is not None, going
        )
        self._jobs: dict[int, Job] = {}
        self._admission = Admission(places)
        self._rest, self._swept = Remaining(engine.plan.sweep_rows), 0.0
        self._counted = engine.counts()  # by the end of the last sweep
        self._lost = 0  # documents in a row that could not be read
        self._fatal: K3Error | None = None  # what ends the batch, when all results are handed out
        self._ready: deque[Result] = deque()  # in the order in which they are handed out
        self._held: dict[int, Result] = {}  # done before an earlier one
        self._next = 0

    # ---- the results ----

    def __iter__(self) -> Batch:
        return self

    def __next__(self) -> Result:
        with self._lock:
            while not self._ready:
                if self._fatal is not None and not self._held:
                    raise self._fatal
                if self._fatal is not None:  # those that waited for an earlier one are done
                    self._ready.extend(self._held.pop(index) for index in sorted(self._held))
                elif not self._admit() and not self._jobs and not self._ready:
                    raise StopIteration
                elif self._jobs and not self._ready:
                    self._pause()
                    self._sweep()
            result = self._ready.popleft()
            if self._raises and result.error is not None:
                self.close()
                raise result.error
            return result

    async def results(self) -> AsyncIterator[Result]:
        """The same results, computed in a thread of their own."""
        end = object()
        try:
            while (result := await asyncio.to_thread(next, self, end)) is not end:
                assert isinstance(result, Result)
                yield result
        finally:
            await asyncio.shield(asyncio.to_thread(self.close))

    @property
    def places(self) -> int:
        """Documents at a time, at most."""
        return self._admission.places

    def close(self) -> None:
        """Let go of every document; nothing more comes."""
        with self._lock:
            for number, job in self._jobs.items():
                self._loop.drop(number)
                job.session.close()
            for kept in (self._jobs, self._ready, self._held):
                kept.clear()
            self._more = False

    def save(self, folder: Callable[[Document], Path]) -> Iterator[tuple[Document, Going]]:
        """Save what is under way, each session in the ``folder`` of its document; yields where to
        go on with it.  Raises ``SessionError``."""
        for job in [job for job in self._jobs.values() if job.session.position]:
            to = folder(job.document)
            job.session.save(to)
            yield job.document, job.going(to, self._clock(), self.tally.sweeps)

    def left(self, waiting: int) -> float | None:
        """Seconds until all is done, if ``waiting`` documents are still to be taken; None before a
        sweep was measured.  Called between sweeps."""
        under_way = []
        for job in self._jobs.values():
            made, session = len(job.tokens), job.session
            prompt = 0 if made else len(session.waiting())
            under_way.append(UnderWay(prompt, made, job.request.max_new_tokens))
        group, places = self._admission.group(), self._admission.places
        return self._rest.seconds(under_way, waiting, self._most, places, group)

    # ---- documents begin ----

    def _admit(self) -> bool:
        """Begin as many documents as have a place, if it is time to; whether there may be more."""
        free = self._admission.places - len(self._jobs)
        if self._more and self._admission.begins(free):
            while self._more and len(self._jobs) < self._admission.places:
                if len(self._ready) >= READY or len(self._held) >= HELD:
                    break  # documents that end before they begin take no place
                self._take()
        return self._more

    def _take(self) -> None:
        """The next document: it begins, or has ended before it could."""
        try:
            index, given = next(self._documents)
        except StopIteration:
            self._more = False
            return
        document = given if isinstance(given, Document) else Document(str(index), given)
        if document.error is not None:
            self._refused(index, document, None, document.error)
            return
        session: Session | None = None
        try:
            asked = self._asking.request(document)
            session = asked.request.session
            said = self._loop.add(index, asked.request)
        except (UsageError, TokenizerError, SessionError) as error:
            self._refused(index, document, session, error)
            return
        except (DoesNotFit, ScratchError) as error:
            if not self._jobs:
                self._refused(index, document, session, error)
                return
            # somebody else's sessions take the room: later, when one of these has ended
            self._documents = itertools.chain([(index, document)], self._documents)
            self._admission.places = len(self._jobs)
            return
        job = Job(index, document, asked, said, self._clock(), self.tally.sweeps)
        self._jobs[index] = job
        self._rest.taken(True)
        self.tally.prompt_tokens += job.prompt

    def _refused(
        self, index: int, document: Document, session: Session | None, error: K3Error
    ) -> None:
        if session is not None:
            session.close()
        self._rest.taken(False)
        self._end(Result(document.id, index, "", (), "error", bare(error)))

    # ---- sweeps ----

    def _sweep(self) -> None:
        """A step; an error of the engine itself comes after the results that are held."""
        try:
            self._step()
        except K3Error as error:
            if not self._held:
                raise
            self._fatal = error

    def _step(self) -> None:
        """A sweep, and what came of it."""
        before, begin = self._engine.counts()["experts"].requests, self._clock()
        sweeping = bool(self._loop.waiting)
        for event in self._loop.step():
            job = self._jobs[event.request]
            if isinstance(event, Token):
                job.token(event.token, event.text, self._clock())
                self.tally.new_tokens += 1
            elif isinstance(event, Done):
                self._finish(job, event)
            else:
                assert isinstance(event, Prefill)
        for job in [job for job in self._jobs.values() if job.complete]:
            self._loop.drop(job.index)
            self._finish(job, Done(job.index, "stop", "", len(job.tokens)))
        if sweeping and any(self._engine.last_rows):
            self._count(before, begin)
        self._watch(self.tally)

    def _count(self, asked: int, begin: float) -> None:
        """A sweep has ended that began at ``begin``, when so many experts had been asked for.  What
        was read counts from the sweep before: the prompt's head is computed in between."""
        tally, engine, now = self.tally, self._engine, self._clock()
        decoding, prompts = engine.last_rows
        self._admission.swept(now - begin, prompts)
        tally.sweeps += 1
        tally.running = len(self._jobs)
        tally.rows = decoding + prompts
        tally.seconds, self._swept = now - (self._swept if tally.sweeps > 1 else begin), now
        self._rest.swept(tally.seconds, decoding, prompts)
        tally.bytes = 0
        before, self._counted = self._counted, engine.counts()
        for kind, counts in self._counted.items():
            name, _, device = kind.partition(" on ")
            tally.moved(name, counts.bytes - before[kind].bytes, bool(device))
        layers = len(engine.spec.moe_layers) or 1
        tally.experts = (self._counted["experts"].requests - asked) / layers

    def _finish(self, job: Job, done: Done) -> None:
        said = job.going(Path(), self._clock(), self.tally.sweeps + 1)
        del self._jobs[job.index]
        job.session.close()
        error = None if done.error is None else bare(done.error)
        if error is None:
            self._admission.ended(len(job.tokens))
            self._rest.ended(len(job.tokens))
        result = Result(
            id=job.document.id,
            index=job.index,
            tokens=tuple(job.tokens),
            error=error,
            prompt_tokens=job.prompt,
            reused=said.reused,
            seconds=said.seconds,
            first_token=said.first_token,
            sweeps=said.sweeps,
            scores=done.choice.scores if isinstance(done, Chosen) else (),
            **job.answer(done),
        )
        self._end(result)
        self._lost = self._lost + 1 if isinstance(error, (ReadError, CheckpointError)) else 0
        if self._lost > max(LOST, 2 * self._admission.places):
            self._fatal = error

    def _end(self, result: Result) -> None:
        self.tally.documents += 1
        self.tally.failed += result.error is not None
        if not self._in_order:
            self._ready.append(result)
            return
        self._held[result.index] = result
        while self._next in self._held:
            self._ready.append(self._held.pop(self._next))
            self._next += 1
