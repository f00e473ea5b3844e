"""Schemas and grammars that cannot be enforced are refused, with the place and what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from k3offload.constrain import Grammar, constraint
from k3offload.errors import UsageError
from k3offload.tokenizer import Tokenizer
from tests.helpers_tokenizer import NANO, Spec

IN_A = "#/properties/a"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO, Spec(2304, 2048, (2050,)))


def holding(part: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part, "b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (holding({"not": {"const": 1}}), ["'not'", IN_A]),
        (holding({"type": "array", "uniqueItems": True}), ["'uniqueItems'", IN_A]),
        (holding({"type": "string", "maxLenght": 3}), ["'maxLenght'", IN_A]),
        (holding({"if": {}, "then": {}}), ["'if'", IN_A]),
        (holding({"nullable": True}), ["'nullable'", IN_A]),
        (holding({"x-guidance": {"lenient": True}}), ["'x-guidance'", IN_A]),
        ({"x-guidance": {"lenient": True}, "not": {}}, ["lenient"]),
        ({"x-guidance": {"speed": 1}}, ["speed", "#"]),
        (holding({"exclusiveMinimum": True}), ["'exclusiveMinimum'", "true", IN_A]),
        (holding({"items": [{}, {"type": "strin"}]}), ["strin", IN_A + "/items/1:"]),
        (holding({"type": "string", "format": "colour"}), ["Unknown format: colour", IN_A + ":"]),
        (holding({"pattern": "(?=a)b", "type": "string"}), ["look-around", IN_A + ":"]),
        (holding({"pattern": "(", "type": "string"}), ["unclosed group", IN_A + ":"]),
        (holding({"$ref": "#/$defs/no"}), ["/$defs/no", IN_A + ":"]),
        (holding({"$ref": "http://example.org/x"}), ["http://example.org/x", IN_A + ":"]),
        ({"$defs": {"x/y": {"enum": 3}}, "$ref": "#/$defs/x~1y"}, ["#/$defs/x~1y:", "enum"]),
        (
            {"$defs": {"d": {}}, **holding({"items": [{"$ref": "#/$defs/d"}, {"type": "x"}]})},
            ["Invalid type", IN_A + "/items/1:"],
        ),
        (holding({"anyOf": [{}, {"minimum": "a"}]}), ["minimum", IN_A + "/anyOf/1:"]),
        (holding({"oneOf": [{"type": "string"}, {"const": "a"}]}), ["oneOf", IN_A + ":"]),
        ({"type": "integer", "minimum": 3, "maximum": 2}, ["minimum (3)", "at #:"]),
        (holding(5), ["5", IN_A]),
    ],
)
def test_schemas_that_cannot_be_enforced(
    tokenizer: Tokenizer, schema: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(UsageError) as refusal:
        constraint(tokenizer, Grammar.of_schema(schema))
    assert all(name in refusal.value.problem for name in names), refusal.value.problem
    assert "\n" not in str(refusal.value) and refusal.value.remedy


def test_notes_and_names_of_properties_are_no_keywords(tokenizer: Tokenizer) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T", "description": "d", "default": {"not": 1}, "examples": [{"if": 2}],
        "x-order": 1, "type": "object",
        "properties": {"not": {"const": {"if": 1}}, "if": {"enum": [{"uniqueItems": 1}]}},
    }  # fmt: skip
    state = constraint(tokenizer, Grammar.of_schema(schema)).start()
    for token in tokenizer.encode('{"not": {"if": 1}'):
        state.accept(token)
    assert state.allowed()[tokenizer.encode("}")[0]]


def deeply_nested() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    return schema


def test_a_schema_nested_too_deeply(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="nested too deeply"):
        constraint(tokenizer, Grammar.of_schema(deeply_nested()))


@pytest.mark.parametrize("schema", ["{", "[1]", "true", '{"a": NaN}', [1], {"a": {1}}])
def test_what_is_no_schema(schema: Any) -> None:
    with pytest.raises(UsageError, match="The JSON schema is"):
        Grammar.of_schema(schema)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.of_regex("a(b"), "unclosed group"),
        (Grammar.of_regex("a(?=b)"), "look-around"),
        (Grammar.of_lark("start: foo"), 'at 1(8): unknown name: "foo"'),
        (Grammar.of_lark('x: "a"'), "no start rule"),
        (Grammar.of_lark('start: "a" <|nope|>'), "unknown special token"),
        (Grammar.of_lark("start: a\na[temperature=0.5]: /[a-z]+/"), "temperature"),
        (Grammar.of_lark('start: a\n  a[capture="x", stop="b"]: /.*/'), "sets stop"),
        (Grammar.of_lark(""), "Empty grammar"),
    ],
)
def test_grammars_that_cannot_be_used(tokenizer: Tokenizer, grammar: Grammar, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        constraint(tokenizer, grammar)
    assert message in refusal.value.problem
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400
