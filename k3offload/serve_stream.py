"""From the engine's thread to a client: as a stream of events, or as one answer.

Knows how updates of a job come into the server's loop, and when a client has gone; not the shapes
of answers, which a ``Writer`` has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, Protocol

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import K3Error
from .serve_engine import EngineThread
from .serve_errors import Answer, TookTooLong, described, dumps
from .serve_job import Ask, Ended, Failed, Step, Update

FAREWELL: Final = 3  #: seconds for a client to take the last events, when the server ends


class Writer(Protocol):
    """The shapes of the answer to one request."""

    def begin(self) -> Iterable[Any]:
        """Chunks that come before anything is known."""

    def step(self, step: Step) -> Iterable[Any]:
        """Chunks of ``step``."""

    def end(self, ended: Ended) -> Iterable[Any]:
        """The last chunks."""

    def whole(self, steps: Sequence[Step], ended: Ended) -> Any:
        """All of it, as one object."""


class Listener:
    """Hears of one job, in the loop that it is made in."""

    def __init__(self, thread: EngineThread, ask: Ask) -> None:
        """Submits ``ask``.  Raises ``Busy``, ``ServerStopped`` or ``UsageError``."""
        self._thread, self._loop = thread, asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        limit = thread.settings.time_limit
        self._deadline = None if limit is None else time.monotonic() + limit
        self.job = thread.submit(ask, self._hear)

    def _hear(self, update: Update) -> None:
        self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    async def updates(self) -> AsyncIterator[Update]:
        """All of them; the last is ``Ended`` or ``Failed``."""
        while True:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            try:
                update = await asyncio.wait_for(self._updates.get(), left)
            except asyncio.TimeoutError:  # of its own kind before Python 3.11
                seconds = self._thread.settings.time_limit or 0
                why = TookTooLong(
                    f"The request took more than {seconds:g} seconds.",
                    "Ask for fewer tokens, or start the server with a larger --time-limit.",
                )
                update = Failed(why)
            yield update
            if not isinstance(update, Step):
                return

    def close(self) -> None:
        """Nobody listens any more."""
        self._thread.cancel(self.job)

    def comment(self) -> str:
        """How far it is, in a line."""
        job, progress = self.job.view(), self._thread.progress
        if job.phase == "waiting":
            return f"waiting, {len(self._thread.running())} requests under way"
        where = f"layer {progress.layer + 1} of {progress.layers}"
        if job.phase == "prefill":
            return f"prompt: {job.prompt_done} of {job.prompt_total} tokens, {where}"
        return f"{job.new_tokens} tokens, {where}"


class Stream(EventSourceResponse):
    """Headers at once, chunks as they come, comments in between, ``[DONE]`` at the end."""

    def __init__(self, listener: Listener, writer: Writer, ping: float, stalled: float) -> None:
        self._listener = listener
        super().__init__(
            _events(listener, writer),
            ping=ping,
            sep="\n",
            ping_message_factory=lambda: ServerSentEvent(comment=listener.comment(), sep="\n"),
            send_timeout=stalled,
            shutdown_grace_period=FAREWELL,  # else the library may cut it before its last event
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:
            pass  # the client takes nothing, so there is nobody to tell
        finally:
            self._listener.close()  # also where the first event was never asked for


async def _events(listener: Listener, writer: Writer) -> AsyncIterator[dict[str, str]]:
    for chunk in writer.begin():
        yield {"data": dumps(chunk)}
    async for update in listener.updates():
        if isinstance(update, Failed):
            yield {"data": dumps(described(update.error)[1])}
            break
        chunks = writer.end(update) if isinstance(update, Ended) else writer.step(update)
        for chunk in chunks:
            yield {"data": dumps(chunk)}
    yield {"data": "[DONE]"}


async def whole(
    request: Request, listener: Listener, writer: Writer, blanks: float | None = None
) -> Response:
    """The answer, when it is complete.  Raises the error that it failed with; ends the work if the
    client goes.  ``blanks``: seconds after which it begins, with a blank, and between two more."""
    if request.scope["http_version"] == "1.0":
        blanks = None  # the end of a connection is that of a body there, so none could break off
    waiting = _Waiting(request, listener)
    try:
        if await waiting.ends(blanks):
            return waiting.answer(writer)
    except BaseException:
        waiting.close()
        raise
    return _Slow(waiting, writer, blanks or 0)


class _Waiting:
    """For all of an answer, or for the client to go."""

    def __init__(self, request: Request, listener: Listener) -> None:
        self._listener = listener
        self._work = asyncio.ensure_future(_collected(listener))
        self._gone = asyncio.ensure_future(_gone(request))

    async def ends(self, seconds: float | None) -> bool:
        """Whether it has come to an end within ``seconds``."""
        both = {self._work, self._gone}
        done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def answer(self, writer: Writer) -> Response:
        """What there is to say then; nobody is waited for any more."""
        try:
            if not self._work.done():
                return Response(status_code=499)  # which nobody sees
            steps, last = self._work.result()
            if isinstance(last, K3Error):
                raise last
            return Answer(writer.whole(steps, last))
        finally:
            self.close()

    def close(self) -> None:
        self._listener.close()
        self._work.cancel()
        self._gone.cancel()


class _Slow(Response):
    """An answer that has begun before it is known: blanks, which JSON may begin with, and then all
    of it.  Its status is said already, so what then fails ends the connection in the middle of the
    body, which no client takes for an answer."""

    def __init__(self, waiting: _Waiting, writer: Writer, every: float) -> None:
        super().__init__(media_type=Answer.media_type)
        self._waiting, self._writer, self._every = waiting, writer, every
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(body: bytes | memoryview, more: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            await say(b" ", True)
            while not await self._waiting.ends(self._every):
                await say(b" ", True)
            try:
                await say(self._waiting.answer(self._writer).body, False)
            except K3Error as error:
                await say(dumps(described(error)[1]).encode(), True)  # for whoever looks
        finally:
            self._waiting.close()


async def _collected(listener: Listener) -> tuple[list[Step], Ended | K3Error]:
    steps: list[Step] = []
    async for update in listener.updates():
        if isinstance(update, Step):
            steps.append(update)
        else:
            return steps, update.error if isinstance(update, Failed) else update
    raise AssertionError("updates end with Ended or Failed")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
