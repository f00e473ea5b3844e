"""The shapes of what a server answers, for the document that describes it.

Nothing is checked by them while it runs: answers are made by the writers, and tests hold the two
together.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Reason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    """What is wrong, and what to do."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Of every answer with a status from 400 up."""

    error: ErrorDetail


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    context_length: int


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """A sign of life from the engine's thread."""

    status: Literal["ok"] = "ok"
    model: str
    seconds: float
    running: int
    waiting: int


class Cached(BaseModel):
    """Prompt tokens that were computed before."""

    cached_tokens: int


class Thought(BaseModel):
    """Tokens of reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached
    completion_tokens_details: Thought


class Called(BaseModel):
    """Name and arguments of a call; these are JSON text, unless they were cut off."""

    name: str
    arguments: str


class Call(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: Called


class Message(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[Call] = []
    refusal: None


class ChatChoice(BaseModel):
    """One of the answers."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: Reason


class Head(BaseModel):
    """How every answer begins."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(Head):
    """An answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(BaseModel):
    """One of the texts."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Reason


class Completion(Head):
    """How a text goes on."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
