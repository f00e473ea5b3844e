"""The server's routes, as an ASGI application over an ``EngineThread`` that runs already."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from . import serve_chat, serve_completions, serve_errors, serve_live
from .chat import Encoder
from .errors import K3Error, UsageError
from .serve_ask import Served, now
from .serve_engine import EngineThread
from .serve_errors import Answer, UnknownModel
from .serve_guard import Guard
from .serve_job import Ask, ServerStopped
from .serve_metrics import Metrics
from .serve_schema import ChatRequest, CompletionRequest
from .serve_settings import Settings
from .serve_shapes import ChatCompletion, Completion, ErrorBody, Health, ModelCard, ModelList
from .serve_stream import Listener, Stream, Writer, whole

_WRONG: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in (
        (400, "The request cannot be, and why"),
        (401, "The key is missing or wrong"),
        (404, "There is no such model"),
        (408, "The body took too long to arrive"),
        (413, "The body is too large"),
        (429, "Too many requests wait; Retry-After says when to come again"),
        (500, "The model could not be computed"),
        (503, "The server ends, or has no room"),
    )
}
_ANSWERS: dict[int | str, dict[str, Any]] = _WRONG | {
    200: {
        "description": "The answer: one object, or a stream of events where that is asked for",
        "content": {"text/event-stream": {}},
    }
}


def create_app(thread: EngineThread, settings: Settings, version: str = "0") -> FastAPI:
    """The application; ``version`` of the program.  Who makes it starts ``thread`` before, and
    closes it behind."""
    app = FastAPI(
        title="k3offload", version=version, docs_url=None, redoc_url=None, openapi_url=None
    )
    served, metrics, began = Served.of(thread.engine, settings), Metrics(thread), now()
    serve_errors.add_to(app)
    _add_answers(app, thread, served)
    _add_facts(app, thread, served, metrics, began)
    app.include_router(serve_live.router(thread))
    _describe(app)
    app.add_middleware(Guard, settings=settings, seen=metrics.seen)
    if settings.origins:  # around the guard: a page that may ask may also read why it was refused
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send names and versions of theirs
            expose_headers=["Retry-After"],
        )  # fmt: skip
    return app


def _add_answers(app: FastAPI, thread: EngineThread, served: Served) -> None:
    engine, settings = served.engine, served.settings
    encoder: Encoder | UsageError
    try:
        encoder = Encoder.of(engine.tokenizer, engine.checkpoint.folder)
    except UsageError as error:  # of another format: it may still go on with texts
        encoder = error

    async def answered(request: Request, ask: Ask, writer: Writer, stream: bool) -> Response:
        listener = Listener(thread, ask)
        if stream:
            return Stream(listener, writer, settings.ping, settings.stalled)
        return await whole(request, listener, writer, settings.ping if settings.blanks else None)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_ANSWERS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """An answer to a conversation."""
        if isinstance(encoder, UsageError):
            raise encoder
        thread.check_room()
        ask = await run_in_threadpool(serve_chat.ask, served, encoder, body)
        return await answered(request, ask, serve_chat.ChatWriter(served, ask, body), body.stream)

    @app.post("/v1/completions", response_model=Completion, responses=_ANSWERS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """How a text goes on."""
        thread.check_room()
        ask = await run_in_threadpool(serve_completions.ask, served, body)
        writer = serve_completions.CompletionWriter(served, ask, body)
        return await answered(request, ask, writer, body.stream)


def _add_facts(
    app: FastAPI, thread: EngineThread, served: Served, metrics: Metrics, began: int
) -> None:
    settings = served.settings
    card = ModelCard(
        id=settings.model, created=began, owned_by="k3offload", context_length=served.context
    )

    @app.get("/v1/models", response_model=ModelList, responses=_WRONG)
    async def models() -> Response:
        """The model that is served."""
        return Answer(ModelList(data=[card]).model_dump())

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=_WRONG)
    async def model(model: str) -> Response:
        """The model that is served, by its name."""
        if model != settings.model:
            raise UnknownModel(
                f"There is no model {model!r:.80} here.", f"Ask for {settings.model!r}."
            )
        return Answer(card.model_dump())

    @app.get("/health", response_model=Health, responses={503: _WRONG[503]})
    async def health() -> Response:
        """Whether the engine's thread answers."""
        asked = time.monotonic()
        future: Future[tuple[int, int]] = thread.call(
            lambda: (len(thread.running()), len(thread.waiting()))
        )
        try:
            counted = await asyncio.wait_for(asyncio.wrap_future(future), settings.health)
        except asyncio.TimeoutError:  # of its own kind before Python 3.11
            wrong = f"The engine has not answered for {settings.health:g} seconds."
            return serve_errors.answer(ServerStopped(wrong))
        running, waiting = counted
        seconds = round(time.monotonic() - asked, 6)
        told = Health(model=settings.model, seconds=seconds, running=running, waiting=waiting)
        return Answer(told.model_dump())

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def measured() -> Response:
        """Figures in the text format of Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _describe(app: FastAPI) -> None:
    """Let ``/openapi.json`` tell what is there; a request that is wrong gets 400 and never 422."""
    made = partial(FastAPI.openapi, app)

    def described() -> dict[str, Any]:
        document = made()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return document

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Answer(described())

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return serve_errors.answer(K3Error("The server has failed.", "Its log says more."))
