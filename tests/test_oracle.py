"""The oracle against the golden numbers, and proof that it notices what it should notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.make_tiny import make_tiny
from tests import oracle
from tests.helpers_golden import CASES, golden_checkpoint, load_golden
from tests.judge import judge
from tests.oracle import F64, Oracle, Result, mxfp4

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 79, 3, 23, 84, 62, 64, 33, 83, 27, 9, 50]
SHORT: dict[str, Any] = {"num_hidden_layers": 5}  # of the 11: both kinds, two block starts


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_checkpoint("odd-0", tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_checkpoint("nano-probe", tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="module")
def base(odd: Path) -> Result:
    return Oracle(odd, **SHORT).run(TOKENS)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    result = Oracle(golden_checkpoint(name, tmp_path)).run(golden.tokens)
    report = judge(golden.logits, result.logits, golden.margin, tol=1e-6)
    assert report, report
    assert report.judged == len(golden.tokens)
    assert result.layers == golden.layers.tolist()
    assert (result.experts == golden.experts).all()
    assert np.abs(result.weights - golden.weights).max() < 1e-6
    assert np.abs(result.margin - golden.margin).max() < 1e-6
    assert golden.margin.min() > 5e-6  # no near-tie that float32 could flip


@pytest.mark.parametrize("name", ["odd-0", "calm-0"])
def test_golden_greedy(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    folder = golden_checkpoint(name, tmp_path)
    tokens, margins = Oracle(folder).greedy(golden.tokens.tolist(), 2)
    assert tokens == golden.greedy[:2].tolist()
    assert np.abs(np.array(margins) - golden.greedy_margin[:2]).max() < 1e-9


def test_golden_size() -> None:
    folder = Path(__file__).parent / "golden"
    assert sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) < 3_000_000


def test_causal(odd: Path, base: Result) -> None:
    """A later token changes nothing before it."""
    short = Oracle(odd, **SHORT).run(TOKENS[:7])
    assert np.abs(short.logits - base.logits[:7]).max() < 1e-9
    assert (short.experts == base.experts[:, :7]).all()


def test_trace_adds_up(odd: Path) -> None:
    """Without AttnRes the stream is the embedding plus every traced sublayer output."""
    model = Oracle(odd, attn_res_block_size=None, **SHORT)
    traced = model.run(TOKENS, trace=True)
    assert len(traced.trace) == 2 * 5
    p = model.w("model.embed_tokens.weight")[TOKENS] + sum(traced.trace.values())
    head = model.w("model.norm.weight") * oracle.rms(p, 1e-5) @ model.w("lm_head.weight").T
    assert np.abs(head - traced.logits).max() < 1e-9


def test_mxfp4_worked_example() -> None:
    """The published bytes of layer 1, expert 0, w1, row 0, and the numbers they stand for."""
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :4] = 22, 185, 206, 35
    row = mxfp4(packed, np.array([[121]], np.uint8))[0, :8]
    expected = [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]
    assert row.tolist() == expected


#: every kind of tensor a token meets, in both kinds of layer
KINDS = [
    "embed_tokens", "model.norm", "lm_head", "output_attn_res_norm", "output_attn_res_proj",
    "input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm",
    "self_attention_res_proj", "mlp_res_proj", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_a_proj", "f_b_proj", "b_proj",
    "A_log", "dt_bias", "o_norm", "0.self_attn.g_proj", "0.self_attn.o_proj", "q_a_proj",
    "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
    "3.self_attn.g_proj", "3.self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "moe.gate.weight", "e_score_correction_bias", "routed_expert_down_proj",
    "routed_expert_norm", "routed_expert_up_proj", "shared_experts.gate_proj",
    "shared_experts.up_proj", "shared_experts.down_proj", "w1.weight", "w2.weight", "w3.weight",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_counts(kind: str, odd: Path, base: Result) -> None:
    """R54: a tenth more or less on every other element of one kind of tensor fails the rule."""
    touched = set()

    def change(name: str, tensor: F64) -> F64:
        if kind not in name:
            return tensor
        touched.add(name)
        flat = tensor.reshape(-1) * np.where(np.arange(tensor.size) % 2, 1.1, 0.9)
        return flat.reshape(tensor.shape)

    report = judge(base.logits, Oracle(odd, change, **SHORT).run(TOKENS).logits)
    assert touched
    assert not report, report


def test_padding_of_a_log_does_not_count(odd: Path, base: Result) -> None:
    """R55: A_log is stored wider than it is used."""

    def change(name: str, tensor: F64) -> F64:
        if name.endswith("A_log"):
            tensor[3:] = 99.0
        return tensor

    assert (Oracle(odd, change, **SHORT).run(TOKENS).logits == base.logits).all()


@pytest.mark.parametrize(
    "field",
    [
        {"attn_res_block_size": 4},
        {"attn_res_block_size": None},
        {"rms_norm_eps": 1e-3},
        {"activation_situ_beta": 5.0},
        {"activation_situ_linear_beta": 20.0},
        {"activation_situ_linear_beta": None},
        {"hidden_act": "silu"},
        {"mla_use_output_gate": False},
        {"latent_moe_use_norm": False},
        {"num_experts_per_token": 4},
        {"num_shared_experts": 0},
        {"moe_renormalize": False, "latent_moe_use_norm": False},
    ],
    ids=str,
)
def test_every_field_counts(field: dict[str, Any], odd: Path, base: Result) -> None:
    """R54: no field is without effect."""
    report = judge(base.logits, Oracle(odd, **{**SHORT, **field}).run(TOKENS).logits)
    assert not report, report


def _swap_nibbles(name: str, tensor: F64) -> F64:
    if ".experts." in name:
        rows = len(tensor)
        return tensor.reshape(rows, -1, 2)[:, :, ::-1].reshape(rows, -1)
    return tensor


def _reverse_taps(name: str, tensor: F64) -> F64:
    return tensor[..., ::-1] if "conv1d" in name else tensor


def _swap_gate_and_up(name: str, tensor: F64) -> F64:
    return tensor.reshape(tensor.shape[::-1]).T if name.endswith("w2.weight") else tensor


@pytest.mark.parametrize("mistake", [_swap_nibbles, _reverse_taps, _swap_gate_and_up])
def test_layout_mistakes_fail(mistake: Callable[[str, F64], F64], odd: Path, base: Result) -> None:
    assert not judge(base.logits, Oracle(odd, mistake, **SHORT).run(TOKENS).logits)


@pytest.mark.parametrize(("constant", "wrong"), [("MLA_EPS", 1e-5), ("L2_EPS", 1e-5)])
def test_wrong_epsilons_fail_on_the_probe(
    constant: str, wrong: float, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe exists because the other checkpoints do not see these."""
    right = Oracle(probe).run(TOKENS).logits
    monkeypatch.setattr(oracle, constant, wrong)
    assert not judge(right, Oracle(probe).run(TOKENS).logits)


def test_renormalisation_shows_on_the_probe(probe: Path) -> None:
    """A common factor of all weights is hidden by the latent norm, except where sums are tiny."""
    right = Oracle(probe).run(TOKENS).logits
    assert not judge(right, Oracle(probe, moe_renormalize=False).run(TOKENS).logits)


def test_bias_chooses_but_does_not_weigh(odd: Path, base: Result) -> None:
    """R52: a bias common to all experts changes neither the choice nor the weights."""

    def change(name: str, tensor: F64) -> F64:
        return tensor + 5 if name.endswith("e_score_correction_bias") else tensor

    shifted = Oracle(odd, change, **SHORT).run(TOKENS)
    assert (shifted.experts == base.experts).all()
    assert np.abs(shifted.weights - base.weights).max() < 1e-12


def test_kimi_linear_agrees_with_transformers(tmp_path: Path) -> None:
    """An implementation by others, in float32: softplus decay, low-rank gate, plain residual,
    experts on the full width, no q-LoRA, scaled weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.24")
    make_tiny(tmp_path, "kimi-linear", 3, layers=5, scale=2.446)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    ours = Oracle(tmp_path).run(TOKENS)
    report = judge(ours.logits, theirs, ours.margin, tol=5e-5)
    assert report, report
    wrong = Oracle(tmp_path, routed_scaling_factor=1.0).run(TOKENS)
    assert not judge(wrong.logits, theirs, tol=5e-5)


def test_bf16_experts_take_the_same_path(tmp_path: Path) -> None:
    """BF16 experts that hold what the MXFP4 bytes decode to give the very same logits."""
    few: dict[str, Any] = {"layers": 4, "experts": 4, "topk": 3}
    make_tiny(tmp_path / "mxfp4", "nano", 2, **few)
    make_tiny(tmp_path / "bf16", "nano", 2, expert_format="bf16", **few)
    decoded = Oracle(tmp_path / "mxfp4").weights

    def change(name: str, tensor: F64) -> F64:
        return decoded.get(name) if ".experts." in name else tensor

    want = Oracle(tmp_path / "mxfp4").run(TOKENS).logits
    assert (Oracle(tmp_path / "bf16", change).run(TOKENS).logits == want).all()
    assert not judge(want, Oracle(tmp_path / "bf16").run(TOKENS).logits)
