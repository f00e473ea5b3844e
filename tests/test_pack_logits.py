"""A pack runs as its source does: the same bits, resident or streamed, quantised or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3offload.loading import load
from k3offload.pack import pack
from tests.helpers_engine import (
    BRIEF,
    call,
    checkpoint,
    greedy,
    logits_of,
    same_bits,
    some_tokens,
    starve,
)

TOKENS = some_tokens(90)
MODELS: dict[str, dict[str, Any]] = {
    "brief": BRIEF,
    "kimi-linear": {"size": "kimi-linear", "layers": 5},  # experts in bfloat16
}


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def source(request: pytest.FixtureRequest) -> Path:
    return checkpoint(**MODELS[request.param])


def test_the_same_bits(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(source, tmp_path / "out")
    with load(source) as engine:
        wanted, text = logits_of(engine, TOKENS, decode_from=80), greedy(engine, TOKENS[:9], 4)
    with load(tmp_path / "out") as engine:
        assert same_bits(logits_of(engine, TOKENS, decode_from=80), wanted)
        assert greedy(engine, TOKENS[:9], 4) == text
    starve(monkeypatch)
    with load(tmp_path / "out") as engine:
        assert not engine.plan.resident_layers
        assert same_bits(logits_of(engine, TOKENS, decode_from=80), wanted)


def test_through_the_command_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.array(TOKENS))
    code, _, err = call(["pack", source, tmp_path / "out"], capsys)
    assert code == 0, err
    for model, name in ((source, "a.npy"), (tmp_path / "out", "b.npy")):
        command = ["logits", model, "--tokens", tmp_path / "ids.npy", "--out", tmp_path / name]
        code, _, err = call(command, capsys)
        assert code == 0, err
    assert same_bits(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))


def test_transformers_reads_a_pack(tmp_path: Path) -> None:
    """A model that it wrote itself: the same weights, nothing missing, nothing unknown to it."""
    transformers = pytest.importorskip("transformers", "5.24")
    from tests.test_kimi_linear import SIZES

    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**SIZES))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "m")
    assert pack(tmp_path / "m", tmp_path / "out").shards > 1
    again, said = transformers.KimiLinearForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(said.values()), said
    wanted, got = model.state_dict(), again.state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("trunk", ["int8", "mxfp4"])
def test_a_quantised_pack_is_the_trunk_quantised_on_the_fly(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trunk: str
) -> None:
    pack(source, tmp_path / "out", trunk)
    with load(source, trunk=trunk) as engine:
        wanted = logits_of(engine, TOKENS, decode_from=80)
    with load(source) as engine:
        assert not same_bits(logits_of(engine, TOKENS, decode_from=80), wanted)
    with load(tmp_path / "out") as engine:
        assert same_bits(logits_of(engine, TOKENS, decode_from=80), wanted)
    starve(monkeypatch)
    with load(tmp_path / "out") as engine:
        assert not engine.plan.resident_layers
        assert same_bits(logits_of(engine, TOKENS, decode_from=80), wanted)
