"""Answers that must or may call tools: whatever a model would rather say, they are well-formed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from k3offload.chat_calls import tools_of
from k3offload.chat_guide import AnswerGuide, guide
from k3offload.chat_parse import Answer, Parser
from k3offload.errors import UsageError
from tests.helpers_chat import CLOSE, TOKENIZER, arguments, tool

ODD = 'a "b" & <|sep|>\n道\\ '


SCHEMAS: dict[str, Any] = {
    "nothing": arguments(),
    "each type": arguments(
        text={"type": "string", "minLength": 1, "maxLength": 5}, number={"type": "number"},
        whole={"type": "integer", "minimum": 3, "maximum": 40}, yes={"type": "boolean"},
        none={"type": "null"}, list={"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        object=arguments(a={"type": "string", "maxLength": 3}),
    ),
    "left out": arguments(["b"], a={"type": "integer"}, b={"const": 1}, c={"type": "null"}),
    "one of some": arguments(
        unit={"enum": ["C", "F", "", "道", 7, 1.5, None, [1]]},
        only={"type": "string", "enum": [1, "x"]}, odd={"const": ODD},
    ),
    "a choice": arguments(
        maybe={"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "title": "Maybe"},
        types={"type": ["integer", "boolean"]}, any={},
    ),
    "patterns": arguments(
        day={"type": "string", "pattern": r"^\d{4}-\d\d$"},
        path={"type": "string", "pattern": "^/[a-z/]+$"},
        some={"type": "string", "pattern": "[0-9]", "maxLength": 6},
        empty={"type": "string", "pattern": "^a*$", "maxLength": 2},
        word={"type": "string", "pattern": r"^[\w.]{1,4}\W[^\d]$"},
    ),
    "references": arguments(
        defs={"Day": {"type": "string", "enum": ["Mon", "Tue"]},
              "Tree": arguments(["v"], v={"type": "integer"}, next={"$ref": "#/$defs/Tree"})},
        day={"$ref": "#/$defs/Day"}, tree={"$ref": "#/$defs/Tree"},
        own={**arguments(["day"], defs={"Day": {"type": "null"}}, day={"$ref": "#/$defs/Day"})},
    ),
    "an odd name": arguments(**{ODD: {"type": "boolean"}, "": {"type": "null"}}),
}  # fmt: skip


ENDS = [CLOSE, *(TOKENIZER.encode(text)[0] for text in ('"', "}", "]"))]


def walked(guide: AnswerGuide, seed: int, thinking: bool = True) -> Answer:
    """An answer drawn from all that ``guide`` lets come; where that is much, ends more often."""
    random, parser, answer = np.random.default_rng(seed), Parser(TOKENIZER, thinking), Answer()
    for _ in range(4000):
        logits = guide.mask(random.gumbel(size=TOKENIZER.vocab).astype(np.float32))
        if np.isfinite(logits).sum() > 60:
            logits[ENDS] += 7
        guide.accept(token := int(np.argmax(logits)))
        answer.add(parser.feed([token]))
        if parser.done:
            break
    assert parser.done and guide.finished
    answer.add(parser.end("stop"))
    return answer


def of(**asked: Any) -> Any:
    how: dict[str, Any] = {"tool_choice": None, "response_format": None, "thinking": True}
    return guide(TOKENIZER, asked.pop("messages", []), **(how | {"tools": None} | asked))


@pytest.mark.parametrize("name", SCHEMAS)
def test_strict_arguments_are_those_of_the_schema(name: str) -> None:
    made = of(tools=[tool("f", SCHEMAS[name])], tool_choice="required")
    seen = set()
    for seed in range(16):
        answer = walked(made(), seed)
        assert answer.calls and answer.finish_reason == "tool_calls" and answer.content == ""
        for called, text in answer.calls:
            assert called == "f"
            jsonschema.validate(json.loads(text), SCHEMAS[name])
            seen.add(text)
    assert len(seen) > 1 or name == "nothing"
    if name == "one of some":
        units = {json.dumps(json.loads(text)["unit"]) for text in seen}
        assert len(units) > 4 and all(json.loads(text)["odd"] == ODD for text in seen)
    if name == "left out":
        assert {len(json.loads(text)) for text in seen} == {1, 2, 3}


FREE = tool("free", {"type": "object", "properties": {"x": {"type": "string"}}}, None)
YES, NO = (tool(name, arguments(a={"type": "boolean"})) for name in ("yes", "no"))


def test_required_is_some_call_and_a_name_is_one_of_that_function() -> None:
    counts, names, thought = set[int](), set[str](), False
    for seed in range(30):
        answer = walked(of(tools=[FREE, YES, NO], tool_choice="required")(), seed)
        assert answer.calls and not answer.content and answer.finish_reason == "tool_calls"
        counts.add(len(answer.calls))
        names.update(name for name, _ in answer.calls)
        for name, text in answer.calls:
            assert isinstance(given := json.loads(text), dict)
            assert name == "free" or list(given) == ["a"]
        thought |= bool(answer.reasoning)
    assert thought and names == {"free", "yes", "no"} and len(counts) > 1
    named = {"type": "function", "function": {"name": "no"}}
    for seed in range(6):
        made = of(tools=[FREE, YES, NO], tool_choice=named, thinking=seed % 2 == 0)()
        answer = walked(made, seed, seed % 2 == 0)
        assert [name for name, _ in answer.calls] == ["no"] and not answer.content


def test_strict_holds_calls_that_nobody_asks_for() -> None:
    """Other functions may be called with anything; the content is free."""
    made, seen = of(tools=[FREE, YES], tool_choice="auto"), set()
    for seed in range(40):
        answer = walked(made(), seed)
        seen |= {"content"} if answer.content else set()
        seen |= {name for name, _ in answer.calls} or {"no call"}
        assert all(list(json.loads(text)) == ["a"] for name, text in answer.calls if name == "yes")
    assert seen == {"content", "no call", "free", "yes"}


def test_none_is_no_call_and_not_parallel_one_at_most() -> None:
    none, one = of(tools=[FREE], tool_choice="none"), of(tools=[FREE], parallel=False)
    both = of(tools=[FREE], parallel=False, tool_choice="required")
    counts = set()
    for seed in range(30):
        assert not walked(none(), seed).calls
        assert len(walked(both(), seed).calls) == 1
        counts.add(len(walked(one(), seed).calls))
    assert counts == {0, 1}


def test_what_asks_for_nothing_is_free() -> None:
    assert of() is None and of(tools=[FREE]) is None and of(tool_choice="none") is None
    assert of(tools=[FREE], tool_choice="auto", response_format={"type": "text"}) is None
    assert of(parallel=False) is None


def test_tools_that_a_message_declares_count_too() -> None:
    messages: list[Any] = [{"role": "user", "content": "a"}, {"role": "system", "tools": [YES]}]
    answer = walked(of(messages=messages, tool_choice="required")(), 0)
    assert answer.calls[0][0] == "yes" and tools_of(messages, [FREE])[1].field.startswith(
        "messages[1]"
    )


CYCLE = arguments(a={"$ref": "#/$defs/x"}, defs={"x": {"$ref": "#/$defs/x"}})
#: Of one argument.
WRONG: list[tuple[Any, str]] = [
    ({"type": "string", "format": "date"}, "#/properties/a a format"),
    ({"uniqueItems": True}, "'uniqueItems' at #/properties/a"),
    ({"oneOf": [{"type": "string"}]}, "'oneOf'"),
    ({"allOf": [{}]}, "'allOf'"),
    ({"$ref": "#"}, "no definition"),
    ({"type": "text"}, "type 'text'"),
    ({"type": [[]]}, "type []"),
    ({"enum": "ab"}, "list of values"),
    ({"enum": [1], "type": "string"}, "nothing"),
    (False, "nothing"),
    ({"enum": ["ab"], "minLength": 1}, "beside 'minLength'"),
    ({"type": "string", "minLength": -1}, "length -1"),
    ({"type": "string", "minLength": 2, "maxLength": 1}, "below"),
    ({"type": "string", "pattern": "("}, "#/properties/a"),
    ({"type": "string", "pattern": 5}, "pattern 5"),
    ({"enum": [10**400], "type": "string"}, "nothing"),
    ({"type": "array", "items": {"$ref": "#"}}, "#/properties/a/items '#'"),
    (arguments(c={"$ref": "#/properties/b"}, b={}), "'#/properties/b', which is no definition"),
    ({"type": "string", "pattern": "(?=a)"}, "#/properties/a"),
    ({"type": "array", "prefixItems": 1}, "#/properties/a"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "#/properties/a"),
]
REFUSED: list[tuple[Any, str, str]] = [
    *((tool("f", arguments(b={"type": "null"}, a=a)), "parameters", told) for a, told in WRONG),
    (tool("f", {"type": "object"}), "parameters", "additionalProperties"),
    (tool("f", "x"), "parameters", "must be an object"),
    (tool("f", {"type": "array"}), "parameters", "type 'array'"),
    (tool("f", {**arguments(), "anyOf": []}), "parameters", "'anyOf'"),
    (tool("f", {**arguments(), "minProperties": 1}), "parameters", "'minProperties'"),
    (tool("f", arguments(["b"], a={})), "parameters", "'b' as required"),
    (tool("f", {**arguments(), "required": [[]]}), "parameters", "[] as required"),
    (tool("f", CYCLE), "parameters", "more ways"),
    (tool("f", arguments(**{"a" * 5000: {}})), "parameters", "5,000 characters"),
    (tool("f" * 5000, arguments()), "name", "5,000 characters"),
    (tool("f", arguments(), "yes"), "strict", "true or false"),
    (tool("yes", arguments()), "name", "that of"),
]


@pytest.mark.parametrize(("wrong", "field", "told"), REFUSED, ids=lambda v: ascii(v)[:60])
def test_what_cannot_be_enforced_is_refused_by_its_place(wrong: Any, field: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        of(tools=[YES, wrong], tool_choice="auto")
    assert error.value.problem.startswith(f"tools[1].function.{field}")
    assert told in str(error.value)
