"""Real replay: the bytes that come from the disk, the link that is fitted, what is refused."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload import bench_replay, cli_replay
from k3offload.bench_compare import compare as judge
from k3offload.bench_frame import Frame, Line, Often
from k3offload.bench_policies import Room
from k3offload.bench_replay import Pages, Played, as_in, compare, fitted
from k3offload.checkpoint import Checkpoint
from k3offload.errors import CheckpointError, DoesNotFit, K3Error, UsageError
from k3offload.scheduler.counts import Counts
from k3offload.scheduler.policy_lru import Policy as Lru
from k3offload.scheduler.predict_repeat import Predictor as Repeat
from k3offload.scheduler.replay import replay
from k3offload.scheduler.replay_real import RealTier
from k3offload.scheduler.replay_timed import Pace, replay_timed
from k3offload.tiers.base import PageId
from k3offload.tiers.tier_disk import DiskTier
from k3offload.tiers.tier_ram import Slab
from k3offload.trace import Trace, read_trace
from k3offload.trace_made import Size, pattern, trace_of
from tests.helpers_engine import call, checkpoint

ROOT = Path(__file__).parents[1]
EXAMPLES, TRACE = ROOT / "examples", ROOT / "benchmarks" / "traces" / "nano_held_out.zip"


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    return Checkpoint.open(checkpoint())


def trace_for(model: Checkpoint, tokens: int = 12) -> Trace:
    """With places in the file that are not the numbers of the experts."""
    trace = trace_of(pattern("skewed", tokens, Size(8, 16, 4)), 16)
    order = np.stack([np.random.default_rng(i).permutation(16) for i in range(8)])
    return as_in(replace(trace, order=order.astype(np.uint16)), model)


def replayed(
    trace: Trace, model: Checkpoint, place: Room, predictor: str = "none", pace: Pace | None = None
) -> tuple[Frame, Line]:
    """One repeat with LRU: the frame, and its line."""
    frame = Frame("replay", "1", Often(1, 0), bench_replay.MEANINGS)
    compare(frame, trace, model, [place], ["lru"], [predictor], pace or Pace(), {})
    (line,) = frame.lines
    return frame, line


def test_pages_of_a_trace_are_experts_in_the_order_of_the_files(model: Checkpoint) -> None:
    trace = trace_for(model)
    pages = Pages(trace, model)
    every = [PageId(int(la), e) for la in trace.layers for e in range(16)]
    found = [pages.locate(page) for page in every]
    assert len(set(found)) == len(every) == pages.wanted == pages.have
    moe = model.spec.moe_layers
    experts = {model.expert(la, e).extents for la in moe for e in range(16)}
    assert set(found) == experts
    for place, layer in enumerate(trace.layers.tolist()):  # order in the file is the trace's
        by_place = sorted(range(16), key=lambda e: trace.order[place, e])
        own = [pages.locate(PageId(layer, e)) for e in by_place]
        assert own == sorted(own)


def test_a_longer_trace_begins_again(model: Checkpoint) -> None:
    trace = as_in(trace_of(pattern("skewed", 3, Size(9, 16, 4)), 16), model)
    pages = Pages(trace, model)
    last, first = int(trace.layers[-1]), int(trace.layers[0])
    assert (pages.wanted, pages.have) == (144, 128)
    assert pages.locate(PageId(last, 3)) == pages.locate(PageId(first, 3))
    frame, _ = replayed(trace, model, Room("", (20,)))
    assert "several of the trace are the same bytes" in frame.notes[0]


@pytest.mark.parametrize("predictor", ["none", "repeat"])
def test_bytes_are_those_of_the_model_the_disk_and_the_system(
    model: Checkpoint, predictor: str
) -> None:
    trace = trace_for(model)
    _, line = replayed(trace, model, Room("", (20,)), predictor, Pace(1e-4, 1e-5))
    size = model.expert_bytes
    assert line["hits"] + line["late"] + line["misses"] == line["requests"]
    assert line["ratio"] > 0 and line["rate"] > 0 and line["latency"] >= 0
    assert line["overhead_bytes"] > 0  # pages are not aligned
    if predictor == "none":
        own = replay(trace.leases(), Lru(20), 20, size)
        assert line["bytes"] == line["modelled_bytes"] == size * line["misses"] == own.bytes
    else:
        assert line["prefetches"] > 0
    if line["mode"] == "direct":
        beside = line["proc_bytes"] - line["bytes"] - line["overhead_bytes"]
        assert -4096 * 500 < beside <= 16 << 20  # a window may reach over the end of a file


def test_the_slots_hold_the_pages_that_were_asked_for(model: Checkpoint) -> None:
    """What lies in a slot when a lease hands it out is what the file has there."""
    trace, pages = trace_for(model, 4), Pages(trace_for(model, 4), model)
    slots = Slab(40 * pages.window_bytes).slots(pages.window_bytes)
    disk = DiskTier(model.files, pages.locate)
    seen: list[PageId] = []

    def look(page: PageId, slot: Any) -> None:
        (extent,) = pages.locate(page)
        with model.files[extent.file].open("rb") as file:
            file.seek(extent.offset)
            skew = extent.offset % 4096
            assert slot[skew : skew + extent.length].tobytes() == file.read(extent.length)
        seen.append(page)

    disk.look = look
    tier = RealTier(model.expert_bytes, disk)
    try:
        counts = replay_timed(
            trace.leases(), Lru(40), Repeat(trace.layers.tolist(), 16, 4), slots, tier
        )
    finally:
        disk.close()
    assert len(seen) * model.expert_bytes == counts.bytes == tier.moved > 0


def test_time_that_is_slept_adds_up(model: Checkpoint) -> None:
    tier = RealTier(1, DiskTier(model.files, Pages(trace_for(model), model).locate))
    for _ in range(40):
        tier.pass_time(1e-3)
    assert 0.0395 <= tier.now < 0.5


def test_the_fitted_link() -> None:
    size = 1000
    exact = {n: [9.0, 2e-3 + n * size / 5e5, 0.0] for n in (1, 2, 4, 8)}
    link = fitted(exact, size)
    assert link.rate == pytest.approx(5e5) and link.latency == pytest.approx(2e-3)
    assert fitted({4: [4e-3]}, size).rate == pytest.approx(1e6)
    shrinking = {n: [n**1.5 * 1e-3] for n in (1, 2, 4, 8)}  # no latency would explain that
    assert fitted(shrinking, size).latency == 0
    assert fitted(shrinking, size).rate > 0


def test_rounds_that_do_not_add_up_are_found(model: Checkpoint) -> None:
    trace = trace_for(model)
    run, place = trace.leases(), Room("", (38,))
    own = replay(run, Lru(38), 38, model.expert_bytes)
    fine = Played(own, 1.0, own.bytes, 4096, own.bytes + 4096)
    check = bench_replay._check
    check(trace, run, place, "lru", "none", fine, fine, "direct")
    for wrong in (
        fine._replace(proc_bytes=own.bytes - 1),  # less than was read: out of a cache
        fine._replace(counts=replace(own, bytes=own.bytes + model.expert_bytes)),
        fine._replace(counts=Counts()),
    ):
        with pytest.raises(K3Error, match="accounts of this run differ"):
            check(trace, run, place, "lru", "none", wrong, fine, "direct")
    check(trace, run, place, "lru", "none", fine._replace(proc_bytes=0), fine, "buffered")


def test_what_is_read_beside_the_pages_is_noted(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, fetched = trace_for(model), bench_replay._fetched
    for beside in (0, 17 << 20):
        looks = iter(range(2))
        monkeypatch.setattr(
            bench_replay, "_fetched", lambda n=beside, i=looks: (fetched() or 0) + n * next(i)
        )
        frame, line = replayed(trace, model, Room("", (38,)))
        noted = bench_replay.MORE_WAS_READ in frame.notes
        assert noted == (line["mode"] == "direct" and beside > 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the frame of all benchmarks; policies and predictors may be files of one's own."""
    file = tmp_path / "a.jsonl"
    given = ["bench", "replay", checkpoint(), TRACE, "--rows", 6, "--layer", 0, "--warmup", 0]
    near, sure = EXAMPLES / "policy_near.py", EXAMPLES / "predict_sure.py"
    code, out, _ = call(
        [*given, "--repeats", 2, "--json", "-o", file, "--policy", "lru", "--policy", near,
         "--predictor", sure], capsys,
    )  # fmt: skip
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == (0 if all(line["clean"] for line in lines) else 4)
    assert [line["policy"] for line in lines] == ["lru", "lru", "near", "near"]
    assert [line["repeat"] for line in lines] == [0, 1, 0, 1]
    for line in lines:
        assert line["trace"] == read_trace(TRACE).rows(slice(6)).digest
        assert line["cpu"] and line["version"] and line["benchmark"] == "replay"
        assert line["predictor"] == "sure" and line["layer_seconds"] == 0 and line["ratio"] > 0
        assert line["background"]["reasons"] or line["clean"]
    kinds = judge(file, file).kinds
    assert [(kind.settings["policy"], kind.a.lines) for kind in kinds] == [("lru", 2), ("near", 2)]
    assert {"ratio", "bytes", "rate"} <= {figure.name for figure in kinds[0].figures}
    code, out, _ = call([*given, "--repeats", 1, "--capacity", "10%"], capsys)
    rows = out.splitlines()
    assert code in (0, 4) and "reads" in rows[0] and "several" in out
    assert rows[2].startswith("10%       lru     none")
    assert rows[-1].startswith("clean" if code == 0 else "CONTENDED")


def test_what_is_off_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    line = {
        "capacity": "5%", "policy": "lru", "predictor": "none", "bytes": 1, "rate": 1e9,
        "latency": 1e-3, "seconds": 1.0, "modelled_seconds": 1.0, "waited_ratio": 1.0,
    }  # fmt: skip
    for ratio, off in ((0.84, True), (0.86, False), (1.14, False), (1.16, True)):
        (row,) = cli_replay._row({**line, "ratio": ratio}, False, 1)
        assert ("off by more than 15%" in row) == off


def test_refused(
    model: Checkpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for more, said in (
        (["--layer", "-1"], "--layer is -1"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--predictor", "latent"], "does not say what to predict from"),
        (["--policy", "best"], "no policy 'best'"),
        (["--capacity", "10%+20%"], "names two tiers"),
    ):
        code, out, err = call(["bench", "replay", checkpoint(), TRACE, *more], capsys)
        assert code == 2 and said in err and not out
    trace = trace_for(model)
    bare = Checkpoint.open(checkpoint(layers=1, vision=False))
    with pytest.raises(CheckpointError, match="no routed experts"):
        Pages(trace, bare)
    monkeypatch.setattr(bench_replay, "SPARE", 1 << 60)
    with pytest.raises(DoesNotFit, match="38 pages"):
        replayed(trace, model, Room("", (38,)))
    with pytest.raises(UsageError, match="two tiers"):
        replayed(trace, model, Room("a+b", (3, 9)))
    with pytest.raises(UsageError, match="does not hold what the predictor router"):
        replayed(trace, model, Room("", (3,)), "router")


def test_bursts_are_misses(model: Checkpoint) -> None:
    trace = trace_for(model)
    with bench_replay._Real(trace, model, 6) as real:
        found = real.bursts(random.Random(0))
        assert list(found) == [1, 2, 4] and {len(s) for s in found.values()} == {5}
        assert real.disk.counts.reads == 5 * (1 + 2 + 4)
        assert all(statistics.median(s) > 0 for s in found.values())
