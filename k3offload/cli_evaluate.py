"""The commands ``evaluate append`` and ``evaluate recall``: parse, call, print.

The other commands of ``evaluate`` have files of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import cli_cost, cli_operators, cli_routing
from .cli_open import read_text
from .cli_options import AsJson, How, Model, at_least_one, loading_options, takes_how
from .config import show_size
from .find import find_model, find_output
from .plot_svg import line_chart, write_chart
from .progress import Progress, loading_libraries, write_out

if TYPE_CHECKING:
    from .evaluate_append import Turn
    from .evaluate_recall import Recall
    from .options import Watch

Text = Annotated[
    Path | None, typer.Option(help="UTF-8 text; the embedded model's held-out text if unset.")
]
Plot = Annotated[Path | None, typer.Option(help="Also write a chart, SVG.")]


def add_to(app: typer.Typer) -> None:
    """Register ``evaluate`` and what it can measure."""
    group = typer.Typer(help="Measure a model.", no_args_is_help=True)
    group.command("append")(append)
    group.command("recall")(recall)
    cli_operators.add_to(group)
    cli_routing.add_to(group)
    cli_cost.add_to(group)
    app.add_typer(group, name="evaluate")


@takes_how("prefix_dir", "prefix_disk", "trace", "trace_with")
def append(
    how: How,
    model: Model,
    turns: Annotated[int, typer.Option(help="Turns of the conversation.")] = 8,
    user: Annotated[int, typer.Option(help="New tokens of each turn.")] = 200,
    reply: Annotated[int, typer.Option(help="Tokens of each reply.")] = 16,
    text: Text = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Cost of a turn with the state kept, with shared prefixes, and with all computed again."""
    at_least_one(("--turns", turns), ("--user", user), ("--reply", reply))
    with Progress() as progress:
        place, words = _places(model, plot, text, progress)
        with loading_libraries(progress):
            from .evaluate_append import append as measure
        found = measure(
            model, turns=turns, user=user, reply=reply, text=words, show=progress.show,
            watch=_warnings(progress), **loading_options(how),
        )  # fmt: skip
    if place is not None:
        write_chart(place, append_chart(found))
    write_out(json.dumps([t.to_dict() for t in found]) if as_json else append_table(found))


@takes_how("prefix_dir", "prefix_disk", "trace", "trace_with")
def recall(
    how: How,
    model: Model,
    longest: Annotated[int, typer.Option(help="Tokens of the longest context.")] = 4096,
    trials: Annotated[int, typer.Option(help="Contexts of each length.")] = 8,
    seed: Annotated[int, typer.Option(help="Deals the names.")] = 0,
    text: Text = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Whether facts at the head, middle and tail of growing contexts are still known."""
    at_least_one(("--longest", longest), ("--trials", trials))
    with Progress() as progress:
        place, words = _places(model, plot, text, progress)
        with loading_libraries(progress):
            from .evaluate_recall import knee
            from .evaluate_recall import recall as measure
        found = measure(
            model, longest=longest, trials=trials, seed=seed, text=words, show=progress.show,
            watch=_warnings(progress), **loading_options(how),
        )  # fmt: skip
    if place is not None:
        write_chart(place, recall_chart(found))
    if as_json:
        write_out(json.dumps({"knee": knee(found), "rows": [r.to_dict() for r in found]}))
    else:
        write_out(recall_table(found, knee(found)))


def _warnings(progress: Progress) -> Watch:
    """Loading says nothing but its warnings."""
    from .options import Watch

    return Watch(warn=lambda line: progress.say(f"warning: {line}"))


def append_table(found: list[Turn]) -> str:
    """A line for each turn, and what its columns are."""
    lines = [
        "         seconds to the first token     tokens computed           save",
        "context     live   shared     cold    live  shared    cold  seconds     bytes",
    ]
    for turn in found:
        seconds = "".join(f"{turn.first_token[way]:9.3f}" for way in ("live", "shared", "cold"))
        tokens = "".join(f"{turn.computed[way]:8,}" for way in ("live", "shared", "cold"))
        saved = f"{turn.save_seconds:9.3f}{show_size(turn.save_bytes):>10}"
        lines.append(f"{turn.context:7,}{seconds}{tokens}{saved}")
    lines.append("live: one session goes on; shared: a new session each turn, from kept prefixes;")
    lines.append("cold: a new session each turn, all computed; save: the live session, to disk")
    return "\n".join(lines)


def append_chart(found: list[Turn]) -> str:
    """Seconds to the first token over the context."""
    series = {
        way: [(float(t.context), t.first_token[way]) for t in found]
        for way in ("live", "shared", "cold")
    }
    return line_chart("Cost of a turn", "tokens of context", "s to the first token", series)


def recall_table(found: list[Recall], knee: int | None) -> str:
    """A line for each length, and the knee."""
    places = list(dict.fromkeys(r.place for r in found))
    lines = ["context  " + "".join(f"{place:>18}" for place in places)]
    for length in dict.fromkeys(r.context for r in found):
        cells = "".join(
            f"{100 * r.known:8.0f} %{r.lead:8.2f}" for r in found if r.context == length
        )
        lines.append(f"{length:7,}  {cells}")
    lines.append(
        f"share of {found[0].trials} trials that are known, and nats that telling the name"
    )
    lines.append("added to its likelihood; who knows nothing is right every other time")
    where = "none up to here" if knee is None else f"{knee:,} tokens"
    lines.append(f"knee (less than half of the best, beyond guessing): {where}")
    return "\n".join(lines)


def recall_chart(found: list[Recall]) -> str:
    """Share of known facts over the context."""
    series: dict[str, list[tuple[float, float]]] = {}
    for r in found:
        series.setdefault(r.place, []).append((float(r.context), r.known))
    return line_chart("Recall of planted facts", "tokens of context", "share known", series,
                      doublings=True)  # fmt: skip


def _places(
    model: str, plot: Path | None, text: Path | None, progress: Progress
) -> tuple[Path | None, str | None]:
    """Where the chart goes, and the text.  Raises ``UsageError``."""
    place = None if plot is None else find_output(plot, find_model(model))
    return place, None if text is None else read_text(text, progress)
