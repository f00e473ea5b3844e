"""A line chart as SVG: a few series over one logarithmic or linear axis, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from .find import published

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 150, 50, 60
_COLOURS = ("#1b6ca8", "#c8553d", "#4c956c", "#7d5ba6")

Points = Sequence[tuple[float, float]]


def line_chart(
    title: str, x_name: str, y_name: str, series: Mapping[str, Points], *, doublings: bool = False
) -> str:
    """The chart as text.  Each series is points (x, y) in order of x; ``doublings``: the x axis is
    logarithmic.  The y axis begins at 0, or below if there are negative values."""
    points = [point for some in series.values() for point in some]
    xs = sorted({x for x, _ in points})
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    high = high if high > low else low + 1
    place = (lambda x: math.log2(x)) if doublings else (lambda x: x)
    first, last = place(xs[0]), place(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (place(x) - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low)
        return (
            round(_LEFT + across * (_WIDTH - _LEFT - _RIGHT), 1),
            round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 28, title, size=16),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 15, x_name, anchor="middle"),
        _text(_LEFT, _TOP - 8, y_name),
    ]
    for i in range(5):
        y = low + (high - low) * i / 4
        height = at(xs[0], y)[1]
        parts.append(
            f'<path d="M{_LEFT} {height}H{_WIDTH - _RIGHT}" stroke="#ddd" fill="none"/>'
            + _text(_LEFT - 8, height + 4, f"{y:.3g}", anchor="end")
        )
    for x in xs[:: max(1, -(-len(xs) // 8))]:
        across, _ = at(x, low)
        parts.append(_text(across, _HEIGHT - _BOTTOM + 20, f"{x:,.6g}", anchor="middle"))
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
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def write_chart(path: Path, chart: str) -> None:
    """Write ``chart`` to ``path``; it appears when it is complete.  An ``OSError`` names it."""
    with published(path) as file:
        file.write(chart.encode())
