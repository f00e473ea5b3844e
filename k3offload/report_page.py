"""A page of HTML that is whole by itself: headings, notes, pictures and tables, no script.

Nothing in it names another file or place, and its policy forbids to load any.  It is made for a
screen, light or dark, and for paper.  This file knows no trace and draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Final

from .find import published

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2329; --paper: #fff; --soft: #5b6670; --rule: #d7dce0;
  --heat: #1b6ca8; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e4e8eb; --paper: #14181b; --soft: #9aa5ae; --rule: #3a434a; --heat: #6db7ef; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem 1.5rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.35rem; border-top: 2px solid var(--rule);
  padding-top: 1rem; margin-top: 2.5rem; } h3 { font-size: 1.1rem; margin-top: 2rem; }
h1, h2, h3, p, li, summary { overflow-wrap: anywhere; }
p, li { max-width: 46rem; } .note { color: var(--soft); }
nav > ul { columns: 16rem; padding-left: 1.2rem; } nav > ul > li { break-inside: avoid; }
figure { margin: 1rem 0; } svg { display: block; max-width: 100%; height: auto; }
svg .paper { fill: none; } svg text { fill: var(--ink); } svg .rule { stroke: var(--rule); }
svg .heat { fill: var(--heat); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.85rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.3rem; }
th, td { padding: 0.15rem 0.7rem 0.15rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); } .n { text-align: right; }
pre { overflow-x: auto; max-height: 20rem; font-size: 0.75rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt;
    -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  h2, h3 { break-after: avoid; } figure, tr { break-inside: avoid; }
  thead { display: table-header-group; }
  .wide { overflow-x: visible; } table { font-size: 7.5pt; }
  th, td { padding-right: 0.35rem; overflow-wrap: break-word; }
  nav, details { display: none; } }
""".strip()

Cell = str | int | float | None


class Page:
    """Grows downwards."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._body: list[str] = []
        self._contents: list[tuple[int, str]] = []  # level, link
        self._headings = 0

    def part(self, title: str) -> None:
        self._heading(2, title)

    def section(self, title: str) -> None:
        self._heading(3, title)

    def _heading(self, level: int, title: str) -> None:
        name, text = f"s{self._headings}", escape(title)
        self._headings += 1
        self._body.append(f'<h{level} id="{name}">{text}</h{level}>')
        self._contents.append((level, f'<a href="#{name}">{text}</a>'))

    @contextmanager
    def above(self) -> Iterator[None]:
        """What is added in this block stands before all that was added until then."""
        body, contents = self._body, self._contents
        self._body, self._contents = [], []
        yield
        self._body += body
        self._contents += contents

    def _nav(self) -> str:
        """Links to parts, each with those of its sections below it."""
        parts: list[tuple[str, list[str]]] = []
        for level, link in self._contents:
            if level == 2 or not parts:
                parts.append((link, []))
            else:
                parts[-1][1].append(f"<li>{link}</li>")
        lines = (
            f"<li>{link}{'<ul>' + ''.join(some) + '</ul>' if some else ''}</li>"
            for link, some in parts
        )
        return f"<nav><ul>{''.join(lines)}</ul></nav>"

    def say(self, text: str) -> None:
        self._body.append(f"<p>{escape(text)}</p>")

    def note(self, text: str) -> None:
        self._body.append(f'<p class="note">{escape(text)}</p>')

    def picture(self, svg: str) -> None:
        """Inside HTML an SVG needs no namespace."""
        inside = svg.strip().replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
        self._body.append(f"<figure>{inside}</figure>")

    def table(self, caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        """Numbers stand right; None is a dash."""
        cells = [list(row) for row in rows]
        right = [any(isinstance(row[at], int | float) for row in cells) for at in range(len(head))]
        classes = [' class="n"' * number for number in right]
        first = "".join(
            f'<th scope="col"{kind}>{escape(name)}</th>'
            for name, kind in zip(head, classes, strict=True)
        )
        lines = [[_shown(cell) for cell in row] for row in cells]
        body = "\n".join(f"<tr>{''.join(line)}</tr>" for line in lines)
        self._body.append(
            f'<div class="wide"><table><caption>{escape(caption)}</caption>'
            f"<thead><tr>{first}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )

    def values(
        self, caption: str, head: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]]
    ) -> None:
        """What a picture shows, by tabs, folded away; a value that is not there is empty."""
        lines = ["\t".join(head)]
        for name, some in rows:
            lines.append("\t".join([name, *("" if x != x else f"{x:.4g}" for x in some)]))
        text = escape("\n".join(lines))
        self._body.append(
            f"<details><summary>{escape(caption)}</summary><pre>{text}</pre></details>"
        )

    def html(self) -> str:
        title = escape(self._title)
        return "\n".join(
            [
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
                '<meta http-equiv="Content-Security-Policy" '
                "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{title}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>",
                f"<h1>{title}</h1>",
                self._nav(),
                *self._body,
                "</body>\n</html>\n",
            ]
        )

    def write(self, path: Path) -> None:
        """It appears when it is complete.  An ``OSError`` names it."""
        with published(path) as file:
            file.write(self.html().encode())


def _shown(cell: Cell) -> str:
    if cell is None:
        return '<td class="n">-</td>'
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td class="n">{cell if isinstance(cell, int) else format(cell, ".4g")}</td>'
