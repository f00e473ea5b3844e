"""Numbers that fail (R43): the request that met them ends with an error that names the layer, its
companions and everything after it are untouched; a token is never made of NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from k3offload.engine import Engine
from k3offload.errors import CheckpointError, NumericError, SessionError
from k3offload.generate import Done, Event, Request, Token, generate
from k3offload.loading import load
from k3offload.run_logits import write_logits
from k3offload.sampling import Sampling
from k3offload.session import Session
from tests.helpers_checkpoint import Raw, change_shard, shards, tiny
from tests.helpers_engine import (
    BRIEF,
    Logits,
    checkpoint,
    expected,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
    starve,
)

PROMPT, OTHER = some_tokens(70, 1), some_tokens(20, 2)
BAD = [float("nan"), float("inf"), float("-inf")]
NEVER_ENDING = Sampling(ignore_end=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(checkpoint(**BRIEF), dtype="float32", sessions=6) as made:
        yield made


@pytest.fixture(scope="module")
def clean(engine: Engine) -> Logits:
    row: Logits = logits_of(engine, OTHER, keep=1)[0]
    return row


def run(engine: Engine, *sessions: Session) -> list[list[Event]]:
    """Events of each request, three tokens each."""
    events = list(generate(engine, [Request(s, 3, NEVER_ENDING) for s in sessions]))
    return [[e for e in events if e.request == i] for i in range(len(sessions))]


def ended(events: list[Event], names: str) -> NumericError:
    """The error that ended a request before any token came out."""
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "error"
    assert not any(isinstance(e, Token) for e in events)
    assert done.tokens == 0 and done.text == ""
    assert isinstance(done.error, NumericError)
    assert names in str(done.error)
    return done.error


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("layer", [0, 3])
def test_a_bad_weight_names_its_layer(
    engine: Engine, clean: Logits, layer: int, value: float
) -> None:
    with engine.weights.layer(layer) as w:
        weight = w.vector("self_attn.o_proj.weight")
    kept = weight[7].clone()
    weight[7] = value
    with session_with(engine, PROMPT) as session:
        ended(run(engine, session)[0], f"Layer {layer} ")
        with pytest.raises(SessionError, match=rf"Layer {layer} .*reset"):
            session.logits()
        weight[7] = kept
        session.reset()
        session.append(OTHER)
        assert same_bits(session.logits(), clean)


@pytest.mark.parametrize("value", BAD)
def test_a_bad_state_ends_its_own_request_only(engine: Engine, clean: Logits, value: float) -> None:
    """In KDA's matrix and in a latent; the companion shares the sweep and even the tile."""
    for where in ("kda", "latent"):
        bad = session_with(engine, PROMPT)
        bad.logits()
        if where == "kda":
            bad.state.kda[1][0, 3, 4] = value
        else:
            bad.state.latents[3].rows(0)[2, 5] = value
        bad.append([1, 2, 3])
        with session_with(engine, OTHER) as good:
            first, second = run(engine, bad, good)
            ended(first, "Layer 1 " if where == "kda" else "Layer 3 ")
            assert [type(e) for e in second].count(Token) == 3
            good.reset()
            good.append(OTHER)
            assert same_bits(good.logits(), clean)
        with pytest.raises(SessionError):
            bad.append([1])
        bad.close()


def test_a_bad_state_in_decode(engine: Engine, clean: Logits) -> None:
    bad, good = session_with(engine, OTHER), session_with(engine, OTHER)
    requests = [Request(bad, 5, NEVER_ENDING), Request(good, 5, NEVER_ENDING)]
    tokens: list[list[int]] = [[], []]
    reasons = ["", ""]
    for event in generate(engine, requests):
        if isinstance(event, Token):
            tokens[event.request].append(event.token)
            if event.request == 0 and event.token and len(tokens[0]) == 2:
                bad.state.kda[4 if 4 in bad.state.kda else 2][1] = float("nan")
        elif isinstance(event, Done):
            reasons[event.request] = event.finish_reason
    assert reasons == ["error", "length"]
    assert len(tokens[0]) == 2 and tokens[1][:2] == tokens[0] and len(tokens[1]) == 5
    good.reset()
    good.append(OTHER)
    assert same_bits(good.logits(), clean)
    bad.close()
    good.close()


@pytest.mark.parametrize("value", BAD[:2])
def test_bad_logits_name_the_step(engine: Engine, value: float) -> None:
    """A head row that is not finite: every layer is sound, the sampler refuses."""
    held = engine.weights._head_held
    assert held is not None
    head = held.tensor("lm_head.weight")
    kept = head[9].clone()
    head[9] = value
    with session_with(engine, OTHER) as session:
        ended(run(engine, session)[0], "Step 0")
    head[9] = kept


def _spoil(folder: Path, kind: str, data: int) -> None:
    """Set one scale byte of every expert of layer 2, and give its group live codes."""

    def change(tensors: dict[str, Raw]) -> None:
        for name, raw in tensors.items():
            if ".experts." in name and name.endswith(kind):
                first = bytes([data]) * (raw.shape[1] if "scale" in kind else 16)
                tensors[name] = Raw(raw.dtype, raw.shape, first + raw.data[len(first) :])

    change_shard(shards(folder)[2], change)


def test_scale_255_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", **BRIEF)
    _spoil(folder, "w3.weight_scale", 255)
    with load(folder, dtype="float32") as engine:
        with session_with(engine, PROMPT) as session:
            with pytest.raises(CheckpointError, match=r"Layer 2, expert \d+: w3.weight_scale"):
                session.logits()
            with pytest.raises(SessionError, match="lost: Layer 2"):
                session.logits()
            done = list(generate(engine, [Request(session_with(engine, OTHER))]))[-1]
            assert isinstance(done, Done) and isinstance(done.error, CheckpointError)
            assert "check MODEL --full" in str(done.error)


def test_scale_254_that_overflows_names_the_layer(tmp_path: Path) -> None:
    """2**127 times live codes is a lawful byte; what it makes of the numbers is not."""
    folder = tiny(tmp_path / "m", **BRIEF, latent_norm=False)
    for name in ("w1.weight_scale", "w2.weight_scale", "w3.weight_scale"):
        _spoil(folder, name, 254)
        _spoil(folder, name.replace("scale", "packed"), 0x77)
    with load(folder) as engine, session_with(engine, PROMPT) as session:
        ended(run(engine, session)[0], "Layer 2 ")


def test_the_largest_scales_are_exact() -> None:
    """Bytes 0, 1 and 254 as the format allows them: finite and equal to the reference."""
    folder = checkpoint(edge_scales=True, **BRIEF)
    with load(folder, dtype="float32") as engine:
        got = logits_of(engine, OTHER)
    assert np.abs(got - expected(folder, OTHER).logits).max() < 1e-2
    assert np.isfinite(got).all()


def test_the_logits_command_stops(engine: Engine, tmp_path: Path) -> None:
    with engine.weights.layer(1) as w:
        weight = w.vector("input_layernorm.weight")
    kept = weight[0].clone()
    weight[0] = float("nan")
    out = tmp_path / "l.npy"
    with pytest.raises(NumericError, match="Layer 1 "):
        write_logits(engine, PROMPT, out, sweep=64)
    weight[0] = kept
    assert list(tmp_path.iterdir()) == []
    write_logits(engine, OTHER, out, sweep=64)
    assert np.isfinite(np.load(out)).all()


def test_a_nonzero_a_log_tail_is_refused_r55(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the heads in use only zeros may lie: refused when opened, or when it streams in."""
    for value in (1.0, float("nan")):
        folder = tiny(tmp_path / str(value), kda_heads=3, **BRIEF)

        def change(tensors: dict[str, Raw], value: float = value) -> None:
            (name,) = (n for n in tensors if n.endswith("A_log"))
            numbers = np.frombuffer(tensors[name].data, np.float32).copy()
            assert len(numbers) == 32
            numbers[3] = value
            tensors[name] = Raw("F32", (32,), numbers.tobytes())

        with monkeypatch.context() as patch:
            starve(patch)
            with load(folder) as engine, session_with(engine, OTHER) as session:
                change_shard(shards(folder)[2], change)  # while the file is in use
                with pytest.raises(CheckpointError, match=r"layers.2.self_attn.A_log"):
                    session.logits()
        with pytest.raises(CheckpointError, match=r"layers.2.self_attn.A_log"):
            load(folder)


def test_convolutions_of_two_ranks_are_the_same_r55(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", **BRIEF)
    with load(folder) as engine:
        wanted = logits_of(engine, OTHER)
    for shard in shards(folder)[:5]:

        def change(tensors: dict[str, Raw]) -> None:
            for name, raw in tensors.items():
                if "conv1d" in name:
                    tensors[name] = Raw(raw.dtype, (raw.shape[0], raw.shape[2]), raw.data)

        change_shard(shard, change)
    with load(folder) as engine:
        assert same_bits(logits_of(engine, OTHER), wanted)
