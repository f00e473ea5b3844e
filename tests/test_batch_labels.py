"""``Engine.batch`` with labels: each document's scores are those it has alone, whatever shares its
sweeps or fails beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import k3offload.engine_plan
from k3offload import Sampling, load, score_labels
from k3offload.batch import Batch
from k3offload.batch_results import Going, Result, Tally
from k3offload.choose_label import Choice
from k3offload.documents import Document
from k3offload.engine import Engine
from k3offload.errors import CheckpointError, DoesNotFit, NumericError, ReadError, UsageError
from k3offload.layout import EMBED
from k3offload.scheduler.plan import Demand, Limits, Plan, make_plan
from k3offload.tiers.base import PageId
from tests.helpers_broken import Broken
from tests.helpers_engine import least

LABELS = [" heaven", " earth", " heavens and all the host of them", " a", " sea, and the dry land"]
TEXTS = [f"Text {i}. " + "And it came to pass " * (i * 7 % 11) + "in the" for i in range(14)]
HEAD = "Say what comes next, in the words of the book, and say no more than that.\n\n" * 8
AROUND = "{text} beginning God created the"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("nano", sessions=8, context=512) as made:
        yield made


@pytest.fixture(scope="module")
def known(engine: Engine) -> list[Choice]:
    """The scores of each document alone."""
    return [score_labels(engine, [AROUND.format(text=t)], LABELS)[0] for t in TEXTS]


def scores(results: list[Result]) -> list[Choice]:
    return [Choice(r.scores) for r in results]


def test_scores_are_those_of_the_document_alone(engine: Engine, known: list[Choice]) -> None:
    tallies: list[Tally] = []
    found = list(
        engine.batch(
            TEXTS, prompt=AROUND, labels=LABELS, watch=lambda t: tallies.append(Tally(**vars(t)))
        )
    )
    assert scores(found) == known
    for result, choice in zip(found, known, strict=True):
        assert result.text == choice.best.label
        assert (result.finish_reason, result.tokens, result.error) == ("label", (), None)
        assert result.prompt_tokens == len(engine.encode(AROUND.format(text=TEXTS[result.index])))
        assert result.first_token is None and result.sweeps >= 2
    labels = sum(len(s.tokens) - 1 for s in known[0].scores) * len(TEXTS)
    rows = sum(t.rows for t in tallies)
    assert rows == sum(r.prompt_tokens for r in found) + labels
    assert tallies[-1].new_tokens == 0 and tallies[-1].documents == len(TEXTS)
    assert len(tallies) < sum(r.sweeps for r in found) / 2


def test_labels_ride_with_prompts_of_others(engine: Engine) -> None:
    """Of one token, prompts alone are computed; of more, sweeps are shared by both."""
    before = engine.counts()["head"].requests
    found = list(engine.batch(TEXTS, labels=[" a", " the"]))
    assert all(r.sweeps == 1 for r in found)
    assert engine.counts()["head"].requests - before == -(-len(TEXTS) // 8)
    tallies: list[int] = []
    list(
        engine.batch(
            ["In the"] * 30, labels=LABELS[:2] + LABELS[4:], watch=lambda t: tallies.append(t.rows)
        )
    )
    longer = len(engine.encode(LABELS[4])) - 1
    assert len(tallies) < 15  # 5 places, 3 copies; 4 prompts and then their labels would take 16
    assert sum(tallies) == 30 * (len(engine.encode("In the")) + longer)


def test_neither_order_nor_companions_count(engine: Engine, known: list[Choice]) -> None:
    mixed = [Document(f"d{i}", TEXTS[i]) for i in (9, 2, 13, 0, 7, 1)]
    found = list(engine.batch(mixed, prompt=AROUND, labels=LABELS, order="completed"))
    assert {r.id: Choice(r.scores) for r in found} == {
        d.id: known[int(d.id[1:])] for d in mixed
    }  # fmt: skip
    (end,) = sorted(engine.tokenizer.end_ids)[:1]
    (one,) = engine.batch(["In the"], labels=[" sea", " sea of"], label_end=[end])
    assert Choice(one.scores) == score_labels(engine, ["In the"], [" sea", " sea of"], [end])[0]
    (one,) = engine.batch(["In the"], labels=[" sea", " sea of"], label_end=".")
    assert Choice(one.scores) == score_labels(engine, ["In the"], [" sea", " sea of"], ".")[0]


def test_documents_are_taken_as_places_become_free(engine: Engine) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield TEXTS[1]

    batch = engine.batch(endless(), labels=LABELS)
    assert taken == 0
    next(batch)
    assert 0 < taken <= 2 * batch.places < 2 * engine.options.sessions
    assert engine._ledger.used > 0
    batch.close()
    gc.collect()
    assert engine._ledger.used == 0


def test_what_is_wrong_with_a_document_is_in_its_result(
    engine: Engine, known: list[Choice]
) -> None:
    documents = [
        Document("0", TEXTS[0]),
        Document("unreadable", error=CheckpointError("It cannot be read.", "Look at it.")),
        Document("long", "word " * 600),
        Document("setting", TEXTS[1], settings={"temperature": 1, "model": "any"}),
        Document("bytes", b"And"),  # type: ignore[arg-type]
        Document("3", TEXTS[3], settings={"model": "any"}),
    ]
    found = {r.id: r for r in engine.batch(documents, prompt=AROUND, labels=LABELS)}
    assert list(found) == [d.id for d in documents]
    wrong = {name: str(r.error) for name, r in found.items() if r.error}
    assert set(wrong) == {"unreadable", "long", "setting", "bytes"}
    assert "512" in wrong["long"] and "temperature" in wrong["setting"]
    assert all(found[name].finish_reason == "error" and not found[name].scores for name in wrong)
    assert [Choice(found[n].scores) for n in "03"] == [known[0], known[3]]
    (empty,) = engine.batch([""], labels=LABELS)
    assert "empty" in str(empty.error)
    with pytest.raises(UsageError, match="empty"):
        next(engine.batch([""], labels=LABELS, on_error="raise"))


def test_numbers_that_fail_end_their_document_only_r43(known: list[Choice]) -> None:
    """A bad row of the embedding, of a word that one document has; then of one that a label has."""
    with load("nano", sessions=8, context=512) as engine:
        held = engine.weights._embed_held
        assert held is not None and engine.weights._head_held is not held
        rows = held.tensor(EMBED)
        (token,) = engine.encode(" wheels")[:1]
        assert not any(token in engine.encode(text) for text in [*TEXTS, *LABELS, AROUND])
        kept = rows[token].clone()
        rows[token] = float("nan")
        found = list(engine.batch([*TEXTS[:5], " wheels", *TEXTS[5:]], prompt=AROUND,
            labels=LABELS))  # fmt: skip
        bad = found.pop(5)
        assert isinstance(bad.error, NumericError) and "Layer 0 " in str(bad.error)
        assert scores(found) == known
        labels = [" wheels within", *LABELS]
        found = list(engine.batch(TEXTS[:3], prompt=AROUND, labels=labels))
        assert all(isinstance(r.error, NumericError) for r in found)
        rows[token] = kept
        gc.collect()
        assert engine._ledger.used == 0
        assert scores(list(engine.batch(TEXTS[:3], prompt=AROUND, labels=LABELS))) == known[:3]


def test_what_prompts_begin_with_is_computed_once() -> None:
    how: dict[str, Any] = {"prompt": HEAD + AROUND, "labels": LABELS}
    with load("nano", sessions=4, context=512) as plain:
        wanted = list(plain.batch(TEXTS, **how))
    with load("nano", sessions=4, context=512, prefix_cache="4M") as engine:
        found = list(engine.batch(TEXTS, **how))
        head = len(engine.encode(HEAD)) // 64 * 64
    assert scores(found) == scores(wanted)
    assert head >= 128 and all(r.reused == head for r in found)


def gone_on(engine: Engine, given: list[Document], states: dict[str, Going]) -> Batch:
    """Where ``states`` says how far the documents were."""
    return Batch(engine, given, labels=LABELS, going=lambda document: states.get(document.id))


def test_what_was_under_way_is_gone_on_with(engine: Engine, tmp_path: Path) -> None:
    """Saved before every sweep: in the middle of a prompt, and while labels are computed."""
    pytest.importorskip("zarr")  # saved sessions need it
    given = [Document(str(i), " unto" * n + " the") for i, n in enumerate((150, 90, 20))]
    wanted = [score_labels(engine, [d.text], LABELS)[0] for d in given]
    saved: dict[int, dict[str, Going]] = {}

    def pause() -> None:
        at = len(saved)
        saved[at] = {d.id: g for d, g in batch.save(lambda d: tmp_path / f"{at}-{d.id}")}

    with load("nano", sessions=8, context=512, sweep=64) as narrow:
        batch = Batch(narrow, given, labels=LABELS, pause=pause)
        assert scores(list(batch)) == wanted
        assert len(saved) > 4 and not saved[0] and len(saved[3]) > 1
        for states in saved.values():
            again = gone_on(narrow, given, states)
            assert scores(list(again)) == wanted
            assert again.tally.sweeps <= len(saved)
        assert again.tally.sweeps < len(saved)


def test_labels_take_nothing_from_shared_prefixes(engine: Engine) -> None:
    """Where a prompt ends with a chunk, and a snapshot lies behind the first chunk of a label."""
    prompt, label = " unto" * 64, " unto" * 69 + " and"
    assert len(engine.encode(prompt)) == 64 and len(engine.encode(label)) == 70
    wanted = score_labels(engine, [prompt], [label, " a"])
    with load("nano", sessions=4, context=512, prefix_cache="4M") as sharing:
        list(sharing.batch([" unto" * 133], max_new_tokens=1))
        assert sharing.prefixes is not None
        kept = len(sharing.prefixes)
        (found,) = sharing.batch([prompt], labels=[label, " a"])
        assert [Choice(found.scores)] == wanted
        assert len(sharing.prefixes) == kept + 1  # the prompt's: labels leave none either


def test_little_room_changes_no_bit(known: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a prompt and one copy: labels take turns.  For a prompt alone: said by each."""

    def tight(demand: Demand, limits: Limits) -> Plan:
        return make_plan(demand, Limits(total=least(demand, limits)))

    monkeypatch.setattr(k3offload.engine_plan, "make_plan", tight)
    with load("nano", sessions=2, context=256, cache=1_000_000) as narrow:
        assert scores(list(narrow.batch(TEXTS[:2], prompt=AROUND, labels=LABELS))) == known[:2]
        with narrow.session() as other:
            other.append("And")
            other.logits()  # what it takes is missing: one document at a time, and no copy
            found = list(narrow.batch(TEXTS[:3], prompt=AROUND, labels=LABELS))
            assert all(isinstance(r.error, DoesNotFit) for r in found)
            found = list(narrow.batch(TEXTS[:3], prompt=AROUND, labels=[" a", " the"]))
            assert all(r.scores for r in found)


class Taken:
    """Room that somebody else takes."""


def test_labels_wait_for_room_that_others_take(engine: Engine) -> None:
    """Two documents and two copies are planned for.  There is no room for the second copy; or
    there is, and none for the next block of latents that both of them need."""
    prompts = [" unto" * 250 + end for end in (" a", " the", " sea")]
    labels = [" and" * 9, " of" * 9, " a"]
    wanted = score_labels(engine, prompts, labels)
    with load("nano", sessions=4, context=512) as tight:
        state = tight.new_state()
        one, block = state.bytes_after(250), state.bytes_after(300) - state.bytes_after(250)
        del state
        for room in (3 * one + block, 4 * one + block):
            taken = Taken()
            tight._ledger.charge(taken, tight._ledger.capacity - room, "")
            assert scores(list(tight.batch(prompts, labels=labels))) == wanted
            assert score_labels(tight, prompts, labels) == wanted
            del taken


def test_a_lost_label_counts_beside_one_without_room(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first label needs two more blocks and has to wait; an expert of the other is lost.  That
    is what the document is told, and not that there was no room."""
    prompt, labels, asked = " unto" * 250, [" and" * 280, " of" * 9, " a"], set[PageId]()

    def on_route(layer: int, group: Any, experts: Any, weights: Any, scores: Any) -> None:
        asked.update(PageId(layer, int(e)) for e in experts.view(-1))

    engine.hooks.on_route = on_route
    with engine.session() as session:
        session.append(prompt)
        session.logits()
        of_prompt = asked.copy()
        session.append(engine.encode(labels[1])[:-1])
        session.logits()
    engine.hooks.on_route = lambda *routed: None
    broken = Broken(monkeypatch)
    with load("nano", sessions=4, context=700) as tight:
        state = tight.new_state()
        one, block = state.bytes_after(250), state.bytes_after(300) - state.bytes_after(250)
        del state  # or there is no room for both copies, and they take turns
        taken = Taken()
        tight._ledger.charge(taken, tight._ledger.capacity - (3 * one + block), "")
        broken.lose(tight.checkpoint, min(asked - of_prompt))
        (found,) = tight.batch([prompt], labels=labels)
        assert isinstance(found.error, ReadError), found.error


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"labels": [" a", " b"], "sampling": Sampling()}, "sampling"),
        ({"labels": [" a", " b"], "max_new_tokens": 3}, "max_new_tokens"),
        ({"labels": []}, "non-empty"),
        ({"labels": [" heaven", " heaven and"]}, "begins with the tokens"),
        ({"labels": [" a", " b"], "label_end": [2304]}, "end of labels: Token 2304"),
        ({"labels": [" a", " b"], "label_end": [-1]}, "end of labels: Token -1"),
        ({"labels": [" a", " b"], "label_end": [1.5]}, "end of labels: These are no token ids"),
        ({"label_end": "."}, "label_end"),
    ],
)
def test_settings_that_cannot_be(engine: Engine, given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        engine.batch(TEXTS, **given)
