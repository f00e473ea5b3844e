"""One request to the engine of a server: what it asks for, what it hears, how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np

from .chat_parse import Content, Event, Finish
from .errors import K3Error, SessionError
from .generate import Guide
from .model import Run
from .sampling import Row, Sampling
from .session import Session
from .textstream import TextStream
from .tokenizer import Tokenizer

LEAST: Final = -9999.0  #: the logarithm of a probability of 0, as JSON has no infinity


class ServerStopped(K3Error):
    """The server ends, or its engine has died; nothing is computed any more."""


class Busy(K3Error):
    """The queue is full.  ``seconds``: when to come again."""

    def __init__(self, problem: str, remedy: str, seconds: int) -> None:
        super().__init__(problem, remedy)
        self.seconds = seconds


class Score(NamedTuple):
    """A token, the logarithm of its probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def score(logits: Row, token: int, most: int) -> Score:
    """``token`` and the ``most`` likeliest, of equals the lowest id first, by ``logits`` [vocab] as
    the model gives them, before any setting."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    best: list[int] = []
    if most:
        edge = np.partition(wide, -most)[-most] if most < len(wide) else -np.inf
        over = np.flatnonzero(wide >= edge)
        best = [int(i) for i in over[np.argsort(-wide[over], kind="stable")][:most]]
    return Score(token, _finite(wide[token]), tuple((i, _finite(wide[i])) for i in best))


def _finite(value: float) -> float:
    return max(float(value), LEAST)


class Reader(Protocol):
    """What makes events of the tokens of one answer, as ``chat_parse.Parser`` does."""

    done: bool

    @property
    def element(self) -> str: ...
    @property
    def content(self) -> TextStream: ...
    def feed(self, ids: Iterable[int]) -> list[Event]: ...
    def end(self, finish_reason: str) -> list[Event]: ...


class TextReader:
    """The events of an answer that is plain text."""

    element = "response"

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.content = TextStream(tokenizer, stop)
        self.done = False

    def feed(self, ids: Iterable[int]) -> list[Event]:
        text = "".join(map(self.content.push, ids))
        self.done = self.content.stopped
        return [Content(text)] if text else []

    def end(self, finish_reason: str) -> list[Event]:
        self.done, rest = True, self.content.flush()
        return [*([Content(rest)] if rest else []), Finish(finish_reason)]


@dataclass(frozen=True)
class Ask:
    """What is asked for: ``most`` new tokens after ``prompt``, once for each of ``samplings``.

    reader, guide: make those of one answer.
    scored: how many alternatives are wanted with each token; None wants no probabilities at all.
    opening: tokens of the prompt that other prompts are likely to begin with as well.
    """

    id: str
    kind: Literal["chat", "completion"]
    prompt: Sequence[int]
    most: int
    samplings: tuple[Sampling, ...]
    reader: Callable[[], Reader]
    guide: Callable[[], Guide] | None = None
    scored: int | None = None
    opening: int = 0


class Step(NamedTuple):
    """A token of answer number ``choice``, or its end, and what became known by it.  ``scores``: of
    the tokens whose text begins in what has been given out by now."""

    choice: int
    events: list[Event]
    scores: Sequence[Score] = ()


class Ended(NamedTuple):
    """All answers are complete.  ``tokens`` of all of them, ``reasoning`` of these."""

    reused: int
    tokens: int
    reasoning: int


class Failed(NamedTuple):
    """Nothing more comes."""

    error: K3Error


Update = Step | Ended | Failed


@dataclass
class Choice:
    """One of the answers of a job, under way."""

    job: Job
    index: int
    number: int  #: in the loop
    session: Session
    reader: Reader
    ended: bool = False
    scores: list[tuple[int, Score]] = field(default_factory=list)  #: where their text begins

    def shown(self) -> list[Score]:
        """Scores of tokens whose text has come out, its beginning at least, since the last call:
        what a stop string cuts off is nobody's."""
        given = self.reader.content.given
        out = [score for at, score in self.scores if at < given]
        self.scores = [(at, score) for at, score in self.scores if at >= given]
        return out


@dataclass(eq=False)
class Job:
    """An ``Ask`` on its way; ``hear`` is called in the engine's thread and must return at once."""

    ask: Ask
    hear: Callable[[Update], None]
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    cancelled: bool = False
    failed: bool = False
    done: int = 0  #: prompt tokens
    reused: int = 0
    new_tokens: int = 0
    reasoning: int = 0
    choices: list[Choice] = field(default_factory=list)

    @property
    def places(self) -> int:
        """Sessions that it takes."""
        return len(self.ask.samplings)

    def leave(self, runs: Sequence[Run]) -> None:
        """Take its own out of a sweep over ``runs``, between two layers."""
        own = {id(choice.session.state) for choice in self.choices if not choice.ended}
        for run in runs:
            if id(run.state) in own:
                run.error = run.error or SessionError("Nobody wants the answer any more.")

    def view(self) -> JobView:
        phase: Phase = "waiting"
        if self.started is not None:
            phase = "decode" if self.new_tokens else "prefill"
        return JobView(
            self.ask.id, self.ask.kind, phase, self.done, len(self.ask.prompt), self.reused,
            self.new_tokens, self.ask.most, self.places, self.submitted, self.started,
        )  # fmt: skip


Phase = Literal["waiting", "prefill", "decode"]


class JobView(NamedTuple):
    """How far a job is.  Tokens; reused ones count as done.  Times of ``time.monotonic``."""

    id: str
    kind: str
    phase: Phase
    prompt_done: int
    prompt_total: int
    reused: int
    new_tokens: int
    max_new_tokens: int
    choices: int
    submitted: float
    started: float | None
