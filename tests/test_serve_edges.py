"""Where two things happen to a server at once, and requests that are nothing but faults."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from k3offload.engine import Engine
from k3offload.errors import ReadError
from k3offload.loading import load
from k3offload.serve_live import WATCHERS
from tests.helpers_broken import Broken, pages_of
from tests.helpers_serve import Server, chat_body, put_together, taken_apart
from tests.test_serve_engine import COUNT, TEXTS, Heard, alone, running, wanted

MANY = 200_000  #: faults in a body
PAGE = "http://page.example"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("nano", sessions=2, context=512) as engine:
        yield engine


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine) as server:
        yield server


# ---- in one sweep ----


def test_who_leaves_takes_no_error_from_who_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layer after one has lost an expert the other is not wanted any more, and a third
    comes."""
    right = alone()[2]
    with load("nano", sessions=4, context=512, cache="1M") as engine:
        needs = [pages_of(engine, text, COUNT) for text in TEXTS[:3]]
        last = len(engine.spec.layers) - 1
        page = min(p for p in needs[1] - needs[0] - needs[2] if 0 < p.layer < last)
        Broken(monkeypatch).lose(engine.checkpoint, page)
        with running(engine) as thread:
            ready, third = threading.Event(), list[Heard]()
            thread.call(lambda: ready.wait(20))  # so that they begin together
            leaves, stays = [Heard(thread, ask) for ask in wanted(engine)[:2]]

            def look(event: str) -> None:
                if not third and any(run.error for run in thread._runs):
                    thread.cancel(leaves.job)
                    third.append(Heard(thread, wanted(engine)[2]))

            thread.watch(look)
            ready.set()
            _, ended = stays.all()
            assert isinstance(ended, ReadError) and "offset" in str(ended)
            assert third[0].texts() == right


# ---- bodies ----


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("chat/completions", "messages[0]", f'{{"messages": [{"1, " * MANY}1]}}'),
        ("chat/completions", "tools[0]", f'{{"messages": [{{}}], "tools": [{"1, " * MANY}1]}}'),
        ("completions", "prompt", f'{{"prompt": [{"true, " * MANY}1]}}'),
        ("completions", "f0", json.dumps({"prompt": "a", **{f"f{i}": 1 for i in range(MANY)}})),
    ],
    ids=("messages", "tools", "prompt", "fields"),
)
def test_of_many_faults_one_is_told(server: Server, path: str, field: str, body: str) -> None:
    before = time.process_time()  # the server is of this process
    answer = server.client.post(
        f"/v1/{path}", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert time.process_time() - before < 0.7  # each told for itself they take 2 seconds


def test_a_long_name_is_not_told_whole(server: Server) -> None:
    answer = server.client.post("/v1/completions", json={"prompt": "a", "x" * 100_000: 1})
    assert answer.status_code == 400 and len(answer.content) < 10_000


def test_offsets_are_of_the_text_where_characters_are_in_parts(engine: Engine) -> None:
    with Server(engine, scripted=True) as server:
        parts = [*"é道".encode(), *b"a"]  # the first 256 tokens are the bytes
        parts = [engine.tokenizer.encode(chr(65))[0] - 65 + byte for byte in parts]
        server.script(parts)
        choice = server.complete("x", max_tokens=len(parts), logprobs=0).json()["choices"][0]
        assert choice["text"] == "é道a"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("cut", ["y", "y b", "by", "\n", "道", "none"])
@pytest.mark.parametrize("text", ["x by the boy", "x é道\ny by"])
def test_probabilities_are_of_the_text_that_is_there(engine: Engine, text: str, cut: str) -> None:
    """Of tokens that are longer than a letter and of letters in parts, whole and streamed."""
    with Server(engine, scripted=True) as server:
        pieces = engine.tokenizer.encode(text)
        for ids in (pieces, [*text.encode()]):  # the first 256 tokens are the bytes
            known: dict[str, Any] = {"max_tokens": len(ids), "stop": cut}
            server.script(ids, 4)
            choice = server.complete("x", logprobs=0, **known).json()["choices"][0]
            assert choice["text"] == text.partition(cut)[0]
            begins, said = choice["logprobs"]["text_offset"], choice["text"]
            whole = b"".join(map(engine.tokenizer.token_bytes, ids[: len(begins)])).decode()
            assert whole.startswith(said) and all(at < len(said) for at in begins)
            told = choice["logprobs"]["tokens"]
            stream = server.completions(logprobs=0, **known)
            assert [t for one in stream for t in one["logprobs"]["tokens"]] == told
            off: dict[str, Any] = {"thinking": {"type": "disabled"}, "logprobs": True}
            answer = taken_apart(server.chat(**known, **off).json())
            assert answer["content"] == said and len(answer["logprobs"]) == len(told)
            assert put_together(server.stream(**known, **off)) == answer


# ---- pages ----


def test_a_page_that_may_ask_may_send_more_and_read_what_was_refused(engine: Engine) -> None:
    with Server(engine, key="secret", origins=(PAGE,)) as server:
        asks = {
            "Origin": PAGE, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        }  # fmt: skip
        answer = server.client.options("/v1/completions", headers=asks)
        assert answer.status_code == 200
        assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
        for origin, told in ((PAGE, PAGE), ("http://evil.example", None)):
            answer = server.client.get("/v1/models", headers={"Origin": origin})
            assert answer.status_code == 401
            assert answer.headers.get("access-control-allow-origin") == told


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_takes_no_place(server: Server, site: str) -> None:
    sent = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
    with server.client.stream("GET", "/live", headers=sent) as answer:  # else it has no end
        assert answer.status_code == 403 and b"other_site" in answer.read()
    answer = server.client.get("/", headers=sent | {"Sec-Fetch-Mode": "navigate"})
    assert answer.status_code == 200  # a link to it


def test_so_many_watch_and_no_more(server: Server) -> None:
    with ExitStack() as leave:
        there = ("127.0.0.1", server.port)
        socks = [leave.enter_context(socket.create_connection(there)) for _ in range(WATCHERS + 9)]
        for sock in socks:  # all at once
            sock.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        told = [sock.recv(1000)[9:12] for sock in socks]
        assert told.count(b"200") == WATCHERS and told.count(b"429") == 9
    until = time.monotonic() + 10
    while True:  # who has left has left a place
        with server.client.stream("GET", "/live") as answer:
            if answer.status_code == 200:
                break
        assert time.monotonic() < until


def test_who_asks_for_a_stream_and_goes_at_once_leaves_nothing(server: Server) -> None:
    body = json.dumps(chat_body(stream=True, max_tokens=400)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(head + body)
    answer: Any = server.chat()
    assert answer.status_code == 200
    server.idle()
