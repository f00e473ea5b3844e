"""Whatever fits the server's own description of itself, or nearly, gets an answer and no 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from k3offload.loading import load
from tests.helpers_serve import Server, chatting

CHECKS = (
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with load(chatting(), sessions=4, context=64) as engine, Server(engine) as server:
        yield server


def test_no_request_breaks_it(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 6
    for operation in operations:
        for mode in GenerationMode:

            @given(operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=12 if operation.method == "post" else 3,
                suppress_health_check=list(HealthCheck),
            )
            def check(case: Any) -> None:
                case.call_and_validate(checks=CHECKS)

            with suppress(Unsatisfiable):  # nothing can be wrong with a path that takes nothing
                check()
    assert server.thread.alive and server.thread.totals.finished > 0
    assert server.thread.totals.failed == 0


def test_what_is_described_is_what_is_there(server: Server) -> None:
    document = server.client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/health",
        "/metrics",
    }  # fmt: skip
    assert "422" not in str(document)
