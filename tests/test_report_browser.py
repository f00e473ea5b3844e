"""Pages of reports in Debian's Chromium: nothing is wider than the page, no picture is empty."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import zlib
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.helpers_report import SECTIONS, k3_sized, recorded, report

CHROMIUM = shutil.which("chromium")
REPLAY = ["--policy", "lru", "--capacity", "5%", "--capacity", "50%"]
TRACES = {"recorded": recorded, "large": k3_sized}


MEASURE = """<script>addEventListener("load", () => {
  const root = document.documentElement;
  const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(SCROLLS) &&
    e.getBoundingClientRect().right > root.clientWidth + 1);
  const boxes = [...document.querySelectorAll("svg")].map(e => {
    const b = e.getBoundingClientRect(); return [b.top, b.bottom]; });
  const out = [...document.querySelectorAll("svg text")].filter(e => {
    const b = e.getBoundingClientRect(), a = e.ownerSVGElement.getBoundingClientRect();
    return b.right > a.right + 1 || b.left < a.left - 1 || b.bottom > a.bottom + 1; });
  document.title = JSON.stringify({width: root.clientWidth, scroll: root.scrollWidth, boxes,
    height: root.scrollHeight, wide: wide.map(e => e.tagName + e.textContent.slice(0, 40)),
    out: out.map(e => e.textContent)}); });</script></head>"""


def chromium(page: Path, *options: str) -> str:
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--hide-scrollbars", f"--user-data-dir={page.parent / 'profile'}",
         *options, page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(page: str, folder: Path, scrolls: str, width: int) -> dict[str, Any]:
    """What a window of ``width`` makes of ``page``; only ``scrolls`` may be wider inside."""
    page = re.sub(r"<meta http-equiv[^>]*>", "", page)  # so that it may run what measures it
    (folder / "m.html").write_text(page.replace("</head>", MEASURE.replace("SCROLLS", scrolls)))
    shown = chromium(folder / "m.html", "--dump-dom", f"--window-size={width},900")
    title = re.search(r"<title>(\{.*?\})</title>", shown)
    assert title, shown[:500]
    found: dict[str, Any] = json.loads(unescape(title[1]))
    return found


def drawn_rows(png: bytes) -> list[bool]:
    """Whether each row of pixels has more than one colour: what a filter of PNG leaves of a row of
    one colour are a few bytes again and again."""
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    data, at = b"", 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw = zlib.decompress(data)
    line = len(raw) // height
    assert line - 1 in (3 * width, 4 * width) and line * height == len(raw)
    rows = (raw[i * line + 1 : (i + 1) * line] for i in range(height))
    return [len(set(row)) > 5 for row in rows]


@pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("K3OFFLOAD_REQUIRE_CHROMIUM"),
    reason="chromium is not installed",
)
@pytest.mark.parametrize("which", TRACES)
def test_a_browser_shows_it(
    which: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert CHROMIUM, "K3OFFLOAD_REQUIRE_CHROMIUM is set, and there is no chromium on the PATH"
    out = tmp_path / "r.html"
    report([TRACES[which](), *REPLAY], out, capsys)
    page = out.read_text("utf-8")
    printed = page.replace("@media print", "@media all").replace("max-width: 60rem;", "")
    for text, scrolls, width in (
        (page, '".wide, pre"', 1000),
        (page, '".wide, pre"', 420),
        (printed, '"nothing"', 700),  # A4 at 96 dots an inch, less margins
    ):
        found = measured(text, tmp_path, scrolls, width)
        assert found["scroll"] <= found["width"] and not found["wide"] and not found["out"], found
    for style, least in (("", 0.2), ("svg * { visibility: hidden; }", 0.0)):
        pictures = page.replace("</style>", f".wide, details {{ display: none; }} {style}</style>")
        found = measured(pictures, tmp_path, '".wide, pre"', 1000)
        out.write_text(pictures)
        size = f"--window-size=1000,{found['height'] + 200}"
        chromium(out, f"--screenshot={tmp_path / 'r.png'}", size)
        rows = drawn_rows((tmp_path / "r.png").read_bytes())
        assert len(found["boxes"]) == 12 and len(rows) >= found["height"]
        for top, bottom in found["boxes"]:
            own = rows[math.ceil(top) : int(bottom)]
            assert (sum(own) > least * len(own)) == bool(least), (top, bottom, style)


def test_a_page_of_k3_is_less_than_3_mb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.html"
    page = report([k3_sized(), "--capacity", "5%", "--policy", "lru", "--rows", 20], out, capsys)
    assert page.text["h3"] == SECTIONS and len(page.text["svg"]) == 12
    assert out.stat().st_size < 3_000_000
