"""What a report says of the routing in a trace: figures first, then pictures and tables of them.

Sections are those that the trace's parts allow; of the others a line says how to record them.  This
file counts and lays out; replaying, drawing and HTML are others'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .bench_policies import BASELINE, Room, chosen_names, compare, rooms
from .config import show_size
from .errors import UsageError
from .machine import facts as machine_facts
from .plot_svg import bar_chart, heat_map, line_chart
from .report_page import Page
from .trace import Trace, facts

CAPACITIES: Final = ("5%", "12%", "25%", "50%", "75%")
COLUMNS: Final = 128  #: of the map of experts, at most
WINDOWS: Final = 48  #: of time, at most
BARS: Final = 40
UNITS: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("bytes", 1))
BLOCK: Final = 1024  #: rows that are compared at a time

Figures = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Tell = Callable[[str], None]


def rooms_of(trace: Trace, capacities: Sequence[str] | None) -> list[Room]:
    """Capacities of one tier, the smallest first.  Raises ``UsageError``."""
    found = rooms(capacities or CAPACITIES, trace)
    for one in found:
        if len(one.slots) > 1:
            raise UsageError(
                f"The capacity {one.text!r} is of two tiers.",
                "Curves have one; bench policies compares two.",
            )
    return sorted(found, key=lambda one: one.slots)


# ---- facts ----


def add_facts(page: Page, trace: Trace) -> None:
    """The trace, the model it is of, and what made this report."""
    found = facts(trace)
    about = found.pop("about")
    found["parts"] = ", ".join(found["parts"]) or "none"
    machine = {f"report: {name}": text for name, text in machine_facts().items() if text}
    rows = {
        **found,
        **{f"run: {name}": value for name, value in about.items()},
        **machine,
    }
    page.section("What was recorded")
    cells = [(name, str(value)) for name, value in rows.items()]
    page.table("Trace, run and machine", ("fact", "value"), cells)


# ---- policies ----


def add_policies(
    page: Page,
    trace: Trace,
    rooms: Sequence[Room],
    policies: Sequence[str] | None,
    rows: int | None,
    tell: Tell,
) -> list[dict[str, Any]]:
    """Replay, from a cold cache and without reading ahead.  Returns the lines of its figures."""
    some = trace.rows(slice(rows))
    page.section("Hits and bytes by capacity")
    page.say(
        f"Replay of {len(some.best):,} tokens from a cold cache, nothing read ahead. MIN is "
        "Belady's optimum, which knows the future; once: every expert that is used is read a "
        "single time."
    )
    lines = list(compare(some, rooms, chosen_names("policy", policies, True), tell=tell))
    policy_figures(page, lines)
    return lines


def policy_figures(page: Page, lines: Sequence[dict[str, Any]]) -> None:
    """Curves and a table of lines as ``bench policies`` has them, of one tier, one predictor."""
    most = max(line["requests"] * line["page_bytes"] for line in lines)
    unit, scale = next((u, s) for u, s in UNITS if most >= s or s == 1)
    hits: dict[str, list[tuple[float, float]]] = {}
    size: dict[str, list[tuple[float, float]]] = {}
    bounds: dict[float, dict[str, int]] = {}
    for line in lines:
        x = round(100 * line["slots"] / line["pages"], 1)
        name = line["policy"]
        hits.setdefault(name, []).append((x, 100 * line["hits"] / line["requests"]))
        size.setdefault(name, []).append((x, line["bytes"] / scale))
        bounds[x] = line
    for name, key in (("LRU", "lru_bytes"), ("MIN", "min_bytes"), ("once", "compulsory_bytes")):
        if name.lower() == BASELINE and BASELINE in hits:
            continue
        size[name] = [(x, line[key] / scale) for x, line in bounds.items()]
        hits[name] = [
            (x, 100 - 100 * line[key] / (line["requests"] * line["page_bytes"]))
            for x, line in bounds.items()
        ]
    page.picture(line_chart("Hits", "% of all experts that fit", "% of requests", hits))
    page.picture(line_chart("Bytes read", "% of all experts that fit", unit, size))
    page.table(
        "Replay by capacity and policy",
        ("capacity", "slots", "policy", "requests", "hits", "hit %", "misses", "bytes",
         "LRU bytes", "MIN bytes", "once bytes", "gap closed %"),
        [
            (line["capacity"], line["slots"], line["policy"], line["requests"], line["hits"],
             100 * line["hits"] / line["requests"], line["misses"], line["bytes"],
             line["lru_bytes"], line["min_bytes"], line["compulsory_bytes"],
             100 * line["gap_closed"])
            for line in lines
        ],
    )  # fmt: skip
    page.note("gap closed: of the bytes between LRU (0 %) and MIN (100 %), what a policy saves.")


# ---- predictors ----


def precision(
    guessed: npt.NDArray[np.uint16], chosen: npt.NDArray[np.uint16], asked: npt.NDArray[np.bool_]
) -> tuple[Counts, Counts]:
    """[L, ranks] and [L]: how often the guess [T, L, ranks] of a rank was among ``chosen``
    [T, L, k], and how often it was made, where ``asked`` [T, L]."""
    _, layers, ranks = guessed.shape
    right = np.zeros((layers, ranks), np.int64)
    for begin in range(0, len(guessed), BLOCK):
        own = slice(begin, begin + BLOCK)
        for rank in range(ranks):
            hit = (guessed[own, :, rank, None] == chosen[own]).any(axis=2) & asked[own]
            right[:, rank] += hit.sum(axis=0)
    return right, asked.sum(axis=0).astype(np.int64)


def repeats(trace: Trace) -> tuple[Counts, Counts]:
    """``precision`` of naming what the row before of the same sequence had, for rows that
    decode."""
    last: dict[int, int] = {}
    rows, before = [], []
    for row, (sequence, decode) in enumerate(
        zip(trace.sequence.tolist(), trace.decode.tolist(), strict=True)
    ):
        if decode and sequence in last:
            rows.append(row)
            before.append(last[sequence])
        last[sequence] = row
    asked = np.ones((len(rows), len(trace.layers)), bool)
    return precision(trace.best[before], trace.chosen[rows], asked)


def add_precision(page: Page, trace: Trace) -> None:
    page.section("Precision of guesses by rank and layer")
    found = {"repeat": repeats(trace)}
    if "ahead_codes" in trace.more:
        asked = np.any(trace.more["ahead_codes"], axis=2)
        found = {"router": precision(trace.more["ahead_best"], trace.chosen, asked), **found}
    else:
        page.note("What routers said a layer ahead was not recorded: --trace-with ahead.")
    found = {name: both for name, both in found.items() if both[1].any()}
    if not found:
        page.note("No token was decoded after another one of its sequence.")
        return
    k, wide = trace.top_k, trace.best.shape[2]
    page.say(
        "Of the expert that a guess ranks first, second and so on: how often it was chosen. "
        "router: the layer's own router, asked at the end of the layer above. repeat: what the "
        f"token before chose, best first. Ranks above {k} are near misses."
    )
    whole = {name: 100 * right.sum(0) / count.sum() for name, (right, count) in found.items()}
    curves = {
        name: [(rank + 1.0, float(share[rank])) for rank in range(wide)]
        for name, share in whole.items()
    }
    page.picture(line_chart("All layers", "rank of the guess", "% that were chosen", curves))
    ranks = [str(rank + 1) for rank in range(wide)]
    page.table(
        "By rank, all layers, % that were chosen",
        ("rank", *found),
        [(int(r), *(float(whole[name][i]) for name in found)) for i, r in enumerate(ranks)],
    )
    names = [str(layer) for layer in trace.layers]
    rows: list[list[Any]] = [[int(layer)] for layer in trace.layers]
    head = ["layer"]
    for name, (right, count) in found.items():
        shares = np.where(count[:, None] > 0, 100 * right / np.maximum(count, 1)[:, None], np.nan)
        title = f"Guesses of {name}: % that were chosen"
        page.picture(heat_map(title, "rank of the guess", "layer", shares, ranks, names, 100.0))
        page.values(f"{title}, by layer and rank", ["layer", *ranks], _lines(names, shares))
        head += [f"{name}: times", "first %", f"first {k} %"]
        for row, line, times in zip(rows, shares, count.tolist(), strict=True):
            best = [float(line[0]), float(line[:k].mean())] if times else [None, None]
            row += [times, *best]
    page.table("By layer", head, rows)


# ---- experts ----


def use_of(trace: Trace) -> Counts:
    """[L, E]: tokens that chose each expert."""
    found = np.zeros((len(trace.layers), trace.experts), np.int64)
    for place in range(len(found)):
        found[place] = np.bincount(trace.chosen[:, place].ravel(), minlength=trace.experts)
    return found


def windows(trace: Trace) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.bool_]]:
    """The sweeps of each window, all about as many; and [windows, L, E] whether it used them."""
    parts = np.array_split(np.unique(trace.sweep), WINDOWS)
    spans = [part for part in parts if len(part)]
    used = np.zeros((len(spans), len(trace.layers), trace.experts), bool)
    place = np.arange(len(trace.layers))[None, :, None]
    for number, span in enumerate(spans):
        own = (trace.sweep >= span[0]) & (trace.sweep <= span[-1])
        used[number, place, trace.chosen[own]] = True
    return spans, used


def add_experts(page: Page, trace: Trace) -> None:
    """The heat of experts over layers, and over time."""
    page.section("Experts over layers")
    uses, experts, tenth = use_of(trace), trace.experts, -(-trace.experts // 10)
    each = -(-experts // COLUMNS)
    begins = list(range(0, experts, each))
    share = uses / uses.sum(axis=1, keepdims=True) * experts
    binned = np.stack([share[:, b : b + each].mean(axis=1) for b in begins], axis=1)
    layers, names = [str(layer) for layer in trace.layers], [str(b) for b in begins]
    title = "Use of experts; 1 is what even routing gives each"
    x_name = "expert" if each == 1 else f"first of {each} experts"
    page.picture(heat_map(title, x_name, "layer", binned, names, layers))
    page.values("Use of experts, by layer and expert", ["layer", *names], _lines(layers, binned))
    ranked = -np.sort(-uses, axis=1)
    parts = uses / uses.sum(axis=1, keepdims=True)
    entropy = -(parts * np.log(np.where(parts > 0, parts, 1))).sum(axis=1) / np.log(experts)
    page.table(
        "Use of experts by layer",
        ("layer", "requests", "experts used", "most used", "its %", f"{tenth} most used %",
         "entropy of even %"),
        [
            (int(layer), int(uses[i].sum()), int((uses[i] > 0).sum()), int(uses[i].argmax()),
             100 * ranked[i, 0] / uses[i].sum(), 100 * ranked[i, :tenth].sum() / uses[i].sum(),
             100 * float(entropy[i]))
            for i, layer in enumerate(trace.layers)
        ],
    )  # fmt: skip
    _add_time(page, trace, layers)


def _add_time(page: Page, trace: Trace, layers: Sequence[str]) -> None:
    page.section("Experts over time")
    spans, used = windows(trace)
    distinct = used.sum(axis=2)
    names = [str(span[0]) for span in spans]
    sweeps = max(map(len, spans))
    title = "Distinct experts in a window"
    x_name = f"first sweep of a window of {sweeps}" if sweeps > 1 else "sweep"
    page.picture(heat_map(title, x_name, "layer", distinct.T, names, layers))
    page.values(f"{title}, by layer", ["layer", *names], _lines(layers, distinct.T))
    kept = [None, *(int((a & b).sum()) for a, b in pairwise(used))]
    page.table(
        "Distinct experts by window of sweeps",
        ("first sweep", "last", "tokens", "experts", "least of a layer", "most", "known %"),
        [
            (int(span[0]), int(span[-1]), _tokens(trace, span), int(own.sum()), int(own.min()),
             int(own.max()), None if same is None else 100 * same / int(own.sum()))
            for span, own, same in zip(spans, distinct, kept, strict=True)
        ],
    )  # fmt: skip
    page.note("known: of the experts of a window, those that the window before used too.")


def _tokens(trace: Trace, span: npt.NDArray[np.int32]) -> int:
    return int(((trace.sweep >= span[0]) & (trace.sweep <= span[-1])).sum())


def _lines(names: Sequence[str], values: npt.NDArray[Any]) -> list[tuple[str, list[float]]]:
    return [(name, line.tolist()) for name, line in zip(names, values, strict=True)]


# ---- residual attention ----


def mixing_map(mixing: npt.NDArray[np.uint8]) -> tuple[Counts, Figures]:
    """[S] entries of each sublayer's mix, and [S, most entries] mean shares: block summaries from
    the left, the running sum in the last column; NaN where there is none."""
    depth, wide = mixing.shape[1:]
    mean = mixing.mean(axis=0, dtype=np.float64) / 255
    last = np.where(mean > 0, np.arange(1, wide + 1), 1).max(axis=1)
    entries = np.maximum.accumulate(last)  # summaries are added and never taken away
    shares = np.full((depth, wide), np.nan)
    for at, count in enumerate(entries.tolist()):
        shares[at, : count - 1] = mean[at, : count - 1]
        shares[at, -1] = mean[at, count - 1] if count > 1 else 1.0
    return entries.astype(np.int64), shares


def add_mixing(page: Page, trace: Trace) -> None:
    page.section("Residual attention over depth")
    if "mixing" not in trace.more:
        page.note("Shares of residual attention were not recorded: --trace-with mixing.")
        return
    entries, shares = mixing_map(trace.more["mixing"])
    blocks = ["embedding", *(f"block {b}" for b in range(1, shares.shape[1] - 1))]
    columns = [*blocks[: shares.shape[1] - 1], "sum"]
    names = [f"{at // 2} {'ffn' if at % 2 else 'attention'}" for at in range(len(shares))]
    page.say(
        "What sublayers read: the share that their mix gives to the embedding, to the sum of each "
        "block of layers before, and to the running sum; means over all tokens."
    )
    title = "Shares of residual attention"
    page.picture(heat_map(title, "entry", "", shares, columns, names, 1.0))
    page.values(f"{title}, by sublayer and entry", ["sublayer", *columns], _lines(names, shares))
    rows = []
    for at, name in enumerate(names):
        best = int(np.nanargmax(shares[at, :-1])) if entries[at] > 1 else None
        other = ("-", None) if best is None else (columns[best], 100 * float(shares[at, best]))
        rows.append((name, int(entries[at]), 100 * float(shares[at, -1]), *other))
    head = ("sublayer", "entries", "running sum %", "largest other", "its %")
    page.table("Residual attention by sublayer", head, rows)


# ---- margins ----


def add_margins(page: Page, trace: Trace) -> None:
    page.section("Margins of routers")
    if "margin" not in trace.more:
        page.note("Margins of routers were not recorded: --trace-with margin.")
        return
    margin = trace.more["margin"].astype(np.float64)
    low, top = min(0.0, float(margin.min())), float(np.quantile(margin, 0.99))
    top = top if top > low else low + 1e-3
    counts, edges = np.histogram(np.minimum(margin, top), BARS, (low, top))
    page.say(
        "Biased score of the last expert that was chosen less that of the best that was not, of "
        "all tokens and layers; the last bar holds all that is larger."
    )
    bars = counts.tolist()
    page.picture(bar_chart("Margins", "margin", "tokens x layers", edges.tolist(), bars))
    lines = zip(edges[:-1].tolist(), edges[1:].tolist(), bars, strict=True)
    rows = [(a, b, n, 100 * n / margin.size) for a, b, n in lines]
    page.table("Margins", ("from", "to", "times", "%"), rows)
    shares = (0.01, 0.1, 0.5, 0.9)
    found = np.quantile(margin, shares, axis=0).T
    page.table(
        "Margins by layer",
        ("layer", *(f"below: {share:.0%}" for share in shares)),
        [(int(la), *line) for la, line in zip(trace.layers, found.tolist(), strict=True)],
    )


def about_trace(trace: Trace) -> str:
    """In a line."""
    return (
        f"{len(trace.best):,} tokens, {len(trace.layers)} layers, {trace.top_k} of {trace.experts} "
        f"experts of {show_size(trace.page_bytes)}"
    )
