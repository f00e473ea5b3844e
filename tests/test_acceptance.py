"""The whole path, from files to figures, on a scaled-down copy of the full-size sparse checkpoint.

Streaming counts and bytes, routing against an independent calculation, and R35: tensors of more
than 2 GiB.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from k3offload.checkpoint import Checkpoint
from k3offload.config import READ_ALIGN
from k3offload.make_tiny import make_tiny_full
from k3offload.scheduler.plan import Plan
from k3offload.tiers.base import Location
from k3offload.tiers.tier_disk import STAGING, DiskTier, _group
from k3offload.tiny_full import RELEASED
from k3offload.weights import Weights as ModelWeights
from tests.helpers_checkpoint import ROOT
from tests.helpers_engine import checkpoint
from tests.helpers_memory import MB, STREAMED
from tests.oracle import F64, Weights, rms, sigmoid, softmax

LAYERS, TOP_K, EXPERTS = 9, 16, 32
MODEL = "language_model.model."


def scaled_config() -> dict[str, Any]:
    """The released configuration, nine layers of 256: trunk 60 MB, 256 experts of 1.3 MB."""
    config: dict[str, Any] = json.loads(RELEASED.read_text())
    config["text_config"].update(
        num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=16_384, num_experts=EXPERTS,
        moe_intermediate_size=1024, routed_expert_hidden_size=768, num_attention_heads=8,
        num_key_value_heads=8, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=32, attn_res_block_size=4,
    )  # fmt: skip
    assert config["text_config"]["num_experts_per_token"] == TOP_K
    config["text_config"]["linear_attn_config"].update(
        kda_layers=[1, 2, 3, 5, 6, 7], full_attn_layers=[4, 8, 9], num_heads=8, head_dim=32
    )
    config["vision_config"]["text_hidden_size"] = 256
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scaled") / "model"
    make_tiny_full(out, 3, config=scaled_config())
    return out


def command(*arguments: object) -> str:
    """What the command line prints, in a process of its own."""
    code = "from k3offload.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def generated(folder: Path) -> dict[str, Any]:
    """``generate -n 2`` from one token, with room for hardly any expert or trunk layer."""
    slot = Checkpoint.open(folder).expert_bytes + 2 * READ_ALIGN
    arguments = ["generate", folder, "a", "-n", 2, "--json", "--ignore-end", "--cache", slot]
    refused = subprocess.run(
        [sys.executable, "-m", "k3offload", *map(str, arguments), "--ram", "1M"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    missing = int(refused.stderr.split(" are missing")[0].split()[-1].replace(",", ""))
    answer: dict[str, Any] = json.loads(command(*arguments, "--ram", 1_000_000 + missing + 3 * MB))
    return answer


def test_peak_is_within_the_plan(generated: dict[str, Any]) -> None:
    memory, plan = generated["memory"], generated["plan"]
    assert plan["expert_slots"] == 1
    assert len(plan["resident_layers"]) < LAYERS and not plan["embed_resident"]
    assert memory["peak_rss"] <= memory["planned"] <= memory["limit"]
    idle = 64 * 163_840 * 4 * 2  # a sweep may keep 64 rows of logits, and this one keeps one
    # The plan's own bound, 32 MB: one token fills neither the tables of the cache policy nor the
    # weight tiles and the heap that a sweep of 64 may take (25 MB below, measured).
    assert memory["peak_rss"] >= memory["planned"] - idle - 32 * MB


def test_requests_and_bytes_of_streaming(folder: Path, generated: dict[str, Any]) -> None:
    """Two sweeps of one token; one slot, so every request is a miss and reads one expert."""
    assert len(generated["tokens"]) == 2 and generated["prompt_tokens"] == 1
    opened = Checkpoint.open(folder)
    experts = generated["tiers"]["ram"]["experts"]
    assert experts["requests"] == experts["misses"] == 2 * (LAYERS - 1) * TOP_K
    assert experts["hits"] == experts["late"] == 0
    assert experts["bytes"] == experts["misses"] * opened.expert_bytes
    trunk, streamed = generated["tiers"]["ram"]["trunk"], set(range(LAYERS))
    streamed -= set(generated["plan"]["resident_layers"])
    assert trunk["requests"] == trunk["hits"] + trunk["late"] + trunk["misses"] == 2 * LAYERS
    assert trunk["hits"] + trunk["late"] >= 2 * (LAYERS - len(streamed)), "the others are there"
    assert trunk["misses"] <= 2, "what comes next is read ahead"
    sizes = [sum(t.location.length for t in opened.trunk(i)) for i in streamed]
    ahead = trunk["bytes"] - 2 * sum(sizes)  # of the sweep that would have followed
    assert 0 <= ahead <= 2 * max(sizes)


def test_the_kernel_agrees_about_what_was_read() -> None:
    """``/proc/self/io`` against our own account, on files without holes: nothing is read twice,
    nothing lies in the page cache."""
    folder = checkpoint(**STREAMED)
    answer = json.loads(
        command("generate", folder, "abc", "-n", 3, "--json", "--ignore-end", "--cache", "2M")
    )
    disk, ram = answer["tiers"]["disk"], answer["tiers"]["ram"]
    if set(disk["modes"].values()) != {"direct"}:
        pytest.skip("the file system of the temporary folder refuses direct reads")
    experts, kernel = ram["experts"], answer["kernel_read_bytes"]
    demanded = experts["bytes"] - experts["prefetch_bytes"]
    assert demanded == experts["misses"] * Checkpoint.open(folder).expert_bytes
    assert experts["bytes"] > 20 * MB
    useful = sum(kind["bytes"] for kind in ram.values())
    assert useful == experts["bytes"]  # all else is resident, and loading is no request
    assert disk["alignment_overhead_bytes"] < 2 * READ_ALIGN * disk["reads"]
    # A library may still page code in while it runs.
    assert useful <= kernel <= useful + disk["alignment_overhead_bytes"] + 4 * MB


# ---- routing ----


def embedding(weights: Weights, tokens: Sequence[int]) -> F64:
    """Rows of the embedding, [n, hidden]."""
    return weights.get(MODEL + "embed_tokens.weight")[list(tokens)]


def routed(weights: Weights, layer: int, e: F64, eps: float) -> tuple[NDArray[np.int64], F64, F64]:
    """Chosen experts in rising order, their weights, and the lead of the last one chosen.

    Every projection is zero, so no sublayer adds anything: of the entries that attention
    residuals mix, the first block summary is the embedding ``e`` and all others are zero.
    """
    name = f"{MODEL}layers.{layer}."
    entries = np.zeros((layer // 4 + 2, *e.shape))
    entries[0] = e
    query = weights.get(name + "mlp_res_norm.weight") * weights.get(name + "mlp_res_proj.weight")[0]
    shares = softmax((rms(entries, eps) * query).sum(-1).T).T
    h = (shares[..., None] * entries).sum(0)
    x = rms(h, eps) * weights.get(name + "post_attention_layernorm.weight")
    scores = sigmoid(x @ weights.get(name + "block_sparse_moe.gate.weight").T)
    biased = scores + weights.get(name + "block_sparse_moe.gate.e_score_correction_bias")
    order = np.argsort(-biased, axis=-1, kind="stable")
    chosen = np.sort(order[:, :TOP_K], axis=-1)
    last = np.take_along_axis(biased, order[:, TOP_K - 1 : TOP_K + 1], -1)
    share = np.take_along_axis(scores, chosen, -1)
    return chosen, share / share.sum(-1, keepdims=True), last[:, 0] - last[:, 1]


def test_routing_equals_an_independent_calculation(folder: Path, tmp_path: Path) -> None:
    tokens = [5, 9, 700, 5, 31, 1023]
    np.save(tmp_path / "t.npy", np.array(tokens))
    command(
        "logits", folder, "--tokens", tmp_path / "t.npy", "--out", tmp_path / "l.npy",
        "--dtype", "float32", "--routing", tmp_path / "r.npz", "--last", 1,
    )  # fmt: skip
    weights, found = Weights(folder), np.load(tmp_path / "r.npz")
    text = scaled_config()["text_config"]
    assert text["routed_scaling_factor"] == 1 and text["moe_renormalize"]
    e = embedding(weights, tokens)
    assert found["layers"].tolist() == list(range(1, LAYERS))
    clear = 0
    for i, layer in enumerate(found["layers"]):
        chosen, share, lead = routed(weights, int(layer), e, text["rms_norm_eps"])
        sure = lead > 1e-5
        clear += int(sure.sum())
        assert (found["experts"][i][sure] == chosen[sure]).all(), layer
        assert np.abs(found["weights"][i] - share)[sure].max() < 1e-5
    assert clear >= 40  # of 48
    assert not np.load(tmp_path / "l.npy").any()  # the head is a hole


# ---- R35: no 32-bit number anywhere ----

MARKS = (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5)  #: bytes around the limits of 32-bit numbers


def _huge(path: Path, size: int, base: int = 0) -> None:
    """A file of ``base + size`` bytes, a hole but for one byte at each mark and the last one."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(base + size)
        for i, mark in enumerate((*(m for m in MARKS if m < size), size - 1)):
            file.seek(base + mark)
            file.write(bytes([i + 1]))


def test_a_location_of_more_than_4_gib_r35(tmp_path: Path) -> None:
    """Pieces of a large file around the limits of 32-bit numbers."""
    size, base = 2**32 + 4096 + 17, 8 + 321
    _huge(tmp_path / "f", size, base)
    tier = DiskTier([tmp_path / "f"], lambda page: [])
    for mark in (*MARKS, size - 1):
        begin = max(0, mark - 9)
        into = np.zeros(min(1 << 20, size - begin), np.uint8)
        tier.read_scatter([(Location(0, base + begin, into.size), into)]).wait()
        wanted = [i + 1 for i, m in enumerate((*MARKS, size - 1)) if begin <= m < begin + into.size]
        assert into[into != 0].tolist() == wanted
        assert into[mark - begin] in wanted
    tier.close()


def test_pieces_of_a_tensor_of_2_2_gb_r35() -> None:
    """Cut into reads of at most 1 MiB, each of which goes to its own place."""
    size = 2_200_000_000
    memory = mmap.mmap(-1, size)  # reserved, not touched
    tasks = _group([(Location(0, 77, size), np.frombuffer(memory, np.uint8))])
    start, end = np.frombuffer(memory, np.uint8).ctypes.data, 77
    for extent, targets in tasks:
        assert extent.offset == end and extent.length <= STAGING
        assert sum(target.size for _, target in targets) == extent.length
        assert targets[0][1].ctypes.data - start == extent.offset - 77
        end += extent.length
    assert end == 77 + size


def _huge_embedding(place: Path) -> Path:
    """A model whose embedding takes 2.7 GB, a hole but for a few of its last rows."""
    config = scaled_config()
    config["text_config"].update(vocab_size=163_840, hidden_size=8192, num_hidden_layers=2)
    config["text_config"]["linear_attn_config"].update(kda_layers=[1], full_attn_layers=[2])
    config["vision_config"]["text_hidden_size"] = 8192
    make_tiny_full(place, 3, config=config)
    return place


def test_rows_beyond_2_gib_of_an_embedding_r35(tmp_path: Path) -> None:
    opened = Checkpoint.open(_huge_embedding(tmp_path / "m"))
    place = opened.globals()["embed_tokens.weight"].location
    assert place.length == 163_840 * 8192 * 2 > 2**31
    rows = [0, 131_071, 131_072, 163_838, 163_839]  # 131,072 rows are 2**31 bytes
    with opened.files[place.file].open("r+b") as file:
        for row in rows:
            file.seek(place.offset + row * 8192 * 2)
            file.write(np.full(8192, 0x3F80 + row % 97, "<u2").tobytes())
    tier = DiskTier(opened.files, lambda page: opened.expert(*page).extents)
    plan = Plan(0, (), frozenset(), False, False, 0, 0, 0, 0, 0, 64, 0, 0, ())
    weights = ModelWeights(opened, tier, plan)
    found = weights.embed([*rows, 131_070], torch.bfloat16)
    bits = found.view(torch.int16).numpy()
    for i, row in enumerate(rows):
        assert (bits[i] == 0x3F80 + row % 97).all(), row
    assert not bits[-1].any()
    tier.close()
