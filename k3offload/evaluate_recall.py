"""Whether a fact is still known after much text: its likelihood where it was told and where not.

Facts (``the keeper of the gate was called Zebulun.``) are planted at the head, in the middle and at
the tail of a text, and asked for at its end.  Nothing is generated: each trial makes the same text
twice, with other names in the facts, and computes how likely each text makes its own name and the
other's.  What a name's likelihood owes to the name or to the text falls out of the difference; what
is left in nats is what telling it did.  The fact counts as known when that is more than nothing, so
whoever knows nothing is right every other time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from .damage import held_out_text
from .engine import Engine
from .errors import UsageError
from .loading import open_engine
from .model import Run
from .sampling import log_probability
from .session import Session
from .spec import ModelSpec
from .tokenizer import Tokenizer

Floats = npt.NDArray[np.float64]
PLACES: Final = ("head", "middle", "tail")
WHO: Final = ("the keeper of the gate", "the captain of the ships", "the builder of the wall")
NAMES: Final = (
    "Zebulun", "Gideon", "Naphtali", "Absalom", "Hezekiah", "Jonathan", "Ephraim", "Barnabas",
)  # fmt: skip
LEAST: Final = 256  #: tokens of the shortest context
BEHIND: Final = 64  #: of a question and a name, at most
CHANCE: Final = 0.5


@dataclass(frozen=True)
class Recall:
    """What is known of facts at ``place`` of a context of ``context`` tokens."""

    context: int
    place: str
    trials: int
    known: float  #: share of the trials in which telling a name made it likelier than the other
    lead: float  #: nats by which it did, mean

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__}


def recall(
    model: str | Path,
    *,
    longest: int = 4096,
    trials: int = 8,
    text: str | None = None,
    seed: int = 0,
    show: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Recall]:
    """Measure contexts of 256 tokens and their doublings up to ``longest``, ``trials`` of each.

    ``text`` fills them, over and over if it is shorter.  ``options`` are those of ``load`` but for
    sizes.  Raises ``UsageError`` for a text or a context that is too short, and whatever loading
    raises.
    """
    words = held_out_text() if text is None else text
    filler: list[int] = []
    if longest < LEAST:
        raise UsageError(f"The longest context is {longest}.", f"Give {LEAST} or more.")
    if seed < 0:
        raise UsageError(f"The seed is {seed}.", "Give 0 or more.")
    lengths = [LEAST << i for i in range(int(math.log2(longest / LEAST)) + 1)]

    def sizes(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int]:
        filler[:] = tokenizer.encode(words)
        if not filler:
            raise UsageError("The text is empty.", "Give a longer one.")
        spec.check_context(lengths[-1] + BEHIND)
        return {"context": lengths[-1] + BEHIND, "sessions": len(NAMES) + 2}

    found, draw = [], np.random.default_rng(seed)
    with open_engine(model, sizes, **options) as engine:
        for length in lengths:
            leads = np.empty((trials, len(PLACES)))
            for trial in range(trials):
                show(f"{length:,} tokens, trial {trial + 1} of {trials}")
                start, names = int(draw.integers(len(filler))), draw.permutation(len(NAMES))
                leads[trial] = _trial(engine, filler, start, length, names)
            for place, own in zip(PLACES, leads.T, strict=True):
                known, lead = float((own > 0).mean()), float(own.mean())
                found.append(Recall(length, place, trials, known, lead))
    return found


def knee(found: Sequence[Recall]) -> int | None:
    """The shortest context in which less than half of what is known best, beyond guessing, is
    known; None if that is nowhere, or if guessing could explain what is known at best."""
    shares = {
        length: (float(np.mean([r.known for r in rows])), sum(r.trials for r in rows))
        for length, group in itertools.groupby(found, key=lambda r: r.context)
        for rows in [list(group)]
    }
    best, count = max(shares.values())
    if best < CHANCE + 3 * math.sqrt(CHANCE * (1 - CHANCE) / count):
        return None
    top = next(length for length, (share, _) in shares.items() if share == best)
    fallen = (
        n for n, (share, _) in shares.items() if n > top and share - CHANCE < (best - CHANCE) / 2
    )
    return next(fallen, None)


def _context(
    engine: Engine, filler: Sequence[int], start: int, length: int, names: Sequence[int]
) -> list[int]:
    """``length`` tokens of ``filler`` from ``start``, the three facts in their places."""
    facts = [
        engine.encode(f" And {who} was called {NAMES[n]}.")
        for who, n in zip(WHO, names, strict=True)
    ]
    room = length - sum(len(fact) for fact in facts)
    cuts = [0, room // 32, room // 2, room - room // 32, room]
    text = list(itertools.islice(itertools.cycle(filler), start, start + room))
    made = text[: cuts[1]]
    for fact, begin, end in zip(facts, cuts[1:], cuts[2:], strict=False):
        made += fact + text[begin:end]
    return made


def _trial(
    engine: Engine, filler: Sequence[int], start: int, length: int, names: npt.NDArray[np.int64]
) -> Floats:
    """For each place: nats that telling a name adds to it, against the other text's name."""
    told = names[: len(PLACES)], names[len(PLACES) : 2 * len(PLACES)]
    one, other = (_ask(engine, _context(engine, filler, start, length, t.tolist())) for t in told)
    place = np.arange(len(PLACES))
    gained = one[place, told[0]] - other[place, told[0]]
    lost = one[place, told[1]] - other[place, told[1]]
    leads: Floats = (gained - lost) / 2
    return leads


def _ask(engine: Engine, context: Sequence[int]) -> Floats:
    """Logarithm of each name's probability behind the question for each place, [places, names]."""
    with engine.session() as session:
        session.append(context)
        session.logits()
        rows = []
        for who in WHO:
            with session.fork() as asked:
                rows.append(_scores(engine, asked, who))
    return np.stack(rows)


def _scores(engine: Engine, session: Session, who: str) -> Floats:
    """Logarithm of each name's probability behind the question ``who``, in nats, [names]."""
    session.append(engine.encode(f" And {who} was called"))
    row, begin = session.logits(), session.position
    candidates = [engine.encode(f" {name}") for name in NAMES]
    scores = np.array([log_probability(row, tokens[0]) for tokens in candidates])
    longer = [i for i, tokens in enumerate(candidates) if len(tokens) > 1]
    runs = [Run(session.state.copy(), candidates[i][:-1], len(candidates[i]) - 1) for i in longer]

    def emit(run: int, position: int, logits: torch.Tensor) -> None:
        for j, after in enumerate(logits.numpy(), position - begin):
            scores[longer[run]] += log_probability(after, candidates[longer[run]][j + 1])

    if runs:
        engine.run(runs, emit)
    for run in runs:
        if run.error is not None:
            raise run.error
    return scores
