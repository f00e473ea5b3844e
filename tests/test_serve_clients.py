"""Programs that people use, against a server: the clients openai and litellm, an agent's loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from k3offload.chat import Encoder
from k3offload.config import KDA_CHUNK
from k3offload.engine import Engine
from k3offload.loading import load
from tests.helpers_serve import FIRST, ScriptedThread, Server, chatting
from tests.test_chat_parse import script

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of a town",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}, "day": {"type": "number"}},
                "required": ["town"],
            },
        },
    }
    for name in ("weather", "height")
]
CALLS = script(
    'Both.§think»«response»§response»«tools»«call tool="weather" index="1"»«argument key="town" '
    'type="string"»Ur "of" <Chaldees>§argument»«argument key="day" type="number"»2§argument»§call»'
    '«call tool="height" index="2"»«argument key="town" type="string"»Ur§argument»§call»§tools»'
    "§message»■"
)
SAYS = script("So.§think»«response»It is 道 warm.§response»§message»■")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(chatting(), sessions=2, context=2048, prefix_cache="8M") as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, scripted=True, key="secret", max_new_tokens=400) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_the_openai_client_reads_answers_and_streams(server: Server, client: openai.OpenAI) -> None:
    server.script(SAYS, 2)
    messages: Any = [{"role": "user", "content": FIRST}]
    answer = client.chat.completions.create(model="nano", messages=messages, logprobs=True)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("It is 道 warm.", "stop")
    assert message.reasoning_content == "So."  # type: ignore[attr-defined]
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content
    text, usage = "", None
    stream = client.chat.completions.create(
        model="nano", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert text == message.content and usage is not None and answer.usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens
    server.script(SAYS)
    with client.chat.completions.stream(model="nano", messages=messages) as events:
        assert events.get_final_completion().choices[0].message.content == message.content
    assert [model.id for model in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == "nano"


def test_the_openai_client_reads_completions_formats_and_errors(
    engine: Engine, client: openai.OpenAI
) -> None:
    with Server(engine) as real:
        plain = openai.OpenAI(base_url=f"{real.url}/v1", api_key="x", max_retries=0)
        done = plain.completions.create(
            model="nano", prompt="In the beginning", max_tokens=5, temperature=0
        )
        parts = plain.completions.create(
            model="nano", prompt="In the beginning", max_tokens=5, temperature=0, stream=True
        )
        assert "".join(part.choices[0].text for part in parts) == done.choices[0].text != ""
        schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {
            "type": "integer", "minimum": 1, "maximum": 99}}, "required": ["a"],
            "additionalProperties": False}, "strict": True}  # fmt: skip
        formed = plain.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": "A number"}], seed=4,
            response_format={"type": "json_schema", "json_schema": schema}, max_tokens=200,
        )  # type: ignore[call-overload]  # fmt: skip
        assert 1 <= json.loads(formed.choices[0].message.content)["a"] <= 99
        with pytest.raises(openai.BadRequestError, match="frequency_penalty") as wrong:
            plain.completions.create(model="nano", prompt="a", frequency_penalty=1)
        assert wrong.value.param == "frequency_penalty"
        with pytest.raises(openai.NotFoundError):
            plain.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.BadRequestError, match="context"):
            plain.completions.create(model="nano", prompt="a " * 3000)
        plain.close()
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_an_agent_calls_tools_until_it_has_its_answer(
    server: Server, client: openai.OpenAI
) -> None:
    """Streamed and not; what the client makes of an answer goes back as it is."""
    assert isinstance(server.thread, ScriptedThread)
    system = "You answer questions about towns, by the tools that you are given. " * 2
    for streamed in (False, True):
        messages: list[Any] = [
            {"role": "system", "content": system},
            {"role": "user", "content": "How warm is it?"},
        ]
        for answer in (CALLS, CALLS, SAYS):
            server.script(answer)
            message = _said(client, messages, streamed)
            messages.append(message)
            for call in message.get("tool_calls") or ():
                given = json.loads(call["function"]["arguments"])
                result = f"{call['function']['name']} of {given['town']}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if message.get("tool_calls"):  # results may come in any order
                messages[-2:] = reversed(messages[-2:])
        assert messages[-1]["content"] == "It is 道 warm."
        first = messages[2]["tool_calls"]
        assert [call["function"]["name"] for call in first] == ["weather", "height"]
        assert json.loads(first[0]["function"]["arguments"]) == {
            "town": 'Ur "of" <Chaldees>', "day": 2,
        }  # fmt: skip
        ids = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
        assert len(set(ids)) == 4
        _goes_on(server, messages)
        server.thread.asked.clear()


def _said(client: openai.OpenAI, messages: list[Any], streamed: bool) -> dict[str, Any]:
    """The next message of the assistant, as the client gives it back."""
    if not streamed:
        answer = client.chat.completions.create(model="nano", messages=messages, tools=TOOLS)
        if len(messages) > 2:  # tools, system message and what was said are known
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached is not None and cached >= KDA_CHUNK
        return answer.choices[0].message.model_dump(exclude_none=True)
    with client.chat.completions.stream(model="nano", messages=messages, tools=TOOLS) as events:
        message = events.get_final_completion().choices[0].message
    plain = message.model_dump(exclude_none=True)
    for call in plain.get("tool_calls") or ():
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    plain.pop("parsed", None)
    return plain


def _goes_on(server: Server, messages: list[Any]) -> None:
    """Each prompt is the whole conversation, its results in the order of their calls."""
    assert isinstance(server.thread, ScriptedThread)
    encoder = Encoder.of(server.thread.engine.tokenizer, chatting())
    prompts = [list(ask.prompt) for ask in server.thread.asked[-3:]]
    told: list[Any] = [dict(m) for m in messages]
    told[3:5], told[6:8] = reversed(told[3:5]), reversed(told[6:8])
    for prompt, count in zip(prompts, (2, 5, 8), strict=True):
        assert prompt == encoder.encode(told[:count], tools=TOOLS, effort=encoder.usual_effort)


@pytest.mark.filterwarnings("ignore:Item:UserWarning")  # of the package itself
def test_litellm_reads_answers_streams_calls_and_errors(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what the package would fetch when it is loaded, it then takes from itself
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    there: dict[str, Any] = {
        "model": "openai/nano", "api_base": f"{server.url}/v1", "api_key": "secret",
        "max_retries": 0,
    }  # fmt: skip
    messages = [{"role": "user", "content": FIRST}]
    server.script(SAYS, 2)
    answer = litellm.completion(messages=messages, **there)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("It is 道 warm.", "So.")
    parts = litellm.completion(messages=messages, stream=True, **there)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == message.content
    server.script(CALLS)
    answer = litellm.completion(messages=messages, tools=TOOLS, **there)
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in calls] == ["weather", "height"]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "x"} for call in reversed(calls)
    ]
    server.script(SAYS)
    again = [*messages, answer.choices[0].message, *results]
    answer = litellm.completion(messages=again, tools=TOOLS, **there)
    assert answer.choices[0].message.content == "It is 道 warm."
    with pytest.raises(litellm.exceptions.BadRequestError, match="seed"):
        litellm.completion(messages=messages, seed=-1, **there)
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(messages=messages, **(there | {"model": "openai/other"}))


def test_an_error_on_the_way_reaches_the_client(server: Server, client: openai.OpenAI) -> None:
    server.script([])  # nothing may come: the first token fails
    messages: Any = [{"role": "user", "content": FIRST}]
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="nano", messages=messages)
    server.script([])
    stream = client.chat.completions.create(model="nano", messages=messages, stream=True)
    with pytest.raises(openai.APIError):
        list(stream)
