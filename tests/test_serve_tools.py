"""Calls that a server makes sure of, by the embedded model, which makes none by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from k3offload.engine import Engine
from k3offload.loading import load
from tests.helpers_chat import arguments, tool
from tests.helpers_serve import Server, chatting, put_together, taken_apart

WEATHER = arguments(
    town={"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"}, day={"type": "integer", "minimum": 1,
    "maximum": 7}, unit={"enum": ["C", "F", None]},
)  # fmt: skip
TOOLS = [
    tool("weather", WEATHER),
    tool("height", arguments(town={"type": "string", "maxLength": 9}, exact={"type": "boolean"})),
]
SCHEMAS = {"weather": WEATHER, "height": TOOLS[1]["function"]["parameters"]}
NAMED = {"type": "function", "function": {"name": "height"}}
OFF = {"type": "disabled"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(chatting(), sessions=3, context=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, max_new_tokens=400) as server:
        yield server


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "seed": 3, "temperature": 1.5, "n": 3},
        {"tool_choice": "required", "thinking": OFF, "parallel_tool_calls": False, "stop": ["a"]},
        {"tool_choice": NAMED},
        {"tool_choice": NAMED, "thinking": OFF, "seed": 1, "temperature": 1.0, "logprobs": True},
    ],
    ids=str,
)
def test_what_is_asked_for_is_called(server: Server, more: dict[str, Any]) -> None:
    free: dict[str, Any] = {"tools": TOOLS, "max_tokens": 300}
    whole = server.chat(**free, **more)
    assert whole.status_code == 200, whole.text
    stream = server.stream(**free, **more)
    for choice in range(more.get("n", 1)):
        made = taken_apart(whole.json(), choice)
        assert put_together(stream, choice) == made
        assert made["finish_reason"] == "tool_calls" and made["calls"] and not made["content"]
        for name, text in made["calls"]:
            jsonschema.validate(json.loads(text), SCHEMAS[name])
        names = [name for name, _ in made["calls"]]
        assert more["tool_choice"] != NAMED or names == ["height"]
        assert more.get("parallel_tool_calls", True) or len(names) == 1
    usage = whole.json()["usage"]
    assert 0 < usage["completion_tokens"] <= 300 * more.get("n", 1)


def test_without_being_asked_it_calls_nothing(server: Server) -> None:
    """So that what is called above is called because it is asked for."""
    for choice in ("auto", "none"):  # the first with a guide as well, since the tools are strict
        for off in (None, OFF):
            more: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "thinking": off}
            made = taken_apart(server.chat(**more).json())
            assert made["content"] and not made["calls"]


class Trip(BaseModel):
    """Plan a trip."""

    town: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)
    by: Literal["foot", "ship"] | None
    stops: list[Literal["Ur", "Tyre"]] = Field(max_length=2)


def test_clients_get_the_arguments_that_their_models_describe(server: Server) -> None:
    there = {"base_url": f"{server.url}/v1", "api_key": "x", "max_retries": 0}
    asked: dict[str, Any] = {
        "model": "nano", "messages": [{"role": "user", "content": "Where to?"}], "seed": 5,
        "tools": [openai.pydantic_function_tool(Trip)], "tool_choice": "required",
        "extra_body": {"thinking": OFF}, "parallel_tool_calls": False,
    }  # fmt: skip
    with openai.OpenAI(**there) as client:  # type: ignore[arg-type]
        parsed = client.chat.completions.parse(**asked).choices[0].message.tool_calls
        assert parsed is not None
        assert isinstance(trip := parsed[0].function.parsed_arguments, Trip) and 1 <= trip.days <= 9
        with client.chat.completions.stream(**asked) as events:
            again = events.get_final_completion().choices[0].message.tool_calls
        assert again is not None and again[0].function.parsed_arguments == trip
        asked["tool_choice"] = {"type": "function", "function": {"name": "Journey"}}
        with pytest.raises(openai.BadRequestError, match="Journey") as wrong:
            client.chat.completions.create(**asked)
        assert wrong.value.param == "tool_choice"


@pytest.mark.filterwarnings("ignore:Item:UserWarning")  # of the package itself
def test_litellm_passes_a_choice_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    answer = litellm.completion(
        model="openai/nano", api_base=f"{server.url}/v1", api_key="x", max_retries=0,
        messages=[{"role": "user", "content": "Where to?"}], tools=TOOLS, tool_choice=NAMED, seed=2,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
