"""Many documents, each with an answer of its own, sharing every sweep.

Documents are taken from their iterable as places become free, as many at a time as the engine was
loaded for (``sessions``).  Prompts of new ones ride in the sweeps in which the others decode; a
beginning that the prompts have in common is computed once, where the engine keeps prefixes.  What
is wrong with a document ends in its result, and the others go on.  The answer to a document does
not depend on the others, on their order, or on how many run at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from .batch_prompt import PLACE, Head, around
from .choose_label import Chosen, LabelLoop, Labels, LabelScore
from .constrain import constraint
from .documents import Document
from .errors import (
    DoesNotFit,
    K3Error,
    ScratchError,
    SessionError,
    TokenizerError,
    UsageError,
)
from .generate import Done, FinishReason, Loop, Prefill, Request, Token
from .sampling import Sampling
from .scheduler.admission import Admission

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

READY, HELD = 64, 4096  #: results that wait at most before more documents are looked at
SETTINGS = frozenset({"temperature", "top_k", "top_p", "min_p", "seed", "stop"})
NEW_TOKENS = 256  #: of an answer, where nobody says how many

Order = Literal["input", "completed"]
OnError = Literal["record", "raise"]


@dataclass(frozen=True)
class Result:
    """What became of a document.  ``index``: its place in the input, from 0.

    ``seconds``: from its begin to its end; ``first_token``: to its first token, None without one.
    ``reused``: prompt tokens that were computed before, for another document.  ``scores``: of all
    labels, where ``text`` is the best of them; nothing was generated then.
    """

    id: str
    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    error: K3Error | None = None
    prompt_tokens: int = 0
    reused: int = 0
    seconds: float = 0.0
    first_token: float | None = None
    sweeps: int = 0  #: that it took part in
    scores: tuple[LabelScore, ...] = ()


@dataclass
class Tally:
    """What a batch has done so far."""

    documents: int = 0  #: ended
    failed: int = 0  #: of them
    running: int = 0
    prompt_tokens: int = 0  #: of the documents that have begun
    new_tokens: int = 0
    sweeps: int = 0
    rows: int = 0  #: of the last sweep
    bytes: int = 0  #: that the last sweep read
    read: int = 0  #: that all of them read
    experts: float = 0.0  #: different ones that the last sweep asked for, a layer


class Going(NamedTuple):
    """A document that was under way when an earlier run ended: the folder in which its session was
    saved, and ``Result.reused`` by then."""

    folder: Path
    reused: int


class _Job:
    """A document under way."""

    def __init__(self, index: int, document: Document, request: Request, sweeps: int) -> None:
        self.index, self.document, self.session = index, document, request.session
        self.begin, self.swept = time.perf_counter(), sweeps
        self.earlier = 0  # ``reused``, of a run before this one
        self.prompt = request.session.length - len(request.made)
        self.first: float | None = None
        self.tokens: list[int] = list(request.made)
        self.pieces: list[str] = []

    @property
    def reused(self) -> int:
        """Prompt tokens that were computed for another document."""
        return self.earlier or self.session.reused


def bare(error: K3Error) -> K3Error:
    """``error`` without what it came from, which may be large (a file that is no UTF-8)."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


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
    ) -> None:
        """See ``Engine.batch``.  ``pause``: called before every sweep, when all results have been
        handed out.  ``going``: where to go on with a document, if anywhere; a session that cannot
        be loaded, or is not of this document, is begun anew."""
        head, self._tail = around(prompt)
        self._head = Head(engine, head)
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
        self._sampling = sampling or Sampling()
        self._raises, self._in_order = on_error == "raise", order == "input"
        self._watch, self._pause, self._going = watch, pause, going
        self._documents: Iterator[tuple[int, Document | str]] = enumerate(documents)
        self._lock = threading.RLock()  # closing waits for the sweep under way
        self._more = True
        self._loop: Loop | LabelLoop = Loop(engine)
        self._labels = None
        places = engine.options.sessions
        if labels is not None:
            for name, given in (("max_new_tokens", max_new_tokens), ("sampling", sampling)):
                if given is not None:
                    raise UsageError(f"{name} means nothing beside labels.", "Leave it out.")
            self._labels = Labels(engine.tokenizer, labels, label_end)
            self._loop = LabelLoop(engine, self._labels)
            most, places = self._labels.longest, self._loop.places
        elif label_end:
            raise UsageError("label_end means nothing without labels.", "Leave it out.")
        self._most = most
        self._jobs: dict[int, _Job] = {}
        self._admission = Admission(places)
        self._ready: deque[Result] = deque()  # in the order in which they are handed out
        self._held: dict[int, Result] = {}  # done before an earlier one
        self._next = 0

    # ---- the results ----

    def __iter__(self) -> Batch:
        return self

    def __next__(self) -> Result:
        with self._lock:
            while not self._ready:
                if not self._admit() and not self._jobs and not self._ready:
                    raise StopIteration
                if self._jobs and not self._ready:
                    self._pause()
                    self._step()
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
            place = folder(job.document)
            job.session.save(place)
            yield job.document, Going(place, job.reused)

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
            request, earlier = self._request(document)
            session = request.session
            said = self._loop.add(index, request)
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
        job = self._jobs[index] = _Job(index, document, request, self.tally.sweeps)
        job.earlier = earlier
        job.pieces.append(said)
        self.tally.prompt_tokens += job.prompt

    def _refused(
        self, index: int, document: Document, session: Session | None, error: K3Error
    ) -> None:
        if session is not None:
            session.close()
        self._end(Result(document.id, index, "", (), "error", bare(error)))

    def _request(self, document: Document) -> tuple[Request, int]:
        """The request, and tokens that an earlier run reused for it.  Raises ``UsageError`` for
        settings or a text that cannot be."""
        if not isinstance(document.text, str):
            raise UsageError(f"The document is a {type(document.text).__name__}.", "Give text.")
        text = self._head.text + document.text + self._tail
        if not text:
            raise UsageError("The document is empty.", "Leave it out, or give a prompt around it.")
        settings = dict(document.settings)
        settings.pop("model", None)  # whatever it names, this one answers
        if self._labels is not None and settings:
            raise UsageError(
                f"The setting {min(settings)!r} means nothing beside labels.", "Leave it out."
            )
        most = settings.pop("max_tokens", self._most)
        if unknown := settings.keys() - SETTINGS:
            raise UsageError(f"Nobody knows the setting {min(unknown)!r}.", "Leave it out.")
        sampling = replace(self._sampling, **settings)
        tokens = self._engine.encode(text)
        self._engine.check_context(len(tokens) + most)
        going = self._going(document)
        if going is not None and (session := self._loaded(document, tokens, going)) is not None:
            made = session.tokens[len(tokens) :]
            return Request(session, most, sampling, made), going.reused
        self._head.compute(tokens)
        session = self._engine.session()
        session.append(tokens)
        return Request(session, most, sampling), 0

    def _loaded(self, document: Document, tokens: list[int], going: Going) -> Session | None:
        """The session of an earlier run for a document of ``tokens``."""
        try:
            session = self._engine.load_session(going.folder)
        except (SessionError, OSError) as error:
            self._engine.warn(f"{document.id} is begun anew: {error}")
            return None
        if session.tokens[: len(tokens)] == tuple(tokens):
            return session
        session.close()
        return None

    # ---- sweeps ----

    def _step(self) -> None:
        engine, tally = self._engine, self.tally
        decoding = sum(session.decoding for session in self._loop.waiting)
        before, begin = engine.counts(), time.perf_counter()
        for event in self._loop.step():
            job = self._jobs[event.request]
            if isinstance(event, Token):
                job.first = job.first or time.perf_counter()
                job.tokens.append(event.token)
                job.pieces.append(event.text)
                tally.new_tokens += 1
            elif isinstance(event, Done):
                self._finish(job, event)
            else:
                assert isinstance(event, Prefill)
        seconds = time.perf_counter() - begin
        after = engine.counts()
        tally.rows = after["embedding"].requests - before["embedding"].requests
        self._admission.swept(seconds, max(0, tally.rows - decoding))
        layers = len(engine.spec.moe_layers) or 1
        tally.sweeps += 1
        tally.running = len(self._jobs)
        tally.bytes = sum(after[kind].bytes - before[kind].bytes for kind in after)
        tally.read += tally.bytes
        tally.experts = (after["experts"].requests - before["experts"].requests) / layers
        self._watch(tally)

    def _finish(self, job: _Job, done: Done) -> None:
        now, reused = time.perf_counter(), job.reused
        del self._jobs[job.index]
        job.session.close()
        error = None if done.error is None else bare(done.error)
        if error is None:
            self._admission.ended(len(job.tokens))
        text = "".join(job.pieces) + done.text
        result = Result(
            id=job.document.id,
            index=job.index,
            text=text,
            tokens=tuple(job.tokens),
            finish_reason=done.finish_reason,
            error=error,
            prompt_tokens=job.prompt,
            reused=reused,
            seconds=now - job.begin,
            first_token=None if job.first is None else job.first - job.begin,
            sweeps=self.tally.sweeps + 1 - job.swept,
            scores=done.choice.scores if isinstance(done, Chosen) else (),
        )
        self._end(result)

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
