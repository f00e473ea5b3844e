"""What stands before the server's routes: the key, and how large a request is and how long it takes
to arrive.

A body is read here as a whole, within its limits, before anything looks into it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .serve_errors import refused
from .serve_settings import Settings

#: Paths that need no key: a sign of life, and a page without any data.
OPEN = ("/health", "/")


class Guard:
    """An ASGI application around another one.  ``seen``: told method, path and status of every
    request that got one."""

    def __init__(
        self, app: ASGIApp, settings: Settings, seen: Callable[[str, str, int], None]
    ) -> None:
        self._app, self._settings, self._seen = app, settings, seen

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
        if not self._may_come(scope, headers):
            wrong = refused(
                401, "The key is missing or wrong. Send Authorization: Bearer KEY.",
                "invalid_api_key", {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
            await wrong(scope, receive, sending)
            return
        limit, seconds = self._settings.body, self._settings.body_seconds
        declared = headers.get("content-length", "0")
        too_large = declared.isdecimal() and int(declared[:20]) > limit
        body: bytes | None = b""
        with anyio.move_on_after(seconds) as within:
            body = None if too_large else await _whole(receive, limit)
        if within.cancelled_caught:
            text = f"The body did not arrive within {seconds:g} seconds."
            await refused(408, text, "timeout", {"Connection": "close"})(scope, receive, sending)
        elif body is None:
            text = f"The body is larger than {limit:,} bytes. Send less."
            close = {"Connection": "close"}
            await refused(413, text, "body_too_large", close)(scope, receive, sending)
        else:
            await self._app(scope, _again(body, receive), sending)

    def _may_come(self, scope: Scope, headers: Headers) -> bool:
        key = self._settings.key
        if key is None or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return True
        given = headers.get("authorization", "").partition(" ")
        right = secrets.compare_digest(given[2].strip().encode(), key.encode())
        return given[0].lower() == "bearer" and right


async def _whole(receive: Receive, limit: int) -> bytes | None:
    """The body; None if it is larger than ``limit``."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)  # whoever reads on finds that out
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            return None
    return bytes(body)


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
