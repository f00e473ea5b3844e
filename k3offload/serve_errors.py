"""Errors of the server as OpenAI's clients read them, and which status each of ours has."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from .errors import DoesNotFit, K3Error, TokenizerError, TooLong, UsageError
from .serve_job import Busy, ServerStopped

_FIELD = re.compile(r"[a-z_][\w.\[\]]*(?=[ :])")
_KINDS: Final = ("str", "int", "dict")
_SHOWN: Final = 2000  #: characters of a message


class UnknownModel(UsageError):
    """A request names a model that is not served here."""


class TookTooLong(K3Error):
    """The request's time is over."""


class Answer(Response):
    """JSON in ASCII alone: whatever a text holds, no reader takes a part of it for an end of line,
    and half a surrogate of a broken request can be told."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode("ascii")


def dumps(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Any:
    """What an error's body is."""
    message, param = message[:_SHOWN], param and param[:_SHOWN]
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def described(error: K3Error) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of ``error``."""
    text = str(error)
    found = _FIELD.match(error.problem)
    field = found[0] if found else None
    if isinstance(error, TooLong):
        wrong = body(text, "invalid_request_error", "max_tokens", "context_length_exceeded")
        return 400, wrong, {}
    if isinstance(error, UnknownModel):
        return 404, body(text, "invalid_request_error", "model", "model_not_found"), {}
    if isinstance(error, (UsageError, TokenizerError)):
        return 400, body(text, "invalid_request_error", field, "invalid_value"), {}
    if isinstance(error, Busy):
        headers = {"Retry-After": str(error.seconds)}
        return 429, body(text, "rate_limit_error", None, "rate_limit_exceeded"), headers
    if isinstance(error, (ServerStopped, DoesNotFit)):
        code = "stopped" if isinstance(error, ServerStopped) else "no_room"
        return 503, body(text, "server_error", None, code), {"Retry-After": "10"}
    if isinstance(error, TookTooLong):
        return 504, body(text, "server_error", None, "timeout"), {}
    return 500, body(text, "server_error", None, type(error).__name__), {}


def answer(error: K3Error) -> Response:
    status, told, headers = described(error)
    return Answer(told, status, headers)


def refused(
    status: int, message: str, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A request that was not even read."""
    return Answer(body(message, "invalid_request_error", None, code), status, headers)


def field_name(place: tuple[Any, ...]) -> str:
    """``("body", "messages", 0)`` -> ``messages[0]``; of a field that may be of two kinds, its name
    without what is wrong with either."""
    text = ""
    for part in place[1:]:
        if isinstance(part, str) and text and (part in _KINDS or not part.isidentifier()):
            break
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _wrong_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name, message = field_name(first["loc"]), first["msg"]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "")
        told = f"The body is no JSON: {why}."
        return Answer(body(told, "invalid_request_error", None, "invalid_json"), 400)
    if first["type"] == "extra_forbidden":
        told = f"{name} is not supported here. Leave it out."
        return Answer(body(told, "invalid_request_error", name, "unsupported_parameter"), 400)
    if first["type"] == "value_error":  # of our own validators, which name the field
        told = message.removeprefix("Value error, ")
        found = _FIELD.match(told)
        name = found[0] if found else name
    else:
        told = f"{name or 'The body'}: {message}."
    return Answer(body(told, "invalid_request_error", name or None, "invalid_value"), 400)


def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text, code = f"{error.detail}.", "http_error"
    if (unread := _unread(error.__cause__)) is not None:
        text, code = f"The body cannot be read as JSON: {unread}.", "invalid_json"
    told = body(text, "invalid_request_error", None, code)
    return Answer(told, error.status_code, dict(error.headers or {}))


def _unread(why: BaseException | None) -> str | None:
    """What the reader of bodies stumbled over, where it says no more than that it did."""
    if isinstance(why, RecursionError):
        return "it is nested too deeply"
    if isinstance(why, UnicodeDecodeError):
        return f"it is no {why.encoding.upper()}, at byte {why.start}"
    return "it has a number of too many digits" if isinstance(why, ValueError) else None


def _of_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, K3Error)
    return answer(error)


def add_to(app: FastAPI) -> None:
    """Let every error of ``app`` have OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _wrong_request)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(K3Error, _of_ours)
