"""Prompts with the same beginning: what is computed, and that it is bit for bit a cold run.

R12 (every turn reads the whole conversation again), R14 (requests one after another), R74 (edges).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from k3offload.engine import Engine
from k3offload.errors import UsageError
from k3offload.generate import Done, Request, generate
from k3offload.loading import load
from k3offload.prefixes import common
from k3offload.sampling import Sampling
from k3offload.session import Session
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import (
    BRIEF,
    Logits,
    checkpoint,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
    starve,
)
from tests.helpers_saved import decode

LONG = some_tokens(1200, 1)
REPLY = some_tokens(20, 2)


def loaded(**options: object) -> Engine:
    """An engine that keeps prefixes."""
    how: dict[str, object] = {"dtype": "float32", "context": 1300, "sessions": 4}
    return load(checkpoint(**BRIEF), **{**how, "prefix_cache": "40M", **options})  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with loaded() as made:
        yield made


@pytest.fixture(scope="module")
def cold() -> Iterator[Engine]:
    """One that keeps none."""
    with load(checkpoint(**BRIEF), dtype="float32", context=1300, sessions=4) as made:
        assert made.prefixes is None
        yield made


def ask(engine: Engine, tokens: list[int]) -> tuple[Logits, int]:
    """The last logits of a session of its own, and how many tokens it did not compute."""
    with session_with(engine, tokens) as session:
        return session.logits(), session.reused


@pytest.mark.parametrize("length", [63, 64, 65, 255, 256, 257, 512])
def test_edges_of_a_prompt_and_its_extensions_r74(
    engine: Engine, cold: Engine, length: int
) -> None:
    first = LONG[:length]
    assert ask(engine, first)[1] == 0
    for more in (1, 2):
        tokens = first + some_tokens(more, more)
        row, reused = ask(engine, tokens)
        assert reused == length // 64 * 64
        assert same_bits(row, logits_of(cold, tokens, keep=1)[0])
    row, reused = ask(engine, first)  # the last token is always computed
    assert reused == (length - 1) // 64 * 64
    assert same_bits(row, logits_of(cold, first, keep=1)[0])


def test_turns_of_a_conversation_r12(cold: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply is prefilled with the next turn, not decoded tokens trusted; experts are read for
    what is new."""
    starve(monkeypatch)
    with loaded(prefix_cache="4M") as engine:
        tokens, reads = LONG[:300], []
        for turn, wanted in enumerate((0, 256, 320, 384)):
            before = engine.counts()["experts"]
            with session_with(engine, tokens) as session:
                row = session.logits()
                now = engine.counts()["experts"]
                reads.append(now.requests - before.requests)
                assert session.reused == wanted
                assert same_bits(row, logits_of(cold, tokens, keep=1)[0])
                decode(session, REPLY)
            tokens = tokens + REPLY + some_tokens(44, turn)
        assert max(reads[1:]) < reads[0]


def test_one_request_after_another_r14(engine: Engine, cold: Engine) -> None:
    """First ever; an extension that outgrows its block; something else; the first, but shorter."""
    for tokens, wanted in (
        (LONG[:200], 0),
        (LONG[:270], 192),
        (some_tokens(150, 9), 0),
        (LONG[:100], 0),
        (LONG[:270], 256),
        (LONG[:100], 64),
    ):
        row, reused = ask(engine, tokens)
        assert reused == wanted
        assert same_bits(row, logits_of(cold, tokens, keep=1)[0])


def test_documents_behind_one_instruction(engine: Engine, cold: Engine) -> None:
    """The second shows where they part, the third need not compute the instruction."""
    reused = []
    for number in range(4):
        tokens = LONG[:150] + some_tokens(200 + number, 10 + number)
        row, count = ask(engine, tokens)
        reused.append(count)
        assert same_bits(row, logits_of(cold, tokens, keep=1)[0])
    assert reused == [0, 0, 128, 128]


@pytest.mark.parametrize("sweep", [64, 192, 512])
def test_sweeps_of_any_size_keep_the_same(cold: Engine, sweep: int) -> None:
    with loaded(sweep=sweep) as engine:
        for tokens, wanted in ((LONG[:700], 0), (LONG[:900], 640), (LONG[:1200], 896)):
            row, reused = ask(engine, tokens)
            assert reused == wanted
            assert same_bits(row, logits_of(cold, tokens, keep=1)[0])


def test_companions_in_one_sweep(engine: Engine, cold: Engine) -> None:
    """Two with one beginning at once, beside one that decodes and one that goes on from there."""
    with session_with(engine, LONG[:90]) as talking:
        talking.logits()
        talking.append_sampled(3)
        sessions = [session_with(engine, t) for t in (LONG[:200], LONG[:201], LONG[:150])]
        engine.advance([talking, *sessions])
        assert [s.reused for s in sessions] == [64, 64, 64]
        for session in sessions:
            wanted = logits_of(cold, list(session.tokens), keep=1)[0]
            assert same_bits(session.logits(), wanted)
            session.close()
        assert ask(engine, LONG[:220])[1] == 192


def test_decoded_tokens_are_not_kept(engine: Engine, cold: Engine) -> None:
    with session_with(engine, LONG[:70]) as session:
        decode(session, LONG[70:140])
        session.append(LONG[140:400])
        session.logits()
    row, reused = ask(engine, LONG[:400])
    assert reused == 64
    assert same_bits(row, logits_of(cold, LONG[:400], keep=1)[0])


def test_a_prompt_cut_inside_a_chunk_is_not_kept(engine: Engine, cold: Engine) -> None:
    with session_with(engine, LONG[:70]) as session:
        session.logits()
        session.append(LONG[70:400])
        session.logits()
    row, reused = ask(engine, LONG[:400])
    assert reused == 64
    assert same_bits(row, logits_of(cold, LONG[:400], keep=1)[0])


def test_a_running_session_catches_up(engine: Engine, cold: Engine) -> None:
    """What another one kept meanwhile is used as long as everything is prefilled."""
    with session_with(engine, LONG[:64]) as session:
        session.logits()
        ask(engine, LONG[:640])
        session.append(LONG[64:700])
        row = session.logits()
        assert session.reused == 640
        assert same_bits(row, logits_of(cold, LONG[:700], keep=1)[0])


def test_what_is_kept_is_not_touched_by_who_goes_on(engine: Engine, cold: Engine) -> None:
    ask(engine, LONG[:300])
    for seed in range(3):
        with session_with(engine, LONG[:256] + some_tokens(300, seed)) as session:
            session.logits()
            decode(session, REPLY)
    row, reused = ask(engine, LONG[:300])
    assert reused == 256
    assert same_bits(row, logits_of(cold, LONG[:300], keep=1)[0])


def snapshot_bytes(engine: Engine, blocks: int) -> int:
    spec = engine.spec
    return spec.kda_state_bytes(4) + spec.vocab * 4 + blocks * 256 * spec.latent_bytes_per_token(4)


def test_the_least_recently_used_makes_room(cold: Engine) -> None:
    """Room for two of one block; the plan names it, and it is never exceeded."""
    size = snapshot_bytes(cold, 1) * 2 + 1000
    with loaded(prefix_cache=size) as engine:
        assert engine.prefixes is not None
        assert dict(engine.plan.purposes)["shared prefixes"] == size
        prompts = [some_tokens(100, 20 + i) for i in range(3)]
        for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
            ask(engine, prompt)
            assert engine.prefixes.ledger.used <= size
        assert [ask(engine, p)[1] for p in (prompts[0], prompts[2])] == [64, 64]
        assert ask(engine, prompts[1])[1] == 0
        row, reused = ask(engine, LONG)  # of more blocks than there is room for
        assert reused == 0 and same_bits(row, logits_of(cold, LONG, keep=1)[0])
        assert ask(engine, prompts[1])[1] == 64  # and nothing had to go for it


def test_shared_blocks_count_once(engine: Engine) -> None:
    assert engine.prefixes is not None
    used = []
    for length in (600, 700, 800):
        ask(engine, LONG[:length])
        gc.collect()
        used.append(engine.prefixes.ledger.used)
    open_block = 256 * engine.spec.latent_bytes_per_token(4)
    # 576, 640 and 768 tokens: two whole blocks are everybody's, then an open one each or a third
    assert used[0] == snapshot_bytes(engine, 3)
    assert used[1] - used[0] == snapshot_bytes(engine, 0) + open_block
    assert used[2] - used[1] == snapshot_bytes(engine, 0) + open_block
    engine.prefixes.clear()
    assert engine.prefixes.ledger.used == 0


def test_sessions_have_their_room_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is not charged to sessions, nor the other way round."""
    starve(monkeypatch)
    with loaded(sessions=1, prefix_cache="8M") as engine:
        for length in (300, 400, 1000):
            assert np.isfinite(ask(engine, LONG[:length])[0]).all()
        gc.collect()
        assert engine._ledger.used == 0
        assert engine.prefixes is not None and engine.prefixes.ledger.used > 0


def test_on_a_device(cold: Engine) -> None:
    """Layers on both sides; what is kept lies in RAM."""
    device = FakeDevice(400 << 20, seed=2)
    with loaded(device=device, vram="60M", trunk_on="split:4") as engine:
        for tokens, wanted in ((LONG[:300], 0), (LONG[:400], 256), (LONG[:330], 256)):
            row, reused = ask(engine, tokens)
            assert reused == wanted
            assert same_bits(row, logits_of(cold, tokens, keep=1)[0])


class Stop(Exception):
    pass


def test_an_interrupted_sweep_keeps_nothing(engine: Engine, cold: Engine) -> None:
    assert engine.prefixes is not None

    def stop(layer: int) -> None:
        if layer == 3:
            raise Stop

    engine.hooks.before_layer = stop
    with session_with(engine, LONG[:300]) as session:
        with pytest.raises(Stop):
            session.logits()
    engine.hooks.before_layer = lambda layer: None
    assert len(engine.prefixes) == 0
    gc.collect()
    assert engine.prefixes.ledger.used == 0
    row, reused = ask(engine, LONG[:300])
    assert reused == 0 and same_bits(row, logits_of(cold, LONG[:300], keep=1)[0])


def test_requests_report_it(engine: Engine) -> None:
    def done(session: Session) -> Done:
        free = Sampling(ignore_end=True)
        (last,) = [e for e in generate(engine, [Request(session, 2, free)]) if isinstance(e, Done)]
        return last

    with session_with(engine, LONG[:300]) as session:
        assert done(session).reused == 0
        session.append([1, 2])
        assert done(session).reused == 301  # its last token waited
    with session_with(engine, LONG[:310]) as session:
        assert done(session).reused == 256


def test_too_little_is_refused() -> None:
    with pytest.raises(UsageError, match=r"prefix cache of 1,000 bytes.*Give it \d"):
        loaded(prefix_cache=1000)


def test_common() -> None:
    one, other = (np.array(t, "<i4").tobytes() for t in ([1, 2, 3], [1, 2, 4, 5]))
    assert (common(one, other), common(one, one), common(one, b""), common(b"", b"")) == (
        2,
        3,
        0,
        0,
    )
