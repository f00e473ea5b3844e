"""Chat completions: a request becomes tokens to go on from, what is answered an OpenAI message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from .chat import EFFORTS, Encoder
from .chat_guide import guide
from .chat_parse import Answer, Arguments, Content, Event, Finish, Parser, Reasoning, ToolCall
from .errors import UsageError
from .serve_ask import Served, chat_logprob, new_id, now, samplings, usage
from .serve_job import Ask, Ended, Step
from .serve_schema import ChatRequest

#: Fields of messages that mean something, or that ``chat_messages`` refuses by itself.
_MESSAGE: Final = frozenset(
    (
        *("role", "content", "name", "reasoning_content", "reasoning"),
        *("tool_calls", "tools", "tool", "tool_call_id"),
        *("function_call", "audio", "refusal", "partial", "prefix"),
    )
)


def ask(served: Served, encoder: Encoder, body: ChatRequest) -> Ask:
    """What ``body`` asks of the engine.  Raises ``UsageError`` that begins with a field's name."""
    served.check_model(body.model)
    thinking, effort = _thinking(encoder, body)
    _check_messages(body.messages)
    _check_format(body)
    told: dict[str, Any] = {"tools": body.tools, "thinking": thinking, "effort": effort}
    chosen: dict[str, Any] = {
        "tool_choice": body.tool_choice,
        "response_format": body.response_format,
    }
    prompt = encoder.encode(body.messages, **told, **chosen)
    tokenizer = served.engine.tokenizer
    return Ask(
        id=new_id("chatcmpl"),
        kind="chat",
        prompt=prompt,
        most=served.most(len(prompt), body.most, body.usual_tokens),
        samplings=samplings(body),
        reader=partial(Parser, tokenizer, thinking, body.stops),
        guide=guide(
            tokenizer,
            body.messages,
            tools=body.tools,
            thinking=thinking,
            parallel=body.parallel_tool_calls,
            **chosen,
        ),
        scored=(body.top_logprobs or 0) if body.logprobs else None,
        opening=encoder.opening(body.messages, **told),
    )


def _thinking(encoder: Encoder, body: ChatRequest) -> tuple[bool, str | None]:
    """Whether to think, and how much."""
    effort = body.reasoning_effort
    off = body.thinking is not None and body.thinking.type == "disabled"
    if effort not in (None, "none", *EFFORTS):
        raise UsageError(
            f"reasoning_effort is {effort!r:.40}.", f"It must be {', '.join(EFFORTS)} or none."
        )
    if effort == "none" or off:
        if effort not in (None, "none"):
            raise UsageError(
                "reasoning_effort says how much to think, and thinking not to.",
                "Leave one of them out.",
            )
        return False, None
    if effort is None:
        return True, encoder.usual_effort
    try:
        encoder.check_effort(effort)
    except UsageError as error:
        raise UsageError(f"reasoning_{error.problem}", error.remedy) from None
    return True, effort


def _check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Refuse what a message says and nobody would read."""
    for i, message in enumerate(messages):
        for name, value in message.items():
            if name not in _MESSAGE and value not in (None, "", [], {}, False):
                raise UsageError(
                    f"messages[{i}].{name:.60} is not supported here.", "Leave it out."
                )


def _check_format(body: ChatRequest) -> None:
    given = body.response_format or {}
    if given.get("type", "text") == "text":
        return
    named = given.get("json_schema")
    if isinstance(named, dict) and named.get("description"):
        raise UsageError(
            "response_format.json_schema.description is given, and K3's format has no place for "
            "it.",
            "Put it into the schema.",
        )


class ChatWriter:
    """The answer to one request, whole or in chunks."""

    def __init__(self, served: Served, ask: Ask, body: ChatRequest) -> None:
        self._served, self._ask, self._scored = served, ask, ask.scored is not None
        self._usage = body.stream_options is not None and body.stream_options.include_usage
        self._created = now()

    # ---- in chunks ----

    def begin(self) -> Iterator[Any]:
        for choice in range(len(self._ask.samplings)):
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def step(self, step: Step) -> Iterator[Any]:
        logprobs = [chat_logprob(self._served.engine, score) for score in step.scores]
        for event in step.events:
            if isinstance(event, Finish):
                if logprobs:
                    yield self._chunk(step.choice, {"content": ""}, logprobs)
                yield self._chunk(step.choice, {}, finish_reason=event.reason)
                return
            mine = logprobs if isinstance(event, Content) else []
            yield self._chunk(step.choice, self._delta(step.choice, event), mine)
            logprobs = [] if mine else logprobs
        if logprobs:  # of a token whose text waits for more
            yield self._chunk(step.choice, {"content": ""}, logprobs)

    def end(self, ended: Ended) -> Iterator[Any]:
        if self._usage:
            used = usage(len(self._ask.prompt), ended)
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": used}

    def _delta(self, choice: int, event: Event) -> dict[str, Any]:
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, Content):
            return {"content": event.text}
        call: dict[str, Any] = {}
        if isinstance(event, ToolCall):
            call = {
                "index": event.index,
                "id": self._call_id(choice, event.index),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        elif isinstance(event, Arguments):
            call = {"index": event.index, "function": {"arguments": event.text}}
        return {"tool_calls": [call]}

    def _chunk(
        self, choice: int, delta: Any, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        told = {"content": logprobs, "refusal": None} if logprobs else None
        one = {"index": choice, "delta": delta, "logprobs": told, "finish_reason": finish_reason}
        made = {**self._head("chat.completion.chunk"), "choices": [one]}
        return {**made, "usage": None} if self._usage else made

    # ---- whole ----

    def whole(self, steps: Sequence[Step], ended: Ended) -> dict[str, Any]:
        choices = [self._choice(i, steps) for i in range(len(self._ask.samplings))]
        used = usage(len(self._ask.prompt), ended)
        return {**self._head("chat.completion"), "choices": choices, "usage": used}

    def _choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        answer, scores = Answer(), []
        for step in steps:
            if step.choice == index:
                answer.add(step.events)
                scores += [chat_logprob(self._served.engine, score) for score in step.scores]
        message = answer.message(partial(self._call_id, index))
        if answer.calls and not answer.content:
            message["content"] = None
        logprobs = {"content": scores, "refusal": None} if self._scored else None
        return {
            "index": index,
            "message": {**message, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
        }

    def _call_id(self, choice: int, index: int) -> str:
        return f"call_{self._ask.id[-16:]}_{choice}_{index}"

    def _head(self, kind: str) -> dict[str, Any]:
        return self._served.head(kind, self._ask.id, self._created)
