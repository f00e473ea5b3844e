"""Running the server: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import FrameType
from typing import ClassVar, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from .budget import state_bytes
from .config import KDA_CHUNK
from .constrain import Grammar, constraint
from .engine import Engine
from .errors import K3Error, UsageError
from .serve_app import create_app
from .serve_engine import EngineThread
from .serve_settings import Settings
from .spec import ModelSpec
from .tokenizer import Tokenizer

CONNECTIONS: Final = 512  #: at a time; more are turned away with 503
GRACE: Final = 5  #: seconds for clients to take what is left, in the end


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block as Ctrl-C does, so that what is open is closed, also while the model
    is loaded; the library gives on a signal that ends its server."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address.  Raises ``UsageError`` if it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"Nobody can listen at {host} port {port}: {str(error).rstrip('.')}.",
            "Choose another --host or --port.",
        ) from None


def get_ready(tokenizer: Tokenizer) -> None:
    """Load what grammars need, if it is installed, so that the plan counts its memory."""
    try:
        constraint(tokenizer, Grammar.of_schema({"type": "object"}))
    except UsageError:
        return  # whoever asks for a format is told what is missing


def prefix_bytes(spec: ModelSpec, dtype: str, context: int, latent_dtype: str | None) -> int:
    """Memory for beginnings of prompts, where nobody says how much: one of the whole context, and
    the constant part of two more that begin like it."""
    least = state_bytes(spec, dtype, KDA_CHUNK, latent_dtype)
    return state_bytes(spec, dtype, context, latent_dtype) + 2 * least


def run(
    engine: Engine,
    settings: Settings,
    version: str,
    sock: socket.socket,
    say: Callable[[str], None],
) -> None:
    """Serve until a signal comes, or the engine dies, which raises ``K3Error``."""
    thread = EngineThread(engine, settings)
    app = create_app(thread, settings, version)
    app.router.lifespan_context = _lifespan(thread)
    server = _Server(
        thread,
        uvicorn.Config(
            app,
            http=Punctual,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        ),
    )

    def dies() -> None:
        server.should_exit = True

    thread.on_death = dies
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"serving {settings.model} at http://{shown}:{port}/v1")
    try:
        server.run(sockets=[sock])
    finally:
        thread.close()
    if thread.failure is not None:
        say("".join(traceback.format_exception(thread.failure)).rstrip())
        raise K3Error(
            f"The engine has failed: {type(thread.failure).__name__}: {thread.failure}.",
            "Start it again.",
        ) from thread.failure


class Punctual(H11Protocol):
    """Closes a connection on which no request has come in time, however much of one has: the
    library waits for as long as there is something."""

    seconds: ClassVar[float] = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait_after(None)

    def on_response_complete(self) -> None:
        last = self.cycle
        super().on_response_complete()  # and the next one may have come already
        self._wait_after(last)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait_after(self, last: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.seconds, self._late, last)

    def _late(self, last: object) -> None:
        if self.cycle is last:
            self.transport.close()


class _Server(uvicorn.Server):
    """Ends what the engine is at before it waits for clients to take their answers.  Goes on
    ignoring Ctrl-C where whoever began the process does (nohup, a job in a script's background)."""

    def __init__(self, thread: EngineThread, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._thread = thread

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with super().capture_signals():
            if ignored:  # the library has taken it over
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._thread.close(0)
        await super().shutdown(sockets)


def _lifespan(
    thread: EngineThread,
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        thread.close(GRACE)

    return lifespan
