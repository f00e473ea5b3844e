"""A quantised trunk in a pack: the quantisers' own bytes, and the inventory that was predicted."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import k3offload.spec
from k3offload import pack_quantise
from k3offload.check import check
from k3offload.checkpoint import Checkpoint
from k3offload.inspect import inspect, render
from k3offload.kernels.quantize import int8, mxfp4
from k3offload.pack import pack
from k3offload.precision import GROUP, quantised
from k3offload.spec import ModelSpec
from tests.helpers_checkpoint import Raw, change_shard, reindex, shards, tiny
from tests.helpers_engine import BRIEF
from tests.helpers_pack import digests, places, tensors

PRECISIONS = ("int8", "mxfp4")
ENDS = {"int8": ("_int8", "_scale"), "mxfp4": ("_packed", "_scale")}
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
KINDS: dict[str, dict[str, Any]] = {
    "brief": BRIEF,
    "odd": {"size": "odd", "layers": 4, "vision": False},
    "kimi-linear": {"size": "kimi-linear", "layers": 5},
}


@pytest.fixture(scope="module", params=KINDS, ids=list(KINDS))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("trunk") / "m", **KINDS[request.param])


@pytest.fixture(scope="module", params=PRECISIONS)
def packed(request: pytest.FixtureRequest, source: Path) -> tuple[Path, str, Path]:
    """Source, precision, pack."""
    out = source.parent / request.param
    pack(source, out, request.param, threads=3)
    return source, request.param, out


def expected(name: str, raw: Raw, precision: str) -> dict[str, Raw]:
    """What a tensor of the source becomes: whole, by the quantisers themselves."""
    if ".experts." in name or not quantised(name, raw.shape, precision):
        return {name: raw}
    weight = torch.frombuffer(bytearray(raw.data), dtype=DTYPES[raw.dtype]).view(raw.shape)
    made = {"int8": int8, "mxfp4": mxfp4}[precision](weight.float())
    types = ("I8", "BF16") if precision == "int8" else ("U8", "U8")
    return {
        name + end: Raw(dtype, tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for end, dtype, t in zip(ENDS[precision], types, made, strict=True)
    }


def test_each_tensor_is_copied_or_quantised(packed: tuple[Path, str, Path]) -> None:
    source, precision, out = packed
    wanted: dict[str, Raw] = {}
    for name, raw in tensors(source).items():
        wanted |= expected(name, raw, precision)
    assert tensors(out) == wanted
    assert any(name.endswith("down_proj.weight" + ENDS[precision][0]) for name in wanted)
    assert any(name.endswith("embed_tokens.weight") for name in wanted)


def test_any_grouping_and_any_threads_give_the_same_bytes(
    packed: tuple[Path, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, precision, out = packed
    monkeypatch.setattr(pack_quantise, "ROWS", 7 * 160)
    pack(source, tmp_path / "out", precision, threads=1)
    assert digests(tmp_path / "out") == digests(out)


def test_a_pack_of_a_quantised_pack_is_the_same(
    packed: tuple[Path, str, Path], tmp_path: Path
) -> None:
    _, precision, out = packed
    result = pack(out, tmp_path / "again")
    assert result.trunk == precision
    first, second = digests(out), digests(tmp_path / "again")
    assert first.pop("config.json") != second.pop("config.json")  # another source
    assert first == second


def test_the_inventory_is_predicted(packed: tuple[Path, str, Path]) -> None:
    """Names, dtypes, shapes and bytes come from config.json alone; every check works."""
    source, precision, out = packed
    spec = ModelSpec.load(out)
    assert spec.trunk_precision == precision
    assert spec == dataclasses.replace(
        ModelSpec.load(source), trunk_precision=spec.trunk_precision, pack_version=1
    )
    held = tensors(out)
    predicted = {t.name: t for t in spec.tensors()}
    assert held.keys() == predicted.keys()
    for name, raw in held.items():
        assert raw.dtype == predicted[name].dtype
        assert len(raw.data) == predicted[name].nbytes
        assert [n for n in raw.shape if n != 1] == [n for n in predicted[name].shape if n != 1]
    facts = inspect(out)
    assert facts.bytes_by_group == spec.bytes_by_group()
    assert facts.tensors == spec.tensor_count == len(held)
    assert facts.sizes["trunk_precision"] == precision
    assert f"a pack with a trunk of {precision}" in render(facts)
    assert json.loads(json.dumps(facts.to_dict()))["packed"] is True
    assert [f for f in check(out, full=True) if f.level != "note"] == []


def test_codes_and_scales_lie_together_in_an_aligned_run(packed: tuple[Path, str, Path]) -> None:
    _, precision, out = packed
    where, checkpoint = places(out), Checkpoint.open(out)
    codes = [name for name in where if name.endswith(".weight" + ENDS[precision][0])]
    codes = [name for name in codes if ".experts." not in name]
    assert codes
    for name in codes:
        scale = where[name[: -len(ENDS[precision][0])] + "_scale"]
        assert (where[name].file, where[name].end) == (scale.file, scale.begin)
        assert scale.begin % 2 == 0
    for layer in checkpoint.spec.layers:
        mine = sorted(tensor.location for tensor in checkpoint.trunk(layer.index))
        assert mine[0].offset % 4096 == 0
        assert sum(t.length for t in mine) == mine[-1].offset + mine[-1].length - mine[0].offset
        assert checkpoint.spec.layer_trunk_bytes(layer.index) == sum(t.length for t in mine)


def test_other_source_dtypes(tmp_path: Path) -> None:
    """F32 and F16 matrices are quantised from what they are."""
    folder = tiny(tmp_path / "m", **BRIEF)

    def widen(held: dict[str, Raw]) -> dict[str, Raw]:
        out = {}
        for name, raw in held.items():
            dtype = "F32" if "q_proj" in name else "F16" if "k_proj" in name else raw.dtype
            if raw.dtype == "BF16" and dtype != "BF16":
                values = torch.frombuffer(bytearray(raw.data), dtype=torch.bfloat16)
                values = (values.float() * 1.01).to(DTYPES[dtype])
                raw = Raw(dtype, raw.shape, values.numpy().tobytes())
            out[name] = raw
        return out

    change_shard(shards(folder)[0], widen)
    pack(folder, tmp_path / "out", "int8")
    held, before = tensors(tmp_path / "out"), tensors(folder)
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"language_model.model.layers.0.self_attn.{part}.weight"
        wanted = expected(name, before[name], "int8")
        assert {n: held[n] for n in wanted} == wanted
    assert before[name]._replace(data=b"").dtype == "BF16"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_damage_in_a_pack_is_found(tmp_path: Path, precision: str) -> None:
    """A scale that is not a number, by ``check --full``."""
    folder = tmp_path / "out"
    pack(tiny(tmp_path / "m", **BRIEF), folder, precision)
    name = "language_model.model.layers.0.self_attn.q_proj.weight_scale"

    def spoil(held: dict[str, Raw]) -> None:
        data = bytearray(held[name].data)
        data[-2:] = b"\xff\xff"
        held[name] = held[name]._replace(data=bytes(data))

    change_shard(shards(folder)[0], spoil)
    assert any(name in f.what for f in check(folder, full=True) if f.level == "error")


def test_a_scale_alone_does_not_make_a_tied_head(tmp_path: Path) -> None:
    source, folder = tiny(tmp_path / "m", **BRIEF), tmp_path / "out"
    value = json.loads((source / "config.json").read_text())
    value["tie_word_embeddings"] = value["text_config"]["tie_word_embeddings"] = True
    (source / "config.json").write_text(json.dumps(value))
    pack(source, folder, "int8")
    codes = "language_model.lm_head.weight_int8"
    last = folder / places(folder)[codes].file
    change_shard(last, lambda held: {n: r for n, r in held.items() if n != codes})
    reindex(folder)
    assert any(f"{codes} is missing" in f.what for f in check(folder) if f.level == "error")


def test_bytes_of_the_release_with_a_quantised_trunk() -> None:
    """From the configuration alone: every matrix by its own formula."""
    released = ModelSpec.load(Path(k3offload.spec.__file__).parent / "released")
    plain = {t.name: t for layer in released.layers for t in released.layer_tensors(layer.index)}
    plain |= {t.name: t for t in released.global_tensors()}
    for precision, bits in (("int8", 8 + 16 / 64), ("mxfp4", 4 + 8 / 32)):
        changes: dict[str, Any] = {"trunk_precision": precision}
        spec = dataclasses.replace(released, **changes)
        changed = [t for t in plain.values() if quantised(t.name, t.shape, precision)]
        saved = sum(math.prod(t.shape) * (16 - bits) / 8 for t in changed)
        assert released.total_bytes - spec.total_bytes == saved
        assert spec.tensor_count == released.tensor_count + len(changed)
        assert all(t.shape[1] % GROUP[precision] == 0 for t in changed)
        assert spec.expert_bytes == released.expert_bytes


def test_numbers_of_a_pack_are_near_those_of_its_source(packed: tuple[Path, str, Path]) -> None:
    """Independent of the quantisers: decode by the formats as they are written down."""
    source, precision, out = packed
    held = tensors(out)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name, raw in tensors(source).items():
        if raw.dtype != "BF16" or name + ENDS[precision][0] not in held:
            continue
        weight = (np.frombuffer(raw.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        codes, scale = (np.frombuffer(held[name + e].data, np.uint8) for e in ENDS[precision])
        if precision == "int8":
            high = scale.view(np.uint16).astype(np.uint32) << 16
            factor, steps = high.view(np.float32).astype(np.float64)[:, None], 0.51
            got = codes.view(np.int8).reshape(-1, 64) * factor
        else:
            factor, steps = 2.0 ** (scale.astype(np.float64) - 127)[:, None], 1.001
            got = e2m1[np.stack([codes & 15, codes >> 4], -1).reshape(-1, 32)] * factor
        assert (np.abs(got - weight.reshape(got.shape)) <= steps * factor).all(), name
