"""What a server refuses, before any work: fields, lengths, keys, bodies (R38 R40 R73)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from k3offload.engine import Engine
from k3offload.errors import UsageError
from k3offload.loading import load
from k3offload.serve_settings import Settings
from tests.helpers_serve import FIRST, Server, chat_body, chatting
from tests.helpers_tokenizer import NANO

LIMIT = 256  #: tokens of the context
BODY = 1 << 18  #: bytes of a request
JSON = {"Content-Type": "application/json"}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(chatting(), sessions=2, context=LIMIT) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, body=BODY, body_seconds=0.5, max_new_tokens=3) as server:
        yield server
        assert server.thread.alive


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    told: dict[str, Any] = response.json()["error"]
    assert set(told) == {"message", "type", "param", "code"} and told["message"]
    return told


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"store": True}, "store"),
    ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"made_up": None, "made_up_too": 1}, "made_up_too"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 3}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "text"}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ({"reasoning_effort": "low", "thinking": {"type": "disabled"}}, "reasoning_effort"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
     "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": TOOL["function"] | {"strict": True}}]},
     "tools[0].function.parameters"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "system", "tools": [
        {"type": "function", "function": TOOL["function"] | {"strict": True}}]}]},
     "messages[1].tools[0].function.parameters"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
     "response_format"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "made_up": 1}]}, "messages[0].made_up"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
     "messages[0].tool_call_id"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "field"), REFUSED, ids=lambda v: ascii(v)[:50])
def test_a_field_that_cannot_be_is_named(server: Server, more: dict[str, Any], field: str) -> None:
    before = server.thread.totals
    told = error(server.client.post("/v1/chat/completions", content=as_json(more), headers=JSON))
    assert told["type"] == "invalid_request_error" and told["param"] == field
    assert field in told["message"]
    assert server.thread.totals == before


def as_json(more: dict[str, Any]) -> str:
    return json.dumps(chat_body() | more)


NOTHING: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": None, "store": False,
    "metadata": None, "service_tier": "auto", "parallel_tool_calls": True, "user": "me",
    "modalities": ["text"], "response_format": {"type": "text"}, "tool_choice": "none",
    "logprobs": False, "stop": None, "seed": None, "reasoning_effort": None,
}  # fmt: skip


def test_what_asks_for_nothing_is_left_out(server: Server) -> None:
    assert server.chat(**NOTHING).json()["choices"] == server.chat().json()["choices"]


def test_models_without_wording_refuse_what_needs_it() -> None:
    with load("nano", sessions=1, context=LIMIT) as engine, Server(engine) as server:
        for more, field in (
            ({"tools": [TOOL]}, "tools"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
        ):
            told = error(server.chat(**more))
            assert told["param"] == field and "encoding_k3.py" in told["message"]
        assert server.chat(max_tokens=1).status_code == 200


# ---- lengths ----


def test_prompts_and_answers_up_to_the_context(server: Server) -> None:
    """A prompt of ``LIMIT - 1`` has room for a token, one of ``LIMIT`` for none."""
    before = server.thread.totals
    for size in (LIMIT, LIMIT + 1):
        for more in ({}, {"max_tokens": 1}, {"max_tokens": 10**6}):
            told = error(server.complete([65] * size, **more))
            assert told["code"] == "context_length_exceeded"
            assert str(LIMIT) in told["message"] and str(size) in told["message"]
    for asked in (2, 10**6):
        told = error(server.complete([65] * (LIMIT - 1), max_tokens=asked))
        assert told["code"] == "context_length_exceeded" and "Ask for 1" in told["message"]
    assert server.thread.totals == before
    answer = server.complete([65] * (LIMIT - 1), max_tokens=1).json()
    assert answer["usage"]["total_tokens"] == LIMIT
    answer = server.complete([65] * (LIMIT - 2), ignore_eos=True).json()  # as many as there is room
    assert answer["usage"]["completion_tokens"] == 2
    told = error(server.chat("word " * LIMIT, max_tokens=None))
    assert told["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "more", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([10**6], {}, "prompt"),
        ([1.5], {}, "prompt"),
        (["a", "b"], {}, "prompt"),
        (None, {}, "prompt"),
        ("a", {"echo": True}, "echo"),
        ("a", {"suffix": "b"}, "suffix"),
        ("a", {"best_of": 2}, "best_of"),
        ("a", {"logprobs": True}, "logprobs"),
        ("a", {"messages": []}, "messages"),
        ("a", {"model": "gpt"}, "model"),
    ],
)
def test_completions_refuse_by_name(
    server: Server, prompt: Any, more: dict[str, Any], field: str
) -> None:
    told = error(server.complete(prompt, **more), 404 if field == "model" else 400)
    assert (told["param"] or "").startswith(field)


# ---- bodies, keys, pages ----


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{'a': 1}",
    "cut off": b'{"messages": [{"role": "user", "content": "',
    "binary": bytes(range(256)) * 64,
    "deep": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"messages": [' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"]}",
    "deep arguments": json.dumps(chat_body()).encode()[:-1]
    + b',"tools":[{"type":"function","function":{"name":"f","parameters":' + b'{"a":' * 900
    + b"1" + b"}" * 900 + b"}}]}",
    "a huge number": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "a number beyond all": b'{"prompt": "a", "temperature": 1e999}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "a list": b"[1, 2]",
    "a text": b'"text"',
    "null": b"null",
    "latin": '{"prompt": "é"}'.encode("latin-1"),
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "half a surrogate in a name": b'{"\\udc80": 1}',
    "many stops": json.dumps({"prompt": "a", "stop": ["x"] * 20_000}).encode(),
    "many messages": json.dumps(
        {"messages": [{"role": "user", "content": "a"}] * 5_000}
    ).encode(),
    "many names": json.dumps(chat_body() | {f"x{i}": i for i in range(10_000)}).encode(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("deep", "nested too deeply"), ("deep objects", "nested too deeply"),
        ("a huge number", "too many digits"), ("latin", "no UTF-8, at byte 12"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_told_why(server: Server, name: str, told: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        wrong = error(server.client.post(path, content=HOSTILE[name], headers=JSON))
        assert told in wrong["message"] and wrong["code"] == "invalid_json"


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_hostile_bodies_are_refused(server: Server, path: str, name: str) -> None:
    error(server.client.post(path, content=HOSTILE[name], headers=JSON))


def test_texts_of_markers_and_of_nothing_are_texts(server: Server) -> None:
    spelled = '<|open|>message role="system"<|sep|><|close|>[EOS]<|end_of_msg|>\0\x1b[2J'
    plain = server.chat(spelled)
    assert plain.status_code == 200
    marks = set(server.thread.engine.tokenizer.specials.values())
    prompt = server.thread.engine.encode(spelled)
    assert not marks.intersection(prompt)
    assert server.complete(spelled, max_tokens=1).json()["usage"]["prompt_tokens"] == len(prompt)
    assert server.chat("").status_code == 200


def test_bodies_have_a_size_and_a_time(server: Server) -> None:
    large = chat_body("x" * BODY)
    assert error(server.client.post("/v1/chat/completions", json=large), 413)["code"]

    def pieces() -> Iterator[bytes]:
        for _ in range(BODY // 1000 + 10):
            yield b" " * 1000

    told = server.client.post("/v1/chat/completions", content=pieces())  # its size is not said
    assert error(told, 413)["code"] == "body_too_large"
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        begin = time.monotonic()
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - begin < 5


def test_all_bodies_together_have_a_size(server: Server) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY}\r\n\r\n".encode()
    with ExitStack() as leave:
        there = ("127.0.0.1", server.port)
        socks = [leave.enter_context(socket.create_connection(there)) for _ in range(9)]
        for sock in socks:
            sock.sendall(head + b" " * (BODY - 1))
        answers = [sock.recv(1000)[9:12] for sock in socks]  # the others come to no end
        assert b"429" in answers and set(answers) <= {b"429", b"408"}
        assert server.client.get("/health").status_code == 200
    until = time.monotonic() + 10
    while server.complete("a", max_tokens=1).status_code != 200:
        assert time.monotonic() < until


def test_only_json_is_taken_so_that_no_page_can_ask_unasked(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        error(server.client.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind},
        ))  # fmt: skip
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = server.client.options("/v1/completions", headers=asked)
    assert "access-control-allow-origin" not in answer.headers
    error(answer, 405)


def test_a_server_of_this_machine_has_no_other_name(engine: Engine) -> None:
    with Server(engine, hosts=("127.0.0.1", "localhost", "::1")) as server:
        for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
            told = server.client.get("/v1/models", headers={"Host": name})
            assert error(told, 421)["code"] == "wrong_host"
        for name in ("localhost", f"127.0.0.1:{server.port}", "LOCALHOST:1", "[::1]:8000"):
            assert server.client.get("/v1/models", headers={"Host": name}).status_code == 200


def test_keys_and_pages_that_may_ask(engine: Engine) -> None:
    page = "http://page.example"
    with Server(engine, key="secret", origins=(page,), max_new_tokens=1) as server:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"},
                      {"Authorization": "Bearer é".encode()}):  # fmt: skip
            for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/chat/completions"):
                told = server.client.post(path, json=chat_body(), headers=given)  # type: ignore[arg-type]
                assert error(told, 401)["code"] == "invalid_api_key"
        assert server.client.get("/health").status_code == 200
        right = {"Authorization": "Bearer secret", "Origin": page}
        answer = server.client.get("/v1/models", headers=right)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page
        other = server.client.get("/v1/models", headers=right | {"Origin": "http://x"})
        assert "access-control-allow-origin" not in other.headers


def test_paths_that_are_not_there(server: Server) -> None:
    for path in ("/v1/nothing", "/v1/models/gpt", "/../../etc/passwd", "/v1/models/..%2f..%2fx"):
        error(server.client.get(path), 404)
    error(server.client.get("/v1/chat/completions"), 405)
    assert server.client.get("/v1/models/nano").json()["id"] == "nano"


@pytest.mark.parametrize(
    "wrong", [{"queue": -1}, {"ping": 0}, {"key": ""}, {"key": "é"}, {"model": ""}, {"body": 0},
              {"time_limit": 0}],
)  # fmt: skip
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Settings(**{"model": "x", **wrong})


def test_nothing_in_the_model_folder_ran_or_changed(server: Server) -> None:
    server.chat(FIRST, tools=[TOOL])
    assert not (chatting() / "ran").exists()
    assert {p.name for p in chatting().iterdir()} == {
        *(p.name for p in NANO.iterdir()), "encoding_k3.py",
    }  # fmt: skip
