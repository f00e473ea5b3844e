"""The frame of ``bench``: what counts, what a line holds, and what is never called clean."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from k3offload import contention
from k3offload.bench_compare import DIFFERS, SAME, compare
from k3offload.bench_frame import Frame, Line, Often, grouped, median, must_be, spread, told
from k3offload.contention import Alone
from k3offload.errors import K3Error, UsageError

IDLE = {"clean": True, "background": {"others": 0.0, "reasons": []}}
BUSY = {"clean": False, "background": {"others": 0.4, "reasons": ["before others used 40%"]}}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What looks at the machine will find, the last of them again and again; idle if nothing."""
    found: list[bool] = []

    def read(self: contention.Background) -> dict[str, Any]:
        idle = not found or (found.pop(0) if len(found) > 1 else found[0])
        reasons = [] if idle else ["other processes used 40% of the processors"]
        return {"clean": idle, "background": {"others": 0.0 if idle else 0.4, "reasons": reasons}}

    monkeypatch.setattr(contention, "LOOK", 0.001)
    monkeypatch.setattr(contention.Background, "read", read)
    return found


def frame(often: Often, **more: Any) -> Frame:
    return Frame("test", "1", often, {"seconds": "s", "never": "of nothing"}, **more)


def test_warm_up_does_not_count_and_seeds_go_on(looks: list[bool]) -> None:
    seeds: list[int] = []
    emitted: list[Line] = []

    def measure(seed: int) -> dict[str, Any]:
        seeds.append(seed)
        return {"seconds": float(seed)}

    made = frame(Often(3, 2, 7), emit=emitted.append)
    lines = made.case({"size": 4}, measure)
    assert seeds == [7, 7, 7, 8, 9] and lines == emitted == made.lines
    assert [(line["repeat"], line["seed"], line["seconds"]) for line in lines] == [
        (0, 7, 7.0), (1, 8, 8.0), (2, 9, 9.0)
    ]  # fmt: skip
    assert lines[0]["settings"] == ["size", "warmup"] and lines[0]["warmup"] == 2
    assert {"cpu", "commit", "processors", "cgroup_memory", "version"} <= lines[0].keys()
    assert median(lines, "seconds") == 8.0
    assert made.verdict() == "clean: nobody else used the machine in any of 3 repeats"
    assert "seconds                      8         7.5         8.5   12.5%  s" in made.table()
    assert "never" not in made.table()


@pytest.mark.parametrize("when", [0, 1, 2])
def test_one_busy_look_is_enough(looks: list[bool], when: int) -> None:
    """Before, during or after: the run is not clean, and says when."""
    looks += [i != when for i in range(3)] + [True]
    made = frame(Often(2, 0))
    first, second = made.case({}, lambda seed: {"seconds": 1.0})
    word = ("before", "during", "after")[when]
    assert not first["clean"] and second["clean"]
    assert first["background"]["reasons"] == [f"{word} other processes used 40% of the processors"]
    assert made.contended == [first] and "clean" not in made.verdict()
    assert made.verdict().startswith("CONTENDED in 1 of 2 repeats") and word in made.table()


def test_waiting_for_an_idle_machine(looks: list[bool]) -> None:
    looks += [False] * 5 + [True]
    assert Alone(wait=30.0).read()["clean"] and len(looks) == 1
    looks[:] = [False]
    begin = time.monotonic()
    assert not Alone(wait=0.05).read()["clean"]
    assert 0.05 <= time.monotonic() - begin < 20


def test_what_is_counted_is_never_contended(tmp_path: Path, looks: list[bool]) -> None:
    looks += [False]
    made = frame(Often(4, 0), timed=False)
    lines = made.case({"size": 4}, lambda seed: {"bytes": 10})
    assert not lines[0]["clean"] and lines[0]["counts"] and made.contended == []
    assert lines[0]["settings"] == ["size"] and "counted, not timed" in made.verdict()
    file = wrote(tmp_path / "a", lines)
    (kind,) = compare(file, file, clean=True).kinds
    assert (kind.a.lines, kind.a.contended) == (4, 0)


def wrote(place: Path, lines: list[Line]) -> Path:
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def lines_of(seconds: float, more: dict[str, Any], found: dict[str, Any] = IDLE) -> list[Line]:
    made = frame(Often(5, 1, 3))
    for i in range(5):
        figures = {"seconds": seconds + i / 100, "deep": {"x": 1}, "ranks": [1.0, 3.0],
                   "computed_by": f"{more['threads']} threads"}  # fmt: skip
        made.add({"size": 4, "share": 0.5, "threads": None}, figures, found, i)
    return made.lines


def test_lines_are_compared_by_the_settings_that_they_name(tmp_path: Path) -> None:
    """A fraction that is a setting, a whole number that is a figure; other machines are told."""
    a = wrote(tmp_path / "a", lines_of(1.0, {"threads": 2}))
    b = wrote(tmp_path / "b", lines_of(2.0, {"threads": 8}, BUSY))
    found = compare(a, b)
    (kind,) = found.kinds
    assert kind.settings == {
        "benchmark": "test", "size": 4, "share": 0.5, "threads": None, "warmup": 1
    }  # fmt: skip
    figures = {one.name: one for one in kind.figures}
    assert set(figures) == {"seconds", "deep.x", "ranks"}
    assert figures["seconds"].verdict == DIFFERS and figures["deep.x"].verdict == SAME
    assert (kind.a.contended, kind.b.contended) == (0, 5)
    assert "computed_by is 2 threads in A and 8 threads in B" in found.notes
    with pytest.raises(UsageError, match="no lines of clean runs"):
        compare(a, b, clean=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 9}, "it has schema 'k3offload-bench' 9"),
        ({"schema": "other"}, "it has schema 'other' 1"),
        ({"settings": ["gone"]}, "lacks settings that it names"),
        ({"settings": 3}, "lacks settings that it names"),
    ],
)
def test_other_schemas_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    good = lines_of(1.0, {"threads": 2})
    bad = wrote(tmp_path / "bad", [*good, {**good[0], **change}])
    with pytest.raises(UsageError, match=f"Line 6 of .*{said}"):
        compare(wrote(tmp_path / "good", good), bad)


def test_no_number_is_no_figure() -> None:
    with pytest.raises(ValueError, match=r"nan|Out of range"):
        frame(Often()).add({}, {"seconds": float("nan")}, IDLE)


def test_accounts_that_differ_end_a_run() -> None:
    must_be("bytes", 10, 10)
    must_be("bytes", 10, 13, slack=3)
    with pytest.raises(K3Error, match=r"bytes is 10 and must be 14"):
        must_be("bytes", 10, 14, slack=3)


def test_small_things() -> None:
    assert spread([4, 1, 3, 2, 5]) == (3, 2, 4)
    assert told({"a": 1, "b": None, "c": "x"}) == "a 1, c x"
    assert frame(Often()).verdict() == "nothing was measured"
    made = frame(Often(1, 0), timed=False)
    for size in (1, 2, 1):
        made.add({"size": size}, {}, IDLE)
    assert [(own, len(some)) for own, some in grouped(made.lines)] == [
        ({"size": 1}, 2), ({"size": 2}, 1)
    ]  # fmt: skip
