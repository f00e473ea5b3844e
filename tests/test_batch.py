"""``Engine.batch``: many documents share sweeps, and none of them notices (R36, R72)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import k3offload.engine_plan
from k3offload import Sampling, load
from k3offload.batch import Batch
from k3offload.batch_results import Going, Result, Tally
from k3offload.budget import state_bytes
from k3offload.documents import Document
from k3offload.engine import Engine
from k3offload.errors import CheckpointError, DoesNotFit, NumericError, UsageError
from k3offload.layout import EMBED
from k3offload.loading import open_engine
from k3offload.scheduler.plan import Demand, Limits, Plan, make_plan
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_batch import Clock

TEXTS = [f"Text {i}. " + "And it came to pass " * (i % 5) + "\n" for i in range(14)]
HEAD = "Go on with what is written here, in the words of the book, and end when it ends.\n\n" * 8
DRAWN = Sampling(temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("nano", sessions=5, context=512) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> list[Result]:
    """Each document in an engine's only place."""
    with load("nano", sessions=1, context=512) as engine:
        return list(engine.batch(TEXTS, max_new_tokens=12, sampling=DRAWN))


def answers(results: list[Result]) -> list[tuple[str, tuple[int, ...]]]:
    return [(r.text, r.tokens) for r in results]


def test_an_answer_is_that_of_the_document_alone(engine: Engine, alone: list[Result]) -> None:
    tallies: list[Tally] = []
    found = list(
        engine.batch(
            TEXTS, max_new_tokens=12, sampling=DRAWN,
            watch=lambda t: tallies.append(Tally(**vars(t))),
        )
    )  # fmt: skip
    assert answers(found) == answers(alone)
    assert [r.index for r in found] == list(range(len(TEXTS)))
    assert [r.id for r in found] == [str(i) for i in range(len(TEXTS))]
    assert {r.finish_reason for r in found} <= {"length", "stop"}
    assert all(r.tokens and r.first_token is not None and r.first_token <= r.seconds for r in found)
    assert max(t.running for t in tallies) <= 5
    assert max(t.rows for t in tallies) > 5
    assert tallies[-1].documents == len(TEXTS)
    assert tallies[-1].new_tokens == sum(len(r.tokens) for r in found)
    assert tallies[-1].prompt_tokens == sum(r.prompt_tokens for r in found)
    assert tallies[-1].sweeps < 0.5 * sum(r.sweeps for r in alone)


def test_neither_order_nor_companions_count(engine: Engine, alone: list[Result]) -> None:
    mixed = [Document(f"d{i}", TEXTS[i]) for i in (9, 2, 13, 0, 7, 1)]
    how: dict[str, Any] = {"max_new_tokens": 12, "sampling": DRAWN}
    found = list(engine.batch(mixed, order="completed", **how))
    assert {r.id: r.tokens for r in found} == {d.id: alone[int(d.id[1:])].tokens for d in mixed}


def test_documents_are_taken_as_places_become_free(engine: Engine) -> None:
    taken = 0

    def endless() -> Iterator[Document]:
        nonlocal taken
        while True:
            taken += 1
            yield Document(str(taken), TEXTS[1], settings={"max_tokens": 3 * taken})

    batch = engine.batch(endless())
    assert taken == 0
    next(batch)
    assert taken <= 10
    assert engine._ledger.used > 0
    batch.close()
    gc.collect()
    assert engine._ledger.used == 0
    with pytest.raises(StopIteration):
        next(batch)


def test_what_is_wrong_with_a_document_is_in_its_result(engine: Engine) -> None:
    documents = [
        Document("fine", TEXTS[1]),
        Document("unreadable", error=CheckpointError("It cannot be read.", "Look at it.")),
        Document("empty"),
        Document("long", "word " * 600),
        Document("setting", TEXTS[1], settings={"top_p": 7}),
        Document("more", TEXTS[1], settings={"max_tokens": 600}),
        Document("unknown", TEXTS[1], settings={"logit_bias": 1}),
        Document("bytes", b"And"),  # type: ignore[arg-type]
        Document("short", TEXTS[1], settings={"max_tokens": 2}),
    ]
    found = {r.id: r for r in engine.batch(documents, max_new_tokens=8)}
    assert list(found) == [d.id for d in documents]
    failed = {name: str(r.error) for name, r in found.items() if r.finish_reason == "error"}
    assert set(failed) == {"unreadable", "empty", "long", "setting", "more",
        "unknown", "bytes",
    }  # fmt: skip
    assert failed["unreadable"] == "It cannot be read. Look at it."
    assert "empty" in failed["empty"]
    assert "512" in failed["long"] and "512" in failed["more"]
    assert "top_p" in failed["setting"]
    assert found["short"].tokens == found["fine"].tokens[:2]


def test_numbers_that_fail_end_their_document_only_r43(alone: list[Result]) -> None:
    """A bad row of the embedding, of a word that one document has: its companions share sweeps and
    tiles with it and keep their bits."""
    with load("nano", sessions=5, context=512, prefix_cache="4M") as engine:
        held = engine.weights._embed_held
        assert held is not None and engine.weights._head_held is not held
        token = engine.encode(" wheels")[0]
        assert not any(token in engine.encode(text) for text in TEXTS)
        assert not any(token in result.tokens for result in alone)
        held.tensor(EMBED)[token] = float("nan")
        mixed = [*TEXTS[:3], "And the wheels", *TEXTS[3:], "wheels, wheels"]
        found = list(engine.batch(mixed, max_new_tokens=12, sampling=DRAWN))
        for bad in (found.pop(), found.pop(3)):
            assert bad.finish_reason == "error" and not bad.tokens and not bad.text
            assert isinstance(bad.error, NumericError) and "Layer 0 " in str(bad.error)
        assert answers(found) == answers(alone)
        gc.collect()
        assert engine._ledger.used == 0
        (head,) = engine.batch(["And"], prompt="wheels " * 80 + "{text}", max_new_tokens=2)
        assert isinstance(head.error, NumericError)


def test_or_is_raised(engine: Engine) -> None:
    batch = engine.batch(["", "", TEXTS[0]], on_error="raise")
    with pytest.raises(UsageError, match="empty"):
        next(batch)
    with pytest.raises(StopIteration):
        next(batch)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prompt": "no place"}, "0 places"),
        ({"prompt": "{text}{text}"}, "2 places"),
        ({"order": "random"}, "order"),
        ({"on_error": "ignore"}, "on_error"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_settings_that_cannot_be(engine: Engine, given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        engine.batch(TEXTS, **given)


def test_what_prompts_begin_with_is_computed_once() -> None:
    how: dict[str, Any] = {"prompt": HEAD + "{text}\nSo:", "max_new_tokens": 6}
    with load("nano", sessions=4, context=512) as plain:
        wanted = list(plain.batch(TEXTS, **how))
    with load("nano", sessions=4, context=512, prefix_cache="4M") as engine:
        found = list(engine.batch(TEXTS, **how))
        head = len(engine.encode(HEAD))
    assert answers(found) == answers(wanted)
    assert head > 128
    assert all(r.reused == head // 64 * 64 for r in found)
    assert not any(r.reused for r in wanted)


def test_results_come_to_a_coroutine_too(engine: Engine, alone: list[Result]) -> None:
    async def collect() -> list[Result]:
        batch = engine.batch(TEXTS[:6], max_new_tokens=12, sampling=DRAWN)
        return [result async for result in batch.results()]

    assert answers(asyncio.run(collect())) == answers(alone[:6])


def test_as_many_sessions_as_let_each_read_least() -> None:
    """With ``fewer`` a plan that cannot hold what was asked for holds a part of it."""
    sizes: dict[str, Any] = {"sessions": 4096, "context": 4096, "fewer": True}
    ram = psutil.Process().memory_info().rss + 700_000_000
    with open_engine("nano", lambda tokenizer, spec: sizes, ram=ram) as engine:
        assert 8 <= engine.options.sessions < 4096
        assert engine.options.sessions & (engine.options.sessions - 1) == 0
        assert engine.plan.total <= ram
        found = list(engine.batch(TEXTS[:3], max_new_tokens=2))
    assert all(r.error is None for r in found)
    with pytest.raises(DoesNotFit), open_engine("nano", lambda t, s: sizes, ram="100M"):
        pass
    sizes["fewest"] = 4096
    with pytest.raises(DoesNotFit), open_engine("nano", lambda t, s: sizes, ram=ram):
        pass


def test_the_head_of_a_batch_gives_way_to_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for itself alone, and is given up before nothing fits."""
    sizes: dict[str, Any] = {"sessions": 1, "fewer": True, "prefix_head": 192, "context": 512}
    with open_engine("nano", lambda tokenizer, spec: sizes, ram="8G") as engine:
        assert engine.prefixes is not None
        head = state_bytes(engine.spec, "bfloat16", 192)
        assert engine.plan.prefixes == engine.prefixes.ledger.capacity == head
        assert sum(r.reused for r in engine.batch(TEXTS[:3], prompt=HEAD + "{text}")) == 3 * 192
        assert len(engine.prefixes) == 1
        without = replace(engine.options, prefix_head=0).prefix_bytes(engine.spec)
        assert without == (0, 0)

    def tight(demand: Demand, limits: Limits) -> Plan:
        return make_plan(replace(demand, prefixes=10**12 * bool(demand.prefixes)), limits)

    monkeypatch.setattr(k3offload.engine_plan, "make_plan", tight)
    with open_engine("nano", lambda tokenizer, spec: sizes, ram="8G") as engine:
        assert engine.prefixes is None and engine.plan.prefixes == 0


def test_as_many_sessions_as_a_device_has_room_for(engine: Engine) -> None:
    """RAM has room for all of them here; the device decides, and the bits are those of the CPU."""
    sizes: dict[str, Any] = {"sessions": 256, "context": 512, "fewer": True}
    device = FakeDevice(400 << 20, seed=6)
    with open_engine("nano", lambda t, s: sizes, device=device, vram="20M") as beside:
        chosen = beside.options.sessions
        assert 4 <= chosen < 256
        assert beside.accelerator is not None and beside.accelerator.plan.total <= 20_000_000
        batch = beside.batch(TEXTS, max_new_tokens=4)
        found = list(batch)
        assert batch.tally.copied["experts"] > 0  # it does compute there
    assert answers(found) == answers(list(engine.batch(TEXTS, max_new_tokens=4)))
    twice = {**sizes, "sessions": 2 * chosen, "fewer": False}
    with pytest.raises(DoesNotFit, match="for the device"):
        open_engine("nano", lambda t, s: twice, device=FakeDevice(400 << 20), vram="20M")


def test_what_an_earlier_run_did_counts(engine: Engine, tmp_path: Path) -> None:
    """Seconds, the first token and sweeps of a document that is gone on with are those of both
    runs, as far as they were saved."""
    pytest.importorskip("zarr")
    clock, given = Clock(10.0, 0.0, 0.0), [Document("a", TEXTS[0]), Document("b", TEXTS[1])]
    clock.drive(engine)
    how: dict[str, Any] = {"max_new_tokens": 12, "clock": clock, "order": "completed"}
    whole = {r.id: r for r in Batch(engine, given, **how)}
    assert (whole["a"].seconds, whole["a"].first_token, whole["a"].sweeps) == (120, 10, 12)
    kept: dict[str, Going] = {}

    def pause() -> None:
        if first.tally.sweeps in (3, 5):  # saved twice, and what comes after the second is lost
            kept.update({d.id: going for d, going in first.save(lambda d: tmp_path / d.id)})
        elif first.tally.sweeps == 8:
            raise KeyboardInterrupt

    first = Batch(engine, given, pause=pause, **how)
    with pytest.raises(KeyboardInterrupt):
        list(first)
    first.close()
    assert [(going.sweeps, going.seconds) for going in kept.values()] == [(5, 50)] * 2
    clock.now += 3600
    found = {r.id: r for r in Batch(engine, given, going=lambda d: kept[d.id], **how)}
    assert found == whole


def test_the_head_is_computed_once_an_engine_and_counted() -> None:
    with load("nano", sessions=2, context=512, prefix_cache="4M", cache="1M") as engine:

        def run() -> tuple[int, int, int]:
            """Rows, and bytes of experts, by the engine and by the tally."""
            before = engine.counts()
            batch = engine.batch(TEXTS[:3], prompt=HEAD + "{text}", max_new_tokens=2)
            assert all(result.error is None for result in batch)
            after = engine.counts()
            rows = after["embedding"].requests - before["embedding"].requests
            read = after["experts"].bytes - before["experts"].bytes
            return rows, read, batch.tally.read["experts"]

        rows, read, told = run()
        assert read == told > 0
        again, read, told = run()
        assert read == told > 0
        assert again == rows - 192  # the head's whole chunks
