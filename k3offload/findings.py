"""Findings: what a look at a model folder brings up, collected or raised.

This file knows levels and wording helpers.  It knows nothing of files or models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from .errors import CheckpointError

Level = Literal["error", "warning", "note"]
COUNTED: Final = 1_000_000  #: more of one kind are not even counted
NAMED: Final = 20  #: findings of one kind that are named one by one


class Finding(NamedTuple):
    """One thing found: how bad, what it is (naming file or tensor), and what to do about it."""

    level: Level
    what: str
    remedy: str


class Report:
    """Collects findings; when ``strict``, the first error is raised as ``CheckpointError``."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.findings: list[Finding] = []

    def error(self, what: str, remedy: str) -> None:
        """Something that keeps the model from being run."""
        if self.strict:
            raise CheckpointError(what, remedy)
        self.findings.append(Finding("error", what, remedy))

    def warn(self, what: str, remedy: str) -> None:
        """Something wrong that does not touch text generation."""
        self.findings.append(Finding("warning", what, remedy))

    def note(self, what: str, remedy: str = "") -> None:
        """Something to know."""
        self.findings.append(Finding("note", what, remedy))

    def each(self, level: Level, whats: Iterable[str], remedy: str) -> None:
        """One finding for each of the first ``NAMED`` texts, and one that counts the rest."""
        stream = iter(whats)
        for what in itertools.islice(stream, NAMED):
            if level == "error":
                self.error(what, remedy)
            else:
                self.findings.append(Finding(level, what, remedy))
        rest = sum(1 for _ in itertools.islice(stream, COUNTED))
        if rest:
            most = "at least " if rest == COUNTED else ""
            self.findings.append(Finding(level, f"... and {most}{rest} more of this kind.", remedy))


def count_of(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listing(names: Iterable[str], limit: int = NAMED) -> str:
    """``a, b, c and 4 more``."""
    every = list(names)
    text = ", ".join(every[:limit])
    return text if len(every) <= limit else f"{text} and {len(every) - limit} more"
