"""Two files of benchmark results, figure by figure: medians, what the noise allows, a verdict.

A file has a JSON object a line, as the commands of ``bench`` and ``benchmarks/`` write them: facts
of the machine, settings and figures.  Lines with the same benchmark and settings are repetitions of
one another, and only those of both files are compared.  A line of the commands names its settings
(``bench_frame.py``).  In others they are texts, truth values and whole numbers of the line itself;
fractions are figures, but for those of ``FRACTIONS``, and so is what ``MEASURED`` names.  Every
number further inside is a figure; a list of numbers counts as its median.

The interval of a ratio is that of its bootstrap: each side's lines are drawn again, as many as
there are, with replacement, and so often that the middle ``SURE`` of the ratios of medians can be
told.  The figures differ if 1 is not in it.  Fewer than ``ENOUGH`` lines of a side tell nothing.
What was counted and not timed needs no interval: it differs if any of it does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .bench_frame import SCHEMA, VERSION
from .errors import UsageError

SURE: Final = 0.95
DRAWS: Final = 4000
ENOUGH: Final = 5  #: lines; of 4, chance alone parts two sides 9 times in 100, of 5 or more 2 to 5
TIMED: Final = ("replay_seconds",)  #: of lines of counts
MANY: Final = 3  #: values of a fact that a note names
MEASURED: Final = re.compile(
    "bytes|rss|seconds|reads|sweeps|misses|hits|slots|rows_of_a_sweep|not_in_ram|distinct"
    "|^late$|prefetch|resident"
)
#: what is said of a machine and a run, and is neither setting nor figure
FACTS: Final = (
    "cpu", "commit", "date", "processors", "cgroup_processors", "cgroup_memory", "clean",
    "background", "version", "path", "computed_by", "memory", "system", "torch",
)  # fmt: skip
#: the same of lines that name their settings
FRAME: Final = ("schema", "schema_version", "settings", "repeat", "seed", "counts")
FRACTIONS: Final = ("cache", "save_every")  #: settings, though they are no whole numbers
_TOLD: Final = (
    "cpu", "processors", "memory", "cgroup_processors", "cgroup_memory", "system", "torch",
    "computed_by",
)  # fmt: skip
DIFFERS, SAME, FEW = "differs", "no difference seen", "too few lines"

Line = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One file's lines of a kind: how many, how many of them beside others, and the medians."""

    lines: int
    contended: int
    unknown: int  #: lines that do not say whether they were


@dataclass(frozen=True)
class Figure:
    """One figure of a kind; ``low`` and ``high`` bound ``ratio``, None with too few lines."""

    name: str
    a: float
    b: float
    ratio: float | None  #: b over a; None where a is 0
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True)
class Kind:
    """The lines of one benchmark with one choice of settings."""

    settings: dict[str, Any]
    a: Side
    b: Side
    figures: tuple[Figure, ...]
    counted: bool = False  #: all but ``TIMED``, so that there is no noise


@dataclass(frozen=True)
class Comparison:
    """``only_a``, ``only_b``: settings of lines that the other file has none of."""

    kinds: tuple[Kind, ...]
    only_a: tuple[dict[str, Any], ...]
    only_b: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(a: Path, b: Path, *, clean: bool = False, seed: int = 0) -> Comparison:
    """Compare the files ``a`` and ``b``; with ``clean``, without the lines of contended runs.

    Raises ``UsageError`` for what is no file of results, and where the files have no kind of line
    in common.
    """
    if seed < 0:
        raise UsageError(f"The seed is {seed}.", "Give 0 or more.")
    sides = [by_kind(path, clean) for path in (a, b)]
    for path, side in zip((a, b), sides, strict=True):
        if clean and not side:
            raise UsageError(
                f"{path} has no lines of clean runs.", "Leave --clean out, or measure with --wait."
            )
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        had = [", ".join(sorted({_name(key) for key in side})) or "nothing" for side in sides]
        why = "with other settings" if had[0] == had[1] else "which are of different kinds"
        raise UsageError(
            f"{a} has lines of {had[0]} and {b} of {had[1]}, {why}.",
            "Only repetitions of one benchmark with the same settings can be compared.",
        )
    draw = np.random.default_rng(seed)
    kinds = []
    for key in common:
        lines = [side[key] for side in sides]
        values = [samples(own) for own in lines]
        counted = all(line.get("counts") is True for side in lines for line in side)
        figures = []
        for name in (name for name in values[0] if name in values[1]):
            both = values[0][name], values[1][name]
            exact = counted and name not in TIMED
            figures.append(_counted(name, *both) if exact else _figure(name, *both, draw))
        own = _side(lines[0]), _side(lines[1])
        kinds.append(Kind(json.loads(key), *own, tuple(figures), counted))
    rest = [
        tuple(json.loads(k) for k in one if k not in other) for one, other in (sides, sides[::-1])
    ]
    every = [[line for key in common for line in side[key]] for side in sides]
    notes = dict.fromkeys(
        note for key in common for note in _unlike(_name(key), [side[key] for side in sides])
    )
    return Comparison(tuple(kinds), rest[0], rest[1], (*notes, *_notes(every)))


def by_kind(path: Path, clean: bool) -> dict[str, list[Line]]:
    """Settings, as JSON -> the lines that have them."""
    found: dict[str, list[Line]] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("it is no object")
            _check_schema(line)
        except ValueError as error:  # UnicodeDecodeError is one
            raise UsageError(
                f"Line {number} of {path} is no result: {error}.",
                "Give files as benchmarks/results has them: a JSON object a line.",
            ) from error
        if clean and _contended(line):
            continue
        found.setdefault(json.dumps(_settings(line), sort_keys=True), []).append(line)
    return found


def _check_schema(line: Line) -> None:
    """Raises ``ValueError`` for a line of a schema of ours that is not this version's."""
    if "schema" not in line:
        return
    if (line["schema"], line.get("schema_version")) != (SCHEMA, VERSION):
        raise ValueError(f"it has schema {line['schema']!r} {line.get('schema_version')}")
    named = line.get("settings")
    if not isinstance(named, list) or not all(isinstance(n, str) and n in line for n in named):
        raise ValueError("it lacks settings that it names")


def _settings(line: Line) -> dict[str, Any]:
    if "schema" in line:
        return {name: line[name] for name in ("benchmark", *line["settings"]) if name in line}
    return {
        name: value
        for name, value in line.items()
        if name not in FACTS and (value is None or isinstance(value, str | bool | int | float))
        if not isinstance(value, float) or name in FRACTIONS
        if isinstance(value, str) or not MEASURED.search(name)
    }


def _name(key: str) -> str:
    return str(json.loads(key).get("benchmark", "no named benchmark"))


def samples(lines: Sequence[Line]) -> dict[str, list[float]]:
    """Figure -> its value in each line that has it."""
    found: dict[str, list[float]] = {}
    for line in lines:
        known = {*_settings(line), *FACTS, *(FRAME if "schema" in line else ())}
        for name, value in line.items():
            if name not in known:
                for path, number in _numbers(name, value):
                    found.setdefault(path, []).append(number)
    return found


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        if math.isfinite(value):
            yield path, float(value)
    elif isinstance(value, dict):
        for name, inside in value.items():
            yield from _numbers(f"{path}.{name}", inside)
    elif isinstance(value, list):
        numbers = [x for x in value if isinstance(x, int | float) and not isinstance(x, bool)]
        if numbers and len(numbers) == len(value):
            yield from _numbers(path, float(np.median(numbers)))
            return
        for i, inside in enumerate(value):
            yield from _numbers(f"{path}.{i}", inside)


def _counted(name: str, a: list[float], b: list[float]) -> Figure:
    """The same of what is the same in every run."""
    middle = float(np.median(a)), float(np.median(b))
    ratio = middle[1] / middle[0] if middle[0] else None
    return Figure(name, *middle, ratio, None, None, SAME if set(a) == set(b) else DIFFERS)


def _figure(name: str, a: list[float], b: list[float], draw: np.random.Generator) -> Figure:
    """The verdict on one figure, of a value for each line."""
    middle = float(np.median(a)), float(np.median(b))
    ratio = middle[1] / middle[0] if middle[0] else None
    if min(len(a), len(b)) < ENOUGH:
        return Figure(name, *middle, ratio, None, None, FEW)
    drawn = [_medians(np.array(values), draw) for values in (a, b)]
    edges = [(1 - SURE) / 2, (1 + SURE) / 2]
    if ratio is None or (drawn[0] <= 0).any():  # then the difference says it
        low, high = np.quantile(drawn[1] - drawn[0], edges)
        return Figure(name, *middle, ratio, None, None, SAME if low <= 0 <= high else DIFFERS)
    low, high = map(float, np.quantile(drawn[1] / drawn[0], edges))
    return Figure(name, *middle, ratio, low, high, SAME if low <= 1 <= high else DIFFERS)


def _medians(values: Any, draw: np.random.Generator) -> Any:
    """Medians of ``DRAWS`` samples of ``values`` with replacement."""
    return np.median(draw.choice(values, (DRAWS, len(values))), axis=1)


def _side(lines: Sequence[Line]) -> Side:
    unknown = sum(line.get("clean") is None for line in lines)
    return Side(len(lines), sum(map(_contended, lines)), unknown)


def _contended(line: Line) -> bool:
    """Whether others made its times what they are; what is counted is the same in company."""
    return line.get("clean") is False and not line.get("counts")


def _unlike(name: str, sides: Sequence[Sequence[Line]]) -> Iterator[str]:
    """What makes lines of one kind other than repetitions: inputs, and figures of one side."""
    seeds = [sorted({line["seed"] for line in side if "schema" in line}) for side in sides]
    if all(seeds) and seeds[0] != seeds[1]:
        a, b = map(_range, seeds)
        yield f"{name}: seed is {a} in A and {b} in B, so that inputs are not the same"
    had = [samples(side) for side in sides]
    for side, own, other in (("A", *had), ("B", *had[::-1])):
        alone = [figure for figure in own if figure not in other]
        if alone:
            yield f"{name}: only lines of {side} have {_some(alone)}"


def _notes(sides: Sequence[Sequence[Line]]) -> Iterator[str]:
    """What makes the sides different beside what is compared, and why lines are marked."""
    for name in (*_TOLD, "version", "commit"):
        found = [sorted({str(line[name]) for line in side if name in line}) for side in sides]
        a, b = map(_some, found)
        if name in _TOLD and all(found) and found[0] != found[1]:
            yield f"{name} is {a} in A and {b} in B"
        for side, had in zip("AB", found, strict=True):
            if len(had) > 1:
                yield f"{side} has lines of more than one {name}, taken together: {_some(had)}"
    for side, lines in zip("AB", sides, strict=True):
        reasons = [
            reason
            for line in lines
            if _contended(line)
            for reason in line.get("background", {}).get("reasons", ["nobody says why"])
        ]
        if reasons:
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            yield f"contended in {side} (--clean leaves such lines out): {reasons[0]}{more}"


def _range(seeds: Sequence[int]) -> str:
    first, last = seeds[0], seeds[-1]
    if 0 < last - first == len(seeds) - 1:
        return f"{first} to {last}"
    return _some([str(seed) for seed in seeds])


def _some(values: Sequence[str]) -> str:
    more = f" and {len(values) - MANY} more" if len(values) > MANY else ""
    return ", ".join(values[:MANY]) + more
