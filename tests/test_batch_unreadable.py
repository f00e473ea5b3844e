"""Experts that cannot be read, and drives that are gone, while documents share sweeps: who needs
them fails, and nobody else (R43, R58, R72)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from k3offload import load
from k3offload.batch import LOST
from k3offload.batch_results import Result, Tally
from k3offload.documents import Document
from k3offload.errors import CheckpointError, ReadError
from k3offload.generate import Done, Request, generate
from k3offload.tiers.base import PageId
from k3offload.tiers.device_fake import FakeDevice
from k3offload.tiers.tier_disk import RETRIES
from tests.helpers_broken import Broken, pages_of
from tests.helpers_engine import call, greedy, session_with, starve

TEXTS = [f"Text {i}. " + "And it came to pass " * (i % 5) + "\n" for i in range(14)]
HEAD = "Go on with what is written here, in the words of the book, and end when it ends.\n\n" * 8
COUNT = 8  #: new tokens of each


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    return Broken(monkeypatch)


@cache
def alone() -> tuple[list[Result], list[set[PageId]]]:
    """Each document in an engine's only place, and the experts that it asks for."""
    with load("nano", sessions=1, context=256) as engine:
        results = list(engine.batch(TEXTS, max_new_tokens=COUNT))
        return results, [pages_of(engine, text, COUNT) for text in TEXTS]


def page_of_few() -> tuple[PageId, set[int]]:
    """An expert that less than half of the documents ask for, and which ones: some side by side."""
    asked = alone()[1]
    wanted = {
        page: {i for i, pages in enumerate(asked) if page in pages} for page in set.union(*asked)
    }
    few = [page for page, who in wanted.items() if len(who) < len(TEXTS) / 2]
    page = max(sorted(few), key=lambda page: len(wanted[page]))
    return page, wanted[page]


def failed(results: list[Result]) -> set[int]:
    return {r.index for r in results if r.error is not None}


def check(results: list[Result], who: set[int]) -> None:
    """Those of ``who`` failed, and the others have the answers that they have alone."""
    assert failed(results) == who
    for got, want in zip(results, alone()[0], strict=True):
        if got.index not in who:
            assert (got.tokens, got.text) == (want.tokens, want.text)


DEVICE: dict[str, Any] = {"vram": "60M"}


@pytest.mark.parametrize(
    ("sessions", "how"),
    [(5, {}), (1, {}), (5, {"cache": "1M"}), (5, {"cache": "1M", "predict": "router"}),
     (5, DEVICE), (5, {**DEVICE, "experts_on": "cpu"})],
    ids=["cached", "one at a time", "streamed", "read ahead", "on a device", "beside a device"],
)  # fmt: skip
def test_those_that_need_an_unreadable_expert_fail(
    broken: Broken, sessions: int, how: dict[str, Any]
) -> None:
    page, who = page_of_few()
    if "vram" in how:
        how = {**how, "device": FakeDevice(400 << 20, seed=4)}
    with load("nano", sessions=sessions, context=256, **how) as engine:
        broken.lose(engine.checkpoint, page)
        batch = engine.batch(TEXTS, max_new_tokens=COUNT)
        results = list(batch)
        check(results, who)
        assert (batch.tally.documents, batch.tally.failed) == (len(TEXTS), len(who))
        extent = engine.checkpoint.expert(*page).extents[0]
        for index in who:
            error = results[index].error
            assert isinstance(error, ReadError)
            assert engine.checkpoint.files[extent.file].name in str(error)
            assert f"offset {extent.offset:,}" in str(error)
            assert error.__traceback__ is None
        # Nobody computes anything twice, and the page is tried again only for who asks for it.
        guesses = batch.tally.sweeps if "cache" in how else 0
        assert broken.failed <= (RETRIES + 1) * (len(who) + guesses)
        broken.mend()
        check(list(engine.batch(TEXTS, max_new_tokens=COUNT)), set())
        assert engine._ledger.used == 0


def test_one_that_the_prompts_head_needs_fails_the_documents_and_not_the_batch(
    broken: Broken,
) -> None:
    with load("nano", sessions=1, context=512) as engine:
        page = min(pages_of(engine, HEAD, 1))
    with load("nano", sessions=5, context=512, prefix_cache="4M") as engine:
        broken.lose(engine.checkpoint, page)
        results = list(engine.batch(TEXTS[:6], prompt=HEAD + "{text}", max_new_tokens=2))
    assert [r.index for r in results] == list(range(6))
    assert all(isinstance(r.error, ReadError) for r in results)


def test_a_damaged_expert_too(broken: Broken) -> None:
    page, who = page_of_few()
    with load("nano", sessions=5, context=256) as engine:
        broken.spoil(engine.checkpoint, page)
        results = list(engine.batch(TEXTS, max_new_tokens=COUNT))
        check(results, who)
        for index in who:
            assert isinstance(results[index].error, CheckpointError)
            assert f"Layer {page.layer}, expert {page.expert}:" in str(results[index].error)


def test_requests_of_a_loop_fail_alone(broken: Broken) -> None:
    page, who = page_of_few()
    with load("nano", sessions=5, context=256) as engine:
        broken.lose(engine.checkpoint, page)
        some = [next(iter(who)), next(i for i in range(len(TEXTS)) if i not in who)]
        made = [session_with(engine, engine.encode(TEXTS[i])) for i in some]
        events = list(generate(engine, [Request(session, COUNT) for session in made]))
        ends = {event.request: event for event in events if isinstance(event, Done)}
        assert isinstance(ends[0].error, ReadError)
        assert ends[1].error is None and ends[1].tokens == COUNT
        with pytest.raises(ReadError):
            greedy(engine, engine.encode(TEXTS[some[0]]), COUNT)
        made[0].reset()  # the way out, as after any other error
        made[0].append(engine.encode(TEXTS[some[1]]))
        assert int(made[0].logits().argmax()) == alone()[0][some[1]].tokens[0]


def test_where_everything_is_lost_the_sweep_ends_at_once(broken: Broken) -> None:
    """Bounded work: the error is there after a page and the beginning of its file were tried."""
    with load("nano", sessions=5, context=256, cache="1M") as engine:
        batch = engine.batch(TEXTS, max_new_tokens=COUNT, order="completed")
        done = [next(batch) for _ in range(3)]
        broken.gone = 0
        before = broken.failed
        with pytest.raises(ReadError, match="No such device"):
            done += list(batch)
        assert len(done) < len(TEXTS)
        assert failed(done) == set()
        # every read of the layer that had begun, and no second layer
        assert broken.failed - before <= 5 * 48 + 1
        batch.close()
        broken.mend()
        check(list(engine.batch(TEXTS, max_new_tokens=COUNT)), set())


def test_what_was_held_back_for_an_earlier_one_comes_before_the_error(broken: Broken) -> None:
    with load("nano", sessions=5, context=256, cache="1M") as engine:

        def watch(tally: Tally) -> None:
            broken.gone = 0 if tally.documents >= 3 else None

        long = Document("0", TEXTS[0], settings={"max_tokens": 60})
        batch = engine.batch([long, *TEXTS[1:]], max_new_tokens=COUNT, watch=watch)
        done: list[Result] = []
        with pytest.raises(ReadError, match="No such device"):
            done.extend(batch)
        assert len(done) == batch.tally.documents >= 3
        assert [r.index for r in done] == sorted(r.index for r in done) and done[0].index > 0
        for result in done:
            assert result.tokens == alone()[0][result.index].tokens


def test_a_watcher_is_told_of_lost_pages(broken: Broken) -> None:
    """And may end the sweep, with what it raises."""
    page, who = page_of_few()
    told: list[PageId] = []
    with load("nano", sessions=5, context=256) as engine:
        engine.hooks.on_lost = told.append
        broken.lose(engine.checkpoint, page)
        check(list(engine.batch(TEXTS, max_new_tokens=COUNT)), who)
        assert set(told) == {page} and len(told) <= len(who)

        def ends(page: PageId) -> None:
            raise CheckpointError(f"Somebody watches {page.expert}.", "Look away.")

        engine.hooks.on_lost = ends
        with pytest.raises(CheckpointError, match=f"Somebody watches {page.expert}"):
            list(engine.batch(TEXTS, max_new_tokens=COUNT))


def test_a_trunk_that_cannot_be_read_ends_the_batch(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    starve(monkeypatch)
    with load("nano", sessions=5, context=256) as engine:
        assert len(engine.plan.resident_layers) < len(engine.spec.layers)
        trunk = engine.checkpoint.trunk(len(engine.spec.layers) - 1)
        broken.lose_at(engine.checkpoint, max(t.location for t in trunk))
        with pytest.raises(ReadError, match=r"offset [\d,]+ of .*safetensors failed"):
            list(engine.batch(TEXTS, max_new_tokens=COUNT))


def test_documents_that_all_fail_end_the_batch(broken: Broken) -> None:
    """A file that was cut off, say: its beginning is there, and nobody can use the rest."""
    with load("nano", sessions=2, context=256) as engine:
        moe = engine.spec.moe
        assert moe is not None
        for expert in range(moe.experts):
            broken.lose(engine.checkpoint, PageId(engine.spec.moe_layers[0], expert))
        found: list[Result] = []
        batch = engine.batch(2 * TEXTS, max_new_tokens=COUNT, order="completed")
        with pytest.raises(ReadError):
            found.extend(batch)
        assert LOST < len(found) <= LOST + 2 < 2 * len(TEXTS)
        assert failed(found) == {r.index for r in found}


def records(out: Path) -> dict[str, dict[str, Any]]:
    """The lines of ``out`` by id, without how long they took."""
    found = {}
    for line in out.read_bytes().decode().splitlines():
        record = json.loads(line)
        del record["timing"]
        found[record["id"]] = record
    return found


@pytest.fixture
def command(tmp_path: Path) -> list[Any]:
    given = tmp_path / "in.jsonl"
    lines = [{"id": f"d{i:02}", "prompt": text} for i, text in enumerate(TEXTS)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    how = ["-n", str(COUNT), "--sessions", "5", "--context", "256", "--seed", "1", "--json"]
    return ["batch", "nano", given, *how]


def test_resumed_when_the_file_is_mended_it_computes_those_that_failed(
    tmp_path: Path, command: list[Any], broken: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    page, who = page_of_few()
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert call([*command, "-o", whole], capsys)[0] == 0
    with load("nano", sessions=1, context=64) as engine:
        broken.lose(engine.checkpoint, page)
    code, told, said = call([*command, "-o", out], capsys)
    facts, found = json.loads(told), records(out)
    assert code == 3 and facts["records"]["retry"] == facts["failed"] == len(who)
    want = records(whole)
    for i, (name, record) in enumerate(found.items()):
        if i in who:
            assert record["retry"] is True and record["error"]["type"] == "ReadError"
            assert "offset" in record["error"]["problem"] and name in said
        else:
            assert record == want[name]
    broken.mend()
    code, told, _ = call([*command, "-o", out, "--resume"], capsys)
    facts = json.loads(told)
    assert code == 0
    assert facts["records"]["reused"] == len(TEXTS) - len(who)
    assert facts["new_tokens"] == sum(want[f"d{i:02}"]["usage"]["new_tokens"] for i in who)
    assert records(out) == want
    assert list(records(out)) == list(want)


def test_a_drive_that_goes_away_leaves_what_is_done(
    tmp_path: Path, command: list[Any], broken: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert call([*command, "-o", whole], capsys)[0] == 0
    broken.gone = 10**9
    command += ["--cache", "1M"]
    assert call([*command, "-o", tmp_path / "count.jsonl"], capsys)[0] == 0
    broken.gone = int(0.7 * (10**9 - broken.gone))
    code, _, said = call([*command, "-o", out], capsys)
    assert code == 1 and "No such device" in said
    done = records(out)
    assert 0 < len(done) < len(TEXTS)
    assert not any(record["error"] for record in done.values())
    broken.mend()
    code, told, _ = call([*command, "-o", out, "--resume"], capsys)
    assert code == 0 and json.loads(told)["records"]["reused"] == len(done)
    assert records(out) == records(whole)
