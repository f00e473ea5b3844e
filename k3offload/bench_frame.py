"""The frame of all commands of ``bench``: repeats, seeds, warm-up, who else used the machine.

A benchmark gives it cases, each with settings and a function that measures them once from a seed;
the frame calls that so often, watches the machine meanwhile, and makes a line of JSON of each
repeat, which ``bench_compare`` reads.  Knows nothing of models.  A line (``SCHEMA``, ``VERSION``):

* ``benchmark``, ``version`` of the package, ``cpu``, ``commit``, ``date``, ``memory`` in bytes,
  ``system``, ``torch``, ``processors``, ``cgroup_processors``, ``cgroup_memory``;
* ``settings``: the names of the fields that are settings.  Lines of one benchmark with the same
  settings are repeats of one another;
* ``repeat``, from 0, and the ``seed`` that its inputs were drawn with;
* figures: every other number, and those inside of tables;
* ``clean``: whether nobody else used the machine, ``background``: how that is known.  ``counts``
  stands in lines whose figures are counted and not timed, so that company changes none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from .contention import Alone, Background, machine
from .errors import K3Error

SCHEMA: Final = "k3offload-bench"
VERSION: Final = 1

Line = dict[str, Any]
Measure = Callable[[int], dict[str, Any]]  #: seed -> figures


@dataclass(frozen=True)
class Often:
    """``warmup`` runs that do not count, then ``repeats`` with the seeds from ``seed`` on; before
    each up to ``wait`` seconds until the machine is idle."""

    repeats: int = 5
    warmup: int = 1
    seed: int = 0
    wait: float = 0.0


class Spread(NamedTuple):
    """Of the repeats' values of a figure: the median, and the quartiles around it."""

    median: float
    low: float
    high: float


class Frame:
    """The lines of one run of ``benchmark``.

    ``meanings``: figure -> what it is, those of the table in its order; ``emit``: told each line as
    soon as it is there; ``timed``: whether any figure is a time.
    """

    def __init__(
        self,
        benchmark: str,
        version: str,
        often: Often,
        meanings: Mapping[str, str],
        *,
        emit: Callable[[Line], None] = lambda line: None,
        show: Callable[[str], None] = lambda text: None,
        timed: bool = True,
    ) -> None:
        self.benchmark, self.often, self.timed, self.show = benchmark, often, timed, show
        self.lines: list[Line] = []
        self.notes: list[str] = []
        self.about: dict[str, Any] = {}  #: facts of all lines, no settings
        self._meanings, self._emit = meanings, emit
        self._machine = {"version": version, **machine()}

    def case(self, settings: Mapping[str, Any], measure: Measure) -> list[Line]:
        """Repeat ``measure`` and return the lines of the repeats that count."""
        often, name = self.often, told(settings)
        for i in range(often.warmup):
            self.show(f"{name}: warm-up {i + 1} of {often.warmup}")
            measure(often.seed)
        made = []
        for i in range(often.repeats):
            self.show(f"{name}: {i + 1} of {often.repeats}")
            watch = Alone(often.wait) if self.timed else Background()
            figures = measure(often.seed + i)
            made.append(self.add(settings, figures, watch.read(), i))
        return made

    def add(
        self, settings: Mapping[str, Any], figures: Mapping[str, Any], found: Mapping[str, Any],
        repeat: int = 0,
    ) -> Line:  # fmt: skip
        """One line; ``found`` is what a watch has read."""
        names = {**settings, "warmup": self.often.warmup} if self.timed else settings
        line = {
            "schema": SCHEMA, "schema_version": VERSION, "benchmark": self.benchmark,
            **self._machine, **self.about, "settings": list(names), **names, "repeat": repeat,
            "seed": self.often.seed + repeat, **figures, **found,
        }  # fmt: skip
        if not self.timed:
            line["counts"] = True
        json.dumps(line, allow_nan=False)  # whatever is no JSON is a bug of the benchmark
        self.lines.append(line)
        self._emit(line)
        return line

    @property
    def contended(self) -> list[Line]:
        """Lines of times that are not those of this machine alone."""
        return [line for line in self.lines if self.timed and not line["clean"]]

    def verdict(self) -> str:
        """One line: whether the run was clean, which it is only if every repeat was."""
        if not self.timed:
            return "counted, not timed: who else uses the machine changes nothing"
        if not self.lines:
            return "nothing was measured"
        if not self.contended:
            return f"clean: nobody else used the machine in any of {len(self.lines)} repeats"
        reasons = [r for line in self.contended for r in line["background"]["reasons"]]
        more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        return (
            f"CONTENDED in {len(self.contended)} of {len(self.lines)} repeats, so that its times "
            f"say little: {reasons[0]}{more}"
        )

    def table(self) -> str:
        """For each case its figures that have a meaning: median, quartiles, spread."""
        cases = grouped(self.lines)
        first = cases[0][0] if cases else {}
        common = {n: v for n, v in first.items() if all(own.get(n, self) == v for own, _ in cases)}
        rows = [f"{self.benchmark}: {told(common)}"]
        for settings, lines in cases:
            own = told({n: v for n, v in settings.items() if n not in common})
            rows.append(f"{own}{': ' if own else ''}{len(lines)} repeats")
            for name, meaning in self._meanings.items():
                values = [line[name] for line in lines if line.get(name) is not None]
                if values:
                    rows.append(_row(name, spread(values), meaning))
        rows.append("columns: median, lower and upper quartile, their distance over the median")
        notes = [f"note: {note}" for note in dict.fromkeys(self.notes)]
        return "\n".join([*rows, *notes, self.verdict()])


def _row(name: str, s: Spread, meaning: str) -> str:
    """A row of the table."""
    part = f"{(s.high - s.low) / abs(s.median):8.1%}" if s.median else f"{'-':>8}"
    return f"  {name:18}{s.median:12.5g}{s.low:12.5g}{s.high:12.5g}{part}  {meaning}"


def told(settings: Mapping[str, Any]) -> str:
    """Settings as a person reads them; those that are None say nothing."""
    parts = [f"{name} {value}" for name, value in settings.items() if value is not None]
    return ", ".join(parts)


def grouped(lines: Sequence[Line]) -> list[tuple[dict[str, Any], list[Line]]]:
    """Lines by their settings, in the order in which those came."""
    found: dict[str, tuple[dict[str, Any], list[Line]]] = {}
    for line in lines:
        own = {name: line[name] for name in line["settings"]}
        found.setdefault(json.dumps(own, sort_keys=True), (own, []))[1].append(line)
    return list(found.values())


def spread(values: Sequence[float]) -> Spread:
    low, middle, high = np.quantile(np.array(values, float), (0.25, 0.5, 0.75))
    return Spread(float(middle), float(low), float(high))


def median(lines: Sequence[Line], name: str) -> float:
    """Of one figure of ``lines``."""
    return float(np.median([line[name] for line in lines]))


def must_be(what: str, found: float, expected: float, slack: float = 0) -> None:
    """Raise ``K3Error`` where two accounts of one thing differ: then no figure can be believed."""
    if abs(found - expected) > slack:
        raise K3Error(
            f"The accounts of this run differ: {what} is {found:,} and must be {expected:,}.",
            "Nothing was measured. This is a bug of k3offload: please report the command.",
        )
