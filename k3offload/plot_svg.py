"""Charts as SVG, and nothing else: lines, heat maps, bars, and lanes over time.

Each is a picture of its own, black on white.  A page that holds one may colour it otherwise:
paper, rules, text and the cells of heat maps have classes.  What is drawn is bounded by the
picture, not by the numbers: cells of one level are one path, and stretches of a lane that are
closer than a pixel are one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .find import published

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 150, 50, 60
_ACROSS: Final = _WIDTH - _LEFT - _RIGHT
_COLOURS = ("#1b6ca8", "#c8553d", "#4c956c", "#7d5ba6", "#b8860b", "#5f7a8a", "#c2528b", "#2a9d9d")
_LEVELS: Final = 16  #: shades of a heat map, the lowest of them nothing at all
_STEPS: Final = (1, 2, 2.5, 5, 10)  #: between ticks, times a power of ten
_LANE: Final = 34  #: height of a lane and its gap

Points = Sequence[tuple[float, float]]


def line_chart(
    title: str, x_name: str, y_name: str, series: Mapping[str, Points], *, doublings: bool = False
) -> str:
    """The chart as text.  Each series is points (x, y) in order of x; ``doublings``: the x axis is
    logarithmic.  The y axis begins at 0, or below if there are negative values."""
    points = [point for some in series.values() for point in some]
    xs = sorted({x for x, _ in points})
    ticks = _ticks(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    low, high = ticks[0], ticks[-1]
    place = (lambda x: math.log2(x)) if doublings else (lambda x: x)
    first, last = place(xs[0]), place(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (place(x) - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low)
        return (
            round(_LEFT + across * _ACROSS, 1),
            round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = [*_paper(title, x_name, y_name), *_rules(ticks)]
    free = 0.0
    for x in xs[:: max(1, -(-len(xs) // 8))]:
        across, _ = at(x, low)
        label = f"{x:,.6g}"
        if across - 4 * len(label) >= free:
            parts.append(_text(across, _HEIGHT - _BOTTOM + 20, label, anchor="middle"))
            free = across + 4 * len(label) + 4
    for number, (name, some) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join("{},{}".format(*at(x, y)) for x, y in some)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            '<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*at(x, y), colour) for x, y in some
        ]
        height = _TOP + 20 * number
        parts.append(
            f'<path d="M{_WIDTH - _RIGHT + 15} {height}h20" stroke="{colour}" stroke-width="2"/>'
            + _text(_WIDTH - _RIGHT + 42, height + 4, name)
        )
    return _done(parts)


def bar_chart(
    title: str, x_name: str, y_name: str, edges: Sequence[float], heights: Sequence[float]
) -> str:
    """A bar between each edge and the next."""
    ticks = _ticks(0.0, max(*heights, 0))
    high = ticks[-1]
    wide, deep = _ACROSS / len(heights), _HEIGHT - _TOP - _BOTTOM
    parts = [*_paper(title, x_name, y_name), *_rules(ticks)]
    for number, value in enumerate(heights):
        tall = round(deep * value / high, 1)
        parts.append(
            f'<rect x="{_LEFT + number * wide:.1f}" y="{_HEIGHT - _BOTTOM - tall:.1f}" '
            f'width="{0.9 * wide:.1f}" height="{tall}" fill="{_COLOURS[0]}"/>'
        )
    for number in range(0, len(edges), max(1, -(-len(edges) // 6))):
        across = round(_LEFT + number * wide, 1)
        parts.append(_text(across, _HEIGHT - _BOTTOM + 20, f"{edges[number]:.3g}", anchor="middle"))
    return _done(parts)


def heat_map(
    title: str,
    x_name: str,
    y_name: str,
    values: npt.ArrayLike,
    x_labels: Sequence[str],
    y_labels: Sequence[str],
    high: float | None = None,
) -> str:
    """A cell for each of ``values`` [rows, columns], the first row above; NaN is left empty.  From
    0 to ``high``, the largest value unless said, it gets darker; what is more is as dark."""
    cells = np.asarray(values, np.float64)
    rows, columns = cells.shape
    if high is None:
        high = float(np.nanmax(cells, initial=0.0))
    high = high or 1.0
    tall = float(np.clip(420 / rows, 3, 22))
    bottom = _TOP + rows * tall
    parts = [
        *_paper(title, x_name, y_name, round(bottom + _BOTTOM)),
        f'<g transform="translate({_LEFT} {_TOP}) scale({_ACROSS / columns:.4f} {tall:.4f})" '
        f'shape-rendering="crispEdges">',
        *_shades(np.nan_to_num(cells, nan=0.0) / high),
        "</g>",
    ]
    for row in range(0, rows, max(1, math.ceil(14 / tall))):
        height = round(_TOP + (row + 0.5) * tall + 4, 1)
        parts.append(_text(_LEFT - 8, height, y_labels[row], anchor="end", size=11))
    most = max(map(len, x_labels), default=1)
    for column in range(0, columns, max(1, math.ceil((8 * most + 10) * columns / _ACROSS))):
        across = round(_LEFT + (column + 0.5) * _ACROSS / columns, 1)
        parts.append(
            _text(across, round(bottom + 18, 1), x_labels[column], anchor="middle", size=11)
        )
    side = _WIDTH - _RIGHT + 25
    scale = np.arange(_LEVELS, 0, -1)[:, None] / _LEVELS
    parts += [
        f'<g transform="translate({side} {_TOP}) scale(18 7)" shape-rendering="crispEdges">',
        *_shades(scale),
        "</g>",
        _text(side + 26, _TOP + 10, f"{high:.3g}"),
        _text(side + 26, _TOP + 7 * _LEVELS, "0"),
    ]
    return _done(parts)


def _shades(shares: npt.NDArray[np.float64]) -> list[str]:
    """Cells of 1 by 1, as dark as their share of 1: a path for each level."""
    levels = np.clip(np.rint(shares * _LEVELS), 0, _LEVELS).astype(int)
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(levels):
        ends = [*(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            if level := int(line[begin]):
                paths.setdefault(level, []).append(f"M{begin} {row}h{end - begin}v1H{begin}z")
    return [
        f'<path class="heat" fill="{_COLOURS[0]}" fill-opacity="{level / _LEVELS:.3g}" '
        f'd="{"".join(paths[level])}"/>'
        for level in sorted(paths)
    ]


def lane_chart(
    title: str, x_name: str, lanes: Mapping[str, Sequence[tuple[float, float]]], end: float
) -> str:
    """Stretches (from, to) of each lane between 0 and ``end``, in order of their begin."""
    bottom = _TOP + _LANE * len(lanes)
    left, across = 150, _WIDTH - 150 - 30
    parts = _paper(title, x_name, "", bottom + _BOTTOM - 10)
    for value in _ticks(0.0, end):
        x = round(left + across * value / (end or 1), 1)
        if value > end:
            continue
        parts.append(
            f'<path class="rule" d="M{x} {_TOP}V{bottom}" stroke="#ddd" fill="none"/>'
            + _text(x, bottom + 18, f"{value:.4g}", anchor="middle")
        )
    for number, (name, some) in enumerate(lanes.items()):
        height = _TOP + _LANE * number + 5
        parts.append(_text(left - 10, height + 16, name, anchor="end"))
        drawn = "".join(
            f"M{left + a:.1f} {height}h{b - a:.1f}v{_LANE - 10}h{a - b:.1f}z"
            for a, b in _joined(some, across / (end or 1))
        )
        if drawn:
            parts.append(f'<path fill="{_COLOURS[number % len(_COLOURS)]}" d="{drawn}"/>')
    return _done(parts)


def _joined(some: Sequence[tuple[float, float]], scale: float) -> list[tuple[float, float]]:
    """``some`` in pixels: at least one wide, joined where less than half of one lies between."""
    found: list[tuple[float, float]] = []
    for begin, end in some:
        a, b = begin * scale, max(end * scale, begin * scale + 1)
        if found and a - found[-1][1] < 0.5:
            found[-1] = found[-1][0], max(b, found[-1][1])
        else:
            found.append((a, b))
    return found


def _paper(title: str, x_name: str, y_name: str, height: int = _HEIGHT) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect class="paper" width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 28, title, size=16),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, height - 15, x_name, anchor="middle"),
        _text(_LEFT, _TOP - 8, y_name),
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, five or six, the first at most ``low`` and the last at least ``high``."""
    rough = (high - low) / 4 if high > low else 0.25
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (size * part for part in _STEPS) if step >= rough * (1 - 1e-9))
    first, last = (math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9))
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _rules(ticks: Sequence[float]) -> list[str]:
    """Lines across at ``ticks``, with their values."""
    deep, far = _HEIGHT - _TOP - _BOTTOM, ticks[-1] - ticks[0]
    heights = [round(_HEIGHT - _BOTTOM - deep * (tick - ticks[0]) / far, 1) for tick in ticks]
    return [
        f'<path class="rule" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="#ddd" fill="none"/>'
        + _text(_LEFT - 8, y + 4, f"{tick:.4g}", anchor="end")
        for tick, y in zip(ticks, heights, strict=True)
    ]


def _done(parts: Sequence[Any]) -> str:
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def write_chart(path: Path, chart: str) -> None:
    """Write ``chart`` to ``path``; it appears when it is complete.  An ``OSError`` names it."""
    with published(path) as file:
        file.write(chart.encode())
