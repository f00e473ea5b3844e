"""A server among bad company: many clients at once that leave, stall and send rubbish; a slow disk;
kills (R04 R12 R18 R58 R70)."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from k3offload.config import KDA_CHUNK
from k3offload.loading import load
from tests.helpers_checkpoint import ROOT
from tests.helpers_engine import call
from tests.helpers_serve import FIRST, Server, chat_body, chunks, put_together, taken_apart

TOLD = {"logprobs": True, "top_logprobs": 1}
#: What is asked for again and again: likely and drawn tokens, one answer and two.
BODIES: list[dict[str, Any]] = [
    chat_body(f"{i} " + "And it came to pass. " * (i % 4), max_tokens=4 + i, seed=i, **TOLD,
              temperature=1.0 * (i % 3), n=1 + (i % 5 == 4))
    for i in range(10)
]  # fmt: skip
RUBBISH = [b"", b"{", b'{"messages": 1}', b"\xff" * 100, b'{"messages": [], "n": 1e400}']


class Crowd:
    """Clients that do as ``random`` says."""

    def __init__(self, server: Server, alone: Sequence[Any], seed: int) -> None:
        self._server, self._alone, self._random = server, alone, random.Random(seed)
        self.seen: Counter[str] = Counter()

    def one(self) -> None:
        """One request, whole, left or no request at all."""
        i, kind = (
            self._random.randrange(len(BODIES)),
            self._random.choice(
                (
                    "whole",
                    "whole",
                    "stream",
                    "stream",
                    "leaves",
                    "leaves early",
                    "stalls",
                    "rubbish",
                )
            ),
        )
        with httpx.Client(base_url=self._server.url, timeout=60) as client:
            getattr(self, f"_{kind.replace(' ', '_')}")(client, i)
        self.seen[kind] += 1

    def _whole(self, client: httpx.Client, i: int) -> None:
        answer = self._patiently(client, BODIES[i])
        n = BODIES[i]["n"]
        assert [taken_apart(answer.json(), choice) for choice in range(n)] == self._alone[i]

    def _patiently(self, client: httpx.Client, body: Any) -> httpx.Response:
        """The answer; one that is turned away comes again."""
        while True:
            answer = client.post("/v1/chat/completions", json=body)
            if answer.status_code != 429:
                assert answer.status_code == 200, answer.text
                return answer
            assert int(answer.headers["retry-after"]) >= 1
            self.seen["turned away"] += 1
            time.sleep(0.02 * self._random.random())

    def _stream(self, client: httpx.Client, i: int) -> None:
        answer = self._patiently(client, BODIES[i] | {"stream": True})
        told = chunks(iter(answer.text.splitlines()))
        n = BODIES[i]["n"]
        assert [put_together(told, choice) for choice in range(n)] == self._alone[i]

    def _leaves(self, client: httpx.Client, i: int) -> None:
        body = BODIES[i] | {"stream": True, "max_tokens": 150}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for _ in zip(range(self._random.randrange(8)), answer.iter_lines(), strict=False):
                pass

    def _leaves_early(self, client: httpx.Client, i: int) -> None:
        self._raw(BODIES[i] | {"stream": bool(i % 2), "max_tokens": 150}, 0.03)

    def _stalls(self, client: httpx.Client, i: int) -> None:
        self._raw(BODIES[i] | {"stream": True, "max_tokens": 100}, 0.3)

    def _raw(self, body: Any, seconds: float) -> None:
        """Asks, takes nothing, and goes."""
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        with socket.create_connection(("127.0.0.1", self._server.port)) as sock:
            sock.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(seconds * self._random.random())

    def _rubbish(self, client: httpx.Client, i: int) -> None:
        data, headers = self._random.choice(RUBBISH), {"Content-Type": "application/json"}
        answer = client.post("/v1/chat/completions", content=data, headers=headers)
        assert answer.status_code in (400, 429), answer.text


@contextmanager
def watched_health(server: Server) -> Iterator[list[int]]:
    """The status of ``/health``, asked all the time."""
    seen: list[int] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=20) as client:
            while not done.is_set():
                seen.append(client.get("/health").status_code)
                done.wait(0.05)

    thread = threading.Thread(target=ask)
    thread.start()
    yield seen
    done.set()
    thread.join()


def held() -> tuple[int, int]:
    """Threads and open files of this process; the server's pool of threads, which is bounded, left
    out."""
    gc.collect()
    threads = [thread for thread in threading.enumerate() if "AnyIO worker" not in thread.name]
    return len(threads), len(os.listdir("/proc/self/fd"))


def test_two_hundred_requests_of_all_kinds_leave_nothing_behind() -> None:
    with (
        load("nano", sessions=3, context=256, prefix_cache="2M") as engine,
        Server(engine, queue=3) as server,
    ):
        alone = []
        for body in BODIES:
            assert engine.prefixes is not None
            engine.prefixes.clear()
            answer = server.client.post("/v1/chat/completions", json=body).json()
            alone.append([taken_apart(answer, choice) for choice in range(body["n"])])
        assert len({str(one) for one in alone}) > len(alone) / 2
        seen: Counter[str] = Counter()
        before: tuple[int, int] = (0, 0)
        sizes: list[int] = []
        ledger = 0
        for rounds in (14, 6, 6):  # the first warm up
            crowds = [Crowd(server, alone, 10 * len(sizes) + i) for i in range(8)]
            with watched_health(server) as health, ThreadPoolExecutor(len(crowds)) as pool:
                for future in [pool.submit(c.one) for _ in range(rounds) for c in crowds]:
                    future.result(60)
            assert set(health) == {200}
            server.idle()
            seen += sum((crowd.seen for crowd in crowds), Counter[str]())
            gc.collect()
            if not sizes:
                before, ledger = held(), engine._ledger.used
            sizes.append(psutil.Process().memory_info().rss)
        assert sum(seen.values()) - seen["turned away"] == 208
        assert len(seen) == 7 and min(seen.values()) > 10, seen
        until = time.monotonic() + 10
        while any(now > then for now, then in zip(held(), before, strict=True)):
            assert time.monotonic() < until, (held(), before)  # sockets that are closing
            time.sleep(0.05)
        assert engine._ledger.used == ledger
        assert sizes[-1] - sizes[1] < 6e6
        assert server.thread.totals.failed == 0 and server.thread.totals.cancelled > 0
        assert "k3_http_answers_total" in server.client.get("/metrics").text


# ---- a slow disk ----


class SlowReads:
    """Reads of model files take ``seconds`` more each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._preadv, self.seconds = os.preadv, 0.0
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, views: Sequence[Any], offset: int) -> int:
        time.sleep(self.seconds)
        return self._preadv(fd, views, offset)


def test_on_a_slow_disk_a_stream_shows_life_and_can_be_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, ping = SlowReads(monkeypatch), 0.2
    body = chat_body(FIRST, max_tokens=4)
    with load("nano", sessions=1, context=256, cache="1M") as engine, Server(engine) as plain:
        wanted = taken_apart(plain.client.post("/v1/chat/completions", json=body).json())
    with (
        load("nano", sessions=1, context=256, cache="1M") as engine,
        Server(engine, ping=ping) as server,
    ):
        reads.seconds = 0.02
        begin, lines, times = time.monotonic(), [], []
        with server.client.stream(
            "POST", "/v1/chat/completions", json=body | {"stream": True}
        ) as answer:
            assert time.monotonic() - begin < 1 and answer.status_code == 200
            for line in answer.iter_lines():
                lines.append(line)
                times.append(time.monotonic())
        comments = [line for line in lines if line.startswith(":")]
        assert times[-1] - begin > 1 and any("prompt: " in line for line in comments)
        assert max(b - a for a, b in zip([begin, *times], times, strict=False)) < 5 * ping
        assert put_together(chunks(iter(lines))) == wanted
        for stream in (True, False):  # leave while the prompt is computed
            with (
                pytest.raises(httpx.ReadTimeout),
                httpx.Client(base_url=server.url, timeout=0.15) as client,
            ):
                client.post("/v1/chat/completions", json=body | {"stream": stream})
            assert server.idle() < 2
        reads.seconds = 0.0
        assert taken_apart(server.client.post("/v1/chat/completions", json=body).json()) == wanted


def test_a_request_has_an_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = SlowReads(monkeypatch)
    with (
        load("nano", sessions=1, context=256, cache="1M") as engine,
        Server(engine, time_limit=0.3) as server,
    ):
        reads.seconds = 0.05
        answer = server.chat()
        assert answer.status_code == 504 and "0.3 seconds" in answer.json()["error"]["message"]
        told = server.stream()[-1]["error"]
        assert told["code"] == "timeout"
        assert server.idle() < 5


# ---- the process ----


class Process:
    """The command, at a port of its own."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k3offload", "serve", "nano", "--port", "0",
             *map(str, arguments)],
            stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.said: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith("serving "):
                break
        else:
            raise AssertionError("".join(self.said))
        self.url = self.said[-1].split()[-1]
        self.client = httpx.Client(base_url=self.url.removesuffix("/v1"), timeout=60)

    def end(self, number: int) -> int:
        self.client.close()
        self.process.send_signal(number)
        self.process.communicate(timeout=30)
        return self.process.returncode

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def test_after_a_kill_kept_prefixes_serve_the_next_process(tmp_path: Path) -> None:
    told = "You answer in the words of the book, and never at length. " * 4
    messages = [{"role": "system", "content": told}, {"role": "user", "content": FIRST}]
    body = chat_body(messages=messages)
    arguments = ("--prefix-dir", tmp_path, "--context", 512, "--places", 2)
    with Process(*arguments) as first:
        cold = first.client.post("/v1/chat/completions", json=body).json()
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        more = body | {"stream": True, "max_tokens": 300}
        with first.client.stream("POST", "/v1/chat/completions", json=more) as answer:
            next(answer.iter_lines())
            assert first.end(signal.SIGKILL) == -signal.SIGKILL
    with Process(*arguments) as second:
        warm = second.client.post("/v1/chat/completions", json=body).json()
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2 * KDA_CHUNK
        assert taken_apart(warm) == taken_apart(cold)
        # another question after the same words
        body = chat_body(messages=[messages[0], {"role": "user", "content": "Where is Eden?"}])
        other = second.client.post("/v1/chat/completions", json=body).json()
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] >= KDA_CHUNK
        assert second.client.get("/health").json()["status"] == "ok"
        assert second.end(signal.SIGTERM) == 128 + signal.SIGTERM


def test_without_the_extra_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; from k3offload.cli import main; "
        "main(['serve', 'nano'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "k3offload[serve]" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--port", 70000], "70000"),
        (["--host", "no.such.host.invalid"], "no.such.host"),
        (["--places", 0], "--places"),
        (["--queue", -1], "queue"),
        (["--api-key", ""], "key"),
        (["--name", ""], "--name is ''"),
        (["--keep-alive", 0], "--keep-alive"),
        (["--body-limit", "x"], "'x'"),
    ],
)
def test_refused_before_anything_is_loaded(
    arguments: list[object], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(["serve", "nano", *arguments], capsys)
    assert (code, out) == (2, "") and what in err and "memory plan" not in err


@pytest.mark.parametrize("port", [-1, 70000])
def test_a_sentence_has_one_end(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(["serve", "nano", "--port", port], capsys)
    assert str(port) in err or "0-65535" in err
    assert ".." not in err


def test_an_address_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        code, _, err = call(["serve", "nano", "--port", port], capsys)
    assert code == 2 and str(port) in err and "memory plan" not in err
