"""Answers that follow a schema, a regex or a grammar, from real vocabularies and a real model."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from k3offload.constrain import ConstraintState, Grammar, constraint
from k3offload.engine import Engine
from k3offload.errors import NumericError, UsageError
from k3offload.generate import Done, Event, Request, Token, generate
from k3offload.loading import load
from k3offload.sampling import Sampler, Sampling
from k3offload.tokenizer import Tokenizer
from tests.helpers_engine import gone_on, same_bits
from tests.helpers_golden import TRAINED
from tests.helpers_tokenizer import NANO, SINGLE, Spec, make_folder

PROMPT = "And Jesus said unto him,"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Moses", "Aaron", "Miriam"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "sons": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "sons"],
    "additionalProperties": False,
}
#: without blanks: the little model, which has never seen JSON, would write many
SCHEMA = Grammar.of_schema({**PERSON, "x-guidance": {"whitespace_flexible": False}})
HOT: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(TRAINED, sessions=10) as made:
        yield made


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO, Spec(2304, 2048, (2050,)))


def answer(engine: Engine, sampling: Sampling, count: int = 200) -> list[Event]:
    with engine.session() as session:
        session.append(PROMPT)
        return list(session.generate(count, sampling))


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, Token | Done))


def tokens_of(events: list[Event]) -> list[int]:
    return [e.token for e in events if isinstance(e, Token)]


def end_of(events: list[Event]) -> Done:
    assert isinstance(events[-1], Done)
    return events[-1]


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "sons"]
    assert value["name"] in PERSON["properties"]["name"]["enum"]
    assert type(value["age"]) is int and 0 <= value["age"] <= 120
    assert len(value["sons"]) <= 3 and set(map(type, value["sons"])) <= {bool}


# ---- answers of a model ----


def test_greedy_and_sampled_answers_follow_a_schema(engine: Engine) -> None:
    seeds = [Sampling(grammar=SCHEMA)]
    seeds += [Sampling(**HOT, seed=seed, grammar=SCHEMA) for seed in range(8)]
    texts = set()
    for sampling in seeds:
        events = answer(engine, sampling)
        assert end_of(events).finish_reason == "stop"
        assert end_of(events).tokens == len(tokens_of(events))
        texts.add(text_of(events))
        check_person(text_of(events))
    assert len(texts) > 3


def test_nothing_is_computed_behind_the_last_token(engine: Engine) -> None:
    """A closed object ends the answer at once; no sweep is made to hear of an end token."""
    before = engine.counts()["head"].requests
    events = answer(engine, Sampling(grammar=SCHEMA))
    assert text_of(events).endswith("}")
    assert engine.counts()["head"].requests - before == len(tokens_of(events))


def test_an_open_grammar_ends_by_an_end_token(engine: Engine) -> None:
    grammar = Grammar.of_regex("[0-9]{3,60}")
    lengths = []
    for seed in range(5):  # so hot that an end token comes as often as any digit
        events = answer(engine, Sampling(temperature=1000.0, seed=seed, grammar=grammar))
        assert re.fullmatch("[0-9]{3,60}", text_of(events))
        assert end_of(events).finish_reason == "stop"
        lengths.append(len(text_of(events)))
    assert min(lengths) < 60


def test_too_few_tokens_cut_it_off(engine: Engine) -> None:
    events = answer(engine, Sampling(grammar=SCHEMA), 5)
    assert end_of(events).finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(text_of(events))


def test_a_stop_string_ends_it_anywhere(engine: Engine) -> None:
    events = answer(engine, Sampling(grammar=SCHEMA, stop=('"age"',)))
    assert end_of(events).finish_reason == "stop"
    assert '"name"' in text_of(events) and '"age"' not in text_of(events)


def test_what_it_allows_is_chosen_as_without_it(engine: Engine) -> None:
    """A grammar of any text changes nothing but that special tokens do not come."""
    anything = Grammar.of_regex("(?s:.*)")
    free = answer(engine, Sampling(ignore_end=True), 24)
    assert not any(engine.tokenizer.is_special(token) for token in tokens_of(free))
    assert tokens_of(answer(engine, Sampling(grammar=anything), 24)) == tokens_of(free)


def test_companions_change_nothing(engine: Engine) -> None:
    settings = [
        Sampling(grammar=SCHEMA),
        Sampling(ignore_end=True),
        Sampling(**HOT, seed=3, grammar=SCHEMA),
        Sampling(**HOT, seed=4, grammar=Grammar.of_regex("[0-9]{20}")),
    ]
    alone = [tokens_of(answer(engine, sampling, 60)) for sampling in settings]
    sessions = [engine.session() for _ in settings]
    for session in sessions:
        session.append(PROMPT)
    requests = [Request(s, 60, k) for s, k in zip(sessions, settings, strict=True)]
    events = list(generate(engine, requests))
    for i, known in enumerate(alone):
        assert tokens_of([e for e in events if e.request == i]) == known
        sessions[i].close()


def test_a_grammar_too_complex_ends_its_request_alone(engine: Engine) -> None:
    """What shows only on the way, here three thousand rules at once, is an error of the request."""
    rules = {f"r{i}": f'A "{i}"' for i in range(3000)}
    lines = ['start: "go" any', "A: /a+/", f"any: {' | '.join(rules)}"]
    wide = Grammar.of_lark("\n".join(lines + [f"{name}: {rule}" for name, rule in rules.items()]))
    with engine.session() as one, engine.session() as other:
        for session in (one, other):
            session.append(PROMPT)
        kinds = [Sampling(grammar=wide), Sampling(ignore_end=True)]
        requests = [Request(s, 64, k) for s, k in zip((one, other), kinds, strict=True)]
        ends = {e.request: e for e in generate(engine, requests) if isinstance(e, Done)}
    assert ends[1].finish_reason == "length"
    assert ends[0].finish_reason == "error"
    assert isinstance(ends[0].error, UsageError)
    assert "3001 items" in ends[0].error.problem


@pytest.mark.parametrize("settings", [{}, HOT | {"seed": 4}])
def test_an_answer_gone_on_with_keeps_its_grammar(engine: Engine, settings: dict[str, Any]) -> None:
    """Wherever it was left: what is there already counts for what may follow."""
    sampling = Sampling(grammar=SCHEMA, **settings)
    whole = [e.token for e in answer(engine, sampling) if isinstance(e, Token)]
    with engine.session() as session:
        session.append(PROMPT)
        json.loads(engine.tokenizer.decode(whole))
        for left in range(1, len(whole), 3):
            said, events = gone_on(engine, PROMPT, sampling, 200, left)
            assert whole[:left] + [e.token for e in events if isinstance(e, Token)] == whole
            rest = "".join(e.text for e in events if isinstance(e, Token | Done))
            assert said + rest == engine.tokenizer.decode(whole)
            assert isinstance(events[-1], Done) and events[-1].finish_reason == "stop"


# ---- masks ----


def walk(tokenizer: Tokenizer, grammar: Grammar, text: str) -> list[int]:
    """The tokens of ``text``, each made sure to be allowed; which are allowed behind it."""
    state = constraint(tokenizer, grammar).start()
    for token in tokenizer.encode(text):
        assert state.allowed()[token]
        assert not state.finished
        state.accept(token)
    return [int(token) for token in np.flatnonzero(state.allowed())]


def test_end_tokens_come_where_it_is_complete_and_only_there(tokenizer: Tokenizer) -> None:
    ends = tokenizer.end_ids
    assert len(ends) == 2
    number = Grammar.of_schema({"type": "integer"})
    assert not ends & set(walk(tokenizer, number, ""))
    assert ends < set(walk(tokenizer, number, "12"))
    loose = Grammar.of_schema(PERSON)
    assert ends == set(walk(tokenizer, loose, '{"name": "Aaron", "age": 7, "sons": []}'))
    state = constraint(tokenizer, number).start()
    assert not state.complete
    state.accept(tokenizer.encode("1")[0])
    assert state.complete and not state.finished
    for end in ends:
        ended = constraint(tokenizer, number).start()
        ended.accept(tokenizer.encode("1")[0])
        ended.accept(end)
        assert ended.finished


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    inside = walk(tokenizer, Grammar.of_schema({"type": "string"}), '"a')
    assert len(inside) > 1000
    assert not set(inside) & set(tokenizer.specials.values())
    assert not any(tokenizer.is_special(token) for token in inside)


def test_lark_may_name_special_tokens(tokenizer: Tokenizer) -> None:
    opened = tokenizer.specials["<|open|>"]
    assert walk(tokenizer, Grammar.of_lark('start: "so" <|open|> /[a-z]/'), "so") == [opened]
    numbered = Grammar.of_lark(f'start: "so" <[{opened}]> /[a-z]/')
    assert walk(tokenizer, numbered, "so") == [opened]


def test_a_mask_is_a_copy_of_its_own(tokenizer: Tokenizer) -> None:
    row = np.random.default_rng(0).standard_normal(tokenizer.vocab).astype(np.float32)
    kept = row.copy()
    row.setflags(write=False)  # as those of a session are
    state = constraint(tokenizer, SCHEMA).start()
    masked, allowed = state.mask(row), state.allowed()
    assert masked.dtype == np.float32 and masked.shape == row.shape
    assert same_bits(row, kept)
    assert (masked[allowed] == row[allowed]).all()
    assert (masked[~allowed] == -np.inf).all()
    assert same_bits(state.mask(row), masked)


def test_states_are_apart(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, SCHEMA)
    assert constraint(tokenizer, Grammar("json", SCHEMA.text)) is made
    one, other = made.start(), made.start()
    before = other.allowed()
    one.accept(tokenizer.encode("{")[0])
    assert (other.allowed() == before).all()
    assert (one.allowed() != before).any()
    with pytest.raises(UsageError, match="cannot go on by its grammar"):
        other.accept(tokenizer.encode("x")[0])


def test_a_token_that_is_refused_without_a_word() -> None:
    """The library may say no and name no error."""

    class Silent:
        def consume_token(self, token: int) -> bool:
            return token == 5

        def is_error(self) -> bool:
            return False

    state = ConstraintState(cast("Any", Silent()), 10)
    state.accept(5)
    with pytest.raises(UsageError, match="no token 6"):
        state.accept(6)


def test_blanks_come_to_an_end(tokenizer: Tokenizer) -> None:
    blank = tokenizer.encode(" ")[0]
    for grammar, most in ((Grammar.of_schema(PERSON), 40), (SCHEMA, 0)):
        state = constraint(tokenizer, grammar).start()
        state.accept(tokenizer.encode("{")[0])
        count = 0
        while count < 50 and state.allowed()[blank]:
            state.accept(blank)
            count += 1
        assert count == most


# ---- vocabularies ----


def test_a_tokenizer_json_with_gaps(tmp_path: Path) -> None:
    """Ids that stand for nothing, and more of them than the file names."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(letters)} | {"he": 270, "Ġt": 280}
    library = Library(models.BPE(vocab=words, merges=[("h", "e"), ("Ġ", "t")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("[EOS]", special=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, Spec(300))
    (end,) = tokenizer.end_ids
    text = "he the é"
    allowed = walk(tokenizer, Grammar.of_regex("(?s:.*)"), text)
    assert {270, 280, end} < set(allowed)
    assert not set(allowed) & {260, 299}
    assert walk(tokenizer, Grammar.of_regex(text), text) == [end]


def test_tokens_longer_than_the_library_takes(tmp_path: Path) -> None:
    tokens = [*SINGLE, b"ab", b"a" * 255, b"a" * 256, b"a" * 300 + b"b", b"b" * 700, b"b" * 701]
    tokenizer = Tokenizer.load(make_folder(tmp_path, tokens), Spec(600))
    allowed = walk(tokenizer, Grammar.of_regex("[ab]*"), "b")
    assert {97, 98, 256, 257} < set(allowed)
    assert not set(allowed) & {258, 259, 260, 261}


def test_a_vocabulary_does_not_keep_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_folder(tmp_path), Spec(512))
    assert walk(tokenizer, Grammar.of_regex("so be it"), "so be") == [ord(" ")]
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_no_end_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_folder(tmp_path), Spec(512))
    tokenizer.end_ids = frozenset()
    with pytest.raises(UsageError, match="no end token"):
        constraint(tokenizer, SCHEMA)


def test_the_extra_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # an import of it fails
    with pytest.raises(UsageError, match=r"k3offload\[constrain\]"):
        constraint(tokenizer, SCHEMA)


# ---- settings ----


def test_a_request_is_refused_before_any_work(engine: Engine) -> None:
    before = engine.counts()["head"].requests
    with engine.session() as session:
        session.append(PROMPT)
        with pytest.raises(UsageError, match="unclosed"):
            session.generate(5, Sampling(grammar=Grammar.of_regex("(")))
    assert engine.counts()["head"].requests == before


def test_settings_that_contradict() -> None:
    with pytest.raises(UsageError, match="ignore_end"):
        Sampling(grammar=SCHEMA, ignore_end=True)
    with pytest.raises(UsageError, match="grammar is"):
        Sampling(grammar='{"type": "object"}')  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no grammar"):
        Grammar("gbnf", "root ::= x")  # type: ignore[arg-type]
    same = Grammar.of_schema(json.dumps(PERSON))
    assert hash(Sampling(grammar=same)) == hash(Sampling(grammar=Grammar.of_schema(PERSON)))


def test_a_mask_hides_no_broken_number(tokenizer: Tokenizer) -> None:
    """NaN at a token that may not come is a NaN of the model all the same."""
    row = np.zeros(tokenizer.vocab, np.float32)
    state = constraint(tokenizer, SCHEMA).start()
    row[int(np.flatnonzero(~state.allowed())[-1])] = np.nan
    with pytest.raises(NumericError, match="nan"):
        Sampler(Sampling()).choose(row, state.mask)
