"""THE loop: choose the next sweep, run it, sample, emit events.

Any number of requests run together: prefill of one rides in the same sweep as decode of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from .constrain import constraint
from .errors import K3Error, SessionError, UsageError
from .sampling import Row, Sampler, Sampling
from .session import Session
from .textstream import TextStream

if TYPE_CHECKING:
    from .engine import Engine

FinishReason = Literal["stop", "length", "label", "error"]


@dataclass(frozen=True)
class Event:
    """Something happened to request number ``request`` (its place in the list)."""

    request: int


@dataclass(frozen=True)
class Prefill(Event):
    """``done`` of ``total`` prompt tokens are computed."""

    done: int
    total: int


@dataclass(frozen=True)
class Token(Event):
    """One sampled token; ``text`` is what became safe to show, maybe empty."""

    token: int
    text: str


@dataclass(frozen=True)
class Done(Event):
    """The end of a request.  ``text`` is what was still held back; ``reused``: tokens before the
    first new one that were computed earlier, by this session or for another."""

    finish_reason: FinishReason
    text: str
    tokens: int
    error: K3Error | None = None
    reused: int = 0


class Guide(Protocol):
    """What says which tokens may come next in one answer, as ``ConstraintState`` does."""

    def mask(self, logits: Row) -> Row: ...
    def accept(self, token: int) -> None: ...
    @property
    def finished(self) -> bool: ...


@dataclass
class Request:
    """Generate up to ``max_new_tokens`` tokens after the tokens of ``session``.

    ``made``: the last tokens of the session that are of this answer already; settings, seed and
    number count as if it had never been interrupted.  ``guide``: of this answer, in place of a
    grammar.
    """

    session: Session
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    made: tuple[int, ...] = ()
    guide: Guide | None = None


class _Active:
    """A request under way."""

    def __init__(self, number: int, request: Request, engine: Engine) -> None:
        if request.max_new_tokens < 1:
            raise UsageError(
                f"max_new_tokens is {request.max_new_tokens}.", "Ask for at least one token."
            )
        self.number, self.request, self.session = number, request, request.session
        if not self.session.length:
            raise UsageError("The session has no tokens.", "Append a prompt first.")
        left = request.max_new_tokens - len(request.made)
        engine.check_context(self.session.length + left)
        self.sampler = Sampler(request.sampling)
        self.text = TextStream(engine.tokenizer, request.sampling.stop)
        self.ends = frozenset() if request.sampling.ignore_end else engine.tokenizer.end_ids
        grammar = request.sampling.grammar
        self.state = request.guide
        if grammar is not None:
            self.state = constraint(engine.tokenizer, grammar).start()
        self.begin = self.session.position
        self.prompt = len(self.session.waiting())
        self.made = len(request.made)
        self.said = "".join(map(self._again, request.made))

    def _again(self, token: int) -> str:
        """Pass over a token that was sampled earlier; its text."""
        self.sampler.skip()
        if self.state is not None:
            self.state.accept(token)
        return self.text.push(token)

    def sample(self) -> Iterator[Event]:
        """Choose the next token from the session's logits; the last event may be ``Done``."""
        state = self.state
        token = self.sampler.choose(self.session.logits(), None if state is None else state.mask)
        if token in self.ends:
            yield self.done("stop")
            return
        self.made += 1
        if state is not None:
            state.accept(token)
        self.session.append_sampled(token)
        yield Token(self.number, token, self.text.push(token))
        if self.text.stopped or (state is not None and state.finished):
            yield self.done("stop")
        elif self.made >= self.request.max_new_tokens:
            yield self.done("length")

    def done(self, reason: FinishReason, error: K3Error | None = None) -> Done:
        reused = max(self.begin, self.session.reused)
        return Done(self.number, reason, self.text.flush(), self.made, error, reused)


class Loop:
    """Requests under way; more may join between sweeps.  Each keeps the number it was given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._active: list[_Active] = []

    def add(self, number: int, request: Request) -> str:
        """The text of ``request.made``.  Raises ``UsageError`` or ``SessionError`` for a request
        that cannot be run."""
        if request.session.engine is not self._engine:
            raise SessionError("A session is of another engine.", "Use its own engine.")
        if any(a.session is request.session for a in self._active):
            raise SessionError("Two requests are of one session.", "Fork it, or run them in turn.")
        active = _Active(number, request, self._engine)
        self._active.append(active)
        return active.said

    @property
    def waiting(self) -> list[Session]:
        """The sessions that the next sweep is for."""
        return [a.session for a in self._active if a.session.needs_work]

    def drop(self, number: int) -> None:
        """Request ``number`` is no longer wanted."""
        self._active = [a for a in self._active if a.number != number]

    def step(self) -> Iterator[Event]:
        """One sweep, then a token of each request that is far enough."""
        waiting = self.waiting
        failed = self._engine.sweep(waiting) if waiting else {}
        for a in list(self._active):
            for event in self._events(a, failed):
                if isinstance(event, Done):
                    self._active.remove(a)
                yield event

    def __len__(self) -> int:
        return len(self._active)

    @staticmethod
    def _events(a: _Active, failed: dict[Session, K3Error]) -> Iterator[Event]:
        if a.session in failed:
            yield a.done("error", failed[a.session])
            return
        if a.session.needs_work:
            yield Prefill(a.number, a.prompt - len(a.session.waiting()), a.prompt)
            return
        if not a.made and a.prompt:
            yield Prefill(a.number, a.prompt, a.prompt)
        try:
            yield from a.sample()
        except K3Error as error:
            yield a.done("error", error)


def generate(engine: Engine, requests: Sequence[Request]) -> Iterator[Event]:
    """Run ``requests`` together; yields events as they happen, one ``Done`` for each request.

    A request whose numbers fail, whose state has no room, or that needs an expert that cannot be
    read ends with ``finish_reason == "error"`` and the others go on; an error of the engine itself
    (the trunk or the whole drive cannot be read) is raised.  Raises ``UsageError`` or
    ``SessionError`` at once for requests that cannot be run.
    """
    loop = Loop(engine)
    for i, request in enumerate(requests):
        loop.add(i, request)
    return _run(loop)


def _run(loop: Loop) -> Iterator[Event]:
    while len(loop):
        yield from loop.step()
