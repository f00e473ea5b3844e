"""What the commands of ``bench`` share: options, where lines go, and how a contended run ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from . import __version__
from .bench_frame import Frame, Line, Often, grouped, median
from .cli_options import at_least_one, not_below_0
from .errors import UsageError
from .find import find_model, find_output, named
from .progress import Progress, write_out

CONTENDED = 4  #: exit code of a run whose times are not those of this machine alone

Repeats = Annotated[int, typer.Option(help="Times that each case is measured.")]
Seed = Annotated[int, typer.Option(help="Draws the inputs of the first repeat; 1 more each.")]
AsLines = Annotated[bool, typer.Option("--json", help="On stdout a line of JSON for each repeat.")]
Out = Annotated[
    Path | None, typer.Option("-o", "--out", help="Append these lines to a file, for compare.")
]
LAYER: Final = (  # of every command that has --layer
    "Seconds of computing in a layer before its experts are known, 0.002 if unset; each of them "
    "takes a tenth of it."
)


class Bench(NamedTuple):
    """The options of every benchmark, as they are typed."""

    repeats: Repeats = 5
    warmup: Annotated[int, typer.Option(help="Times before that, which do not count.")] = 1
    seed: Seed = 0
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for an idle machine before each repeat.")
    ] = 0.0
    out: Out = None
    as_json: AsLines = False

    def often(self) -> Often:
        """Raises ``UsageError``."""
        at_least_one(("--repeats", self.repeats))
        not_below_0(("--warmup", self.warmup), ("--seed", self.seed))
        if not 0 <= self.wait < 1e6:
            raise UsageError(f"--wait is {self.wait}.", "Give seconds, 0 or more.")
        return Often(self.repeats, self.warmup, self.seed, self.wait)


@contextmanager
def framed(
    name: str,
    bench: Bench,
    meanings: Mapping[str, str],
    progress: Progress,
    *,
    model: str | None = None,
    timed: bool = True,
    table: Callable[[Frame], str] = Frame.table,
) -> Iterator[Frame]:
    """The frame of one run.  Its lines go where ``bench`` says, each as soon as it is there; a
    ``table`` to stdout in the end if they do not go there.  Exits with ``CONTENDED`` where the
    machine was not this process's alone."""
    often, place = bench.often(), None
    if not timed:
        often = replace(often, warmup=0)
    if bench.out is not None:
        folder = Path(__file__).parent if model is None else find_model(model)
        place = find_output(bench.out, folder)

    def emit(line: Line) -> None:
        progress.clear()
        text = json.dumps(line)
        if bench.as_json:
            write_out(text)
        if place is not None:
            with named(place), place.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    frame = Frame(
        name, __version__, often, meanings, emit=emit, show=progress.show, timed=timed
    )  # fmt: skip
    yield frame
    progress.clear()
    if not bench.as_json:
        write_out(table(frame))
    else:
        progress.say(frame.verdict())
    if frame.contended:
        raise typer.Exit(CONTENDED)


def rows_by_trace(
    frame: Frame, figures: Sequence[str], row: Callable[[Line, bool, int], list[str]]
) -> list[str]:
    """For each case what ``row`` makes of the medians of ``figures`` (None where no repeat has
    it), whether it is the first of its trace, and the number of repeats."""
    rows, seen = [], ""
    for _, lines in grouped(frame.lines):
        middle = dict(lines[0])
        for name in figures:
            there = [line for line in lines if line[name] is not None]
            middle[name] = median(there, name) if there else None
        rows += row(middle, middle["path"] != seen, len(lines))
        seen = middle["path"]
    return rows


def warnings(progress: Progress) -> Any:
    """Loading says nothing but its warnings."""
    from .options import Watch

    return Watch(warn=lambda line: progress.say(f"warning: {line}"))
