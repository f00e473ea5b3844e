"""Requests as OpenAI's clients send them, checked field by field.

What the server cannot do is refused by the name of its field, since leaving it out would give
another answer than was asked for.  A field that is null, or has the value that asks for nothing,
counts as left out.  Messages and tools are checked by ``chat_messages``.

Of long lists the first fault is told and no other: each that is told takes time and memory.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

#: Values of fields that ask for nothing; of those that are unknown otherwise.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
#: Names of somebody or something, which no answer depends on.
LABELS: Final = ("user", "safety_identifier", "prompt_cache_key")

Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Whole = Annotated[int, Field(ge=1, le=2**31 - 1)]


class StreamOptions(BaseModel):
    """What a stream holds beside the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Thinking(BaseModel):
    """Whether the answer begins with reasoning."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["enabled", "disabled"]


class Common(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    usual_tokens: ClassVar[int | None] = None  #: of an answer, if not those of the settings

    model: Annotated[str, StringConstraints(max_length=300)] = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[Stop], Field(max_length=16)] | Stop = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=128)] = 1

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        """Leave out what asks for nothing."""
        if not isinstance(given, dict):
            return given
        kept = {name: value for name, value in given.items() if value is not None}
        for name in kept.keys() & NEUTRAL.keys():
            if any(_same(kept[name], value) for value in NEUTRAL[name]):
                del kept[name]
        for name in kept.keys() & set(LABELS):
            if isinstance(kept[name], str):
                del kept[name]
        unknown = [name for name in kept if name not in cls.model_fields]
        for name in unknown[1:]:  # one is enough to refuse it, and there may be a million
            del kept[name]
        return kept

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream. Leave it out.")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(Common):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs. Set logprobs to true.")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError(
                "max_tokens and max_completion_tokens are given, and differ. Leave one out."
            )
        return self

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Common):
    """Of ``/v1/completions``."""

    prompt: str | Annotated[list[int], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    usual_tokens: ClassVar[int | None] = 16

    @property
    def most(self) -> int | None:
        return self.max_tokens


def _same(value: Any, neutral: Any) -> bool:
    """Whether they are equal, and neither is a number where the other is true or false."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
