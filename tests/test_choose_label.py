"""Labels are scored as full sequences would be, whatever is scored beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import k3offload.engine_plan
from k3offload.choose_label import Choice, LabelScore, Prompt, score_labels
from k3offload.config import KDA_CHUNK
from k3offload.engine import Engine
from k3offload.errors import DoesNotFit, UsageError
from k3offload.loading import load
from k3offload.sampling import Sampling, log_probability
from k3offload.scheduler.plan import Demand, Limits, Plan, make_plan
from tests.helpers_engine import (
    BRIEF,
    checkpoint,
    greedy,
    least,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
)
from tests.helpers_golden import TRAINED

PROMPT = "In the beginning God created the"
#: of one token and of many; none begins with another
LABELS = [" heaven", " earth", " heavens and all the host of them", " a", " sea, and the dry land"]
PROMPTS = [PROMPT, "And Jesus said unto him,", PROMPT + " heaven and the earth. " * 20]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(TRAINED, sessions=20) as made:
        yield made


@pytest.fixture(scope="module")
def exact() -> Iterator[Engine]:
    """Float32, so that what differs from another computation is rounding alone; sweeps of 64."""
    with load(TRAINED, sessions=4, sweep=64, dtype="float32") as made:
        yield made


def by_full_sequences(engine: Engine, prompt: Sequence[int], label: Sequence[int]) -> float:
    """The sum from a prefill of prompt and label as one sequence, in float64."""
    rows = logits_of(engine, [*prompt, *label], keep=len(label) + 1)[:-1].astype(np.float64)
    logs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
    logs -= rows.max(1, keepdims=True)
    return float(logs[np.arange(len(label)), list(label)].sum())


def sums(choice: Choice) -> dict[str, float]:
    return {score.label: score.log_likelihood for score in choice.scores}


def test_sums_are_those_of_full_sequences(exact: Engine) -> None:
    for prompt, choice in zip(PROMPTS, score_labels(exact, PROMPTS, LABELS), strict=True):
        assert [score.label for score in choice.scores] == LABELS
        for score in choice.scores:
            assert list(score.tokens) == exact.encode(score.label)
            known = by_full_sequences(exact, exact.encode(prompt), score.tokens)
            assert score.log_likelihood == pytest.approx(known, abs=2e-3)
            assert score.mean == score.log_likelihood / len(score.tokens)
    assert {len(score.tokens) > 1 for score in choice.scores} == {False, True}


def test_rows_are_those_of_a_prompt_that_goes_on(engine: Engine) -> None:
    """The bits of appending a label to the prompt, which are not those of decoding it."""
    (choice,) = score_labels(engine, [PROMPT], [" wheel"])
    first, second = choice.scores[0].tokens
    with engine.session() as session:
        session.append(PROMPT)
        logs = [log_probability(session.logits(), first)]
        session.append([first])
        logs.append(log_probability(session.logits(), second))
    assert choice.scores[0].log_likelihood == math.fsum(logs)


def test_the_model_knows_its_book(engine: Engine) -> None:
    (choice,) = score_labels(engine, [PROMPT], [" heaven and the earth", " wheel of the chariot"])
    assert choice.best.label == " heaven and the earth"
    assert choice.best.probability > 0.9


def test_probabilities_are_in_proportion(engine: Engine) -> None:
    (choice,) = score_labels(engine, [PROMPT], LABELS)
    assert sum(score.probability for score in choice.scores) == pytest.approx(1)
    first, second = choice.scores[:2]
    ratio = math.exp(first.log_likelihood - second.log_likelihood)
    assert first.probability / second.probability == pytest.approx(ratio)
    assert choice.best == max(choice.scores, key=lambda score: score.log_likelihood)


def test_the_first_of_equals_is_best() -> None:
    equal = tuple(LabelScore(label, (1,), -1.0, 0.5) for label in "ba")
    assert Choice(equal).best.label == "b"


def test_order_and_company_change_no_bit(engine: Engine) -> None:
    together = score_labels(engine, PROMPTS, LABELS)
    for prompt, choice in zip(PROMPTS, together, strict=True):
        (alone,) = score_labels(engine, [prompt], LABELS)
        assert alone == choice
        for label in LABELS:
            (single,) = score_labels(engine, [prompt], [label])
            assert single.scores[0].log_likelihood == sums(choice)[label]
            assert single.scores[0].probability == 1
    turned = score_labels(engine, PROMPTS[::-1], LABELS[::-1])
    for choice, other in zip(together, turned[::-1], strict=True):
        assert other.scores == choice.scores[::-1]


def test_sweeps_change_no_bit(exact: Engine) -> None:
    """Labels over the end of a chunk, and one longer than a sweep, among others."""
    labels = [" unto" * n + " and" for n in (1, 30, 150)] + LABELS
    prompts = [some_tokens(n, n) for n in (5, 60, 64, 100)]
    assert max(len(exact.encode(label)) for label in labels) > 2 * exact.plan.sweep_rows
    narrow = score_labels(exact, prompts, labels)
    with load(TRAINED, sessions=40, dtype="float32") as wide:
        assert wide.plan.sweep_rows > exact.plan.sweep_rows
        assert score_labels(wide, prompts, labels) == narrow
    for choice, prompt in zip(narrow, prompts, strict=True):
        for score in choice.scores[:3]:
            known = by_full_sequences(exact, prompt, score.tokens)
            assert score.log_likelihood == pytest.approx(known, rel=1e-4)


def test_few_sweeps(engine: Engine) -> None:
    """One for the prompts, one for all labels; none for labels where one token is enough."""
    before = engine.counts()["head"].requests
    score_labels(engine, PROMPTS[:2], LABELS)
    assert engine.counts()["head"].requests - before == 2
    before = engine.counts()["head"].requests
    score_labels(engine, PROMPTS[:2], [" a", "b", "c"])
    assert engine.counts()["head"].requests - before == 1


def test_little_room_changes_no_bit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a prompt and one copy: labels take turns.  For a prompt alone: refused."""
    known = score_labels(engine, PROMPTS, LABELS)

    def tight(demand: Demand, limits: Limits) -> Plan:
        return make_plan(demand, Limits(total=least(demand, limits)))

    monkeypatch.setattr(k3offload.engine_plan, "make_plan", tight)
    with load(TRAINED, sessions=2, context=256, cache=1_000_000) as narrow:
        assert score_labels(narrow, PROMPTS[:1], LABELS) == known[:1]
        longer = sum(len(narrow.encode(label)) > 1 for label in LABELS)
        assert longer > 1
        assert narrow.counts()["head"].requests == 1 + longer
        assert score_labels(narrow, PROMPTS, LABELS) == known
    with load(TRAINED, sessions=1, context=256, cache=1_000_000) as none:
        with pytest.raises(DoesNotFit):
            score_labels(none, PROMPTS, LABELS)
        with none.session() as session:  # all was given back
            session.append(PROMPT)
            session.logits()


def test_sessions_as_prompts_stay_as_they_are(engine: Engine) -> None:
    (known,) = score_labels(engine, [PROMPT], LABELS)
    with engine.session() as session, engine.session() as decoded:
        session.append(PROMPT)
        assert score_labels(engine, [session], LABELS) == [known]
        row, length = session.logits(), session.length
        assert score_labels(engine, [session], LABELS) == [known]
        assert session.position == session.length == length
        assert same_bits(session.logits(), row)
        ids = engine.encode(PROMPT)
        assert list(session.tokens) == ids
        decoded.append(PROMPT)
        list(decoded.generate(3, Sampling(ignore_end=True)))
        after = [*ids, *greedy(engine, ids, 3)]
        assert list(decoded.tokens) == after
        one, two = score_labels(engine, [decoded, after], LABELS)
        for label, value in sums(two).items():  # decoded against prefilled: rounding
            assert sums(one)[label] == pytest.approx(value, abs=0.5)
        assert score_labels(engine, [session, session], LABELS) == [known, known]


def test_labels_that_begin_others_need_an_end(engine: Engine) -> None:
    pair = [" heaven", " heaven and the earth"]
    with pytest.raises(UsageError, match=r"begins with the tokens of ' heaven'.*end="):
        score_labels(engine, [PROMPT], pair)
    end = sorted(engine.tokenizer.end_ids)[:1]
    (choice,) = score_labels(engine, [PROMPT], pair, end)
    for score in choice.scores:
        assert list(score.tokens) == [*engine.encode(score.label), *end]
        known = by_full_sequences(engine, engine.encode(PROMPT), score.tokens)
        assert score.log_likelihood == pytest.approx(known, abs=0.5)  # bfloat16
    (dotted,) = score_labels(engine, [PROMPT], pair, ".")
    assert dotted.scores[0].tokens == (*engine.encode(" heaven"), *engine.encode("."))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "non-empty"),
        ([" a", ""], "non-empty"),
        ("yes", "non-empty"),
        ([" a", " b", " a"], "' a' and ' a' are the same tokens"),
    ],
)
def test_labels_that_cannot_be_compared(
    engine: Engine, labels: Sequence[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        score_labels(engine, [PROMPT], labels)


def test_prompts_that_cannot_be_scored(engine: Engine) -> None:
    before = engine.counts()["head"].requests
    cases: list[tuple[Sequence[Prompt], str]] = [
        ([PROMPT, ""], "Prompt 1 is empty"),
        (PROMPT, "a single one"),
        ([PROMPT, [1] * 4096], "context of 4,096"),
    ]
    for prompts, message in cases:
        with pytest.raises(UsageError, match=message):
            score_labels(engine, prompts, LABELS)
    assert engine.counts()["head"].requests == before
    assert score_labels(engine, [], LABELS) == []


def test_a_sequence_of_made_up_weights() -> None:
    """Experts that stream, three kinds of layer: the same against full sequences."""
    with load(checkpoint(**BRIEF), dtype="float32", sweep=64, cache=20_000, sessions=8) as small:
        with session_with(small, some_tokens(KDA_CHUNK - 3)) as session:
            labels = ["abc", "b", "cdefgh"]
            (choice,) = score_labels(small, [session], labels)
            for score in choice.scores:
                known = by_full_sequences(small, list(session.tokens), score.tokens)
                assert score.log_likelihood == pytest.approx(known, rel=1e-4)
