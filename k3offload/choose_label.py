"""Which of some given labels follows a prompt best: their likelihoods, and nothing is generated.

Each prompt is computed once.  Its last row says how likely the first token of every label is; a
label of one token needs no more.  The others go on from copies of the prompt's state, and ride in
the sweeps in which other prompts are computed, as many at a time as memory allows.

A label is always computed in one piece behind its prompt.  Labels that begin alike share no work:
a piece that two of them share would be cut where the others tell, and its bits would depend on
them.  So no score depends on the other labels or prompts, their order, or on memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from .errors import DoesNotFit, K3Error, NumericError, UsageError
from .generate import Done, Request
from .sampling import log_probability
from .session import Session, checked_ids

if TYPE_CHECKING:
    from .engine import Engine
    from .tokenizer import Tokenizer

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


class Labels:
    """``labels`` and their tokens, with those of ``end`` behind each; see ``score_labels``.

    Raises ``UsageError`` for what cannot be compared.
    """

    def __init__(
        self, tokenizer: Tokenizer, labels: Sequence[str], end: str | Sequence[int] = ()
    ) -> None:
        try:
            ids = checked_ids(
                tokenizer.encode(end) if isinstance(end, str) else end, tokenizer.vocab
            )
        except UsageError as error:
            raise UsageError(f"The end of labels: {error.problem}", error.remedy) from error
        self.tokens = _tokens(tokenizer, labels, ids)
        self.texts = tuple(labels)
        self.longest = max(map(len, self.tokens))
        self.copies = sum(len(ids) > 1 for ids in self.tokens)  # that a prompt needs, one by one

    def choice(self, logs: Sequence[Sequence[float]]) -> Choice:
        """The scores from the logarithms of all tokens of each label; raises ``NumericError``.

        ``fsum`` is exact, so the order of labels changes no bit.
        """
        sums = [math.fsum(own) for own in logs]
        for label, total in zip(self.texts, sums, strict=True):
            if not math.isfinite(total):
                raise NumericError(
                    f"The likelihood of label {label!r} is {total}.",
                    "Check the model's files: k3offload check MODEL --full.",
                )
        weights = [math.exp(total - max(sums)) for total in sums]
        whole = math.fsum(weights)
        return Choice(
            tuple(
                LabelScore(label, ids, total, weight / whole)
                for label, ids, total, weight in zip(
                    self.texts, self.tokens, sums, weights, strict=True
                )
            )
        )


@dataclass(frozen=True)
class Chosen(Done):
    """All labels of a request are scored; ``text`` is the best one."""

    choice: Choice = Choice(())


@dataclass(eq=False)
class _Scoring:
    """A prompt, and what is known of its labels."""

    number: int
    session: Session
    begin: int  # tokens that were computed before
    logs: list[list[float]] = field(default_factory=list)  # of each label; none before the prompt
    left: deque[int] = field(default_factory=deque)  # labels that go on from a copy still to make
    copies: list[Session] = field(default_factory=list)

    def first(self, labels: Labels) -> None:
        """The prompt is computed: score the first token of all labels."""
        row = self.session.logits()
        self.logs = [[log_probability(row, ids[0])] for ids in labels.tokens]
        self.left.extend(i for i, ids in enumerate(labels.tokens) if len(ids) > 1)

    def copy(self, labels: Labels) -> None:
        """Begin with the rest of a label; its last token is never computed.  ``DoesNotFit``."""
        copy = self.session.fork()
        label = self.left.popleft()
        ids, logs = labels.tokens[label], self.logs[label]
        copy.append(ids[:-1])
        copy.on_rows = partial(_score, ids, logs)
        self.copies.append(copy)


def _score(ids: Sequence[int], logs: list[float], rows: torch.Tensor) -> None:
    first = len(logs)
    logs += [log_probability(row, ids[first + i]) for i, row in enumerate(rows.numpy())]


class LabelLoop:
    """Takes the place of ``generate.Loop`` where labels are scored: prompts of some requests and
    labels of others share each sweep, and every request ends with ``Chosen``, or an error.

    ``places``: requests at a time, so many that what they and ``room`` copies of their states take
    is planned for.  While half of them are computed, the labels of the others are.
    """

    def __init__(self, engine: Engine, labels: Labels, places: int | None = None) -> None:
        self._engine, self._labels = engine, labels
        most = engine.options.sessions
        self.places = max(1, 2 * most // (2 + labels.copies)) if places is None else places
        self._room = max(1, most - self.places)
        self._active: dict[int, _Scoring] = {}

    def add(self, number: int, request: Request) -> str:
        """As ``Loop.add``; only the session of ``request`` counts, and is left as it is."""
        session = request.session
        if not session.length:
            raise UsageError("The session has no tokens.", "Append a prompt first.")
        self._engine.check_context(session.length + self._labels.longest)
        self._active[number] = _Scoring(number, session, session.position)
        return ""

    def drop(self, number: int) -> None:
        """Request ``number`` is no longer wanted."""
        scoring = self._active.pop(number, None)
        for copy in scoring.copies if scoring else ():
            copy.close()

    def close(self) -> None:
        """None of the requests is."""
        for number in list(self._active):
            self.drop(number)

    def __len__(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> list[Session]:
        """The sessions that the next sweep is for: labels first, they make room."""
        every = [copy for a in self._active.values() for copy in a.copies]
        every += [a.session for a in self._active.values()]
        return [session for session in dict.fromkeys(every) if session.needs_work]

    def step(self) -> Iterator[Done]:
        """One sweep; then the requests that are done."""
        waiting = self.waiting
        failed = self._engine.sweep(waiting) if waiting else {}
        goes_on = len(failed) < len(waiting)
        for a in list(self._active.values()):
            errors = [failed[s] for s in (a.session, *a.copies) if s in failed]
            # what fits later is tried again, but not beside one that is lost
            errors.sort(key=lambda error: isinstance(error, DoesNotFit))
            error = errors[0] if errors else None
            if isinstance(error, DoesNotFit) and goes_on:
                error = None  # it is tried again: what has ended makes room
            goes_on = goes_on or error is not None
            if (event := self._event(a, error)) is not None:
                self.drop(a.number)
                yield event
        yield from self._copy()

    def _event(self, a: _Scoring, error: K3Error | None) -> Done | None:
        """How ``a`` has ended, if it has, after a sweep in which it met ``error``."""
        reused = max(a.begin, a.session.reused)
        if error is None and a.session.needs_work:
            return None
        try:
            if error is not None:
                raise error
            if not a.logs:
                a.first(self._labels)
            for copy in [copy for copy in a.copies if not copy.needs_work]:
                a.copies.remove(copy)
                copy.close()
            if a.left or a.copies:
                return None
            choice = self._labels.choice(a.logs)
        except K3Error as wrong:
            return Done(a.number, "error", "", 0, wrong.with_traceback(None), reused)
        return Chosen(a.number, "label", choice.best.label, 0, None, reused, choice)

    def _copy(self) -> Iterator[Done]:
        """Make copies for labels, as far as there is room; a request for which there never is one
        ends."""
        for a in list(self._active.values()):
            while a.left and sum(len(b.copies) for b in self._active.values()) < self._room:
                try:
                    a.copy(self._labels)
                except K3Error as error:
                    if isinstance(error, DoesNotFit) and self.waiting:
                        return  # what goes into the next sweep makes room
                    self.drop(a.number)
                    yield Done(a.number, "error", "", 0, error.with_traceback(None))
                    break


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
    known = Labels(engine.tokenizer, labels, end)
    together = max(1, engine.options.sessions // (1 + known.copies))
    given = _ids_or_sessions(engine, prompts, known.longest)
    loop, choices = LabelLoop(engine, known, together), dict[int, Choice]()
    for first in range(0, len(given), together):
        with ExitStack() as opened:
            opened.callback(loop.close)
            for i, prompt in enumerate(given[first : first + together], first):
                loop.add(i, Request(_session(engine, prompt, opened)))
            while len(loop):
                for done in loop.step():
                    if done.error is not None:
                        raise done.error
                    assert isinstance(done, Chosen)
                    choices[done.request] = done.choice
    return [choices[i] for i in range(len(given))]


def _tokens(
    tokenizer: Tokenizer, labels: Sequence[str], end: Sequence[int]
) -> list[tuple[int, ...]]:
    """The ids of every label with ``end`` behind, after making sure that they can be compared."""
    if isinstance(labels, str) or not labels or not all(isinstance(x, str) and x for x in labels):
        raise UsageError(f"The labels are {labels!r:.60}.", "Give a list of non-empty strings.")
    tokens = [(*tokenizer.encode(label), *end) for label in labels]
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
