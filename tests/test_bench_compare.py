"""``k3offload bench compare``: what is compared, what is refused, and how often noise is believed;
and the mark of lines that were measured beside others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.run
from k3offload.bench_compare import DIFFERS, ENOUGH, FEW, SAME, _figure, compare
from k3offload.bench_frame import SCHEMA, VERSION
from k3offload.contention import Background, _groups, _pressure, limits
from k3offload.errors import UsageError
from tests.helpers_engine import call

Line = dict[str, Any]


def wrote(place: Path, lines: list[Line]) -> Path:
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def runs(seconds: Any, **more: Any) -> list[Line]:
    """A line for each of ``seconds``."""
    facts = {"cpu": "one", "commit": "abc", "date": "2026-01-01", "clean": True}
    return [
        {"benchmark": "wide", "trunk": "int8", **facts, "seconds": s, "bytes": 10, **more}
        for s in seconds
    ]


def noisy(middle: float, count: int, seed: int) -> list[float]:
    drawn: list[float] = (middle * np.random.default_rng(seed).lognormal(0, 0.05, count)).tolist()
    return drawn


def test_medians_and_intervals(tmp_path: Path) -> None:
    a = wrote(tmp_path / "a", runs([1.0, 1.1, 0.9, 1.05, 5.0]))
    b = wrote(tmp_path / "b", runs([2.0, 2.1, 1.9, 2.05, 0.1]))
    (kind,) = compare(a, b).kinds
    seconds, size = kind.figures
    assert kind.settings == {"benchmark": "wide", "trunk": "int8"}
    assert (seconds.name, seconds.a, seconds.b) == ("seconds", 1.05, 2.0)
    assert seconds.ratio == pytest.approx(2.0 / 1.05)
    assert seconds.low is not None and seconds.high is not None
    assert seconds.low < 2.0 / 1.05 < seconds.high
    # the same on both sides: no doubt, no difference
    assert (size.ratio, size.low, size.high, size.verdict) == (1, 1, 1, SAME)
    many = wrote(tmp_path / "c", runs(noisy(1.0, 20, 0)))
    assert compare(a, many) == compare(a, many) != compare(a, many, seed=1)


def test_a_difference_is_seen_and_noise_seldom(tmp_path: Path) -> None:
    """20 % more beside noise of 5 %; and of pairs with none few are said to differ."""
    wrong = missed = 0
    for seed in range(60):
        a = wrote(tmp_path / "a", runs(noisy(1.0, 8, 3 * seed)))
        same = wrote(tmp_path / "s", runs(noisy(1.0, 8, 3 * seed + 1)))
        more = wrote(tmp_path / "m", runs(noisy(1.2, 8, 3 * seed + 2)))
        wrong += compare(a, same).kinds[0].figures[0].verdict == DIFFERS
        missed += compare(a, more).kinds[0].figures[0].verdict != DIFFERS
    assert wrong <= 6 and missed <= 3


def test_few_lines_tell_nothing(tmp_path: Path) -> None:
    a, b = wrote(tmp_path / "a", runs([1.0] * 9)), wrote(tmp_path / "b", runs([2.0] * 4))
    (kind,) = compare(a, b).kinds
    assert {one.verdict for one in kind.figures} == {FEW}
    assert kind.figures[0].ratio == 2 and kind.figures[0].low is None
    enough = wrote(tmp_path / "c", runs([2.0] * 5))
    assert compare(a, enough).kinds[0].figures[0].verdict == DIFFERS


@pytest.mark.parametrize("count", [ENOUGH, 2 * ENOUGH])
def test_chance_alone_seldom_parts_two_sides(count: int) -> None:
    """5 times in 100, about, as an interval of 95 % promises; of 4 lines it were 9."""
    draw, times = np.random.default_rng(0), 250
    drawn = draw.lognormal(0, 0.05, (times, 2, count)).tolist()
    wrong = sum(_figure("", a, b, draw).verdict == DIFFERS for a, b in drawn)
    assert wrong <= 0.065 * times


def test_one_line_tells_what_was_counted(tmp_path: Path) -> None:
    """Bytes of replay are the same in every run; the time that it took is not."""
    a = wrote(tmp_path / "a", runs([1.0], counts=True, replay_seconds=1.0))
    b = wrote(tmp_path / "b", runs([1.0], counts=True, replay_seconds=2.0, bytes=11))
    (kind,) = compare(a, b).kinds
    assert kind.counted
    assert {one.name: one.verdict for one in kind.figures} == {
        "seconds": SAME, "bytes": DIFFERS, "replay_seconds": FEW,
    }  # fmt: skip
    c = wrote(tmp_path / "c", runs([1.0], replay_seconds=2.0, bytes=11))
    assert {one.verdict for one in compare(c, c).kinds[0].figures} == {FEW}


def test_a_side_of_several_machines_or_versions_is_told(tmp_path: Path) -> None:
    a = wrote(tmp_path / "a", runs([1.0]) + runs([1.0], cpu="two"))
    b = wrote(tmp_path / "b", [line for c in "vwxyz" for line in runs([1.0], commit=c)])
    assert compare(a, b).notes == (
        "cpu is one, two in A and one in B",
        "A has lines of more than one cpu, taken together: one, two",
        "B has lines of more than one commit, taken together: v, w, x and 2 more",
    )


def framed(seeds: Sequence[int], **more: Any) -> list[Line]:
    """Lines as the commands of ``bench`` write them."""
    about = {"schema": SCHEMA, "schema_version": VERSION, "settings": ["trunk"]}
    return [
        line | about | {"seed": seed, "repeat": i}
        for i, seed in enumerate(seeds)
        for line in runs([1.0], **more)
    ]


def test_other_inputs_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = wrote(tmp_path / "a", framed(range(5)))
    for seeds, told in ((range(7, 12), "7 to 11"), (range(9), "0 to 8"), ([0, 2, 5, 9], "0, 2, 5")):
        b = wrote(tmp_path / "b", framed(seeds))
        (note,) = compare(a, b).notes
        assert note.startswith("wide: seed is 0 to 4 in A and " + told)
        code, out, _ = call(["bench", "compare", a, b], capsys)
        assert code == 0 and f"note: {note}" in out
    assert compare(a, a).notes == ()


def test_figures_of_one_side_are_told(tmp_path: Path) -> None:
    a = wrote(tmp_path / "a", framed(range(5), of_fio=1.1, rate=3.5))
    b = wrote(tmp_path / "b", framed(range(5), rate=3.5, watts=7.5))
    assert compare(a, b).notes == (
        "wide: only lines of A have of_fio",
        "wide: only lines of B have watts",
    )


def test_kinds_are_kept_apart(tmp_path: Path) -> None:
    a = wrote(tmp_path / "a", runs([1, 2], tokens=5) + runs([3.0], tokens=6))
    b = wrote(tmp_path / "b", runs([7.0], tokens=6) + runs([9.0], tokens=6, ram=None))
    found = compare(a, b)
    (kind,) = found.kinds
    assert kind.settings["tokens"] == 6 and kind.figures[0].a == 3 and kind.figures[0].b == 7
    assert [one["tokens"] for one in found.only_a] == [5]
    assert [one["ram"] for one in found.only_b] == [None]
    other = wrote(tmp_path / "c", [{"benchmark": "stream", "seconds": 1.0}])
    for one, two, words in (
        (a, other, "lines of wide and .* of stream, which are of different kinds"),
        (a, wrote(tmp_path / "d", runs([1.0], tokens=7)), "with other settings"),
        (a, wrote(tmp_path / "e", []), "of nothing"),
    ):
        with pytest.raises(UsageError, match=words):
            compare(one, two)


def test_numbers_inside_and_lists(tmp_path: Path) -> None:
    line = {
        "benchmark": "x", "cases": [{"share": 0.5, "name": "n", "bytes": 4}, {"share": 1}],
        "rounds": [3.0, 1.0, 2.0], "deep": {"er": {"seconds": 2.5, "flag": True}}, "none": None,
        "odd": float("nan"), "seconds": 7, "background": {"others": 0.3},
    }  # fmt: skip
    a = wrote(tmp_path / "a", [line])
    (kind,) = compare(a, a).kinds
    assert {one.name: one.a for one in kind.figures} == {
        "cases.0.share": 0.5, "cases.0.bytes": 4, "cases.1.share": 1, "rounds": 2.0,
        "deep.er.seconds": 2.5, "seconds": 7,
    }  # fmt: skip
    assert kind.settings == {"benchmark": "x", "none": None}


def test_nothing_before(tmp_path: Path) -> None:
    """No ratio to nought; the difference decides."""
    a, b = wrote(tmp_path / "a", runs([0.0] * 5)), wrote(tmp_path / "b", runs([1.0] * 5))
    assert [f.verdict for f in compare(a, b).kinds[0].figures] == [DIFFERS, SAME]
    assert [f.verdict for f in compare(a, a).kinds[0].figures] == [SAME, SAME]
    assert compare(a, b).kinds[0].figures[0].ratio is None


def test_contended_lines_are_marked_and_may_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = {"reasons": ["other processes used 40% of the processors"]}
    a = wrote(tmp_path / "a", runs([1.0] * 5) + runs([9.0] * 5, clean=False, background=why))
    lines = runs([1.0] * 5)
    del lines[0]["clean"]
    b = wrote(tmp_path / "b", lines)
    code, out, _ = call(["bench", "compare", a, b], capsys)
    assert code == 0 and "A 10 lines (5 contended), B 5 lines (1 not said)" in out
    told = "contended in A (--clean leaves such lines out): other processes used 40% of the "
    assert f"{told}processors, and 4 more" in out
    assert "only in" not in out
    code, out, _ = call(["bench", "compare", a, b, "--clean", "--json"], capsys)
    facts = json.loads(out)
    assert facts["kinds"][0]["a"] == {"lines": 5, "contended": 0, "unknown": 0}
    assert facts["kinds"][0]["figures"][0]["verdict"] == SAME and facts["notes"] == []
    none = wrote(tmp_path / "c", runs([1.0] * 5, clean=False, background=why))
    code, out, err = call(["bench", "compare", a, none, "--clean"], capsys)
    assert code == 2 and f"{none} has no lines of clean runs" in err and not out


def test_other_machines_are_told(tmp_path: Path) -> None:
    a, b = wrote(tmp_path / "a", runs([1.0])), wrote(tmp_path / "b", runs([1.0], cpu="two"))
    assert compare(a, b).notes == ("cpu is one in A and two in B",)


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = wrote(tmp_path / "good", runs([1.0])), tmp_path / "bad"
    for data, words in ((b'{"a": 1}\n[2]\n', "Line 2 of"), (b"\xff\n", "Line 1 of"),
                        (b'\n{"a": 1', "Line 2 of")):  # fmt: skip
        bad.write_bytes(data)
        code, _, err = call(["bench", "compare", good, bad], capsys)
        assert code == 2 and words in err
    code, _, err = call(["bench", "compare", good, tmp_path / "none"], capsys)
    assert code == 1 and "none" in err
    code, _, err = call(["bench", "compare", good, good, "--seed", "-1"], capsys)
    assert code == 2 and "The seed is -1" in err


def test_the_results_of_this_project_can_be_read() -> None:
    """Every line of them is of some kind, and a file is no different from itself."""
    for file in (Path(benchmarks.run.__file__).parent / "results").glob("*.jsonl"):
        found = compare(file, file)
        assert not found.only_a and not found.only_b
        count = len(file.read_text().splitlines())
        assert sum(kind.a.lines for kind in found.kinds) == count
        assert {f.verdict for kind in found.kinds for f in kind.figures} <= {SAME, FEW}


# ---- contention ----

BURN = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"


def test_what_others_use_is_theirs_and_what_we_use_is_ours() -> None:
    """An orphan is nobody's child: its time is that of others.  Our own, and a child's, is not."""
    before = Background()
    end = time.perf_counter() + 0.4
    while time.perf_counter() < end:
        pass
    own = before._now()["own"] - before._before["own"]
    assert own > 0.05  # others may run in between
    shell = f'{sys.executable} -c "{BURN}" >/dev/null 2>&1 & echo $!'
    pid = int(subprocess.run(["sh", "-c", shell], capture_output=True, check=True).stdout)
    try:
        watch = Background()
        time.sleep(1.0)
        found = watch.read()
    finally:
        os.kill(pid, signal.SIGKILL)
    background = found["background"]
    assert background["others"] * len(os.sched_getaffinity(0)) > 0.15
    child = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        watch = Background()
        time.sleep(1.0)
        used = watch._now()["own"] - watch._before["own"]
    finally:
        child.kill()
        child.wait()
    assert used > 0.15


@pytest.mark.parametrize(
    ("used", "words"),
    [
        ({"busy": 0.02}, None),
        ({"busy": 1.0, "own": 1.0}, None),
        ({"busy": 1.0, "own": 0.5}, "other processes used"),
        ({"stolen": 0.5}, "the hypervisor took"),
        ({"held_back": 3.0}, "held it back 3 times"),
        ({"waited_cpu": 0.9}, None),
    ],
)
def test_reasons(used: dict[str, float], words: str | None) -> None:
    """Figures of a second on each processor, of which some passed as told."""
    watch, count = Background(), len(os.sched_getaffinity(0))
    watch._before = dict.fromkeys(("busy", "own", "stolen", "held_back", "waited_cpu"), 0.0)
    scaled = {k: v * (1 if k in ("held_back", "waited_cpu") else count) for k, v in used.items()}
    watch._now = lambda: {**watch._before, **scaled}  # type: ignore[method-assign]
    watch._begin = time.perf_counter() - 1
    found = watch.read()
    assert found["clean"] == (words is None)
    assert [words in reason for reason in found["background"]["reasons"]] == (
        [] if words is None else [True]
    )


def test_limits_are_the_tightest(tmp_path: Path) -> None:
    assert limits(tmp_path)["cgroup_processors"] is None
    groups = _groups(tmp_path)
    for folder in groups:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text("max 100000\n")
        (folder / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert limits(tmp_path)["cgroup_processors"] is limits(tmp_path)["cgroup_memory"] is None
    (groups[0] / "cpu.max").write_text("350000 100000\n")
    (groups[-1] / "cpu.max").unlink()
    (groups[-1] / "cpu.cfs_quota_us").write_text("150000\n")
    (groups[-1] / "cpu.cfs_period_us").write_text("100000\n")
    (groups[-1] / "memory.max").write_text("4096\n")
    found = limits(tmp_path)
    assert found["processors"] == len(os.sched_getaffinity(0))
    assert found["cgroup_memory"] == 4096
    assert found["cgroup_processors"] == 1.5
    (tmp_path / "pressure").write_text("some avg10=1.00 avg60=1.00 avg300=1.00 total=2500000\n")
    assert _pressure(tmp_path / "pressure") == 2.5 and _pressure(tmp_path / "no") is None


def test_result_lines_say_whether_they_are_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.run, "ROOT", tmp_path)
    facts = benchmarks.run.machine()
    assert {"cpu", "commit", "date", "processors", "cgroup_processors"} <= set(facts)
    benchmarks.run.note({"benchmark": "x", **facts, "seconds": 1.0})
    (file,) = (tmp_path / "results").iterdir()
    line = json.loads(file.read_text())
    assert line["clean"] in (True, False) and line["background"]["seconds"] > 0
    assert line["clean"] == (not line["background"]["reasons"])
    (kind,) = compare(file, file).kinds
    assert kind.settings == {"benchmark": "x"} and len(kind.figures) == 1


def test_settings_that_are_fractions(tmp_path: Path) -> None:
    """A share of the experts in the cache is chosen, not measured."""
    prompt = "stream_prompt"
    few = runs([1.0] * 4, benchmark=prompt, cache=0.1)
    many = runs([9.0] * 4, benchmark=prompt, cache=0.5)
    found = compare(wrote(tmp_path / "a", few + many), wrote(tmp_path / "b", few))
    (kind,) = found.kinds
    assert kind.settings["cache"] == 0.1 and kind.a.lines == 4
    assert kind.figures[0].a == 1.0
    assert [one["cache"] for one in found.only_a] == [0.5]


def test_replays_of_other_versions_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Path(__file__).with_name("golden") / "routing_natural.zip"
    command = ["bench", "policies", trace, "--rows", 60, "--capacity", "25%", "--json"]
    code, out, _ = call([*command, "--policy", "lru", "--predictor", "repeat"], capsys)
    assert code == 0
    line = json.loads(out)
    other = {**line, "version": "9", "path": "elsewhere"}
    for name in ("late", "misses", "hits", "resident", "prefetches", "prefetched_in_time", "bytes"):
        other[name] += 1
    found = compare(wrote(tmp_path / "a", [line]), wrote(tmp_path / "b", [other]))
    (kind,) = found.kinds
    assert not found.only_a and kind.settings["trace"] == line["trace"]
    figures = {one.name for one in kind.figures}
    assert {"late", "prefetches", "resident", "prefetched_in_time", "bytes"} <= figures
    lines = [{"benchmark": "old", "latents": n, "seconds": 1.0} for n in (5, 6)]
    for one, name in zip(lines, ("c", "d"), strict=True):
        wrote(tmp_path / name, [one])
    with pytest.raises(UsageError, match="with other settings"):
        compare(tmp_path / "c", tmp_path / "d")
