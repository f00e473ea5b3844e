"""Pages of reports: whole by themselves, with the numbers that a slower way gives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import k3offload
from k3offload import registry
from k3offload.plot_svg import _ticks
from k3offload.report_page import Page
from k3offload.report_routing import mixing_map
from k3offload.scheduler.belady import Belady
from k3offload.scheduler.replay import replay
from k3offload.trace import read_trace
from k3offload.trace_made import NANO, pattern, trace_of, write_trace
from tests.helpers_engine import call
from tests.helpers_report import SECTIONS, Read, close, numbers, recorded, report


@pytest.fixture
def page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Read:
    return report([recorded()], tmp_path / "r.html", capsys)


def test_all_sections_of_a_recorded_trace(page: Read) -> None:
    assert page.text["h3"] == SECTIONS
    assert not any("recorded:" in text for text in page.text["p"])
    assert len(page.text["svg"]) == 2 + 3 + 2 + 3 + 1 + 1
    facts = dict(page.tables["Trace, run and machine"][1:])
    trace = read_trace(recorded())
    assert facts["digest"] == trace.digest and facts["rows"] == "52" and facts["sweeps"] == "13"
    assert facts["run: model"] == "nano" and facts["run: policy"] == "reuse"
    assert facts["report: cpu"] and facts["parts"] == "ahead, margin, mixing, tiers"


def test_policies_are_those_of_replay(page: Read) -> None:
    trace, name = read_trace(recorded()), "Replay by capacity and policy"
    run, size = trace.leases(), trace.page_bytes
    policies = registry.names("scheduler", "policy")
    assert page.column(name, "policy") == 5 * policies
    slots = [int(n) for n in page.column(name, "slots")]
    assert slots[:: len(policies)] == [
        round(share * 336) for share in (0.05, 0.12, 0.25, 0.5, 0.75)
    ]
    columns = ("requests", "hits", "misses", "bytes", "LRU bytes", "MIN bytes", "once bytes")
    found = list(zip(*(page.column(name, column) for column in columns), strict=True))
    lru = registry.implementation("scheduler", "policy", "lru").Policy
    for count, policy, row in zip(slots, 5 * policies, found, strict=True):
        make = registry.implementation("scheduler", "policy", policy).Policy
        own = replay(run, make(count), count, size)
        bounds = (replay(run, p, count, size).bytes for p in (lru(count), Belady(run)))
        wanted = (own.requests, own.hits, own.misses, own.bytes, *bounds, run.distinct * size)
        assert tuple(map(int, row)) == wanted


def test_precision_is_that_of_counting(page: Read) -> None:
    trace, name = read_trace(recorded()), "By rank, all layers, % that were chosen"
    right: dict[str, Counter[Any]] = {"router": Counter(), "repeat": Counter()}
    for row in range(40, 52):
        for place in range(len(trace.layers)):
            guesses = {"repeat": trace.best[row - 1, place].tolist()}
            if trace.more["ahead_codes"][row, place].any():
                guesses["router"] = trace.more["ahead_best"][row, place].tolist()
            for who, ranked in guesses.items():
                right[who][place] += 1
                for rank, expert in enumerate(ranked):
                    right[who][place, rank] += expert in trace.chosen[row, place]
    for who, seen in right.items():
        made = sum(seen[place] for place in range(7))
        wanted = [100 * sum(seen[p, rank] for p in range(7)) / made for rank in range(8)]
        assert numbers(page.column(name, who)) == close(wanted)
        assert numbers(page.column("By layer", f"{who}: times")) == [seen[p] for p in range(7)]
    assert sum(right["router"].values()) > sum(right["repeat"].values()) / 2
    first = [
        100 * right["repeat"][p, 0] / right["repeat"][p] if right["repeat"][p] else 0
        for p in range(7)
    ]
    head, *rows = page.tables["By layer"]
    at = head.index("repeat: times") + 1
    assert numbers([row[at] for row in rows]) == close(first)
    matrix = [text.split("\n") for text in page.text["pre"]][1]
    assert numbers([line.split("\t")[1] for line in matrix[1:]]) == close(first)


def test_experts_are_those_of_counting(page: Read) -> None:
    trace, name = read_trace(recorded()), "Use of experts by layer"
    for place, row in enumerate(page.tables[name][1:]):
        uses = Counter(trace.best[:, place, :4].ravel().tolist())
        most = max(uses.values())
        assert numbers(row[:3]) == [trace.layers[place], 52 * 4, len(uses)]
        assert int(row[3]) == min(e for e, n in uses.items() if n == most)
        ten = sum(n for _, n in uses.most_common(5))
        assert numbers(row[4:6]) == close([100 * most / 208, 100 * ten / 208])
        entropy = -sum(n / 208 * np.log(n / 208) for n in uses.values()) / np.log(48)
        assert float(row[6]) == pytest.approx(100 * entropy, rel=1e-3)
    known: set[tuple[int, int]] = set()
    rows = page.tables["Distinct experts by window of sweeps"][1:]
    assert [row[0] for row in rows] == [str(sweep) for sweep in range(13)]  # a sweep each
    for sweep, row in enumerate(rows):
        own = trace.chosen[trace.sweep == sweep]
        pages = {(p, int(e)) for p in range(7) for e in own[:, p].ravel()}
        assert [int(cell) for cell in row[2:4]] == [len(own), len(pages)]
        by_layer = Counter(place for place, _ in pages).values()
        assert [int(cell) for cell in row[4:6]] == [min(by_layer), max(by_layer)]
        if sweep:
            assert float(row[6]) == pytest.approx(100 * len(pages & known) / len(pages), rel=1e-3)
        known = pages


def test_mixing_and_margins_are_those_recorded(page: Read) -> None:
    trace = read_trace(recorded())
    mixing, name = trace.more["mixing"] / 255, "Residual attention by sublayer"
    config = json.loads((Path(k3offload.__file__).parent / "nano" / "config.json").read_text())
    block, rows = config["text_config"]["attn_res_block_size"], page.tables[name][1:]
    assert len(rows) == mixing.shape[1] and rows[0][:2] == ["0 attention", "1"]
    for at, (_, entries, share, _, largest) in enumerate(rows):
        layer, count = at // 2, int(entries)
        begun = layer // block + 1 if at % 2 else -(-layer // block)
        assert count == begun + 1 and not mixing[:, at, count:].any()
        if count > 1:
            mean = mixing[:, at].mean(axis=0)
            assert float(share) == pytest.approx(100 * mean[count - 1], rel=1e-3)
            assert float(largest) == pytest.approx(100 * mean[: count - 1].max(), rel=1e-3)
    margin = np.sort(trace.more["margin"].astype(float).ravel())
    edges = numbers(page.column("Margins", "from"))
    times = [int(n) for n in page.column("Margins", "times")]
    assert sum(times) == len(margin) and len(times) == 40
    for edge, below in zip(edges[1:], np.cumsum(times), strict=False):
        assert abs((margin < edge).sum() - below) <= 3  # an edge is shown by four digits
    middle = numbers(page.column("Margins by layer", "below: 50%"))
    assert middle == close([float(np.median(trace.more["margin"][:, p])) for p in range(7)])


def test_the_running_sum_is_the_last_entry() -> None:
    mixing = np.zeros((2, 4, 3), np.uint8)
    mixing[:, 1, :2] = [[51, 204], [153, 102]]
    mixing[:, 2, :2] = [[255, 0], [255, 0]]  # nothing of the sum is seen: still two entries
    mixing[:, 3] = [[0, 51, 204], [0, 51, 204]]
    entries, shares = mixing_map(mixing)
    nan = np.nan
    wanted = [[nan, nan, 1], [0.4, nan, 0.6], [1, nan, 0], [0, 0.2, 0.8]]
    assert entries.tolist() == [1, 2, 2, 3]
    np.testing.assert_allclose(shares, wanted)


def test_what_was_not_recorded_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "a", trace_of(pattern("skewed", 30), NANO.experts, page_bytes=1000))
    write_trace(tmp_path / "b", trace_of(pattern("stack", 20), NANO.experts))
    page = report([tmp_path / "a", tmp_path / "b", "--rows", 10], tmp_path / "r.html", capsys)
    assert page.text["h2"] == ["Which policy at which budget", "a", "b"]
    assert page.text["h3"] == 2 * SECTIONS
    said = "\n".join(page.text["p"])
    for part in ("ahead", "tiers", "mixing", "margin"):
        assert said.count(f"--trace-with {part}.") == 2
    assert set(page.column("Replay by capacity and policy", "requests")) == {str(10 * 7 * 4)}
    assert not any(name.startswith(("Sweeps", "Margins")) for name in page.tables)


def test_several_traces_have_an_overview(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above all else, from the bytes that ``bench policies`` tells."""
    paths = [tmp_path / kind for kind in ("skewed", "uniform")]
    for path in paths:
        write_trace(path, trace_of(pattern(path.name, 200), NANO.experts))
    how = ["--capacity", "12%", "--capacity", "50%", "--policy", "lru", "--policy", "lfru"]
    out = call(["bench", "policies", *paths, *how, "--json"], capsys)[1]
    lines = [json.loads(line) for line in out.splitlines()]
    page = report([*paths, *how], tmp_path / "r.html", capsys)
    name, share, least = "Bytes, % of LRU's", dict[Any, float](), dict[Any, Any]()
    for line in lines:
        place = Path(line["path"]).name, line["capacity"]
        for policy, size in ((line["policy"], line["bytes"]), ("MIN", line["min_bytes"])):
            share[place + (policy,)] = 100 * size / line["lru_bytes"]  # noqa: RUF005, Python 3.10
        least[place] = min(least.get(place, (9e9, "")), (line["bytes"], line["policy"]))
    keys = list(zip(page.column(name, "capacity"), page.column(name, "policy"), strict=True))
    assert keys == [(c, p) for c in ("12%", "50%") for p in ("lru", "lfru", "MIN")]
    for kind in ("skewed", "uniform"):
        wanted = [share[kind, capacity, policy] for capacity, policy in keys]
        assert numbers(page.column(name, kind)) == close(wanted)
        best = [least[kind, capacity][1] for capacity in ("12%", "50%")]
        assert page.column("Fewest bytes", kind) == best
    halves = zip(*(page.column(name, kind) for kind in ("skewed", "uniform")), strict=True)
    means = [sum(numbers(pair)) / 2 for pair in halves]
    assert numbers(page.column(name, "mean")) == close(means)
    assert page.column("Fewest bytes", "all") == ["lfru", "lfru"]
    assert report([paths[0], *how], tmp_path / "r.html", capsys).text["h2"] == ["skewed"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 98, [0, 25, 50, 75, 100]),
        (0, 246.1, [0, 100, 200, 300]),
        (0, 100, [0, 25, 50, 75, 100]),
        (-1, 3, [-1, 0, 1, 2, 3]),
        (0, 7e-9, [0, 2e-9, 4e-9, 6e-9, 8e-9]),
        (0, 0, [0, 0.25]),
        (5, 5, [5, 5.25]),
    ],
)
def test_ticks_are_round_and_hold_all(low: float, high: float, ticks: list[float]) -> None:
    assert _ticks(low, high) == pytest.approx(ticks)


def test_results_of_benchmarks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    lines = [
        {"benchmark": "stream", "size": "small", "rate": rate, "case": {"waited": rate / 4},
         "clean": rate < 3} for rate in (1.5, 2.5, 4.5)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report([path], tmp_path / "r.html", capsys)
    assert page.tables["Figures"] == [
        ["figure", "lines", "median", "least", "most"],
        ["rate", "3", "2.5", "1.5", "4.5"], ["case.waited", "3", "0.625", "0.375", "1.125"],
    ]  # fmt: skip
    assert any("1 of 3 runs were not alone" in text for text in page.text["p"])
    page = report([path, "--clean"], tmp_path / "r.html", capsys)
    assert page.column("Figures", "median") == ["2", "0.5"]
    write_trace(tmp_path / "t", trace_of(pattern("skewed", 30), NANO.experts))
    code, out, _ = call(["bench", "policies", tmp_path / "t", "--json"], capsys)
    assert code == 0
    path.write_text(out)
    page = report([path], tmp_path / "r.html", capsys)
    found = page.column("Replay by capacity and policy", "bytes")
    assert found == [str(json.loads(line)["bytes"]) for line in out.splitlines()]
    assert len(page.text["svg"]) == 2
    more = [tmp_path / "t", "--repeats", 3, "--capacity", "25%", "--policy", "lru", "--json"]
    parts = call(["bench", "policies", *more], capsys)[1]
    disks = [call(["bench", "policies", *more, "--predictor", "repeat", "--rate", rate], capsys)[1]
             for rate in ("1M", "9M")]  # fmt: skip
    path.write_text(parts + parts + "".join(disks))
    page = report([path], tmp_path / "r.html", capsys)
    sizes = sorted(json.loads(line)["bytes"] for line in parts.splitlines())
    assert page.column("Replay by capacity and policy", "bytes") == [str(sizes[1])]  # one row
    assert any("Medians of up to 6 lines" in text for text in page.text["p"])
    assert len(page.text["svg"]) == 3 * 2  # disks of two speeds are no repeats


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--capacity", "1k+2k"], "is of two tiers"),
        (["--policy", "best"], "There is no policy 'best'"),
        (["--rows", "0"], "--rows is 0"),
        (["-o", "t/inside.html"], "would be written into"),
        (["-o", "no/r.html"], "no is not a folder"),
        (["-o", "."], "is a folder"),
    ],
)
def test_refused(
    given: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace("t", trace_of(pattern("skewed", 20), NANO.experts))
    out = [] if "-o" in given else ["-o", "r.html"]
    code, _, err = call(["report", "t", *out, *given], capsys)
    assert code == 2 and said in err and not list(tmp_path.glob("*.html"))
    Path("e.jsonl").write_text("\n")
    assert "holds no results" in call(["report", "e.jsonl", "-o", "r.html"], capsys)[2]


def test_what_a_page_is_given_is_text() -> None:
    page = Page("<b>&")
    page.table("<i>", ("<u>",), [("</td><script>",), (None,), (2.0,), (12345678,)])
    page.values("<s>", ["</pre>"], [("<x>", [1.0, float("nan")])])
    found = Read(page.html())
    assert found.tables["<i>"] == [["<u>"], ["</td><script>"], ["-"], ["2"], ["12345678"]]
    assert found.text["h1"] == ["<b>&"] and found.text["pre"] == ["</pre>\n<x>\t1\t"]
    assert "script" not in found.text and "b" not in found.text
