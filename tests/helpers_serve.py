"""Servers for tests: real ones, at a free port of this machine, over engines that are real as well.

A scripted one has the engine compute everything and sample what a script says.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final

import httpx
import numpy as np
import uvicorn

from k3offload.engine import Engine
from k3offload.run_serve import Punctual
from k3offload.sampling import Row
from k3offload.serve_app import create_app
from k3offload.serve_engine import EngineThread
from k3offload.serve_job import Ask, Job, Update
from k3offload.serve_settings import Settings
from tests.helpers_chat import folder_with
from tests.helpers_tokenizer import NANO

FIRST: Final = "What is the seal of Ammiel?"
_ROOT: Final = TemporaryDirectory(prefix="k3-serve-")


@cache
def chatting() -> Path:
    """The embedded model in a folder that has the wording of system messages, too."""
    folder = Path(_ROOT.name) / "nano"
    folder.mkdir()
    for file in NANO.iterdir():
        (folder / file.name).symlink_to(file)
    return folder_with(folder)


class Script:
    """A guide that lets nothing come but ``tokens``, one after another."""

    finished = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = deque(tokens)

    def mask(self, logits: Row) -> Row:
        masked: Row = np.full_like(logits, -np.inf)
        if self._tokens:  # else none may come, which fails the answer
            masked[self._tokens[0]] = 0.0
        return masked

    def accept(self, token: int) -> None:
        assert token == self._tokens.popleft()


class ScriptedThread(EngineThread):
    """Answers as ``scripts`` say, in the order in which they are asked for."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        super().__init__(engine, settings)
        self.scripts: deque[Sequence[int]] = deque()
        self.asked: list[Ask] = []

    def submit(self, ask: Ask, hear: Callable[[Update], None]) -> Job:
        self.asked.append(ask)
        script = self.scripts.popleft()
        return super().submit(replace(ask, guide=partial(Script, script)), hear)


class Server:
    """Serves ``engine`` at ``url`` until it is closed; the engine stays open."""

    def __init__(
        self,
        engine: Engine,
        scripted: bool = False,
        http: type[Punctual] = Punctual,
        **settings: Any,
    ) -> None:
        self.settings = Settings(**{"model": "nano", **settings})
        self.thread = (ScriptedThread if scripted else EngineThread)(engine, self.settings).start()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = create_app(self.thread, self.settings)
        config = uvicorn.Config(app, http=http, log_level="critical", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._at_work = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._at_work.start()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def script(self, tokens: Sequence[int], times: int = 1) -> None:
        assert isinstance(self.thread, ScriptedThread)
        self.thread.scripts = deque([tokens] * times)

    def chat(self, content: str = FIRST, **more: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=chat_body(content, **more))

    def complete(self, prompt: Any, **more: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **more})

    def completions(self, prompt: Any = "x", **more: Any) -> list[Any]:
        """The choices of a streamed text."""
        body = {"prompt": prompt, "stream": True, **more}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            return [chunk["choices"][0] for chunk in chunks(response.iter_lines())]

    def stream(self, content: str = FIRST, **more: Any) -> list[Any]:
        """The chunks of an answer; the last thing that comes is ``[DONE]``."""
        body = chat_body(content, stream=True, **more)
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return chunks(response.iter_lines())

    def idle(self, within: float = 5.0) -> float:
        """Seconds until nothing is under way."""
        begin = time.monotonic()
        while self.thread.running() or self.thread.waiting():
            assert time.monotonic() - begin < within, self.thread.running()
            time.sleep(0.005)
        return time.monotonic() - begin

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self.thread.close(10)
        self._at_work.join(10)
        assert not self._at_work.is_alive()
        self._socket.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def chat_body(content: str = FIRST, **more: Any) -> dict[str, Any]:
    """A request that takes the likeliest tokens, few of them."""
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 12, **more}


def chunks(lines: Iterator[str]) -> list[Any]:
    """What a stream of events holds, comments left out."""
    told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert told[-1] == "[DONE]"
    return [json.loads(text) for text in told[:-1]]


def put_together(stream: Sequence[Any], choice: int = 0) -> dict[str, Any]:
    """One answer of a stream in the form of one that is not streamed; its ids of calls left out."""
    made: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "logprobs": []}
    for chunk in stream:
        for one in chunk.get("choices", ()):
            if one["index"] != choice:
                continue
            assert "finish_reason" not in made
            delta = one["delta"]
            made["reasoning"] += delta.get("reasoning_content", "")
            made["content"] += delta.get("content", "")
            made["logprobs"] += (one["logprobs"] or {}).get("content", [])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    made["calls"].append([call["function"]["name"], ""])
                made["calls"][call["index"]][1] += call["function"]["arguments"]
            if one["finish_reason"] is not None:
                made["finish_reason"] = one["finish_reason"]
    return made


def taken_apart(answer: Any, choice: int = 0) -> dict[str, Any]:
    """The same of an answer that is not streamed."""
    one = answer["choices"][choice]
    message = one["message"]
    return {
        "reasoning": message.get("reasoning_content", ""),
        "content": message["content"] or "",
        "calls": [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls", ())
        ],
        "logprobs": (one["logprobs"] or {}).get("content", []),
        "finish_reason": one["finish_reason"],
    }
