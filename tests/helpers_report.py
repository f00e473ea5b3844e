"""Traces and pages for the tests of reports, and what reads a page strictly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pytest

import k3offload
from k3offload.scheduler.lease import Event
from k3offload.trace import EVENT, Array, Writer
from k3offload.trace_made import Size, pattern, trace_of
from k3offload.trace_record import record
from tests.helpers_engine import call

_ROOT: Final = TemporaryDirectory(prefix="k3-report-")
VOID = {"meta", "path", "rect", "circle", "polyline"}
SECTIONS = [
    "What was recorded", "Hits and bytes by capacity", "Precision of guesses by rank and layer",
    "Experts over layers", "Experts over time", "Tiers over time", "Residual attention over depth",
    "Margins of routers",
]  # fmt: skip


class Read(HTMLParser):
    """A page, checked for tags that do not match; its tables, by caption."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.text: dict[str, list[str]] = {}  # by tag
        self.attributes: list[tuple[str, str, str]] = []
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.text.setdefault(tag, []).append("")
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table":
            self.tables[self.text["caption"][-1]] = self._rows

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text[self._open[-1]][-1] += data
            if self._open[-1] in ("td", "th"):
                self._rows[-1][-1] += data

    def column(self, caption: str, name: str) -> list[str]:
        head, *rows = self.tables[caption]
        return [row[head.index(name)] for row in rows]

    def row(self, caption: str, name: str) -> list[str]:
        return next(row[1:] for row in self.tables[caption] if row[0] == name)


def numbers(cells: Sequence[str]) -> list[float]:
    return [float(cell) for cell in cells]


def close(values: Sequence[float]) -> Any:
    """What a cell of four digits shows of them."""
    return pytest.approx(list(values), rel=1e-3, abs=1e-9)


def report(arguments: list[Any], out: Path, capsys: pytest.CaptureFixture[str]) -> Read:
    code, said, err = call(["report", *arguments, "-o", out], capsys)
    assert code == 0 and not said and out.name in err, err
    page = out.read_text("utf-8")
    found = Read(page)
    references = [v for _, name, v in found.attributes if name in ("href", "src", "xlink:href")]
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert all(value.removeprefix("#") in ids for value in references)
    assert len(ids) == len(set(ids)) and "://" not in page and "url(" not in page
    assert not {"script", "img", "link", "iframe", "object", "base"} & found.text.keys()
    assert "default-src 'none'" in page
    return found


@cache
def recorded() -> Path:
    """A prompt and 12 tokens of the embedded model, with all that reports show; read only."""
    folder = Path(_ROOT.name) / "recorded"
    with k3offload.load("nano", context=128, cache="500k") as engine:
        record(engine, folder, ("ahead", "mixing", "tiers", "margin"), {"model": "nano"})
        with engine.session() as session:
            session.append(list(range(40)))
            session.logits()
            for token in range(40, 52):
                session.append_sampled(token)
                session.logits()
    return folder


@cache
def k3_sized() -> Path:
    """100 tokens of as many layers, experts and sublayers, in which everything is recorded."""
    folder = Path(_ROOT.name) / "large"
    size, rng = Size(92, 896, 16), np.random.default_rng(0)
    trace = trace_of(pattern("uniform", 100, size), size.experts, page_bytes=17_500_000)
    more: dict[str, Array] = {
        "ahead_best": trace.best[rng.permutation(100)], "ahead_codes": trace.codes,
        "margin": rng.random((100, 92), np.float32).astype(np.float16),
        "mixing": rng.integers(1, 30, (100, 186, 9)).astype(np.uint8),
    }  # fmt: skip
    writer = Writer(
        folder, trace.layers.tolist(), trace.experts, trace.top_k, page_bytes=trace.page_bytes,
        more={name: (a.shape[1:], str(a.dtype)) for name, a in more.items()}, events=True,
    )  # fmt: skip
    rows = ("best", "codes", "sweep", "sequence", "position", "decode")
    writer.append(**more, **{name: getattr(trace, name) for name in rows})
    pages = 3 * 92 * 16
    layer, expert = np.repeat(np.tile(trace.layers, 3), 16), trace.chosen[:3].reshape(-1)
    begins = np.arange(pages) * 1e-3
    events = {
        "sweep": np.repeat(np.arange(3), pages // 3) + (layer == 92), "tier": np.zeros(pages),
        "layer": layer, "expert": expert, "bytes": np.full(pages, trace.page_bytes),
    }  # fmt: skip
    order = np.argsort(np.r_[begins, begins + 3.7e-3], kind="stable")
    both = {f"event_{name}": np.r_[a, a][order] for name, a in events.items()}
    both["event_kind"] = np.repeat([Event.MISS, Event.ENDED], pages)[order]
    both["event_time"] = np.r_[begins, begins + 3.7e-3][order]
    writer.append_events(**{name: both[name].astype(kind) for name, kind in EVENT.items()})
    writer.close()
    return folder
