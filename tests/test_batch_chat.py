"""Chats in a batch: answered as alone, saved and gone on with, beside plain texts."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest

from k3offload import Sampling, load
from k3offload.batch import Batch
from k3offload.batch_results import Going, Result
from k3offload.chat import Encoder
from k3offload.chat_parse import Answer, Parser
from k3offload.cli_options import How, loading_options
from k3offload.constrain import Grammar
from k3offload.documents import Document
from k3offload.engine import Engine
from k3offload.find import find_model
from k3offload.generate import Done, Token
from k3offload.loading import open_engine
from k3offload.run_batch import Task
from k3offload.run_ray_worker import BLOCK, ROW, Answers, Asked, Work
from k3offload.session_identity import identity
from tests.helpers_chat import arguments, folder_with, tool
from tests.helpers_engine import call

MOST, DRAWN = 28, Sampling(temperature=0.8, seed=3)
HOW: Final[dict[str, Any]] = {"max_new_tokens": MOST, "sampling": DRAWN}
SYSTEM = {"role": "system", "content": "Answer in the words of the book, and briefly. " * 18}
ASKED = ["What is the seal of Ammiel?", "Go on: In the beginning God", "And Jesus said?", "Who?"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chats() -> list[Document]:
    """With and without reasoning, with a history, with tools; and plain texts between them."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history = [user("Look."), {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c", "content": "the king"}]  # fmt: skip
    made = [Document(f"a{i}", chat={"messages": [user(text)]}) for i, text in enumerate(ASKED)]
    made += [Document(f"b{i}", chat={"messages": [user(text)], "thinking": False})
             for i, text in enumerate(ASKED)]  # fmt: skip
    made.append(Document("c", chat={"messages": history, "tools": TOOLS, "tool_choice": "auto"}))
    made.append(Document("d", chat={"messages": [user("Who?")], "reasoning_effort": "low"}))
    made.append(Document("e", chat={"messages": [user("Who?")]}, settings={"max_tokens": 3}))
    made.insert(3, Document("plain", "And it came to pass"))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, with wording of system messages."""
    return folder_with(
        Path(shutil.copytree(find_model("nano"), tmp_path_factory.mktemp("m") / "m"))
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with load(folder, sessions=5, context=1024) as made:
        yield made


def alone(engine: Engine, document: Document, sampling: Sampling, most: int) -> Answer:
    """What its model answers to a chat: one session, one token after another."""
    assert document.chat is not None
    chat = {"thinking": True, **document.chat}
    effort = chat.pop("reasoning_effort", "max")
    prompt = Encoder.of(engine.tokenizer, engine.checkpoint.folder).encode(effort=effort, **chat)
    parser, answer = Parser(engine.tokenizer, chat["thinking"], sampling.stop), Answer()
    reason = "stop"
    with engine.session() as session:
        session.append(prompt)
        for event in session.generate(most, replace(sampling, stop=())):
            if isinstance(event, Token):
                answer.add(parser.feed([event.token]))
                if parser.done:
                    break
            elif isinstance(event, Done):
                reason = event.finish_reason
    answer.add(parser.end(reason))
    return answer


def said(results: list[Result]) -> dict[str, Any]:
    return {r.id: (r.prompt_tokens, r.tokens, r.text, r.message, r.finish_reason) for r in results}


@pytest.fixture(scope="module")
def results(engine: Engine) -> list[Result]:
    """Of ``chats``."""
    return list(engine.batch(chats(), **HOW))


@pytest.fixture(scope="module")
def whole(results: list[Result]) -> dict[str, Any]:
    return said(results)


def test_an_answer_is_that_of_the_chat_alone(engine: Engine, results: list[Result]) -> None:
    documents, found = chats(), {r.id: r for r in results}
    assert list(found) == [d.id for d in documents] and not any(r.error for r in found.values())
    for document in documents:
        result = found[document.id]
        if document.chat is None:
            assert result.message is None and result.text
            continue
        answer = alone(engine, document, DRAWN, document.settings.get("max_tokens", MOST))
        assert result.message == answer.message()
        assert (result.text, result.finish_reason) == (answer.content, answer.finish_reason)
    assert found["a0"].message is not None and found["a0"].message["content"].startswith("The seal")
    assert {r.finish_reason for r in found.values()} >= {"stop", "length"}
    assert found["e"].finish_reason == "length" and len(found["e"].tokens) == 3


def test_a_stop_string_ends_the_content_alone(engine: Engine) -> None:
    plain = Document("a", chat={"messages": [user(ASKED[0])]})
    (whole,) = engine.batch([plain], max_new_tokens=60)
    assert "seal" in whole.text
    (found,) = engine.batch(
        [replace(plain, settings={"stop": ("seal", "response")})], max_new_tokens=60
    )
    assert found.text == whole.text.partition("seal")[0] and found.finish_reason == "stop"
    assert found.tokens == whole.tokens[: len(found.tokens)] and len(found.tokens) < len(
        whole.tokens
    )
    assert engine._ledger.used == 0


@pytest.mark.parametrize("sweeps", [2, 9, 20])
def test_saved_in_the_middle_of_an_answer_and_gone_on_with(
    sweeps: int, engine: Engine, whole: dict[str, Any], tmp_path: Path
) -> None:
    saved: dict[str, Going] = {}
    batch = engine.batch(chats(), order="completed", **HOW)
    while batch.tally.sweeps < sweeps:
        batch._admit()
        batch._step()
    for document, going in batch.save(lambda document: tmp_path / document.id):
        saved[document.id] = going
    batch.close()
    assert len(saved) == 5
    rest = [document for document in chats() if document.id in saved]
    again = Batch(engine, rest, going=lambda document: saved[document.id], **HOW)
    assert said(list(again)) == {id: whole[id] for id in saved}
    assert again.tally.prompt_tokens == sum(whole[id][0] for id in saved)
    assert again.tally.new_tokens < sum(len(whole[id][1]) for id in saved)


def test_what_is_wrong_with_a_chat_is_in_its_result(engine: Engine) -> None:
    ask = [user("Who?")]
    bad: dict[str, dict[str, Any]] = {
        "messages is empty": {"messages": []},
        "messages is None": {},
        "messages[0].role": {"messages": [{"role": "x"}]},
        "messages[0].content[0] is of type": {
            "messages": [{"role": "user", "content": [{"type": "image_url"}]}]
        },
        "tools[0].type": {"messages": ask, "tools": [{"type": "x"}]},
        "tool_choice is": {"messages": ask, "tools": TOOLS, "tool_choice": {"type": "function"}},
        "effort is 'medium'": {"messages": ask, "reasoning_effort": "medium"},
        "no thinking": {"messages": ask, "reasoning_effort": "low", "thinking": False},
        "A chat has no field 'n'": {"messages": ask, "n": 1},
        "messages[0].content: The text holds U+D800": {"messages": [user("\ud800")]},
        "1,024": {"messages": [user("word " * 1200)]},
    }
    documents = [Document(name, chat=chat) for name, chat in bad.items()]
    documents += [Document("text and chat", "a", chat={"messages": ask})]
    documents += [Document("good", chat={"messages": ask})]
    *found, good = engine.batch(documents, max_new_tokens=4)
    assert good.error is None and good.message is not None
    for result in found[:-1]:
        assert result.id in str(result.error), result
    assert "no prompt is put around" in str(found[-1].error)
    (found[0],) = engine.batch(documents[-1:], prompt="Say: {text}", max_new_tokens=4)
    assert "no prompt is put around" in str(found[0].error)
    (found[0],) = engine.batch(documents[-1:], labels=["a", "b"])
    assert "here are labels" in str(found[0].error)


def test_a_grammar_holds_the_content(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    sampling = Sampling(grammar=Grammar.of_regex("(yes|no), [a-z]{3}"))
    plain = {"messages": [user("Is it?")], "thinking": False}
    documents = [Document("fine", chat=plain), Document("thinks", chat={**plain, "thinking": True}),
                 Document("tools", chat={**plain, "tools": TOOLS})]  # fmt: skip
    fine, thinks, tools = engine.batch(documents, max_new_tokens=40, sampling=sampling)
    assert fine.text[:3] in ("yes", "no,") and fine.finish_reason == "stop", fine
    assert "leaves no reasoning" in str(thinks.error) and "leaves no" in str(tools.error)


STRICT = arguments(name={"type": "string", "maxLength": 8}, deep={"type": "boolean"})
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": STRICT, "strict": True}}


def held() -> list[Document]:
    """Chats whose answers are held to calls of a tool, or to a format."""
    plain = {"messages": [user("Look.")], "thinking": False}
    tools = {**plain, "tools": [tool("look", STRICT)]}
    named = {"type": "function", "function": {"name": "look"}}
    return [Document("required", chat={**tools, "tool_choice": "required"}),
            Document("named", chat={**tools, "tool_choice": named, "thinking": True}),
            Document("format", chat={**plain, "response_format": FORMAT}),
            Document("auto", chat={**tools, "tool_choice": "auto"})]  # fmt: skip


def test_answers_are_held_to_what_is_asked_for(engine: Engine, tmp_path: Path) -> None:
    """Also where one is saved in the middle, and gone on with."""
    how: dict[str, Any] = {"max_new_tokens": 200, "sampling": Sampling(temperature=1.0, seed=3)}
    found = {result.id: result for result in engine.batch(held(), **how)}
    for name in ("required", "named"):
        message = found[name].message
        assert message is not None
        call = message["tool_calls"][0]["function"]
        jsonschema.validate(json.loads(call["arguments"]), STRICT)
        assert found[name].finish_reason == "tool_calls" and not found[name].text
    jsonschema.validate(json.loads(found["format"].text), STRICT)
    assert found["auto"].message is not None and "tool_calls" not in found["auto"].message
    saved: dict[str, Going] = {}
    batch = engine.batch(held(), **how)
    while batch.tally.sweeps < 25:
        batch._admit()
        batch._step()
    for document, going in batch.save(lambda document: tmp_path / document.id):
        saved[document.id] = going
    batch.close()
    assert {"required", "named"} & saved.keys()
    rest = [document for document in held() if document.id in saved]
    again = said(list(Batch(engine, rest, going=lambda document: saved[document.id], **how)))
    assert again == {id: whole for id, whole in said([*found.values()]).items() if id in saved}


def test_what_cannot_be_held_is_refused_for_that_chat_alone(engine: Engine) -> None:
    loose = tool("look", {"type": "object"})
    both = {"tools": [tool("look", STRICT)], "response_format": FORMAT}
    schema = {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}
    wrong: dict[str, Any] = {
        "tools[0].function.parameters": {"tools": [loose]},
        "response_format is given": both,
        "response_format: The JSON schema": {"response_format": schema},
    }
    ask = {"messages": [user("Look.")], "thinking": False}
    documents = [Document(told, chat={**ask, **more}) for told, more in wrong.items()]
    *found, good = engine.batch([*documents, Document("good", chat=ask)], max_new_tokens=2)
    assert good.error is None and all(result.id in str(result.error) for result in found)
    grammar = Sampling(grammar=Grammar.of_regex("a"))
    held = Document("a", chat={**ask, "response_format": FORMAT})
    (two,) = engine.batch([held], max_new_tokens=2, sampling=grammar)
    assert "Leave one of them out" in str(two.error)


def sharing(folder: Path, head: int) -> Engine:
    sizes: dict[str, Any] = {"sessions": 2, "context": 1024, "prefix_head": head}
    return open_engine(folder, lambda *_: sizes)


def test_what_chats_begin_with_is_computed_once(folder: Path, engine: Engine) -> None:
    documents = [Document(str(i), chat={"messages": [SYSTEM, user(text)]})
                 for i, text in enumerate(ASKED)]  # fmt: skip
    how: dict[str, Any] = {"max_new_tokens": 6, "sampling": DRAWN}
    anew = list(engine.batch(documents, **how))
    assert {r.reused for r in anew} == {0}
    with sharing(folder, 512) as shares:
        found = list(shares.batch(documents, **how))
        assert said(found) == said(anew)
        assert {r.reused for r in found} == {reused := found[0].reused} and reused > 256
        # another beginning takes its place, and it is not computed again for one
        other = [Document(t, chat={"messages": [user(SYSTEM["content"] + t)]}) for t in ASKED]
        mixed = [documents[0], *other[:3], documents[1], *other[3:]]
        assert [r.reused for r in shares.batch(mixed, max_new_tokens=2)] == [
            reused, 0, reused, reused, 0, reused
        ]  # fmt: skip
    with sharing(folder, 192) as shares:  # no room for more than a block
        assert {r.reused for r in shares.batch(documents, **how)} == {256}
        assert said(list(shares.batch(documents, **how))) == said(anew)


def test_a_worker_of_ray_answers_the_same(
    engine: Engine, folder: Path, whole: dict[str, Any]
) -> None:
    task = Task("{text}", MOST, DRAWN)
    work = Work(
        str(folder), loading_options(How(threads=1)), {"sessions": 3, "context": 512}, task,
        identity(engine),
    )  # fmt: skip
    block = pickle.dumps([Asked(document, "a") for document in chats()[:5]])
    rows = [pickle.loads(row[ROW][0]) for row in Answers(work)({BLOCK: [block]})]
    assert [row.record["id"] for row in rows] == [document.id for document in chats()[:5]]
    for row in rows:
        assert (row.record["text"], row.record.get("message")) == whole[row.record["id"]][2:4]


def lines_of(file: Path) -> dict[str, Any]:
    found = {}
    for line in file.read_text("utf-8").splitlines():
        record = json.loads(line)
        del record["timing"]
        found[record["id"]] = record
    return found


def requests(path: Path, count: int) -> Path:
    lines: list[dict[str, Any]] = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "k3", "messages": [SYSTEM, user(f"{i}. {ASKED[i % 4]}")],
                  "max_completion_tokens": 12}}
        for i in range(count)
    ]  # fmt: skip
    lines[1]["body"]["messages"] = [{"role": "user", "content": [{"type": "image_url"}]}]
    lines[2]["body"]["logprobs"] = True
    lines[3]["url"], lines[3]["body"] = "/v1/completions", {"prompt": "And", "max_tokens": 4}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = requests(tmp_path / "in.jsonl", 8), tmp_path / "out.jsonl"
    how = ["batch", folder, given, "-o", out, "--context", 600, "--sessions", 2, "--threads", 1]
    code, _, err = call(how, capsys)
    assert code == 3, err
    found = lines_of(out)
    assert list(found) == [f"r{i}" for i in range(8)]
    assert {id for id, record in found.items() if record["error"]} == {"r1", "r2"}
    assert "messages[0].content[0] is of type" in found["r1"]["error"]["problem"]
    assert "'logprobs': True" in found["r2"]["error"]["problem"]
    assert "message" not in found["r3"] and found["r3"]["text"]
    assert found["r0"]["message"]["role"] == "assistant"
    assert found["r0"]["text"] == found["r0"]["message"]["content"]
    # the first two have nothing in common
    before = out.read_bytes()
    assert call([*how, "--resume"], capsys)[0] == 3 and out.read_bytes() == before
    text = given.read_text().replace("5. Go", "5. Now go")
    given.write_text(text)
    code, _, err = call([*how, "--resume"], capsys)
    again = lines_of(out)
    assert code == 3 and again["r5"]["digest"] != found["r5"]["digest"]
    assert {id for id in found if again[id] != found[id]} <= {"r5"}


def test_the_shape_of_openai(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = requests(tmp_path / "in.jsonl", 4), tmp_path / "out.jsonl"
    code, _, err = call(
        ["batch", folder, given, "-o", out, "--context", 600, "--output-format", "openai"], capsys
    )
    assert code == 3, err
    found = lines_of(out)
    body = found["r0"]["response"]["body"]
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"]["role"] == "assistant" and choice["message"]["refusal"] is None
    assert body["usage"]["completion_tokens"] > 0
    assert found["r3"]["response"]["body"]["object"] == "text_completion"
    assert found["r1"]["response"] is None and "image_url" in found["r1"]["error"]["message"]
