"""Where two things happen to a server at once, and requests that are nothing but faults."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from k3offload.engine import Engine
from k3offload.errors import ReadError
from k3offload.loading import load
from k3offload.run_serve import Punctual
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


def test_probabilities_are_of_the_text_that_is_there(engine: Engine) -> None:
    """Of tokens that are longer than a letter and of letters in parts, whole and streamed."""
    off: dict[str, Any] = {"thinking": {"type": "disabled"}, "logprobs": True}
    with Server(engine, scripted=True) as server:
        for text, cut in (
            ("x by the boy", "y b"),
            ("a by", "none"),
            ("x é道\ny", "\n"),
            ("é道", "道"),
        ):
            pieces = engine.tokenizer.encode(text)
            for ids in (pieces, [*text.encode()]):  # the first 256 tokens are the bytes
                known: dict[str, Any] = {"max_tokens": len(ids), "stop": cut}
                server.script(ids, 4)
                choice = server.complete("x", logprobs=0, **known).json()["choices"][0]
                said, told = choice["text"], choice["logprobs"]["tokens"]
                assert said == text.partition(cut)[0]
                whole = b"".join(map(engine.tokenizer.token_bytes, ids[: len(told)])).decode()
                assert whole.startswith(said)
                assert all(at < len(said) for at in choice["logprobs"]["text_offset"])
                stream = server.completions(logprobs=0, **known)
                assert [t for one in stream for t in one["logprobs"]["tokens"]] == told
                answer = taken_apart(server.chat(**known, **off).json())
                assert answer["content"] == said and len(answer["logprobs"]) == len(told)
                assert put_together(server.stream(**known, **off)) == answer


# ---- connections ----


class Hasty(Punctual):
    seconds = 0.4


def closed(sock: socket.socket, drip: bytes) -> float:
    """Seconds until the server has closed ``sock``, to which ``drip`` goes byte by byte."""
    begin = time.monotonic()
    sock.settimeout(0.05)
    for i in range(100):
        try:
            sock.sendall(drip[i : i + 1])
            if sock.recv(1000) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - begin


def test_a_connection_has_its_time_for_a_request(engine: Engine) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: " + b"x" * 100
    with Server(engine, http=Hasty) as server, ExitStack() as leave:
        there = ("127.0.0.1", server.port)
        new, again, busy = (leave.enter_context(socket.create_connection(there)) for _ in range(3))
        busy.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        again.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        for sock in (new, again):
            assert closed(sock, head) < 3
        busy.settimeout(3)  # what is being answered has all the time that it takes
        until = time.monotonic() + 3 * Hasty.seconds
        while time.monotonic() < until:
            assert busy.recv(100_000)


# ---- signs of life ----

LATE: dict[str, Any] = {"max_tokens": 300, "thinking": {"type": "disabled"}}


def slow(server: Server) -> None:
    """Its answers take a third of a second, and more."""
    server.thread.watch(lambda event: time.sleep(0.003 if event == "layer" else 0))


def test_blanks_come_before_an_answer_that_takes_its_time(engine: Engine) -> None:
    text = [*b"Noah built it."]
    with Server(engine, scripted=True) as server:
        server.script(text)
        plain = server.chat(**LATE | {"max_tokens": len(text)})
        assert plain.content.startswith(b"{") and "content-length" in plain.headers
    with Server(engine, scripted=True, blanks=True, ping=0.05) as server:
        slow(server)
        server.script(text)
        body = json.dumps(chat_body(**LATE | {"max_tokens": len(text)}))
        sent: dict[str, Any] = {"content": body, "headers": {"Content-Type": "application/json"}}
        with server.client.stream("POST", "/v1/chat/completions", **sent) as answer:
            first, *rest = answer.iter_raw()
        whole = b"".join([first, *rest])
        assert not first.strip() and len(whole) - len(whole.lstrip()) >= 3
        assert taken_apart(json.loads(whole)) == taken_apart(plain.json())
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            server.script(text)
            given: Any = {"model": "nano", "max_tokens": len(text), "prompt": "x"}
            assert client.completions.create(**given).choices[0].text == "Noah built it."
            with pytest.raises(openai.BadRequestError):  # what is refused has its status
                client.completions.create(model="nano", prompt="")
    with Server(engine, scripted=True, blanks=True, ping=30) as server:
        server.script([])  # as has what fails before the first of them
        assert server.chat(**LATE).status_code == 500


@pytest.mark.filterwarnings("ignore:Item:UserWarning")  # of the package itself
def test_an_error_behind_blanks_is_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    text = [*b"Noah built it."]  # then nothing may come, which fails the answer
    asked: Any = {"model": "nano", "messages": [{"role": "user", "content": "Who?"}]}
    with Server(engine, scripted=True, blanks=True, ping=0.05) as server:
        slow(server)
        server.script(text)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.APIConnectionError):
                client.chat.completions.create(**asked, extra_body=LATE)
        server.script(text)
        with pytest.raises(litellm.exceptions.InternalServerError):
            litellm.completion(
                **asked | {"model": "openai/nano"}, extra_body=LATE, max_retries=0,
                api_base=f"{server.url}/v1", api_key="x",
            )  # fmt: skip
        server.script(text * 20)
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            body = json.dumps(chat_body(**LATE)).encode()
            sock.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                b"application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        server.script(text)
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(
                b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
                b"Host: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )  # whose end of a connection would be that of an answer
            assert sock.recv(1000).startswith(b"HTTP/1.1 500")
        server.idle(2)  # who leaves ends the work, as ever
        assert server.thread.totals.cancelled == 1


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
