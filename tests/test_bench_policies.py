"""``bench policies`` and the commands of ``trace``, and routing that other engines wrote down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload import bench_policies, registry
from k3offload.errors import UsageError
from k3offload.scheduler import policy_lru
from k3offload.scheduler.policy_lru import Policy as Lru
from k3offload.scheduler.replay import replay
from k3offload.scheduler.replay_timed import Pace
from k3offload.trace import Trace, read_trace
from k3offload.trace_import import import_trace
from k3offload.trace_made import NANO, PATTERNS, pattern, trace_of, write_trace
from tests.helpers_engine import call

GOLDEN = Path(__file__).with_name("golden") / "routing_natural.zip"


def made(folder: Path, tokens: int = 120) -> Trace:
    trace = trace_of(pattern("skewed", tokens), NANO.experts, page_bytes=1000)
    write_trace(folder, trace)
    return trace


def lines_of(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    code, out, _ = call(arguments, capsys)
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def test_each_policy_beside_the_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = made(tmp_path / "t")
    lines = lines_of(
        ["bench", "policies", tmp_path / "t", "--json", "--capacity", "25%", "--capacity", "50k"],
        capsys,
    )
    assert [line["policy"] for line in lines] == 2 * registry.names("scheduler", "policy")
    assert [line["slots"] for line in lines] == [84] * 4 + [50] * 4
    for line in lines:
        assert line["trace"] == trace.digest and line["cpu"] and line["version"]
        assert line["compulsory_bytes"] <= line["min_bytes"] <= line["bytes"]
        assert line["hits"] + line["late"] + line["misses"] == line["requests"]
        assert line["resident"] + line["prefetched_in_time"] == line["hits"]
        assert line["bytes"] == 1000 * line["misses"]
        won, gap = (line["lru_bytes"] - line[name] for name in ("bytes", "min_bytes"))
        assert line["gap_closed"] == pytest.approx(won / gap, abs=1e-4)
        if line["policy"] == "lru":
            own = replay(trace.leases(), Lru(line["slots"]), line["slots"], 1000)
            assert line["bytes"] == line["lru_bytes"] == own.bytes


def test_two_tiers_and_predictors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "t")
    lines = lines_of(
        ["bench", "policies", tmp_path / "t", "--json", "--capacity", "6%+40%", "--policy", "lru",
         "--predictor", "none", "--predictor", "repeat", "--rate", "1M"], capsys,
    )  # fmt: skip
    top, low, guessed, guessed_low = lines
    assert [line["tier"] for line in lines] == [0, 1, 0, 1]
    assert low["requests"] == top["misses"]
    assert low["min_bytes"] <= low["bytes"] == low["lru_bytes"]
    assert guessed["prefetches"] and guessed["waited_seconds"] > 0
    assert guessed_low["requests"] == guessed["misses"] + guessed["prefetch_bytes"] // 1000
    assert guessed["min_bytes"] == top["min_bytes"]


def test_what_is_given_twice_is_replayed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = made(tmp_path / "t", 40)
    rooms = bench_policies.rooms(["25%", " 25.0%", "12%", "84k"], trace)  # pages of 1000 bytes
    assert [one.text for one in rooms] == ["25%", "12%"]
    command = ["bench", "policies", tmp_path / "t", tmp_path / "t", "--policy", "lru", "--json"]
    twice = lines_of([*command, "--capacity", "25%", "--capacity", "84k"], capsys)
    assert [line["capacity"] for line in twice] == ["25%"]


def test_a_layer_takes_the_same_in_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its experts are known, and a tenth of it for each of them."""
    made(tmp_path / "t", 40)
    command = ["bench", "policies", tmp_path / "t", "--policy", "lru", "--predictor", "repeat"]
    waits = []
    for layer in ("0", "0.5"):
        (line,) = lines_of(
            [*command, "--capacity", "25%", "--json", "--rate", "1M", "--layer", layer], capsys
        )
        assert line["page_seconds"] == line["layer_seconds"] / 10 == float(layer) / 10
        waits.append(line["waited_seconds"])
    assert waits[0] > waits[1] > 0
    usual = bench_policies.Speeds().pace
    assert usual == Pace.of(0.002)


def test_large_traces_are_replayed_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same lines in the same order, policies of one's own and errors included."""
    trace = made(tmp_path / "t", 60)
    mine = tmp_path / "policy_mine.py"
    text = Path(policy_lru.__file__).read_text().replace("..tiers", "k3offload.tiers")
    mine.write_text(text)
    rooms = [bench_policies.room(text, trace) for text in ("6%+20%", "25%")]

    def lines(processes: int) -> list[dict[str, Any]]:
        monkeypatch.setattr(bench_policies, "LARGE", 0)
        monkeypatch.setattr(bench_policies, "default_threads", lambda: processes)
        some = ["lfru", str(mine)], ["none", "repeat"]
        found = list(bench_policies.compare(trace, rooms, *some))
        return [{**line, "replay_seconds": 0} for line in found]

    assert lines(2) == lines(1)
    gone = "del self._pages[victim]\n        return victim"
    assert gone in text
    mine.write_text(text.replace(gone, "return PageId(99, 99)"))
    with pytest.raises(UsageError, match="not there"):
        lines(2)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(
        ["bench", "policies", GOLDEN, "--rows", 60, "--policy", "lru", "--policy", "lfru"], capsys
    )
    rows = out.splitlines()
    assert code == 0 and len(rows) == 2 + 3 * 2
    assert "60 tokens, 7 x 4 of 48" in rows[0] and "closed" in rows[1]
    assert len({len(row) for row in rows[1:]}) == 1


def test_a_new_policy_appears_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scheduler").mkdir()
    for name in ("policy_lru", "policy_brandnew", "predict_none"):
        (tmp_path / "scheduler" / f"{name}.py").touch()
    monkeypatch.setattr(registry, "_PACKAGE", tmp_path)
    monkeypatch.setitem(sys.modules, "k3offload.scheduler.policy_brandnew", policy_lru)
    assert bench_policies.chosen_names("policy", None, True) == ["brandnew", "lru"]
    trace = trace_of(pattern("uniform", 40), NANO.experts)
    room = bench_policies.room("20%", trace)
    (line,) = bench_policies.compare(trace, [room], ["brandnew"])
    assert line["bytes"] == line["lru_bytes"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--policy", "best"], "There is no policy 'best'"),
        (["--predictor", "oracle"], "There is no predictor 'oracle'"),
        (["--capacity", "x%"], "'x%' is no share"),
        (["--capacity", "0%"], "0 experts of 336"),
        (["--capacity", "1k+2k+3k"], "one tier or of two"),
        (["--latency", "-1", "--predictor", "repeat"], "below 0"),
        (["--layer", "nan", "--predictor", "repeat"], "no number"),
        (["--rate", "0", "--predictor", "repeat"], "--rate is 0"),
        (["--rate", "1G"], "--rate does nothing without a predictor"),
        (["--latency", "1"], "--latency does nothing without a predictor"),
        (["--layer", "1", "--predictor", "none"], "--layer does nothing without a predictor"),
        (["--capacity", "nan%"], "'nan%' is no share"),
        (["--capacity", "inf%"], "'inf%' is no share"),
        (["--capacity", "2000%"], "6720 experts of 336, more than ten times"),
        (["--rows", "0"], "--rows is 0"),
    ],
)
def test_refused(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "t", 20)
    code, out, err = call(["bench", "policies", tmp_path / "t", *given], capsys)
    assert code == 2 and said in err and not out


def test_predictors_without_what_they_ask_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a row that looks as if they were worth nothing."""
    made(tmp_path / "t", 20)
    for name, said in (
        ("router", "does not hold what the predictor router asks for"),
        ("latent", "does not say what to predict from"),
    ):
        code, out, err = call(
            ["bench", "policies", tmp_path / "t", "--predictor", name, "--policy", "lru"], capsys
        )
        assert code == 2 and said in err and not out


def test_a_trace_without_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t", made(tmp_path / "u", 20).rows(slice(0)))
    for command in (["bench", "policies", tmp_path / "t"],
                    ["trace", "like", tmp_path / "t", "-o", tmp_path / "v"]):  # fmt: skip
        code, out, err = call(command, capsys)
        assert code == 2 and "holds no tokens" in err and not out
    assert call(["trace", "info", tmp_path / "t"], capsys)[0] == 0
    assert not (tmp_path / "v").exists()


def test_what_is_refused_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "t", 20)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    rows = tmp_path / "rows.csv"
    rows.write_text("sequence,position,layer,experts\n0,0,1,2 3\n")
    make, like = ["trace", "make", "scan"], ["trace", "like", tmp_path / "t"]
    for command, out, said in (
        (["trace", "make", "odd"], "u", "no such pattern as 'odd'"),
        ([*make, "--seed", -1], "u", "--seed is -1"),
        ([*make[:2], "drawn", "--seed", -1], "u", "--seed is -1"),
        ([*like, "--seed", -1], "u", "--seed is -1"),
        (["trace", "like", tmp_path / "none"], "u", "no routing trace"),
        (make, "model/u", "in the model's folder"),
        (like, "model/u", "in the model's folder"),
        (["trace", "import", rows], "model/u", "in the model's folder"),
    ):
        code, _, err = call([*command, "-o", tmp_path / out], capsys)
        assert code == 2 and said in err, (command, err)
        assert not (tmp_path / out).exists(), command
    assert call(["trace", "import", rows, "-o", tmp_path / "u"], capsys)[0] == 0


def test_trace_make_and_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t"
    assert (
        call(["trace", "make", "stack", "-o", out, "-n", 30, "--page-bytes", "2k"], capsys)[0] == 0
    )
    (found,) = lines_of(["trace", "info", out, "--json"], capsys)
    assert (found["rows"], found["requests"], found["page_bytes"]) == (30, 30 * 7 * 4, 2000)
    code, text, _ = call(["trace", "info", out], capsys)
    assert code == 0 and found["digest"] in text
    assert call(["trace", "make", "stack", "-o", out], capsys)[0] == 2  # not empty
    code, _, err = call(["trace", "make", "odd", "-o", tmp_path / "u"], capsys)
    assert code == 2 and "'uniform'" in err


# ---- import ----

ROWS = [(0, 0, 3, [1, 5]), (0, 0, 4, [2, 0]), (0, 1, 3, [7, 5]), (0, 1, 4, [2, 3]),
        (4, 0, 3, [1, 0]), (4, 0, 4, [0, 1])]  # fmt: skip


def written(folder: Path, kind: str) -> Path:
    path = folder / f"routing.{kind}"
    if kind == "csv":
        rows = [f"{s},{p},0.5,{la},{' '.join(map(str, e))}" for s, p, la, e in ROWS]
        path.write_text("\n".join(["sequence,position,weight,layer,experts", *rows, ""]))
    else:
        keys = ("sequence", "position", "layer", "experts")
        path.write_text("".join(json.dumps(dict(zip(keys, r, strict=True))) + "\n" for r in ROWS))
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_import(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, kind), tmp_path / "t"
    code, _, _ = call(
        ["trace", "import", path, "-o", out, "--experts", 10, "--page-bytes", 7], capsys
    )
    assert code == 0
    trace = read_trace(out)
    assert (trace.layers.tolist(), trace.experts, trace.top_k) == ([3, 4], 10, 2)
    assert trace.chosen.tolist() == [[[1, 5], [0, 2]], [[5, 7], [2, 3]], [[0, 1], [0, 1]]]
    assert (trace.sequence.tolist(), trace.position.tolist()) == ([0, 0, 4], [0, 1, 0])
    assert trace.decode.all() and (trace.codes == 128).all() and trace.page_bytes == 7
    assert replay(trace.leases(), Lru(3), 3, 7).requests == 12
    assert import_trace(path).experts == 8


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"sequence": 0, "position": 2, "layer": 3}', "line 7 is no routing: it has no 'experts'"),
        ('{"sequence": 0, "position": 2, "layer": 4, "experts": [1, 2]}', "layer 4 is not the one"),
        ('{"sequence": 0, "position": 2, "layer": 3, "experts": [1]}', "not 2 different experts"),
        ('{"sequence": 0, "position": 2, "layer": 3, "experts": [1, 1]}', "not 2 different"),
        ('{"sequence": 0, "position": 2, "layer": 3, "experts": [1, 2]}', "last token lacks"),
        ('{"sequence": 0, "position": 2, "layer": 3, "experts": [1, 70000]}', "out of range"),
        ("{", "line 7"),
    ],
)
def test_import_refuses(line: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match=said):
        import_trace(path)


def test_import_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sequence,position,layer,experts\n")
    with pytest.raises(UsageError, match="holds no routing"):
        import_trace(tmp_path / "a.csv")
    with pytest.raises(UsageError, match="names expert 7"):
        import_trace(written(tmp_path, "csv"), experts=7)


def test_patterns_are_routings() -> None:
    for name in PATTERNS:
        chosen = pattern(name, 40, NANO._replace(experts=24, top_k=3))
        assert chosen.shape == (40, 7, 3) and 0 <= chosen.min() <= chosen.max() < 24, name
        assert (np.diff(chosen, axis=2) > 0).all(), name
