"""What stands before the server's routes: its name, the key, and how large a request is and how
long it takes to arrive.

A body is read here as a whole, within its limits, before anything looks into it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import anyio
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .serve_errors import refused
from .serve_settings import Settings

#: Paths that need no key: a sign of life, and a page without any data.
OPEN = ("/health", "/")
BODIES = 8  #: of the largest that may be in memory at a time
#: So many times the largest are read, and thrown away, of one that is too large: who still sends
#: when the connection is closed may never see why.
READ_ON = 4


class Guard:
    """An ASGI application around another one.  ``seen``: told method, path and status of every
    request that got one."""

    def __init__(
        self, app: ASGIApp, settings: Settings, seen: Callable[[str, str, int], None]
    ) -> None:
        self._app, self._settings, self._seen = app, settings, seen
        self._held = [0]  # bytes of bodies whose requests are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._seen(scope["method"], scope["path"], message["status"])
            await send(message)

        headers = Headers(scope=scope)
        if not self._is_ours(headers):
            text = "The server has another name. Ask for localhost, or start it with --api-key."
            await refused(421, text, "wrong_host")(scope, receive, sending)
            return
        if _is_slipped_in(headers):
            text = "A page of another site asks for this without being allowed to read it."
            await refused(403, text, "other_site")(scope, receive, sending)
            return
        if not self._may_come(scope, headers):
            wrong = refused(
                401, "The key is missing or wrong. Send Authorization: Bearer KEY.",
                "invalid_api_key", {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
            await wrong(scope, receive, sending)
            return
        held = _Held(self._held)
        try:
            read = await self._read(headers, receive, held)
            if isinstance(read, Response):
                await read(scope, receive, sending)
            else:
                await self._app(scope, _again(read, receive), sending)
        finally:
            held.let_go()

    async def _read(self, headers: Headers, receive: Receive, held: _Held) -> bytes | Response:
        """The body, or what is wrong with it."""
        limit, seconds = self._settings.body, self._settings.body_seconds
        close = {"Connection": "close"}
        declared = headers.get("content-length", "0")
        large = declared.isdecimal() and int(declared[:20]) > limit
        if large and int(declared[:20]) > READ_ON * limit:
            return _too_large(limit)
        body, size, more = bytearray(), 0, True
        with anyio.move_on_after(seconds):
            while more and size <= READ_ON * limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    break  # whoever reads on finds that out
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                large = large or size > limit
                body += part
                if large:
                    body.clear()
                if not held.take(len(body), BODIES * limit):
                    text = "The bodies of other requests take all the room for them. Come again."
                    return refused(429, text, "no_room", {**close, "Retry-After": "10"})
            return _too_large(limit) if large else bytes(body)
        if large:
            return _too_large(limit)
        text = f"The body did not arrive within {seconds:g} seconds."
        return refused(408, text, "timeout", close)

    def _is_ours(self, headers: Headers) -> bool:
        """Whether the request calls the server by a name that it has."""
        host = headers.get("host", "").rpartition("@")[2]
        name = host.rpartition("]")[0].lstrip("[") if "]" in host else host.partition(":")[0]
        return not self._settings.hosts or name.lower() in self._settings.hosts

    def _may_come(self, scope: Scope, headers: Headers) -> bool:
        key = self._settings.key
        if key is None or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return True
        given = headers.get("authorization", "").partition(" ")
        right = secrets.compare_digest(given[2].strip().encode(), key.encode())
        return given[0].lower() == "bearer" and right


def _is_slipped_in(headers: Headers) -> bool:
    """Whether a browser asks for a page of another site that does not mean to read the answer, as
    scripts and pictures are asked for: it would only take a listener's place."""
    others = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    return others and headers.get("sec-fetch-mode") == "no-cors"


def _too_large(limit: int) -> Response:
    text = f"The body is larger than {limit:,} bytes. Send less."
    return refused(413, text, "body_too_large", {"Connection": "close"})


class _Held:
    """Bytes of one body, among those of all: ``total`` has one number."""

    def __init__(self, total: list[int]) -> None:
        self._total, self._mine = total, 0

    def take(self, size: int, limit: int) -> bool:
        """Now they are ``size``; whether there is room."""
        self._total[0] += size - self._mine
        self._mine = size
        return self._total[0] <= limit

    def let_go(self) -> None:
        self._total[0] -= self._mine


def _again(body: bytes, receive: Receive) -> Receive:
    """Give ``body`` once, then what else there is."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
