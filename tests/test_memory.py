"""Memory is what the plan says: measured in processes of their own.

R02 and R03 (the budget is kept and used), R35 (loading), R65 (open files), R70 (nothing grows).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import k3offload.engine_plan
from k3offload.loading import load
from k3offload.machine import Machine
from tests.helpers_checkpoint import run_python, split, tiny
from tests.helpers_engine import BRIEF, checkpoint
from tests.helpers_memory import HEAD, MB, STREAMED, TRUNK, keeps_its_word, measure

RUN = (
    HEAD
    + """
options = arguments["options"]
if arguments["least"] is not None:
    try:
        load(folder, **options, ram=1)
    except errors.DoesNotFit as refusal:
        options["ram"] = refusal.missing + 1 + arguments["least"]
with load(folder, **options) as engine:
    loaded = peak_rss()
    with engine.session() as session:
        session.append([i * 7 % 256 for i in range(arguments["prompt"])])
        if arguments["new"]:
            *_, done = session.generate(arguments["new"], Sampling(ignore_end=True))
            assert isinstance(done, Done) and done.finish_reason == "length", done
        for _ in range(arguments.get("saves", 0)):
            session.save(Path(options["prefix_dir"]) / "saved")
            session.append([5])
            session.logits()
        if arguments.get("saves", 0):
            session.close()
            with engine.load_session(Path(options["prefix_dir"]) / "saved") as again:
                again.append([7, 8])
                again.logits()
    plan = engine.plan
    print(json.dumps({
        "peak": peak_rss(), "loaded": loaded, "plan": plan.total, "limit": plan.limit,
        "slots": plan.slots, "experts": plan.experts, "streamed":
        len(plan.layer_sizes) - len(plan.resident_layers), "purposes": dict(plan.purposes),
    }))
"""
)


@pytest.mark.parametrize(
    ("dtype", "prompt", "new", "sweep", "least"),
    [
        ("bfloat16", 100, 20, 100, None),
        ("float32", 100, 20, 100, None),
        ("bfloat16", 600, 1, 512, None),
        ("float32", 600, 1, 512, None),
        ("bfloat16", 100, 3, 128, 8 * MB),
    ],
)
def test_peak_is_the_plan_r02(
    dtype: str, prompt: int, new: int, sweep: int, least: int | None
) -> None:
    """Everything resident, a long prompt, and trunk and experts streaming in little memory."""
    options = {"dtype": dtype, "context": prompt + new, "sweep": sweep}
    found = measure(
        RUN, checkpoint(**STREAMED), options=options, prompt=prompt, new=new, least=least
    )
    keeps_its_word(found)
    if least is None:
        assert found["slots"] == found["experts"] == 480 and not found["streamed"]
    else:
        assert found["streamed"] and found["slots"] < 120


def test_peak_is_the_plan_with_saves_and_prefixes_r02(tmp_path: Path) -> None:
    """Sessions are written and read through a few blocks, whatever their length."""
    options = {"context": 12_000, "sweep": 2048, "prefix_dir": str(tmp_path)}
    found = measure(
        RUN, checkpoint(**STREAMED), options=options, prompt=11_000, new=2, least=None, saves=3
    )
    keeps_its_word(found)
    assert found["purposes"]["shared prefixes"]


def test_peak_is_the_plan_with_files_in_scratch_r02(tmp_path: Path) -> None:
    """Latents and block summaries on disk: buffers, slots and the library that makes the files."""
    options = {"context": 12_000, "sweep": 2048, "scratch": str(tmp_path)}
    options |= {"latents": "5M", "summaries": "2M"}
    found = measure(RUN, checkpoint(**STREAMED), options=options, prompt=2048, new=2, least=None)
    keeps_its_word(found)
    for name in ("latents, the newest, and buffers", "block summaries, a part of them"):
        assert found["purposes"][name]
    assert not list(tmp_path.iterdir())


def test_loading_holds_one_tensor_more_at_most_r35() -> None:
    found = measure(
        RUN, checkpoint(**TRUNK), options={"context": 64, "sweep": 64}, prompt=1, new=0, least=None
    )
    later = ("sequence state", "working set", "decoding tables")
    due = sum(n for name, n in found["purposes"].items() if not name.startswith(later))
    largest = 16_384 * 1024 * 2
    assert found["purposes"]["trunk, resident"] > 3 * largest
    assert found["loaded"] <= due + largest, found
    assert found["loaded"] <= found["plan"]


REQUESTS = (
    HEAD
    + """
files, rss, threads = [], [], []
for cycle in range(50):
    with load(folder, threads=2) as engine:
        if cycle % 10 == 9:
            with engine.session() as session:
                session.append(range(cycle))
                session.logits()
    files.append(me.num_fds())
    threads.append(min(  # a joined thread is still leaving the kernel for a moment
        time.sleep(0.01) or me.num_threads() for _ in range(8)))
    if cycle % 10 == 9:
        rss.append(settled())
slope = []
with load(folder, threads=2, context=3000, sessions=2) as engine:
    def stop(layer):
        if layer == 2:
            raise ValueError
    for number in range(190):
        with engine.session() as session:
            session.append(range(1 + number * 13 % 90))
            if number % 10 == 3:
                engine.hooks.before_layer = stop
                try:
                    session.logits()
                except ValueError:
                    pass
                engine.hooks.before_layer = lambda layer: None
            elif number % 10 == 6:
                next(session.generate(5))
            else:
                list(session.generate(1 + number % 2))
        if number % 10 == 9:
            slope.append(settled())
    before = settled()
    with engine.session() as session:
        session.append([i % 256 for i in range(1500)])
        session.logits()
    with engine.session() as session:
        session.append([1])
        session.logits()
    after, left = settled(), engine._ledger.used
print(json.dumps({"files": files, "rss": rss, "threads": threads, "slope": slope,
                  "before": before, "after": after, "left": left}))
"""
)


def test_nothing_grows_r65_r70() -> None:
    """Fifty loads, then 190 requests of mixed length with errors and cancellations; the allocator
    is warm after 90, later the busier the machine is."""
    found = measure(REQUESTS, checkpoint(**BRIEF))
    files, rss, slope = found["files"], found["rss"], found["slope"]
    assert files[-1] == files[5]
    assert found["threads"][-1] == found["threads"][5]
    assert rss[-1] - rss[0] < 8 * MB, rss
    assert slope[-1] - slope[8] < 0.5 * MB, slope
    assert found["after"] - found["before"] < 0.1 * found["before"]
    assert found["left"] == 0


MANY = """
import json, resource, sys
from k3offload.loading import load
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
with load(sys.argv[1], cache=200_000) as engine, engine.session() as session:
    session.append(range(90))
    print(json.dumps([float(x) for x in session.logits()[:9]]))
"""


def test_three_hundred_shards_and_few_handles_r65(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", **BRIEF)
    with load(folder, cache=200_000) as engine, engine.session() as session:
        session.append(range(90))
        wanted = [float(x) for x in session.logits()[:9]]
    split(folder, 300)
    run = run_python(MANY, [str(folder)])
    assert run.returncode == 0, run.stderr.decode()
    assert json.loads(run.stdout) == wanted


def _fake_machine(monkeypatch: pytest.MonkeyPatch, free: int, cgroup: int | None = None) -> None:
    """A machine on which this process has 300 MB and ``free`` bytes in all."""
    own = 300 * MB
    machine = Machine(physical=1 << 50, available=free - own, cgroup=cgroup, rss=own)
    monkeypatch.setattr(k3offload.engine_plan, "read_machine", lambda: machine)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_default_budget_follows_free_memory_r03(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a flag, expert slots take what is free once the trunk has its place; the tightest
    control group counts as the machine does."""
    folder = checkpoint(**STREAMED)
    _fake_machine(monkeypatch, 4_000 * MB)
    with load(folder, sweep=64) as engine:
        assert engine.plan.slots == 480
        room = 480 * engine.plan.slot_bytes
        rest = engine.plan.total - room
    free = int((rest + share * room + 4 * MB) / 0.9)
    for machine in ({"free": free}, {"free": 1 << 40, "cgroup": free}):
        _fake_machine(monkeypatch, **machine)
        with load(folder, sweep=64) as engine:
            assert engine.plan.total <= engine.plan.limit <= 0.91 * free
            assert abs(engine.plan.slots / 480 - share) < 0.15
            assert len(engine.plan.resident_layers) == 6
