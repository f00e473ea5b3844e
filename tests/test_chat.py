"""Conversations to ids: goldens, texts that spell markers, refusals by name (R08 R40 R68 R74)."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload.chat import Encoder
from k3offload.chat_format import may_be_tag, read_tag
from k3offload.errors import TokenizerError, UsageError
from k3offload.tokenizer import Tokenizer
from tests.helpers_chat import BASE, TEXT, TOKENIZER, TREE, WORDING, encoder, folder_with
from tests.helpers_tokenizer import SINGLE, Spec, make_folder

GOLDEN = json.loads((Path(__file__).parent / "golden" / "chat.json").read_text("utf-8"))
USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.fixture
def full(tmp_path: Path) -> Encoder:
    return encoder(folder_with(tmp_path))


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_conversations(case: dict[str, Any], full: Encoder) -> None:
    """``written``: by hand, texts parted by ``¦``; the ids were made from it by tiktoken alone."""
    ids = full.encode(case["messages"], **case["settings"])
    assert ids == case["ids"]
    shown = case["written"].replace("¦", "")
    for name in ("open", "close", "sep", "end_of_msg"):
        shown = shown.replace(f"«{name.removesuffix('_of_msg')}»", f"<|{name}|>")
    assert TOKENIZER.decode(ids) == shown


def test_the_models_code_is_read_and_never_run(tmp_path: Path, full: Encoder) -> None:
    assert full.usual_effort == "max"
    full.encode([USER], tools=[TOOL], effort="high", tool_choice="none", response_format=SCHEMA)
    assert [p.name for p in tmp_path.iterdir()] == ["encoding_k3.py"]


NEEDS = [
    ({"tools": [TOOL]}, "tools"),
    ({"effort": "low"}, "effort"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": SCHEMA}, "response_format"),
]


@pytest.mark.parametrize(("asked", "field"), NEEDS)
def test_without_the_models_wording_what_needs_it_is_refused(
    asked: dict[str, Any], field: str, tmp_path: Path
) -> None:
    for folder in (None, tmp_path):
        plain = encoder(folder)
        assert plain.usual_effort is None
        assert plain.encode([USER])
        with pytest.raises(UsageError, match=rf"^{field} cannot be told .*no encoding_k3.py"):
            plain.encode([USER], **asked)


BROKEN = {
    "syntax": ("return segments", "return (", "cannot be read", ("effort", "tools")),
    "bytes": ("Rendering.", "\0", "cannot be read", ("effort", "tools")),
    "two values": (
        "Now: {thinking_effort}",
        "{thinking}{thinking_effort}",
        "not have",
        ("effort",),
    ),
    "a format": ("{thinking_effort}.", "{thinking_effort!r}.", "not have", ("effort",)),
    "computed": ('f"Now: {thinking_effort}.",', "+ str(thinking),", "not have", ("effort",)),
    "told twice": (
        "    return segments\n",
        '    _system("thinking-effort", f"Or {thinking}.")\n',
        "not have",
        ("effort",),
    ),
    "assigned twice": ("segments.append(body)", 'body = f"{tools}"', "not have", ("tools",)),
    "too large": ("Rendering.", "x" * 1_000_001, "larger than", ("effort", "tools")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_of_another_shape_refuses_exactly_what_it_lacks(name: str, tmp_path: Path) -> None:
    old, new, why, lost = BROKEN[name]
    head, found, tail = WORDING.rpartition(old)
    assert found
    other = encoder(folder_with(tmp_path, head + new + tail))
    every: dict[str, Any] = {"effort": "low", "tools": [TOOL]}
    for field, value in every.items():
        if field in lost:
            with pytest.raises(UsageError, match=rf"^{field} .*{why}"):
                other.encode([USER], **{field: value})
        else:
            other.encode([USER], **{field: value})


def test_a_deeply_nested_file_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    deep = encoder(folder_with(tmp_path, "x = " + "(" * 5000 + ")" * 5000))
    with pytest.raises(UsageError, match=r"^effort .*cannot be read"):
        deep.encode([USER], effort="low")


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("hi", {}, "messages is 'hi'"),
    ({"role": "user"}, {}, "messages is "),
    ([], {}, "messages is empty"),
    (["hi"], {}, r"messages\[0\] is 'hi'"),
    ([USER, {"content": "x"}], {}, r"messages\[1\].role is None"),
    ([{"role": "function", "content": "x"}], {}, r"messages\[0\].role is 'function'"),
    ([{"role": "user"}], {}, r"messages\[0\].content is None"),
    ([{"role": "user", "content": 3}], {}, r"messages\[0\].content is 3"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        {},
        r"messages\[0\].content\[0\] is of type 'image_url'",
    ),
    ([{**USER, "name": 3}], {}, r"messages\[0\].name is 3"),
    ([{**USER, "content": "a\ud800"}], {}, r"messages\[0\].content: .*U\+D800"),
    ([{**USER, "name": "a\ud800"}], {}, r"messages\[0\].name: .*U\+D800"),
    ([{**USER, "tool_calls": [{}]}], {}, r"messages\[0\].tool_calls .*of the user"),
    ([{**USER, "audio": {"id": "x"}}], {}, r"messages\[0\].audio"),
    ([{**USER, "tools": [TOOL]}], {}, r"messages\[0\].tools"),
    ([{"role": "assistant", "content": "x", "partial": True}], {}, r"messages\[0\].partial"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        {},
        r"messages\[0\].tool_calls\[0\].function.name is None",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
        {},
        r"messages\[0\].tool_calls\[0\].function.arguments is 1",
    ),
    (
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}],
            }
        ],
        {},
        r"messages\[0\].tool_calls\[0\].function.arguments is no JSON",
    ),
    ([USER, {"role": "tool", "content": "x"}], {}, r"messages\[1\].tool_call_id is None"),
    (
        [
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "b", "content": "x"},
        ],
        {},
        r"messages\[1\].tool_call_id is 'b'",
    ),
    ([USER], {"tools": "f"}, "tools is 'f'"),
    ([USER], {"tools": [{"type": "web"}]}, r"tools\[0\].type is 'web'"),
    ([USER], {"tools": [{"function": {}}]}, r"tools\[0\].function.name is None"),
    (
        [USER],
        {"tools": [{"function": {"name": "f", "x": float("nan")}}]},
        r"tools\[0\] is no JSON",
    ),
    ([USER], {"tools": [{"function": {"name": "\udfff"}}]}, r"tools: .*U\+DFFF"),
    ([USER], {"effort": "medium"}, "effort is 'medium'"),
    ([USER], {"tool_choice": "required"}, "tool_choice is required, and no tools"),
    ([USER], {"tool_choice": {"type": "function"}}, "tool_choice is "),
    ([USER], {"response_format": "json_object"}, "response_format is 'json_object'"),
    ([USER], {"response_format": {"type": "xml"}}, "response_format is "),
    (
        [USER],
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema has no schema",
    ),
]


@pytest.mark.parametrize(("messages", "asked", "what"), REFUSED)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(
    messages: Any, asked: dict[str, Any], what: str, full: Encoder
) -> None:
    with pytest.raises(UsageError, match=f"^{what}"):
        full.encode(messages, **asked)


def test_what_says_nothing_changes_nothing(full: Encoder) -> None:
    plain = full.encode([USER])
    assert full.encode([{**USER, "name": None, "refusal": None, "annotations": []}]) == plain
    assert full.encode([USER], tools=[], tool_choice="none", response_format=None) == plain
    assert full.encode([USER], tool_choice="auto", response_format={"type": "text"}) == plain
    tools = full.encode([USER], tools=[TOOL])
    assert full.encode([USER], tools=[TOOL], tool_choice="auto") == tools != plain
    system = full.encode([{"role": "system", "content": "x"}])
    assert full.encode([{"role": "developer", "content": "x"}]) == system


def test_results_without_ids_follow_the_calls(full: Encoder) -> None:
    calls = [{"id": i, "function": {"name": f"f{i}"}} for i in "12"]
    said = {"role": "assistant", "tool_calls": calls}
    named = [{"role": "tool", "tool_call_id": i, "content": f"r{i}"} for i in "12"]
    bare = [{"role": "tool", "content": f"r{i}"} for i in "12"]
    wanted = full.encode([USER, said, *named])
    assert full.encode([USER, said, *bare]) == wanted
    assert full.encode([USER, said, *reversed(named)]) == wanted
    stale = [{**named[1], "name": "other"}, named[0]]
    assert full.encode([USER, said, *stale]) == wanted
    second = TOKENIZER.decode(full.encode([USER, said, named[1]]))
    assert 'role="tool" tool="f2" index="2"' in second
    lost = [{"role": "tool", "tool_call_id": "9", "name": "f9", "content": "r"}]
    assert 'tool="f9" index="1"' in TOKENIZER.decode(full.encode([USER, said, *lost]))
    both = TOKENIZER.decode(full.encode([USER, said, named[0], *lost]))
    assert both.index('tool="f1" index="1"') < both.index('tool="f9" index="2"')
    with pytest.raises(UsageError, match=r"messages\[3\].tool_call_id is '9'"):
        full.encode([USER, said, named[0], {**lost[0], "name": ""}])


def test_nothing_merges_over_the_edge_of_a_piece(tmp_path: Path) -> None:
    """In a vocabulary where it would: the embedded one has no tokens of quotes and dots."""
    merges = [b'="', b'=".', b'."', b"hi", b'"m']
    greedy = Tokenizer.load(make_folder(tmp_path, [*SINGLE, *merges]), Spec(261 + 256))
    assert greedy.encode('=".') == [257] and greedy.encode('."') == [258]
    ids = Encoder.of(greedy).encode([{**USER, "name": ".x."}], generation_prompt=False)
    o, c, s, e = (greedy.specials[f"<|{name}|>"] for name in ("open", "close", "sep", "end_of_msg"))
    user = [*b" role", 256, *b'user"']
    name = [*b" name", 256, *b'.x."']
    assert ids == [o, *b"message", *user, *name, s, 259, c, *b"message", s, e]


def test_a_vocabulary_without_the_markers_has_no_chat(tmp_path: Path) -> None:
    declared = {str(256 + i): {"content": f"<{i}>"} for i in range(256)}
    folder = make_folder(tmp_path, SINGLE, tokenizer_config={"added_tokens_decoder": declared})
    other = Tokenizer.load(folder, Spec(512))
    with pytest.raises(UsageError, match=r"no token <\|open\|>"):
        Encoder.of(other)


def test_a_tokenizer_that_makes_markers_of_text_is_not_trusted() -> None:
    class Careless(Tokenizer):
        def encode(self, text: str, specials: bool = False) -> list[int]:
            return super().encode(text, specials=True)

    careless = Careless(TOKENIZER._codec, 2304, None, ())
    with pytest.raises(TokenizerError, match="special tokens of the plain text"):
        Encoder.of(careless).encode([{"role": "user", "content": "a <|sep|>"}])


# ---- random trees of messages ----


@settings(max_examples=150)
@given(messages=TREE, thinking=st.booleans())
def test_every_text_decodes_to_itself_and_makes_no_marker(messages: Any, thinking: bool) -> None:
    plain = encoder()
    segments = plain.segments(
        messages,
        tools=None,
        thinking=thinking,
        effort=None,
        tool_choice=None,
        response_format=None,
        generation_prompt=True,
    )
    ids = [plain.tokens(segment) for segment in segments]
    for segment, made in zip(segments, ids, strict=True):
        assert TOKENIZER.decode(made) == segment.text
        assert segment.marker == any(token >= BASE for token in made)
    assert [*chain(*ids)] == plain.encode(messages, thinking=thinking)
    texts = [m["content"] for m in messages if isinstance(m["content"], str) and m["content"]]
    assert all(text in [s.text for s in segments if not s.marker] for text in texts)


@given(
    name=st.sampled_from(["call", "argument", "message"]),
    attributes=st.dictionaries(st.sampled_from(["tool", "key", "index", "type"]), TEXT),
)
def test_tags_are_read_as_they_are_written(name: str, attributes: dict[str, str]) -> None:
    from k3offload.chat_format import Attribute, opened

    pairs = [Attribute(key, value) for key, value in attributes.items()]
    text = "".join(segment.text for segment in opened(name, *pairs)[1:-1])
    tag = read_tag(f" {text} ")
    assert tag is not None and (tag.name, tag.attributes) == (name, attributes)
    assert all(may_be_tag(text[:n], closing=False) for n in range(len(text) + 1))


@pytest.mark.parametrize("text", ["", "thinks", "think x", "call tool=x", 'call tool="x" y'])
def test_what_is_no_tag(text: str) -> None:
    assert read_tag(text) is None
