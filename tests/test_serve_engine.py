"""The thread that owns a server's engine: company, cancels, failures, prefixes (R18 R58 R74)."""

from __future__ import annotations

import gc
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from k3offload.chat_parse import Content, Finish
from k3offload.config import KDA_CHUNK
from k3offload.engine import Engine
from k3offload.errors import K3Error, NumericError, ReadError, UsageError
from k3offload.loading import load
from k3offload.model import Run
from k3offload.sampling import Row, Sampling
from k3offload.serve_engine import EngineThread
from k3offload.serve_job import Ask, Busy, Ended, Failed, Job, ServerStopped, TextReader, Update
from k3offload.serve_settings import Settings
from k3offload.tiers.base import PageId
from tests.helpers_broken import Broken, pages_of
from tests.helpers_serve import Server

TEXTS = [f"Text {i}. " + "And it came to pass " * (3 * i) for i in range(5)]
COUNT = 10  #: new tokens of each


class Heard:
    """What is heard of one request."""

    def __init__(self, thread: EngineThread, ask: Ask) -> None:
        self.updates: queue.Queue[Update] = queue.Queue()
        self._asked = len(ask.samplings)
        self.job: Job = thread.submit(ask, self.updates.put)

    def all(self) -> tuple[list[str], Ended | K3Error]:
        """The texts of its answers, and how it ended."""
        texts = [""] * self._asked
        while True:
            update = self.updates.get(timeout=20)
            if isinstance(update, Failed):
                return texts, update.error
            if isinstance(update, Ended):
                return texts, update
            for event in update.events:
                if isinstance(event, Content):
                    texts[update.choice] += event.text
                elif isinstance(event, Finish):
                    texts[update.choice] += f" [{event.reason}]"

    def texts(self) -> list[str]:
        texts, ended = self.all()
        assert isinstance(ended, Ended), ended
        return texts


def asked(engine: Engine, text: str | Sequence[int], *seeds: int, **more: Any) -> Ask:
    """A request; without seeds of the likeliest tokens."""
    tokens = engine.encode(text) if isinstance(text, str) else text
    samplings = tuple(Sampling(temperature=1.5, seed=seed) for seed in seeds) or (Sampling(),)
    reader = partial(TextReader, engine.tokenizer)
    return replace(Ask("id", "completion", tokens, COUNT, samplings, reader), **more)


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with load("nano", sessions=4, context=512, sweep=128) as engine:
        yield engine


@pytest.fixture
def thread(shared: Engine) -> Iterator[EngineThread]:
    with running(shared) as thread:
        yield thread


@contextmanager
def running(engine: Engine, **settings: Any) -> Iterator[EngineThread]:
    """A thread over ``engine``; all that it was given is back when it has ended."""
    gc.collect()
    held = engine._ledger.used
    before = threading.active_count()
    thread = EngineThread(engine, Settings("x", **settings)).start()
    yield thread
    thread.close(20)
    assert threading.active_count() <= before
    gc.collect()
    assert engine._ledger.used == held and not thread.running()


@cache
def alone() -> list[list[str]]:
    """Each text in an engine's only place, nothing kept from one to the next."""
    with load("nano", sessions=1, context=512) as engine:
        with running(engine) as thread:
            found = [Heard(thread, asked(engine, text)).texts() for text in TEXTS]
            seeds = (Heard(thread, asked(engine, TEXTS[2], seed)).texts() for seed in (5, 6, 7))
            found.append([text for texts in seeds for text in texts])
    return found


def wanted(engine: Engine) -> list[Ask]:
    """Requests that ``alone`` has the answers of; the last has three."""
    return [*(asked(engine, text) for text in TEXTS), asked(engine, TEXTS[2], 5, 6, 7)]


# ---- company ----


@pytest.mark.parametrize("seed", range(3))
def test_answers_in_company_are_those_alone(thread: EngineThread, seed: int) -> None:
    order = list(enumerate(wanted(thread.engine)))
    random.Random(seed).shuffle(order)
    heard = {i: Heard(thread, ask) for i, ask in order}
    assert [heard[i].texts() for i in sorted(heard)] == alone()
    assert len(set(alone()[-1])) == 3


def test_several_answers_compute_their_prompt_once(thread: EngineThread) -> None:
    rows = []
    thread.engine.hooks.add(on_sweep=lambda runs: rows.append(sum(len(r.tokens) for r in runs)))
    ask = asked(thread.engine, TEXTS[2], 5, 6, 7)
    assert Heard(thread, ask).texts() == alone()[-1]
    prompt = len(ask.prompt)
    assert prompt <= sum(rows) <= prompt + 3 * COUNT


def test_more_answers_than_places_are_refused(thread: EngineThread) -> None:
    with pytest.raises(UsageError, match="n is 5"):
        thread.submit(asked(thread.engine, "a", 1, 2, 3, 4, 5), lambda update: None)


def test_a_full_queue_says_when_to_come_again() -> None:
    with load("nano", sessions=1, context=512) as engine:
        with running(engine, queue=1) as thread:
            gate = threading.Event()
            stop = thread.watch(partial(_wait, gate))
            first = Heard(thread, asked(engine, TEXTS[0]))
            while not any(view.phase == "prefill" for view in thread.running()):
                pass
            second = Heard(thread, asked(engine, TEXTS[1]))
            with pytest.raises(Busy) as refusal:
                Heard(thread, asked(engine, TEXTS[2]))
            assert refusal.value.seconds >= 1
            assert [view.phase for view in (*thread.running(), *thread.waiting())] == [
                "prefill", "waiting",
            ]  # fmt: skip
            stop()
            gate.set()
            assert [first.texts(), second.texts()] == alone()[:2]


def _wait(gate: threading.Event, event: str) -> None:
    gate.wait(20)


# ---- nobody wants it any more ----


def at_layer(thread: EngineThread, layer: int, then: Callable[[], None]) -> list[int]:
    """Call ``then`` before ``layer`` of the first sweep that reaches it; the layers that begin
    after that."""
    begun: list[int] = []

    def layers(event: str) -> None:
        if event != "layer":
            return
        if begun:
            begun.append(thread.progress.layer)
        elif thread.progress.layer == layer:
            begun.append(layer)
            then()

    thread.watch(layers)
    return begun


def test_a_cancelled_request_ends_within_a_layer(thread: EngineThread) -> None:
    layers = at_layer(thread, 3, lambda: thread.cancel(heard.job))
    heard = Heard(thread, asked(thread.engine, TEXTS[4]))
    idle(thread)
    assert layers == [3] and heard.updates.empty()
    assert thread.totals.cancelled == 1 and thread.totals.new_tokens == 0
    assert Heard(thread, asked(thread.engine, TEXTS[4])).texts() == alone()[4]


def idle(thread: EngineThread) -> None:
    """Until nothing is under way, by its own word."""
    while thread.call(lambda: len(thread.running()) + len(thread.waiting())).result(20):
        pass


@pytest.mark.parametrize("layer", [0, 3])
def test_who_stays_has_the_answer_that_it_has_alone(thread: EngineThread, layer: int) -> None:
    ready = threading.Event()
    thread.call(lambda: ready.wait(20))  # so that they begin together
    heard = [Heard(thread, ask) for ask in wanted(thread.engine)[1:4]]
    for_one = at_layer(thread, max(layer, 1), lambda: thread.cancel(heard[1].job))
    ready.set()
    assert [heard[0].texts(), heard[2].texts()] == [alone()[1], alone()[3]]
    assert for_one and heard[1].updates.empty()


def test_cancelled_while_it_decodes_or_waits(thread: EngineThread) -> None:
    heard = Heard(thread, asked(thread.engine, TEXTS[0], most=400))
    heard.updates.get(timeout=20)
    others = [Heard(thread, ask) for ask in wanted(thread.engine)]
    thread.cancel(others[4].job)
    thread.cancel(heard.job)
    assert [other.texts() for i, other in enumerate(others) if i != 4] == [
        text for i, text in enumerate(alone()) if i != 4
    ]
    assert others[4].updates.empty()


# ---- what fails ----


class Nowhere:
    """Lets one token come, then none."""

    finished = False

    def __init__(self) -> None:
        self._left = 1

    def mask(self, logits: Row) -> Row:
        self._left -= 1
        return logits if self._left >= 0 else np.full_like(logits, -np.inf)

    def accept(self, token: int) -> None:
        pass


def test_who_fails_fails_alone(thread: EngineThread) -> None:
    asks = wanted(thread.engine)
    heard = [Heard(thread, replace(ask, guide=Nowhere) if i in (1, 5) else ask)
             for i, ask in enumerate(asks)]  # fmt: skip
    for i, one in enumerate(heard):
        texts, ended = one.all()
        if i in (1, 5):
            assert isinstance(ended, NumericError) and ended.__traceback__ is None
        else:
            assert texts == alone()[i]
    assert thread.totals.failed == 2


def test_an_expert_that_is_lost_fails_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with load("nano", sessions=4, context=512, cache="1M") as engine:
        needs = [pages_of(engine, text, COUNT) for text in TEXTS]
        pages = [page for page in sorted(set.union(*needs)) if page not in needs[0]]
        page: PageId = pages[len(pages) // 2]
        broken = Broken(monkeypatch)
        broken.lose(engine.checkpoint, page)
        with running(engine) as thread:
            heard = [Heard(thread, ask) for ask in wanted(engine)[:5]]
            for i, one in enumerate(heard):
                texts, ended = one.all()
                if page in needs[i]:
                    assert isinstance(ended, ReadError) and "offset" in str(ended)
                else:
                    assert texts == alone()[i]
            broken.gone = 0  # the whole drive: whoever asks fails, and the thread goes on
            for _ in range(2):
                _, ended = Heard(thread, asked(engine, TEXTS[1])).all()
                assert isinstance(ended, ReadError)
            broken.mend()
            assert Heard(thread, asked(engine, TEXTS[1])).texts() == alone()[1]


def test_an_error_that_nobody_knows_ends_it_and_everybody_hears(
    shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(shared) as server, monkeypatch.context() as patched:
        thread, died = server.thread, threading.Event()
        thread.on_death = died.set
        assert server.client.get("/health").json()["status"] == "ok"

        def breaks(sessions: Sequence[Any]) -> None:
            raise ZeroDivisionError("made to fail")

        gate = threading.Event()
        thread.call(lambda: gate.wait(20))
        heard = [Heard(thread, ask) for ask in wanted(shared)]
        patched.setattr(shared, "sweep", breaks)
        gate.set()
        for one in heard:
            assert isinstance(one.all()[1], ServerStopped)
        assert died.wait(20) and isinstance(thread.failure, ZeroDivisionError)
        with pytest.raises(ServerStopped, match="made to fail"):
            thread.call(lambda: None).result(20)
        answer = server.client.get("/health")
        assert answer.status_code == 503 and "made to fail" in answer.text
        assert server.chat().status_code == 503
    # the engine is as it was: another thread may have it
    with running(shared) as again:
        assert Heard(again, asked(shared, TEXTS[1])).texts() == alone()[1]


def test_an_engine_that_does_not_answer_is_not_healthy(shared: Engine) -> None:
    with Server(shared, health=0.2) as server:
        gate = threading.Event()
        server.thread.call(lambda: gate.wait(20))
        assert server.client.get("/health").status_code == 503
        gate.set()
        assert server.client.get("/health").status_code == 200


def test_who_watches_and_fails_only_watches_no_more(thread: EngineThread) -> None:
    seen: list[str] = []

    def breaks(event: str) -> None:
        seen.append(event)
        raise ZeroDivisionError("made to fail")

    thread.watch(breaks)
    assert Heard(thread, asked(thread.engine, TEXTS[1])).texts() == alone()[1]
    assert len(seen) == 1 and thread.alive


def test_a_call_that_fails_is_the_callers_alone(thread: EngineThread) -> None:
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(20)
    assert thread.call(lambda: 5).result(20) == 5 and thread.alive


def test_closing_ends_what_is_under_way(shared: Engine) -> None:
    thread = EngineThread(shared, Settings("x")).start()
    layers = at_layer(thread, 2, lambda: thread.close())
    heard = [Heard(thread, ask) for ask in wanted(shared)]
    for one in heard:
        assert isinstance(one.all()[1], ServerStopped)
    thread.close(20)
    assert layers == [2] and not thread.alive
    with pytest.raises(ServerStopped):
        thread.check_room()


# ---- beginnings that prompts have in common ----


def rows_of(engine: Engine) -> list[int]:
    """Prompt rows of each sweep from now on."""
    rows: list[int] = []

    def on_sweep(runs: Sequence[Run]) -> None:
        rows.append(sum(len(run.tokens) for run in runs if not run.decode))

    engine.hooks.add(on_sweep=on_sweep)
    return rows


def test_prompts_that_grow_reuse_what_ends_at_a_chunk() -> None:
    text = list(range(32, 32 + 3 * KDA_CHUNK))
    lengths = [
        base + more
        for base in (KDA_CHUNK - 1, KDA_CHUNK, KDA_CHUNK + 1, 2 * KDA_CHUNK)
        for more in (0, 1, 2)
    ]
    with load("nano", sessions=1, context=512) as fresh, running(fresh) as thread:
        cold = {
            length: Heard(thread, asked(fresh, text[:length], most=3)).texts() for length in lengths
        }
    with load("nano", sessions=1, context=512, prefix_cache="4M") as engine:
        assert engine.prefixes is not None
        for base, one, two in zip(lengths[::3], lengths[1::3], lengths[2::3], strict=True):
            engine.prefixes.clear()
            with running(engine) as thread:
                for before, length in pairwise((0, base, one, two)):
                    heard = Heard(thread, asked(engine, text[:length], most=3))
                    texts, ended = heard.all()
                    assert texts == cold[length] and isinstance(ended, Ended)
                    assert ended.reused == min(before, length - 1) // KDA_CHUNK * KDA_CHUNK


def test_a_declared_beginning_is_computed_once_for_different_prompts() -> None:
    begin = "You are a scribe. Answer in the words of the book, and never at length. " * 6
    with load("nano", sessions=2, context=512, prefix_cache="4M") as engine:
        opening = len(engine.encode(begin))
        whole = opening // KDA_CHUNK * KDA_CHUNK
        assert whole > KDA_CHUNK
        rows = rows_of(engine)
        with running(engine) as thread:
            for i, question in enumerate(("Who built the ark?", "Where is Eden? And when?")):
                ask = asked(engine, begin + question, opening=opening)
                _, ended = Heard(thread, ask).all()
                assert isinstance(ended, Ended)
                assert ended.reused == (whole if i else 0)
        assert sum(rows) < opening + KDA_CHUNK + 40
