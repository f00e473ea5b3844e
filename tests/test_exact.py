"""Logits against the stored references and against the float64 reference, in every way to feed a
prompt: one sweep, cut into sweeps, token by token, prefill then decode (R11, R43, R52, R54, R63).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3offload.engine import Engine
from k3offload.generate import Token
from k3offload.hooks import Hooks
from k3offload.kernels import native
from k3offload.kernels.choose import OPS
from k3offload.loading import load
from k3offload.run_logits import Routing, write_logits
from k3offload.sampling import Sampling
from tests.helpers_engine import (
    BRIEF,
    Logits,
    checkpoint,
    expected,
    logits_of,
    same_bits,
    session_with,
    some_tokens,
)
from tests.helpers_golden import CASES, golden_checkpoint, load_golden
from tests.judge import Report, judge
from tests.oracle import F64, Oracle

#: sweep, first token that is decoded, how many tokens of the case are fed
WAYS = {
    "one-sweep": (512, None, None),
    "sweep-13": (13, None, None),
    "sweep-1": (1, None, 14),
    "decode-from-20": (512, 20, 28),
}
TRAINED_SAFE = 1e-4  # router margin under which a token of real text is not judged
SAFE = 1e-5


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Engines of the golden cases by (name, dtype, kernels), loaded once."""
    made: dict[tuple[str, str, str], Engine] = {}
    parent = tmp_path_factory.mktemp("golden")

    def get(name: str, dtype: str = "float32", backend: str = "") -> Engine:
        key = (name, dtype, backend)
        if key not in made:
            how: dict[str, Any] = {"isa": backend} if backend in native.isas() else {}
            if backend == "reference":
                how = {"kernels": dict.fromkeys(OPS, "reference")}
            made[key] = load(golden_checkpoint(name, parent), dtype=dtype, **how)
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


def fed(engine: Engine, name: str, way: str, out: Path) -> tuple[Logits, int]:
    """Logits that the ``logits`` command's code writes for a case, and how many rows."""
    sweep, decode_from, count = WAYS[way]
    tokens = load_golden(name).tokens.tolist()[:count]
    write_logits(engine, tokens, out, sweep=sweep, decode_from=decode_from)
    return np.load(out), len(tokens)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_golden_float32(name: str, way: str, engines: Any, tmp_path: Path) -> None:
    got, n = fed(engines(name), name, way, tmp_path / "l.npy")
    golden = load_golden(name)
    safe = TRAINED_SAFE if name == "trained" else 0.0
    report = judge(golden.logits[:n], got, golden.margin[:, :n], safe_router=safe)
    assert report, report
    assert report.judged >= (8 if name == "trained" else n), report


@pytest.mark.parametrize("way", WAYS)
def test_golden_bfloat16(way: str, engines: Any, tmp_path: Path) -> None:
    got, n = fed(engines("calm-0", "bfloat16"), "calm-0", way, tmp_path / "l.npy")
    report = judge(load_golden("calm-0").logits[:n], got, bf16=True)
    assert report, report


@pytest.mark.parametrize("way", ["one-sweep", "decode-from-20"])
@pytest.mark.parametrize("backend", ["reference", *native.isas()])
@pytest.mark.parametrize("name", ["nano-0", "odd-0"])
def test_golden_on_every_backend(
    name: str, backend: str, way: str, engines: Any, tmp_path: Path
) -> None:
    """Torch kernels, and native ones for each instruction set that runs here."""
    got, n = fed(engines(name, backend=backend), name, way, tmp_path / "l.npy")
    golden = load_golden(name)
    report = judge(golden.logits[:n], got, golden.margin[:, :n])
    assert report, report
    assert report.judged == n


@pytest.mark.parametrize("name", CASES)
def test_golden_greedy(name: str, engines: Any) -> None:
    golden = load_golden(name)
    assert golden.greedy_margin.min() > 1e-3
    with session_with(engines(name), golden.tokens.tolist()) as session:
        events = list(session.generate(len(golden.greedy), Sampling(ignore_end=True)))
    assert [e.token for e in events if isinstance(e, Token)] == golden.greedy.tolist()


@pytest.mark.parametrize("name", ["nano-0", "odd-0"])
def test_routing_r52(name: str, engines: Any) -> None:
    """Chosen experts and their weights; the reference lists them best first."""
    golden, engine = load_golden(name), engines(name)
    seen = Routing(engine.spec, len(golden.tokens))
    engine.hooks.on_route = seen.watch
    logits_of(engine, golden.tokens.tolist(), sweep=64, keep=1)
    engine.hooks = Hooks()
    found = seen.arrays()
    order = np.argsort(golden.experts, axis=-1)
    assert found["layers"].tolist() == golden.layers.tolist()
    assert (found["experts"] == np.take_along_axis(golden.experts, order, -1)).all()
    wanted = np.take_along_axis(golden.weights, order, -1)
    assert np.abs(found["weights"] - wanted).max() < 1e-4


def test_router_bias_chooses_but_does_not_weigh_r52() -> None:
    folder, tokens = checkpoint(**BRIEF), some_tokens(20)

    def change(name: str, x: F64) -> F64:
        return x + 3.0 * (np.arange(len(x)) == 5) if name.endswith("correction_bias") else x

    with load(folder, dtype="float32") as engine:
        before = logits_of(engine, tokens)
        for layer in range(1, 5):
            with engine.weights.layer(layer) as w:
                w.vector("block_sparse_moe.gate.e_score_correction_bias")[5] += 3.0
        seen = Routing(engine.spec, len(tokens))
        engine.hooks.on_route = seen.watch
        got = logits_of(engine, tokens)
    wanted = Oracle(folder, change).run(tokens)
    assert (seen.arrays()["experts"] == 5).any(-1).all()  # chosen by every token
    assert not (wanted.weights.max(-1) > 0.9).any()  # and yet not weighed by the bias
    assert judge(wanted.logits, got, wanted.margin, safe_router=SAFE)
    assert not same_bits(before, got)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "decay-slow-edge-scales": ("nano", {"decay": "slow", "edge_scales": True, **BRIEF}),
    "decay-fast": ("nano", {"decay": "fast", "seed": 7, **BRIEF}),
    "no-attnres": ("nano", {"attn_res": 0, **BRIEF}),
    "attnres-every-layer-conv-2": ("nano", {"attn_res": 1, "conv": 2, **BRIEF}),
    "attnres-one-block-top-all": ("nano", {"attn_res": 40, "topk": 16, **BRIEF}),
    "no-latent": ("nano", {"latent": 0, **BRIEF}),
    "no-latent-norm-no-shared": ("nano", {"latent_norm": False, "shared": 0, **BRIEF}),
    "low-rank-gate-no-q-lora": ("nano", {"full_rank_gate": False, "q_lora": 0, **BRIEF}),
    "no-mla-gate-silu": ("nano", {"mla_gate": False, "activation": "silu", **BRIEF}),
    "softplus-fast": ("nano", {"bounded_decay": False, "decay": "fast", **BRIEF}),
    "bf16-experts": ("nano", {"expert_format": "bf16", **BRIEF}),
    "no-renormalize": ("nano", {"renormalize": False, "scale": 2.5, **BRIEF}),
    "top-1": ("nano", {"topk": 1, **BRIEF}),
    "mla-first": ("nano", {"mla_layers": (0, 2), **BRIEF}),
    "all-mla": ("nano", {"mla_layers": (0, 1, 2, 3, 4), **BRIEF}),
    "all-kda": ("nano", {"mla_layers": (), **BRIEF}),
    "kimi-linear": ("kimi-linear", {"layers": 5}),
    "kimi-linear-mxfp4": ("kimi-linear", {"layers": 4, "expert_format": "mxfp4", "seed": 3}),
    "odd-nine-heads": (
        "odd",
        {"heads": 9, "kda_heads": 10, "kda_dim": 24, "layers": 5, "vision": False, "attn_res": 2},
    ),
    "odd-wider": (
        "odd",
        {"hidden": 288, "latent": 160, "moe_inter": 32, "experts": 40, "topk": 9, "layers": 4,
         "kv_lora": 200, "rope": 40, "vocab": 1000, "vision": False, "seed": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    """Prefill in one sweep over a chunk's edge, and sweeps of 13 followed by decoding."""
    size, options = VARIANTS[variant]
    folder, tokens = checkpoint(size, **options), some_tokens(70, 1)
    wanted = expected(folder, tokens)
    with load(folder, dtype="float32") as engine:
        whole = logits_of(engine, tokens)
        mixed = logits_of(engine, tokens[:20], sweep=13, decode_from=17)
    near = wanted.margin if wanted.margin.size else None
    _passes(judge(wanted.logits, whole, near, safe_router=SAFE), 20)
    near = None if near is None else near[:, :20]
    _passes(judge(wanted.logits[:20], mixed, near, safe_router=SAFE), 15)


def _passes(report: Report, judged: int) -> None:
    assert report, report
    assert report.judged >= judged, report


SHORT: dict[str, Any] = {"layers": 3, "mla_layers": (2,), "vision": False}


@pytest.fixture(scope="module")
def short() -> Iterator[Engine]:
    """KDA over a dense layer, KDA over experts, MLA over experts."""
    with load(checkpoint(**SHORT), dtype="float32") as engine:
        yield engine


def test_every_prompt_length_from_1_to_70_r43(short: Engine) -> None:
    tokens = some_tokens(70, 1)
    wanted = expected(checkpoint(**SHORT), tokens)
    last = np.concatenate([logits_of(short, tokens[:n], keep=1) for n in range(1, 71)])
    report = judge(wanted.logits, last, wanted.margin, safe_router=SAFE)
    assert report, report
    assert report.judged == 70


def test_no_chunk_is_forgotten_r11(short: Engine) -> None:
    """Three chunks and 5 tokens: same answer at any sweep; the first tokens are remembered."""
    tokens = some_tokens(3 * 64 + 5, 3)
    other = [*tokens[:3], (tokens[3] + 1) % 256, *tokens[4:]]
    wanted = expected(checkpoint(**SHORT), tokens)
    assert wanted.margin[:, -1].min() > SAFE
    for sweep, decode_from in (
        (7, None),
        (63, None),
        (64, None),
        (65, None),
        (512, None),
        (99, 189),
    ):
        last = logits_of(short, tokens, sweep, decode_from, keep=1)
        assert judge(wanted.logits[-1:], last), sweep
        changed = logits_of(short, other, sweep, decode_from, keep=1)
        assert np.linalg.norm(changed - last) > 1e-3 * np.linalg.norm(last), sweep


def test_every_internal_switch_r63() -> None:
    """Chunk and tile (64), latent block (256), tiles that share a block's expansion (512)."""
    folder = checkpoint(layers=3, vision=False, mla_layers=(1, 2))
    tokens = some_tokens(515, 4)
    wanted = expected(folder, tokens)
    assert wanted.margin.min() > 1e-7
    with load(folder, dtype="float32", sweep=1024) as engine:
        whole = logits_of(engine, tokens, sweep=1024)
        _passes(judge(wanted.logits, whole, wanted.margin, safe_router=1e-6), 300)
        for n in (63, 64, 65, 255, 256, 257, 511, 512, 513):
            assert same_bits(logits_of(engine, tokens[:n], sweep=1024, keep=1)[0], whole[n - 1]), n
        decoded = logits_of(engine, tokens[:260], decode_from=250, keep=10)
        report = judge(wanted.logits[250:260], decoded)
        assert report, report


def test_every_trunk_tensor_matters_r54(short: Engine) -> None:
    """A tensor that is loaded but not used would leave the logits as they are."""
    tokens = some_tokens(12)
    before = logits_of(short, tokens)
    noise = torch.Generator().manual_seed(1)
    groups = {f"layer {i}": short.weights._resident[i] for i in range(3)}
    for where, weights in {**groups, "global": short.weights.globals}.items():
        for name, tensor in weights._tensors.items():
            kept = tensor.clone()
            much = 1.0 if name.endswith("correction_bias") else 0.1  # it must change a choice
            factor = 1 + much * torch.randn(tensor.shape, generator=noise)
            tensor.copy_(tensor.float() * factor)
            moved = np.abs(logits_of(short, tokens) - before).max()
            tensor.copy_(kept)
            alone = where == "layer 0" and name.startswith("self_attention_res")  # of one source
            assert (moved == 0) if alone else (moved > 1e-5), (where, name)
    assert same_bits(logits_of(short, tokens), before)
