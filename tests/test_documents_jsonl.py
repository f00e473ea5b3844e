"""Lines as documents: plain JSONL, and requests of OpenAI's batch files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3offload.documents import Document, count_documents, read_documents
from k3offload.errors import DocumentError
from k3offload.sampling import Sampling


def rows(place: Path, **options: Any) -> list[Document]:
    documents = list(read_documents(place, **options))
    limit = options.get("limit", 64_000_000)
    assert count_documents(place, limit=limit) == len(documents)
    return documents


def jsonl(folder: Path, *lines: Any, **options: Any) -> list[Document]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "x.jsonl").write_text("\n".join(texts), "utf-8", "surrogateescape")
    return rows(folder / "x.jsonl", **options)


def refused(folder: Path, line: Any, **options: Any) -> str:
    """Why one line is refused, and that the next one is read all the same."""
    bad, good = jsonl(folder, line, {"prompt": "good", "x": "good", "id": "z"}, **options)
    assert isinstance(bad.error, DocumentError)
    assert bad.error.remedy
    assert not bad.text
    assert good.text == "good"
    return str(bad.error).removeprefix(f"{folder}/x.jsonl:1").lstrip(": ")


def test_jsonl(tmp_path: Path) -> None:
    documents = jsonl(
        tmp_path,
        "\ufeff" + json.dumps({"id": "a", "prompt": "first", "label": [1, {"x": None}]}),
        "",
        " \t",
        {"id": 7, "prompt": "line\nend \N{GRINNING FACE}"},
        {"text": "other name"},
        {"prompt": "both", "text": "not this"},
    )
    assert [(d.id, d.text) for d in documents] == [
        ("a", "first"),
        ("7", "line\nend \N{GRINNING FACE}"),
        ("x.jsonl:5", "other name"),
        ("x.jsonl:6", "both"),
    ]
    assert documents[1].source == f"{tmp_path}/x.jsonl:4"


def test_chosen_fields(tmp_path: Path) -> None:
    line = {"id": "i", "key": "k", "prompt": "p", "x": "content", "max_tokens": "a label"}
    (document,) = jsonl(tmp_path, line, text_field="x", id_field="key")
    assert (document.id, document.text) == ("k", "content")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "is no JSON object: Expecting ',' delimiter, character 15"),
        ("[1]", "is no JSON object: it is a list"),
        ("NaN", "is no JSON object: NaN is no JSON number"),
        ("9" * 5000, "is no JSON object: Exceeds the limit"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "caf\udce9"}', "is not UTF-8: byte 15 is 0xe9"),
        ({}, "has no 'prompt': it has none. Choose the column or field of the text"),
        ({"id": "a", "body": "b"}, "has no 'prompt': it has 'id', 'body'"),
        ({"prompt": 5}, "'prompt' is a number. It must be a text"),
        ({"prompt": None}, "'prompt' is null"),
        ({"prompt": ["a"]}, "'prompt' is a list"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": " \n"}, "'prompt' holds nothing but white space"),
        ({"prompt": "a\0b"}, "'prompt' holds a NUL at 1"),
        ({"prompt": "a\ud83d"}, r"'prompt' holds '\ud83d' at 1, which is no character"),
        ({"prompt": "a", "id": None}, "the id in 'id' is null"),
        ({"prompt": "a", "id": 1.5}, "the id in 'id' is a number. Give it a text or a "),
        ({"prompt": "a", "id": True}, "the id in 'id' is true or false"),
        ({"prompt": "a", "id": " "}, "the id in 'id' is empty"),
        ({"prompt": "a", "id": "\udc00"}, "the id in 'id' is no UTF-8"),
        ({"prompt": "a", "max_tokens": 5}, "has max_tokens beside its prompt, where it would be"),
        ({"messages": []}, "holds messages, and is no batch request. Write it as one, with the "),
    ],
)
def test_bad_lines(line: Any, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, line)


def test_a_good_id_stays_with_a_bad_text(tmp_path: Path) -> None:
    bad, unnamed = jsonl(tmp_path, {"id": "a", "prompt": 5}, {"id": [], "prompt": "b"})
    assert (bad.id, unnamed.id) == ("a", "x.jsonl:2")


def test_chosen_fields_that_a_line_has_not(tmp_path: Path) -> None:
    assert "has no 'x': it has 'prompt'" in refused(tmp_path, {"prompt": "a"}, text_field="x")
    bad, good = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b", "key": 1}, id_field="key")
    assert "has no 'key': it has 'prompt'. Choose the column or field of the id" in str(bad.error)
    assert (good.id, good.text) == ("1", "b")


def test_long_lines_are_passed_over(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x" * 80})
    for text in ({"prompt": "y" * 81}, "y" * 3_000_000):
        documents = jsonl(tmp_path, line, text, line, limit=len(line))
        assert [d.error is None for d in documents] == [True, False, True]
        assert documents[1].id == "x.jsonl:2"
        assert f"too large: a longer line, and the limit is {len(line)} bytes" in str(
            documents[1].error
        )


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")).filter(
    lambda text: bool(text.strip())
)
ROWS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=20, unique_by=lambda row: row[0])


@given(ROWS, st.booleans())
def test_what_is_written_as_jsonl_is_read(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[str, str]], ascii: bool
) -> None:
    place = tmp_path_factory.mktemp("rows") / "x.jsonl"
    lines = [json.dumps({"id": i, "prompt": p}, ensure_ascii=ascii) for i, p in written]
    place.write_text("\n".join(lines), "utf-8", newline="")
    assert [(d.id, d.text) for d in rows(place)] == written


# Requests


def request(body: Any, **more: Any) -> dict[str, Any]:
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/completions", "body": body}
    return {name: value for name, value in (line | more).items() if value is not ...}


def test_batch_requests(tmp_path: Path) -> None:
    settings = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["\n", "##"]}
    usual = {"n": 1, "stream": False, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": None}
    plain, full = jsonl(
        tmp_path,
        request({"prompt": "a", "stop": "."}),
        request({"model": "k3", "prompt": "b", **settings, **usual}, custom_id="r2"),
    )
    assert (plain.id, plain.text, plain.error) == ("r1", "a", None)
    assert plain.settings == {"stop": (".",)}
    assert full.settings == {**settings, "stop": ("\n", "##"), "model": "k3"}
    Sampling(**{k: v for k, v in full.settings.items() if k not in ("max_tokens", "model")})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (request({"prompt": "a"}, custom_id=...), "has no 'custom_id'"),
        (request({"prompt": "a"}, method=...), "has no field 'method'"),
        (request({"prompt": "a"}, url=...), "has no field 'url'"),
        (request({"prompt": "a"}, method="GET"), "has the method 'GET'. Only POST"),
        (request({"input": "a"}, url="/v1/embeddings"), "asks for '/v1/embeddings', which is not"),
        (request("a"), "has a body that is a text"),
        (request({"prompt": "a"}, priority=1), "has the field 'priority', which is not known"),
        (request({}), "has no field 'prompt' in its body"),
        (request({"prompt": ["a", "b"]}), "has a prompt that is a list. Give one text"),
        (request({"prompt": [1, 2]}), "has a prompt that is a list"),
        (request({"prompt": " "}), "the prompt holds nothing but white space"),
        (request({"prompt": "a", "n": 2}), "asks for 'n': 2, which cannot be done. Leave it out"),
        (request({"prompt": "a", "n": True}), "asks for 'n': True"),
        (request({"prompt": "a", "stream": True}), "asks for 'stream': True"),
        (request({"prompt": "a", "echo": 0}), "asks for 'echo': 0"),
        (request({"prompt": "a", "presence_penalty": 0.5}), "asks for 'presence_penalty': 0.5"),
        (request({"prompt": "a", "logprobs": 0}), "asks for 'logprobs': 0"),
        (request({"prompt": "a", "suffix": "b"}), "asks for 'suffix': 'b'"),
        (request({"prompt": "a", "user": "u" * 99}), "asks for 'user': 'uuuu"),
        (request({"prompt": "a", "model": 3}), "has a model that is a number"),
        (request({"prompt": "a", "max_tokens": 0}), "has max_tokens 0. Give a whole number from 1"),
        (request({"prompt": "a", "max_tokens": -1}), "has max_tokens -1"),
        (request({"prompt": "a", "max_tokens": "5"}), "has max_tokens '5'"),
        (request({"prompt": "a", "max_tokens": 5.0}), "has max_tokens 5.0"),
        (request({"prompt": "a", "max_tokens": True}), "has max_tokens True"),
        (request({"prompt": "a", "temperature": -1}), "temperature is -1. It must be a number"),
        (request({"prompt": "a", "temperature": "hot"}), "temperature is 'hot'"),
        (request({"prompt": "a", "top_p": 2}), "top_p is 2"),
        (request({"prompt": "a", "seed": -3}), "seed is -3"),
        (request({"prompt": "a", "stop": [""]}), "stop is ('',)"),
        (request({"prompt": "a", "stop": 5}), "stop is 5"),
    ],
)
def test_requests_that_cannot_be_done_as_asked_r38(line: Any, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, line)
