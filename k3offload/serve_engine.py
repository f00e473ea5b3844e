"""The one thread that owns the engine of a server, and what others may say to it.

Requests wait in a queue and begin in the order in which they came, when as many places are free as
they have answers; all that have begun share every sweep.  Nobody waits for the thread in it:
whoever hears of tokens must return at once.  What is said to it is done between two layers at the
latest.  A request that nobody wants any more ends there too: its rows leave the sweep, which goes
on for the others, if there are any.

A request that fails leaves the others alone.  An error of the engine that this file does not know
ends the thread: everybody is told, and nothing is accepted any more.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from .batch_results import bare
from .errors import DoesNotFit, K3Error, ScratchError, UsageError
from .generate import Done, Event, Loop, Prefill, Request, Token
from .serve_inbox import Inbox
from .serve_job import (
    Ask,
    Busy,
    Choice,
    Ended,
    Failed,
    Job,
    JobView,
    ServerStopped,
    Step,
    Update,
    score,
)
from .serve_settings import Settings

if TYPE_CHECKING:
    from .engine import Engine
    from .model import Run
    from .session import Session

T = TypeVar("T")
LONGEST_WAIT: Final = 3600  #: seconds that a client is told to wait at most


class Abandoned(Exception):
    """The sweep under way ends with the thread."""


class Progress(NamedTuple):
    """The sweep under way, or the last one; ``begun`` by ``time.monotonic``."""

    sweep: int = 0
    layer: int = 0
    layers: int = 0
    rows_decode: int = 0
    rows_prompt: int = 0
    begun: float = 0.0
    busy: bool = False


class Totals(NamedTuple):
    """Since the start."""

    sweeps: int = 0
    sweep_seconds: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0


class EngineThread:
    """Owns ``engine``, which nobody else may sweep with; does not close it."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.places: int = engine.options.sessions
        self.progress = Progress(layers=len(engine.spec.layers))
        self.totals = Totals()
        self.failure: BaseException | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._loop, self._inbox = Loop(engine), Inbox()
        self._running: list[Job] = []  # changed by the thread alone, as all that follows
        self._choices: dict[int, Choice] = {}
        self._numbers = 0
        self._runs: Sequence[Run] = ()
        self._watchers: list[Callable[[str], None]] = []
        self._usual = 1.0  # seconds that a request takes, about
        self._thread = threading.Thread(target=self._main, name="k3offload-engine", daemon=True)

    # ---- for other threads ----

    def start(self) -> EngineThread:
        hooks = self.engine.hooks
        self._before = hooks.before_layer, hooks.on_sweep
        hooks.add(before_layer=self._before_layer, on_sweep=self._on_sweep)
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and self._inbox.open

    def running(self) -> tuple[JobView, ...]:
        """Requests that have begun, in the order in which they came."""
        return tuple(job.view() for job in tuple(self._running))

    def waiting(self) -> tuple[JobView, ...]:
        """Requests in the queue."""
        return tuple(job.view() for job in self._inbox.jobs())

    def check_room(self) -> None:
        """Raise ``Busy`` if another request would find the queue full, ``ServerStopped``."""
        self._inbox.check(self._check_room)

    def submit(self, ask: Ask, hear: Callable[[Update], None]) -> Job:
        """Let ``ask`` wait for its turn.  Raises ``Busy`` and ``ServerStopped``, and ``UsageError``
        for more answers than there are places."""
        job = Job(ask, hear)
        if job.places > self.places:
            raise UsageError(
                f"n is {job.places}, and {self.places} answers can be under way at a time.",
                "Ask for fewer, or start the server with more --places.",
            )
        self._inbox.put(job, self._check_room)
        return job

    def cancel(self, job: Job) -> None:
        """Nobody wants ``job`` any more, which may have ended; it hears nothing from now on."""
        self._inbox.cancel(job)

    def call(self, what: Callable[[], T]) -> Future[T]:
        """Let the thread call ``what``, between two layers at the latest.  It must be quick, and
        sweep nothing.  The result raises ``ServerStopped`` if the thread ends before."""
        return self._inbox.call(what)

    def watch(self, watcher: Callable[[str], None]) -> Callable[[], None]:
        """Let ``watcher`` be called in the thread: after a ``layer``, a ``sweep``, and when
        ``idle`` begins.  The result ends that."""
        self._watchers = [*self._watchers, watcher]

        def stop() -> None:
            self._watchers = [w for w in self._watchers if w is not watcher]

        return stop

    def close(self, timeout: float | None = None) -> None:
        """End the thread, at the next layer.  Requests hear of it at once: a layer may take longer
        than their clients are waited for."""
        self._inbox.close(ServerStopped("The server is ending.", "Try again later."))
        for job in (*self._inbox.jobs(), *self._running):  # none is missed that begins meanwhile
            self._say(job, Failed(self._inbox.why))
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _free(self) -> int:
        return self.places - sum(job.places for job in tuple(self._running))

    def _check_room(self, waiting: int) -> None:
        # what has a place to go to does not wait
        if waiting >= self.settings.queue + max(0, self._free()):
            rounds = (waiting + 1) / self.places
            seconds = min(LONGEST_WAIT, max(1, math.ceil(self._usual * rounds)))
            raise Busy(f"{waiting} requests are waiting already.", "Try again later.", seconds)

    # ---- the thread ----

    def _main(self) -> None:
        inbox, hooks = self._inbox, self.engine.hooks
        try:
            while inbox.open:
                if inbox.empty and not len(self._loop):
                    self._tell("idle")
                    inbox.wait()
                inbox.serve()
                self._admit()
                if len(self._loop):
                    self._step()
        except BaseException as error:
            self.failure = error
            why = f"The engine has failed: {type(error).__name__}: {error}."
            inbox.close(ServerStopped(why, "Start it again."))
        finally:
            hooks.before_layer, hooks.on_sweep = self._before
            for job in [*self._running, *inbox.give_up()]:
                self._say(job, Failed(inbox.why))
                self._drop(job)
            if self.failure is not None:
                self.on_death()

    def _tell(self, event: str) -> None:
        for watcher in self._watchers:
            try:
                watcher(event)
            except Exception as error:  # no answer depends on it
                self._watchers = [w for w in self._watchers if w is not watcher]
                if not isinstance(error, RuntimeError):  # the loop of one that has gone
                    self.engine.warn(f"Somebody no longer watches: {error!r}")

    def _say(self, job: Job, update: Update) -> None:
        if not job.cancelled:
            with suppress(RuntimeError):
                job.hear(update)

    def _count(self, **more: float) -> None:
        told = self.totals._asdict()
        self.totals = Totals(**{**told, **{name: told[name] + n for name, n in more.items()}})

    # ---- requests begin and end ----

    def _admit(self) -> None:
        while (job := self._inbox.begin(self._free(), self._running)) is not None:
            try:
                self._begin(job)
            except (DoesNotFit, ScratchError) as error:
                if len(self._running) == 1:
                    self._fail(job, error)
                    self._drop(job)
                    continue
                # somebody else's sessions take the room: later, when one of these has ended
                self._drop(job)
                self._inbox.put_back(job)
                return
            except K3Error as error:
                self._fail(job, error)
                self._drop(job)

    def _begin(self, job: Job) -> None:
        session = self.engine.session()
        try:
            session.append(job.ask.prompt)
            session.leaves = (job.ask.opening,)
            self._add(job, session)
        except BaseException:
            session.close()
            raise
        job.started = time.monotonic()

    def _add(self, job: Job, session: Session) -> None:
        """One more answer of ``job`` goes on from ``session``."""
        ask, index = job.ask, len(job.choices)
        guide = None if ask.guide is None else ask.guide()
        self._numbers += 1
        request = Request(session, ask.most, ask.samplings[index], guide=guide)
        self._loop.add(self._numbers, request)
        choice = Choice(job, index, self._numbers, session, ask.reader())
        job.choices.append(choice)
        self._choices[self._numbers] = choice

    def _drop(self, job: Job) -> None:
        """Let go of what ``job`` holds."""
        for choice in job.choices:
            self._let_go(choice)
        job.choices, job.started = [], None
        if job in self._running:
            self._running.remove(job)

    def _let_go(self, choice: Choice) -> None:
        self._loop.drop(choice.number)
        self._choices.pop(choice.number, None)
        choice.session.close()

    def _fail(self, job: Job, error: K3Error) -> None:
        """What it holds is let go after the sweep: its loop is still at it."""
        self._say(job, Failed(bare(error)))
        self._count(failed=1)
        job.failed = True

    def _reap(self) -> None:
        """After a sweep: requests that have ended, or that nobody wants."""
        for job in tuple(self._running):
            if job.cancelled or job.failed:
                self._count(cancelled=job.cancelled and not job.failed)
                self._drop(job)
                continue
            for choice in job.choices:
                if choice.ended:
                    self._let_go(choice)
            if len(job.choices) == job.places and all(choice.ended for choice in job.choices):
                assert job.started is not None
                self._usual += (time.monotonic() - job.started - self._usual) / 8
                self._count(finished=1, prompt_tokens=len(job.ask.prompt), reused_tokens=job.reused)
                self._say(job, Ended(job.reused, job.new_tokens, job.reasoning))
                self._drop(job)

    # ---- sweeps ----

    def _on_sweep(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self.progress = self.progress._replace(
            sweep=self.progress.sweep + 1, layer=0, begun=time.monotonic(), busy=True
        )
        self._count_rows()

    def _count_rows(self) -> None:
        left = [run for run in self._runs if run.error is None]
        decoding = sum(run.decode for run in left)
        rows = sum(len(run.tokens) for run in left)
        self.progress = self.progress._replace(rows_decode=decoding, rows_prompt=rows - decoding)

    def _before_layer(self, layer: int) -> None:
        """Between two layers: what others have said is done now."""
        self.progress = self.progress._replace(layer=layer)
        self._inbox.serve()
        if layer:
            self._tell("layer")
        if not self._inbox.open:
            raise Abandoned
        if gone := [job for job in self._running if job.cancelled]:
            for job in gone:
                job.leave(self._runs)
            self._count_rows()

    def _step(self) -> None:
        """A sweep, and a token of each request that is far enough."""
        try:
            for event in self._loop.step():
                self._happened(event)
        except Abandoned:
            pass
        except K3Error as error:
            # of the whole sweep: those whose states are lost by it fail
            lost = [
                job
                for job in self._running
                if any(not c.ended and c.session.state.broken for c in job.choices)
            ]
            for job in lost or self._running:
                self._fail(job, error)
        finally:
            self._runs = ()
        if self.progress.busy:
            taken = time.monotonic() - self.progress.begun
            self.progress = self.progress._replace(busy=False)
            self._count(sweeps=1, sweep_seconds=taken)
        self._reap()
        self._tell("sweep")

    def _happened(self, event: Event) -> None:
        choice = self._choices.get(event.request)
        if choice is None or choice.ended or choice.job.cancelled or choice.job.failed:
            return
        job = choice.job
        if isinstance(event, Prefill):
            if not choice.index:
                job.done, job.reused = event.done, choice.session.reused
                if event.done == event.total:
                    self._fork(job)
        elif isinstance(event, Token):
            self._token(choice, event.token)
        elif isinstance(event, Done):
            if event.error is not None:
                self._fail(job, event.error)
            else:
                self._end(choice, [], event.finish_reason)

    def _fork(self, job: Job) -> None:
        """The prompt is computed: further answers go on from there."""
        try:
            for _ in range(1, job.places):
                self._add(job, job.choices[0].session.fork())
        except K3Error as error:
            self._fail(job, error)

    def _token(self, choice: Choice, token: int) -> None:
        job, reader = choice.job, choice.reader
        self._count(new_tokens=1)
        job.new_tokens += 1
        before, at = reader.element, reader.content.decoded
        events = reader.feed([token])
        of = before if before == reader.element else ""  # where its text went, if it is text
        job.reasoning += of == "think"
        special = self.engine.tokenizer.is_special(token)
        if job.ask.scored is not None and of == "response" and not special:
            logits = choice.session.known_logits
            assert logits is not None
            choice.scores.append((at, score(logits, token, job.ask.scored)))
        if reader.done:
            self._end(choice, events, "stop")
        elif (scores := choice.shown()) or events:
            self._say(job, Step(choice.index, events, scores))

    def _end(self, choice: Choice, events: list[Any], reason: str) -> None:
        choice.ended = True
        events = [*events, *choice.reader.end(reason)]
        self._say(choice.job, Step(choice.index, events, choice.shown()))
