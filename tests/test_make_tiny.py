"""make-tiny: same bytes every time, the released layout, and no damage to anything else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload import tiny_recipes
from k3offload.errors import CheckpointError, DoesNotFit, UsageError
from k3offload.make_tiny import SIZES, make_tiny, tiny_size
from k3offload.spec import ModelSpec
from k3offload.tiny_recipes import E2M1_EDGES, Recipes, quantize_mxfp4
from k3offload.tiny_write import write_shard
from tests.helpers_golden import TINY_CASES, golden_checkpoint
from tests.oracle import Weights, mxfp4, oracle_logits

#: sha256 of the first shard, one in the middle and the one with embedding and head
PINNED = {
    "nano-0": {
        1: "d82a027bed5fa30454da66a6b5c9cee0d38646f8df2ee4d2c3e300a604c35de9",
        5: "3e6a7ad178fa1ae8d91f87cd276cc2f61d34740c7515cbb5733f0a0a6007196a",
        10: "1ff39888f15846ce012c4132d7b03dda5908c2b1e215ac677176ded9a36f88f7",
    },
    "odd-0": {
        1: "7bb73bcb73d0efd0a074cae8a7bae08d9b24f8e6528cf155e466e5d2ded0ab20",
        8: "a3640ffdd9d191840e57fe0aaec0a7ce1081825d3673195a49f969247d77e517",
        12: "4c89ee1aa756bdd901a6208699267f35ead562d140e3e310d9c6e396fe5a98a5",
    },
    "nano-probe": {
        1: "ff09e36d9aaef292b040fdf770f35c73b8e4e3f7abd9d209ba16692a6be3cab3",
        5: "0dc5347fe077cb00f41b385717f63435b4de35f3707573b0a142480a92aa8b55",
        10: "1ff39888f15846ce012c4132d7b03dda5908c2b1e215ac677176ded9a36f88f7",
    },
    "calm-0": {
        1: "f80b58d568a2ad4637ce757b0462978dc76ebc68b3af26627c2d817750267c65",
        5: "d2df181d9c95474f85e28781a0f1d85480c651248e99aa9e311d3839733fa894",
        10: "1ff39888f15846ce012c4132d7b03dda5908c2b1e215ac677176ded9a36f88f7",
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "no_attn_res": {"attn_res": 0},
    "no_latent": {"latent": 0},
    "no_latent_norm": {"latent_norm": False},
    "low_rank_gate": {"full_rank_gate": False},
    "no_q_lora": {"q_lora": 0},
    "softplus": {"bounded_decay": False},
    "bf16_experts": {"expert_format": "bf16"},
    "no_mla_gate": {"mla_gate": False},
    "no_shared": {"shared": 0},
    "silu": {"activation": "silu", "scale": 2.5},
    "schedule": {"mla_layers": (0, 3)},
    "everything_off": {
        "attn_res": 0, "latent": 0, "full_rank_gate": False, "q_lora": 0, "bounded_decay": False,
        "expert_format": "bf16", "mla_gate": False, "activation": "silu", "vision": False,
    },
}  # fmt: skip
FEW: dict[str, Any] = {"layers": 5, "experts": 8, "topk": 2}


@pytest.mark.parametrize("name", TINY_CASES)
def test_pinned_bytes(name: str, tmp_path: Path) -> None:
    size, options = TINY_CASES[name]
    hashes = make_tiny(tmp_path / name, size, 0, **options)["sha256"]
    made = {i: hashes[f"model-{i:05d}-of-{len(hashes):06d}.safetensors"] for i in PINNED[name]}
    assert made == PINNED[name]


def test_bytes_do_not_depend_on_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_tiny(tmp_path / "whole", "odd", 3, **FEW)["sha256"]
    monkeypatch.setattr(tiny_recipes, "CHUNK", 999)
    assert make_tiny(tmp_path / "pieces", "odd", 3, **FEW)["sha256"] == whole
    assert make_tiny(tmp_path / "other", "odd", 4, **FEW)["sha256"] != whole


def test_memory_is_bounded_by_a_chunk(tmp_path: Path) -> None:
    """A 67 MB tensor is written without holding it."""
    value = Recipes(SIZES["nano"], 0).linear("big", 8192, 4096)
    tracemalloc.start()
    write_shard(tmp_path / "big.safetensors", {"big": value}, sparse=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert value.nbytes == 67_108_864
    assert peak < 20_000_000


def test_quantizer_is_exact_where_it_can_be() -> None:
    codes = np.arange(16, dtype=np.uint8).repeat(4).reshape(2, 32)
    codes[:, 0] = 7  # every group holds its largest code, so the exponent is unique
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scale = np.array([[120], [131]], np.uint8)
    again, exponent = quantize_mxfp4(mxfp4(packed, scale).astype(np.float32))
    assert (again == packed).all()
    assert (exponent == scale).all()


def test_quantizer_rounds_to_the_nearest_code() -> None:
    w = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    packed, scale = quantize_mxfp4(w)
    step = np.exp2(scale.astype(float) - 127).repeat(32, axis=1)
    error = np.abs(mxfp4(packed, scale) - w) / step
    assert error[np.abs(w) <= 6 * step].max() <= 1.0  # half of the widest gap, 4 to 6
    ties = np.array([*E2M1_EDGES, 6.0] * 4, np.float32)[None]
    assert mxfp4(*quantize_mxfp4(ties))[0, :8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_edge_scales_are_there(tmp_path: Path) -> None:
    make_tiny(tmp_path, "nano", 0, edge_scales=True, **FEW)
    weights = Weights(tmp_path)
    scales = [weights.raw(n).ravel() for n in weights.where if n.endswith("_scale")]
    assert {0, 1, 254} <= set(np.concatenate(scales).tolist())
    top = max(np.abs(weights.get(n[:-6])).max() for n in weights.where if n.endswith("_scale"))
    assert top < 100  # byte 254 stands only over zeros


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_holds_what_its_config_promises(variant: str, tmp_path: Path) -> None:
    """Names, dtypes and shapes in the headers are those that ModelSpec reads from the config."""
    report = make_tiny(tmp_path, "odd", 1, **FEW, **VARIANTS[variant])
    spec = ModelSpec.load(tmp_path)
    where = Weights(tmp_path).where
    held = {name: (dtype, tuple(shape)) for name, (_, dtype, shape, _) in where.items()}
    vision = {name for name in held if name.startswith(("vision_tower.", "mm_projector."))}
    promised = {t.name: (t.dtype, t.shape) for t in spec.tensors()}
    assert {k: v for k, v in held.items() if k not in vision} == promised
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report["bytes"]
    assert index["weight_map"] == {name: at[0].name for name, at in where.items()}
    result = oracle_logits(tmp_path, [1, 2, 3, 2, 1])
    assert np.isfinite(result.logits).all()
    assert result.experts.shape == (4, 5, 2)


def test_kimi_linear_holds_what_its_config_promises(tmp_path: Path) -> None:
    make_tiny(tmp_path, "kimi-linear", 1)
    spec = ModelSpec.load(tmp_path)
    assert spec.family == "kimi_linear"
    held = {name: (at[1], tuple(at[2])) for name, at in Weights(tmp_path).where.items()}
    assert held == {t.name: (t.dtype, t.shape) for t in spec.tensors()}


def test_variants_differ(tmp_path: Path) -> None:
    """Every variant computes something else: none of the options is without effect."""
    seen = {}
    for variant, options in VARIANTS.items():
        make_tiny(tmp_path / variant, "odd", 1, **FEW, **options)
        seen[variant] = oracle_logits(tmp_path / variant, [1, 2, 3, 2, 1]).logits[-1]
    for variant, logits in seen.items():
        others = [v for k, v in seen.items() if k != variant]
        assert min(np.abs(logits - o).max() for o in others) > 1e-3, variant


def test_safetensors_library_reads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    make_tiny(tmp_path, "odd", 0, **FEW)
    weights = Weights(tmp_path)
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safetensors.safe_open(path, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                _, dtype, shape, _ = weights.where[name]
                assert opened.get_slice(name).get_shape() == shape
                if dtype != "BF16":  # numpy has no bfloat16
                    assert (opened.get_tensor(name) == weights.raw(name)).all()


def test_an_expert_is_one_contiguous_read(tmp_path: Path) -> None:
    """The six tensors of an expert lie back to back, w1, w2, w3, codes before scales."""
    weights = Weights(golden_checkpoint("nano-0", tmp_path))
    at = "language_model.model.layers.3.block_sparse_moe.experts.7."
    keys = [f"{at}w{i}.weight_{part}" for i in (1, 2, 3) for part in ("packed", "scale")]
    ends = [weights.where[k][3] + int(np.prod(weights.where[k][2])) for k in keys]
    assert [weights.where[k][3] for k in keys[1:]] == ends[:-1]


def test_a_former_output_is_replaced_whole(tmp_path: Path) -> None:
    make_tiny(tmp_path, "nano", 0, **FEW)
    (tmp_path / "notes.txt").write_text("mine")
    report = make_tiny(tmp_path, "nano", 0, layers=3, vision=False)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(report["sha256"]) == 4
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_interrupted_run_cannot_be_opened_and_can_be_repeated(tmp_path: Path) -> None:
    make_tiny(tmp_path, "nano", 0, **FEW)

    def stop(name: str, done: int, total: int) -> None:
        assert 0 < done <= total
        if "00002" in name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_tiny(tmp_path, "nano", 1, progress=stop, **FEW)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert not json.loads((tmp_path / "make_tiny.json").read_text())["complete"]
    again = make_tiny(tmp_path, "nano", 1, **FEW)
    assert again["sha256"] == make_tiny(tmp_path / "fresh", "nano", 1, **FEW)["sha256"]


def test_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json.*empty folder"):
        make_tiny(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        make_tiny(tmp_path / "config.json")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_refuses_a_full_disk_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum comes first and names the bytes that are missing."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(DoesNotFit, match="1000 bytes") as caught:
        make_tiny(tmp_path / "out")
    assert 5_000_000 < caught.value.missing < 8_000_000
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": "huge"}, "huge.*nano"),
        ({"hiden": 128}, "hiden.*hidden"),
        ({"latent": 48}, "48.*32"),
        ({"latent": 0, "hidden": 72}, "72"),
        ({"moe_inter": 100}, "100"),
        ({"vocab": 300}, "300"),
        ({"topk": 17}, "17.*16"),
        ({"layers": 0}, "layers"),
        ({"decay": "never"}, "never.*slow"),
        ({"expert_format": "int4"}, "int4.*bf16"),
        ({"mla_layers": (9,)}, "9"),
        ({"family": "kimi_linear"}, "Kimi Linear"),
    ],
)
def test_refuses_what_cannot_be_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tiny_size(**options)


def test_needs_no_torch() -> None:
    code = "import sys, k3offload.make_tiny; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
