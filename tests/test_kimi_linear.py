"""Kimi Linear against transformers' own implementation, which shares no line with ours.

It proves KDA with the softplus gate, the low-rank output gate, NoPE MLA without q-LoRA, the
shared experts and plain routed experts, on files that transformers itself wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from k3offload.loading import load
from k3offload.tiny_write import write_byte_ranks
from tests.helpers_engine import Logits, greedy, logits_of, some_tokens
from tests.judge import judge

transformers = pytest.importorskip("transformers", "5.24")

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 64,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 2, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "qk_nope_head_dim": 32, "num_experts_per_tok": 4, "num_local_experts": 12,
    "linear_head_dim": 40, "linear_num_heads": 3, "pad_token_id": 511, "bos_token_id": 256,
    "eos_token_id": 258, "rms_norm_eps": 2e-5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention",
                    "full_attention"],
}  # fmt: skip
LENGTH = 90


def _randomize(model: Any) -> None:
    """Weights that make every part matter: the initial ones are all but off."""
    noise = torch.Generator().manual_seed(11)

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=noise) * std

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("A_log"):
                tensor.copy_(torch.rand(tensor.shape, generator=noise) * 2 - 1)
            elif name.endswith("dt_bias"):
                tensor.copy_(normal(tensor, 1) - 2)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(normal(tensor, 0.1))
            elif tensor.dim() == 1:  # norms
                tensor.copy_(1 + normal(tensor, 0.2))
            elif "conv1d" in name:
                tensor.copy_(normal(tensor, 0.5))
            elif "embed_tokens" in name:
                tensor.copy_(normal(tensor, 1))
            else:
                tensor.copy_(normal(tensor, 1.5 * tensor.shape[-1] ** -0.5))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[int], Logits]]:
    """A folder that transformers saved (with weights in two precisions), and its own logits."""
    folder = tmp_path_factory.mktemp("kimi")
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**SIZES)).eval()
    _randomize(model)
    model.to(request.param).save_pretrained(folder)
    write_byte_ranks(folder / "tiktoken.model")
    tokens = some_tokens(LENGTH, 2)
    with torch.no_grad():
        logits = model.float()(torch.tensor([tokens])).logits[0].numpy()
    yield folder, tokens, logits


def _judge(reference: NDArray[np.float32], got: Logits) -> None:
    report = judge(reference, got)
    assert report, report


def test_prefill(made: tuple[Path, list[int], Logits]) -> None:
    folder, tokens, reference = made
    with load(folder, dtype="float32") as engine:
        _judge(reference, logits_of(engine, tokens))
        _judge(reference, logits_of(engine, tokens, sweep=13))


def test_decode(made: tuple[Path, list[int], Logits]) -> None:
    folder, tokens, reference = made
    with load(folder, dtype="float32") as engine:
        _judge(reference[:24], logits_of(engine, tokens[:24], decode_from=10))


def test_greedy_continues_as_transformers_does(made: tuple[Path, list[int], Logits]) -> None:
    folder, tokens, _ = made
    model = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted: list[int] = []
    with torch.no_grad():
        for _ in range(3):
            row = model(torch.tensor([tokens + wanted])).logits[0, -1]
            assert row.topk(2).values.diff().abs() > 1e-3  # no tie that rounding could flip
            wanted.append(int(row.argmax()))
    with load(folder, dtype="float32") as engine:
        assert greedy(engine, tokens, 3) == wanted


def test_the_hub_form_of_the_config_means_the_same(
    made: tuple[Path, list[int], Logits], tmp_path: Path
) -> None:
    """The released config names layers in ``linear_attn_config``, counted from 1."""
    folder, tokens, reference = made
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path.resolve())
    config = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
        del config[name]
    config["linear_attn_config"] = {
        "kda_layers": [1, 3, 4], "full_attn_layers": [2, 5], "num_heads": 3, "head_dim": 40,
        "short_conv_kernel_size": 4,
    }  # fmt: skip
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with load(tmp_path, dtype="float32") as engine:
        _judge(reference[:20], logits_of(engine, tokens[:20]))
