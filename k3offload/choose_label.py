"""Which of some given labels follows a prompt best: their likelihoods, and nothing is generated.

Each prompt is computed once.  Its last row says how likely the first token of every label is; a
label of one token needs no more.  The others go on from copies of the prompt's state, as many of
all prompts in one sweep as rows and memory allow.

A label is always computed in one piece behind its prompt.  Labels that begin alike share no work:
a piece that two of them share would be cut where the others tell, and its bits would depend on
them.  So no score depends on the other labels or prompts, their order, or on memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .errors import DoesNotFit, NumericError, UsageError
from .model import Run
from .sampling import log_probability
from .scheduler.sweep import cut
from .session import Session
from .state import SequenceState

if TYPE_CHECKING:
    from .engine import Engine

Prompt = Session | str | Sequence[int]


@dataclass(frozen=True)
class LabelScore:
    """How well ``label`` follows: likelihoods as natural logarithms.

    ``tokens``: what was scored, the end's tokens too.  ``probability``: among the labels, in
    proportion to their likelihoods.  ``mean``: ``log_likelihood`` for each token.
    """

    label: str
    tokens: tuple[int, ...]
    log_likelihood: float
    probability: float

    @property
    def mean(self) -> float:
        return self.log_likelihood / len(self.tokens)


@dataclass(frozen=True)
class Choice:
    """The scores of all labels for one prompt, in the order they were given."""

    scores: tuple[LabelScore, ...]

    @property
    def best(self) -> LabelScore:
        """The most likely label, the first of equals."""
        return max(self.scores, key=lambda score: score.log_likelihood)


@dataclass(eq=False)
class _Job:
    """A label whose tokens from the second on are still to be scored behind ``session``."""

    session: Session
    tokens: tuple[int, ...]
    logs: list[float]  # of its tokens so far
    state: SequenceState | None = None
    left: list[int] = field(init=False)  # what is not computed yet; the last token never is

    def __post_init__(self) -> None:
        self.left = list(self.tokens[:-1])


def score_labels(
    engine: Engine,
    prompts: Sequence[Prompt],
    labels: Sequence[str],
    end: str | Sequence[int] = (),
) -> list[Choice]:
    """Score every label behind every prompt: one ``Choice`` for each prompt.

    A prompt is text, token ids, or a session, which is computed to its end and otherwise left as
    it is.  Prompt and label become tokens apart, as texts appended to a session do; so where words
    are meant, the blank between belongs to the label (``" yes"``).

    ``end``, text or ids, is put behind every label and scored with it.  Without it a label says
    that the answer begins so, with it that the answer is just that.  A label that another one
    begins with could never lose without it, and is refused; it is left to the caller because
    models end an answer in different ways (an end token, a mark, a line end).

    Memory decides how many prompts go together: most at ``sessions = prompts x (1 + labels of
    more than one token)``.  Raises ``UsageError`` for labels or prompts that cannot be scored,
    ``DoesNotFit`` if there is no room for one copy of a state, and the first error of a sweep.
    """
    tokens = _tokens(engine, labels, engine.encode(end) if isinstance(end, str) else end)
    longer = sum(len(ids) > 1 for ids in tokens)
    together = max(1, engine.options.sessions // (1 + longer))
    given = _ids_or_sessions(engine, prompts, max(map(len, tokens)))
    choices: list[Choice] = []
    for first in range(0, len(given), together):
        with ExitStack() as opened:
            sessions = [_session(engine, p, opened) for p in given[first : first + together]]
            engine.advance(list(dict.fromkeys(sessions)))
            jobs = [_job(session, ids) for session in sessions for ids in tokens]
            waiting = deque(job for job in jobs if job.left)
            while waiting:
                _sweep(engine, waiting)
        per = len(labels)
        choices += (_choice(labels, jobs[i : i + per]) for i in range(0, len(jobs), per))
    return choices


def _tokens(engine: Engine, labels: Sequence[str], end: Sequence[int]) -> list[tuple[int, ...]]:
    """The ids of every label with ``end`` behind, after making sure that they can be compared."""
    if isinstance(labels, str) or not labels or not all(isinstance(x, str) and x for x in labels):
        raise UsageError(f"The labels are {labels!r:.60}.", "Give a list of non-empty strings.")
    tokens = [(*engine.encode(label), *end) for label in labels]
    for i, own in enumerate(tokens):
        for j, other in enumerate(tokens):
            if i < j and own == other:
                raise UsageError(
                    f"The labels {labels[i]!r} and {labels[j]!r} are the same tokens.",
                    "Give each label once.",
                )
            if own != other and other[: len(own)] == own:
                raise UsageError(
                    f"The label {labels[j]!r} begins with the tokens of {labels[i]!r}, which is "
                    "then never less likely.",
                    "Say with end= what follows a label, an end token or a line end.",
                )
    return tokens


def _ids_or_sessions(
    engine: Engine, prompts: Sequence[Prompt], longest: int
) -> list[Session | list[int]]:
    """Sessions as they are and ids of the others, with room for labels of ``longest`` tokens."""
    if isinstance(prompts, str | Session):
        raise UsageError("The prompts are a single one.", "Give a list of prompts.")
    given: list[Session | list[int]] = []
    for i, prompt in enumerate(prompts):
        one = engine.encode(prompt) if isinstance(prompt, str) else prompt
        given.append(one if isinstance(one, Session) else list(one))
        length = one.length if isinstance(one, Session) else len(one)
        if not length:
            raise UsageError(f"Prompt {i} is empty.", "Give it some text.")
        engine.check_context(length + longest)
    return given


def _session(engine: Engine, prompt: Session | list[int], opened: ExitStack) -> Session:
    """The session of ``prompt``; one that is made for it is closed by ``opened``."""
    if isinstance(prompt, Session):
        return prompt
    session = opened.enter_context(engine.session())
    session.append(prompt)
    return session


def _job(session: Session, tokens: tuple[int, ...]) -> _Job:
    """A label whose first token is scored."""
    return _Job(session, tokens, [log_probability(session.logits(), tokens[0])])


def _sweep(engine: Engine, waiting: deque[_Job]) -> None:
    """One sweep over the labels at the head of ``waiting``; those that are scored leave it."""
    room, jobs, runs = engine.plan.sweep_rows, list[_Job](), list[Run]()
    for job in waiting:
        begin = job.session.position if job.state is None else job.state.position
        count = cut(begin, len(job.left), room)
        if not count:
            break
        new = job.state is None
        try:
            with engine.blamed():
                state = job.state = job.state or engine.copied(job.session.state)
                state.reserve(count)
        except DoesNotFit:  # what goes into this sweep makes room for the next one
            if not runs:
                raise
            if new:
                job.state = None
            break
        jobs.append(job)
        runs.append(Run(state, job.left[:count], keep=count))
        room -= count

    def emit(run: int, position: int, logits: torch.Tensor) -> None:
        job = jobs[run]
        for row in logits.numpy():
            job.logs.append(log_probability(row, job.tokens[len(job.logs)]))

    engine.run(runs, emit)
    for job, run in zip(jobs, runs, strict=True):
        if run.error is not None:
            raise run.error
        del job.left[: len(run.tokens)]
        if not job.left:
            job.state = None
            waiting.remove(job)


def _choice(labels: Sequence[str], jobs: Iterable[_Job]) -> Choice:
    """The scores of one prompt.  ``fsum`` is exact, so the order of labels changes no bit."""
    jobs = list(jobs)
    sums = [math.fsum(job.logs) for job in jobs]
    for label, total in zip(labels, sums, strict=True):
        if not math.isfinite(total):
            raise NumericError(
                f"The likelihood of label {label!r} is {total}.",
                "Check the model's files: k3offload check MODEL --full.",
            )
    weights = [math.exp(total - max(sums)) for total in sums]
    whole = math.fsum(weights)
    return Choice(
        tuple(
            LabelScore(label, job.tokens, total, weight / whole)
            for label, job, total, weight in zip(labels, jobs, sums, weights, strict=True)
        )
    )
