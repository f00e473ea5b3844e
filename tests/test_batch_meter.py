"""What a batch says of itself: figures, bytes by tier, and how long the rest takes, on a clock that
only sweeps move."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from k3offload import Sampling, load
from k3offload.batch import Batch
from k3offload.batch_meter import BatchMeter
from k3offload.batch_results import Tally
from k3offload.documents import Document
from k3offload.engine import Engine
from k3offload.errors import DocumentError
from k3offload.progress import Progress
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_batch import Clock

WORDS = [
    "and",
    "it",
    "came",
    "to",
    "pass",
    "that",
    "the",
    "people",
    "of",
    "the",
    "city",
    "went",
    "up",
    "in",
    "those",
    "days",
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("nano", sessions=6, context=512) as made:
        yield made


def documents(count: int, most: int = 30, bad: int = 0) -> list[Document]:
    drawn, made = random.Random(4), []
    for i in range(count):
        text = " ".join(drawn.choice(WORDS) for _ in range(drawn.randrange(3, most)))
        error = DocumentError("It is damaged.") if bad and i % bad == 3 else None
        made.append(Document(str(i), f"{i} {text}", error))
    return made


Seen = list[tuple[float, float | None]]


def play(engine: Engine, clock: Clock, given: Sequence[Document], **how: Any) -> tuple[Seen, float]:
    """What was said to be left and when, after each sweep; and when it was over."""
    clock.drive(engine)
    meter = BatchMeter(Progress(quiet=True), len(given), False, clock)
    seen: Seen = []

    def watch(tally: Tally) -> None:
        meter.swept(tally)
        seen.append((clock.now, meter.left()))

    batch = Batch(engine, given, order="completed", watch=watch, clock=clock, **how)
    meter.begins(batch.tally, batch.left)
    assert meter.left() is None
    for _ in batch:
        pass
    assert meter.left() == 0
    return seen, clock.now


ENDED = Sampling(temperature=1.0, seed=5, stop=("of", "un"))  # answers of 1 to 24 tokens
STREAM, COMPUTE = (60.0, 1.0, 0.3), (1.0, 10.0, 5.0)  # what a sweep costs: itself, or its rows
CASES: dict[str, tuple[tuple[float, float, float], list[Document], dict[str, Any], bool]] = {
    "short": (STREAM, documents(60), {"max_new_tokens": 3}, True),
    "long": (STREAM, documents(24), {"max_new_tokens": 60}, True),
    "all prompt": (STREAM, documents(40, most=300), {"max_new_tokens": 2}, True),
    "rows cost": (COMPUTE, documents(30), {"max_new_tokens": 20}, True),
    "some are bad": (STREAM, documents(60, bad=5), {"max_new_tokens": 10}, False),
    "they end": (STREAM, documents(60), {"max_new_tokens": 24, "sampling": ENDED}, False),
    "they end and rows cost": (
        COMPUTE, documents(60), {"max_new_tokens": 24, "sampling": ENDED}, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_is_close_from_a_quarter_of_the_run_on(engine: Engine, name: str) -> None:
    """How long answers become, and how many documents are bad, is not to be known: of so short a
    run one answer, or one more round, is a large part; the whole of it has to be close then."""
    prices, given, how, known = CASES[name]
    clock = Clock(*prices)
    begin = clock.now
    seen, end = play(engine, clock, given, **how)
    assert all(left is not None for _, left in seen)  # from the first sweep on
    later = [(now, left) for now, left in seen if now - begin >= (end - begin) / 4]
    assert len(later) > 10
    for now, left in later:
        assert left is not None
        assert abs(now + left - end) < 0.25 * (end - begin)
        if known and now - begin < 0.9 * (end - begin):
            assert abs(now + left - end) < 0.25 * (end - now)


def test_nobody_knows_without_the_number_of_documents() -> None:
    meter = BatchMeter(Progress(quiet=True), None, False)
    meter.begins(Tally(), lambda waiting: 5.0)
    meter.swept(Tally(sweeps=1))
    assert meter.left() is None and "left" not in meter.line()


def test_time_passes_between_two_looks_at_what_is_left() -> None:
    clock, looks = Clock(0, 0, 0), list[int]()

    def left(waiting: int) -> float:
        looks.append(waiting)
        return 100.0

    meter = BatchMeter(Progress(quiet=True), 20, False, clock)
    meter.skipped()
    meter.begins(Tally(), left)
    tally = Tally(documents=3, running=4, sweeps=9)
    meter.swept(tally)
    clock.now += 0.5
    meter.swept(tally)
    assert looks == [12] and meter.left() == 99.5
    clock.now += 60
    assert meter.left() == 39.5  # in the middle of a long sweep
    clock.now += 60
    assert meter.left() == 0
    tally.documents, tally.running = 19, 0
    assert meter.left() == 0


def test_the_line_for_people_and_the_facts_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(0, 0, 0)
    meter = BatchMeter(Progress(quiet=True), 20, True, clock)
    meter.skipped()
    meter.begins(Tally(), lambda waiting: 90.0)
    tally = Tally(documents=3, failed=1, running=4, prompt_tokens=70, new_tokens=1200, rows=50)
    for sweep in range(1, 41):
        clock.now += 2
        tally.sweeps, tally.seconds, tally.experts, tally.bytes = sweep, 2.0, 12.5, 0
        tally.moved("experts", 1_500_000_000 if sweep > 30 else 0, False)
        tally.moved("trunk", 500_000_000 if sweep > 30 else 0, False)
        tally.moved("experts", 750_000_000, True)
        meter.swept(tally)
    facts = meter.facts()
    assert (facts["documents"], facts["of"], facts["found_done"]) == (4, 20, 1)
    assert facts["read"] == {"experts": 15_000_000_000, "trunk": 5_000_000_000}
    assert facts["copied"] == {"experts": 30_000_000_000}
    assert facts["bytes_read"] == 20_000_000_000
    assert facts["bytes_per_token"] == 40_000_000
    assert facts["disk_rate"] == 2_000_000_000 * 10 / (16 * 2)  # of the last 16 sweeps
    assert facts["tokens_per_second"] == 15 and facts["seconds_left"] == 90
    meter.layer(2, 93)
    assert meter.line() == (
        "4 of 20 documents, 1 failed, 4 running, 1,200 tokens, 15 a second, 50 rows a sweep, "
        "12.5 experts, 40 MB a token, read 15 GB experts and 5 GB trunk (625 MB/s), "
        "to the device 30 GB experts, 1 min 30 s left, sweep 41 layer 3 of 93"
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 40  # every two seconds one; the layer came in the same second
    assert lines[-1]["layer"] == 0 and lines[-1]["layers"] == 1


def test_rows_are_those_that_were_computed() -> None:
    """Not those that a prefix jumped over."""
    head = "Go on with what is written here, in the words of the book, and end when it ends.\n" * 8
    rows: list[int] = []
    with load("nano", sessions=4, context=512, prefix_cache="4M") as engine:
        batch = engine.batch(
            [d.text for d in documents(9)], prompt=head + "{text}", max_new_tokens=5,
            watch=lambda tally: rows.append(tally.rows),
        )  # fmt: skip
        results = list(batch)
    assert all(r.reused >= 128 for r in results)
    assert sum(rows) == sum(r.prompt_tokens - r.reused + len(r.tokens) - 1 for r in results)


@pytest.mark.parametrize("on_device", [False, True])
def test_what_was_read_is_what_the_disk_says(on_device: bool) -> None:
    how: dict[str, Any] = {"cache": "1M", "predict": "none"}
    if on_device:
        how |= {"device": FakeDevice(400 << 20, seed=2), "vram": "60M"}
    with load("nano", sessions=4, context=512, **how) as engine:
        before, last = engine.disk.counts.bytes, list[int]()
        batch = engine.batch(documents(9), max_new_tokens=5, watch=lambda t: last.append(t.bytes))
        list(batch)
        read = engine.disk.counts.bytes - before
        counts = engine.counts()
        assert sum(last) == sum(batch.tally.read.values()) == read > 0
        assert batch.tally.read["experts"] == counts["experts"].bytes
        if on_device:
            assert batch.tally.copied["experts"] == counts["experts on the device"].bytes > 0
        else:
            assert not batch.tally.copied
