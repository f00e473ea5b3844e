"""The live page and the stream of figures behind it, as routes of the server.

The page is one document, joined from the files in ``page/`` when the routes are made: it loads
nothing further, and its policy says so.  Figures are collected while somebody listens, once for all
who do.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from .live import Live
from .serve_job import Busy, ServerStopped
from .serve_settings import Settings

if TYPE_CHECKING:
    from .serve_engine import EngineThread

EVERY: Final = 0.5  #: seconds between two events
WATCHERS: Final = 16  #: that are served at once
PARTS: Final = {"style.css": "style", "wire.js": "script", "lanes.js": "script",
                "machine.js": "script", "chat.js": "script"}  # fmt: skip
FOLDER: Final = Path(__file__).with_name("page")


def page() -> tuple[str, dict[str, str]]:
    """The document, and headers that let it run its own parts and reach this server alone."""
    text = (FOLDER / "index.html").read_text("utf-8")
    allowed: dict[str, list[str]] = {"style": [], "script": []}
    for name, tag in PARTS.items():
        part = (FOLDER / name).read_text("utf-8")
        digest = b64encode(sha256(part.encode()).digest()).decode()
        allowed[tag].append(f"'sha256-{digest}'")
        text = text.replace(f"<!-- {name} -->", f"<{tag}>{part}</{tag}>")
    policy = {
        "default-src": "'none'", "style-src": " ".join(allowed["style"]),
        "script-src": " ".join(allowed["script"]), "connect-src": "'self'", "img-src": "data:",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }  # fmt: skip
    return text, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-cache",
    }  # fmt: skip


Ear = asyncio.Queue[str | None]


def _put(ear: Ear, event: str | None) -> None:
    """Who is slow hears the newest alone."""
    if ear.full():
        ear.get_nowait()
    ear.put_nowait(event)


async def _ends(ear: Ear, leave: anyio.Event) -> None:
    await leave.wait()
    _put(ear, None)


class _Stage:
    """One collector for everybody who listens: it starts with the first and stops with the last."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread, self._live = thread, Live(thread.engine)
        self._ticker: asyncio.Task[None] | None = None
        self.ears: set[Ear] = set()

    def enter(self) -> Ear:
        """One more listener, who has to ``leave``.  Raises ``Busy``."""
        if len(self.ears) >= WATCHERS:
            raise Busy(f"{WATCHERS} pages are watching already.", "Close one.", 10)
        ear: Ear = asyncio.Queue(1)
        self.ears.add(ear)
        return ear

    def leave(self, ear: Ear) -> None:
        self.ears.discard(ear)
        if not self.ears and self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
            self._thread.call(self._turn)

    async def events(self, ear: Ear, leave: anyio.Event) -> AsyncIterator[ServerSentEvent]:
        """What stays as it is, then what changes, until the engine, the listener or the server is
        to ``leave``."""
        ending = asyncio.create_task(_ends(ear, leave))
        try:
            about = {"model": self._thread.settings.model, **self._live.about()}
            yield ServerSentEvent(json.dumps(about), event="about", sep="\n")
            if self._ticker is None or self._ticker.done():
                self._ticker = asyncio.create_task(self._tick())
            while (event := await ear.get()) is not None:
                yield ServerSentEvent(event, event="live", sep="\n")
        finally:
            ending.cancel()

    async def _tick(self) -> None:
        try:
            await asyncio.wrap_future(self._thread.call(self._turn))
            while self._thread.alive:
                self._tell(json.dumps({**self._live.facts(), "requests": self._requests()}))
                await asyncio.sleep(EVERY)
        except ServerStopped:
            pass
        finally:
            if self._ticker is asyncio.current_task():  # it was not called off
                self._tell(None)

    def _turn(self) -> None:
        """Collect, or do not any more: in the engine's thread, between two layers, which may be
        seconds later.  By then somebody else may listen, or nobody."""
        if not self.ears:
            self._live.stop()
        elif not self._live.watched:
            self._live.start()

    def _tell(self, event: str | None) -> None:
        for ear in self.ears:
            _put(ear, event)

    def _requests(self) -> list[dict[str, Any]]:
        """Those under way, then those that wait; nothing of what they say."""
        running = self._thread.running()
        prompts = [job for job in running if job.phase == "prefill"]
        answers = sum(job.choices for job in running if job.phase == "decode")
        todo = [job.prompt_total - job.prompt_done for job in prompts]
        left = dict(zip((job.id for job in prompts), self._live.left(todo, answers), strict=True))
        return [
            {
                "id": job.id, "phase": job.phase, "done": job.prompt_done,
                "total": job.prompt_total, "reused": job.reused, "made": job.new_tokens,
                "most": job.max_new_tokens * job.choices, "left": left.get(job.id),
            }
            for job in (*running, *self._thread.waiting())
        ]  # fmt: skip


class _Watching(EventSourceResponse):
    """The events of one listener, who has a place from now on.  Raises ``Busy``."""

    def __init__(self, stage: _Stage, settings: Settings) -> None:
        leave, self._stage, self._ear = anyio.Event(), stage, stage.enter()
        super().__init__(
            stage.events(self._ear, leave), ping=settings.ping, sep="\n",
            send_timeout=settings.stalled, shutdown_event=leave, shutdown_grace_period=1,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:
            pass  # the listener takes nothing
        finally:
            self._stage.leave(self._ear)


def router(thread: EngineThread) -> APIRouter:
    """The page at ``/``, which holds no data, and its figures at ``/live``."""
    routes, stage = APIRouter(include_in_schema=False), _Stage(thread)
    document, headers = page()

    @routes.get("/")
    async def shown() -> Response:
        return HTMLResponse(document, headers=headers)

    @routes.get("/live")
    async def live() -> Response:
        if not thread.alive:
            raise ServerStopped("The engine has ended.", "Start the server again.")
        return _Watching(stage, thread.settings)

    return routes
