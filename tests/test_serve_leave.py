"""Requests that nobody wants any more, while others share their sweep: they leave it at the next
layer, and the others have the answers that they have alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from k3offload.engine import Engine
from k3offload.loading import load
from k3offload.model import Run
from k3offload.serve_engine import EngineThread
from tests.helpers_serve import Server, chat_body
from tests.test_serve_engine import Heard, alone, at_layer, idle, running, wanted


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with load("nano", sessions=6, context=512, sweep=512) as engine:
        yield engine


class Rows:
    """Of each sweep the rows that its layers computed, of those that have experts."""

    def __init__(self, engine: Engine) -> None:
        self.sweeps: list[dict[int, int]] = []
        engine.hooks.add(on_sweep=self._on_sweep, on_route=self._on_route)

    def _on_sweep(self, runs: Sequence[Run]) -> None:
        self.sweeps.append({})

    def _on_route(self, layer: int, group: Any, *_: Any) -> None:
        rows = self.sweeps[-1]
        rows[layer] = rows.get(layer, 0) + group.end - group.begin


@pytest.fixture
def rows(shared: Engine) -> Iterator[Rows]:
    before = shared.hooks.on_sweep, shared.hooks.on_route
    yield Rows(shared)
    shared.hooks.on_sweep, shared.hooks.on_route = before


def together(thread: EngineThread, then: Callable[[list[Heard]], None]) -> list[Heard]:
    """Requests that begin in the same sweep; ``then`` is called before any of them does."""
    ready = threading.Event()
    thread.call(lambda: ready.wait(20))
    heard = [Heard(thread, ask) for ask in wanted(thread.engine)[:4]]
    then(heard)
    ready.set()
    return heard


def cancel_at(layer: int, thread: EngineThread, one: Heard) -> None:
    at_layer(thread, layer, lambda: thread.cancel(one.job))


@pytest.mark.parametrize("layer", range(1, 8))
def test_a_prompt_leaves_its_company_within_a_layer(shared: Engine, rows: Rows, layer: int) -> None:
    with running(shared) as thread:
        heard = together(thread, lambda heard: cancel_at(layer, thread, heard[2]))
        texts = [one.texts() for i, one in enumerate(heard) if i != 2]
        assert texts == [text for i, text in enumerate(alone()[:4]) if i != 2]
        idle(thread)
        assert heard[2].updates.empty() and thread.totals.cancelled == 1
    lengths = [len(one.job.ask.prompt) for one in heard]
    assert rows.sweeps[0] == {
        at: sum(lengths) - lengths[2] * (at >= layer) for at in shared.spec.moe_layers
    }


def test_who_decodes_leaves_within_a_layer(shared: Engine, rows: Rows) -> None:
    with running(shared) as thread:
        told: list[int] = []

        def later(event: str) -> None:
            """In the fourth sweep, at the third layer: both answers of the last one."""
            if event == "layer" and thread.progress.sweep == 4 and thread.progress.layer == 3:
                told.append(thread.progress.rows_decode)
                thread.cancel(heard[3].job)
            elif event == "layer" and thread.progress.sweep == 4:
                told.append(thread.progress.rows_decode)

        thread.watch(later)
        heard = together(thread, lambda heard: None)
        assert [one.texts() for one in heard[:3]] == alone()[:3]
        idle(thread)
    assert told == [4, 4, 4, 3, 3, 3, 3]
    assert [rows.sweeps[3][layer] for layer in range(1, 8)] == [4, 4, 3, 3, 3, 3, 3]


def test_a_client_that_hangs_up_leaves_the_sweep_of_another(shared: Engine, rows: Rows) -> None:
    """Over HTTP, while layers take long: the sweep ends without it, and the place is free."""
    with Server(shared) as server:
        body = chat_body("Who was the father of Ammiel, and who his mother?", max_tokens=4)
        want = server.client.post("/v1/chat/completions", json=body).json()
        server.idle()
        rows.sweeps.clear()
        server.thread.watch(lambda event: time.sleep(0.1 * (event == "layer")))
        ready = threading.Event()
        server.thread.call(lambda: ready.wait(20))
        answers: list[Any] = []
        stays = threading.Thread(
            target=lambda: answers.append(server.client.post("/v1/chat/completions", json=body))
        )
        stays.start()
        while not server.thread.waiting():
            time.sleep(0.01)
        long = chat_body("And so on. " * 20, stream=True)
        with server.client.stream("POST", "/v1/chat/completions", json=long) as response:
            lines = response.iter_lines()
            while not next(lines).startswith("data:"):
                pass
            ready.set()
            while server.thread.progress.layer != 2:  # after it has computed one
                time.sleep(0.01)
        stays.join(20)
        assert answers[0].json()["choices"] == want["choices"]
        first = rows.sweeps[0]
        assert first[1] > 100 > first[4] == first[7] > 0, first
        assert server.thread.totals.cancelled == 1
