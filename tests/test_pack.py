"""What a pack holds: the same tensors, byte for byte, aligned and in order, as a valid model."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import k3offload.spec
from k3offload.check import check
from k3offload.checkpoint import Checkpoint
from k3offload.errors import UsageError
from k3offload.inspect import inspect, render
from k3offload.pack import Packed, pack
from k3offload.spec import ModelSpec
from tests.helpers_checkpoint import (
    INDEX,
    Raw,
    change_shard,
    config,
    hub_cache,
    read_shard,
    reindex,
    shards,
    split,
    tiny,
)
from tests.helpers_engine import BRIEF
from tests.helpers_pack import PADDING, digests, places, stamp, tensors

ALIGN = 4096
KINDS: dict[str, dict[str, Any]] = {
    "nano": {},
    # a norm of odd length, so that what follows it would not lie at a multiple of 4
    "odd": {"size": "odd", "layers": 4, "q_lora": 87},
    "kimi-linear": {"size": "kimi-linear"},
    # pages of 3 x 4096 bytes and more, as K3's are a multiple of 4096: no padding between them
    "even": {"layers": 4, "latent": 64, "moe_inter": 128, "experts": 5, "topk": 2, "vision": False},
}


@pytest.fixture(scope="module", params=KINDS, ids=list(KINDS))
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Packed]:
    """A model, its pack, and what packing says."""
    root = tmp_path_factory.mktemp("pack")
    source = tiny(root / "source", **KINDS[request.param])
    return source, root / "out", pack(source, root / "out")


def test_every_tensor_is_there_byte_for_byte(packed: tuple[Path, Path, Packed]) -> None:
    source, out, result = packed
    before, after = tensors(source), tensors(out)
    assert after == before
    assert result.tensors == len(before)
    assert result.tensor_bytes == sum(len(raw.data) for raw in before.values())
    assert result.file_bytes == sum(path.stat().st_size for path in shards(out))


def test_experts_are_single_aligned_pages_in_order(packed: tuple[Path, Path, Packed]) -> None:
    _, out, _ = packed
    checkpoint = Checkpoint.open(out)
    moe = checkpoint.spec.moe
    assert moe is not None
    assert checkpoint.one_read_experts == checkpoint.spec.expert_count
    order = []
    for layer in checkpoint.spec.moe_layers:
        for expert in range(moe.experts):
            (extent,) = checkpoint.expert(layer, expert).extents
            assert extent.offset % ALIGN == 0
            order.append((checkpoint.files[extent.file].name, extent.offset))
    assert order == sorted(order)


def test_the_trunk_of_a_layer_is_one_aligned_run(packed: tuple[Path, Path, Packed]) -> None:
    _, out, _ = packed
    checkpoint, where = Checkpoint.open(out), places(out)
    for layer in checkpoint.spec.layers:
        mine = sorted(tensor.location for tensor in checkpoint.trunk(layer.index))
        assert mine[0].offset % ALIGN == 0
        for one, two in itertools.pairwise(mine):
            assert (one.file, one.offset + one.length) == (two.file, two.offset)
    embedding = next(name for name in where if name.endswith("embed_tokens.weight"))
    head = next(name for name in where if name.endswith("lm_head.weight"))
    assert where[embedding].begin % ALIGN == where[head].begin % ALIGN == 0


def test_tensors_lie_at_multiples_of_their_elements(packed: tuple[Path, Path, Packed]) -> None:
    """Readers that map a shard into memory want it so."""
    _, out, _ = packed
    sizes = {"BF16": 2, "F32": 4, "U8": 1}
    where = places(out)
    for name, raw in tensors(out).items():
        assert where[name].begin % sizes[raw.dtype] == 0, name


def test_padding_is_zeros_of_less_than_a_block_and_only_where_needed(
    packed: tuple[Path, Path, Packed],
) -> None:
    _, out, _ = packed
    where = places(out)
    fill = {n: r for path in shards(out) for n, r in read_shard(path).items() if PADDING in n}
    assert all(not any(raw.data) and 0 < len(raw.data) < ALIGN for raw in fill.values())
    names = list(where)
    for name in fill:
        follower = names[names.index(name) + 1]
        assert where[follower].begin % ALIGN == 0
        assert where[follower].file == where[name].file
    assert sorted(fill, key=lambda n: int(n[len(PADDING) :])) == [n for n in names if n in fill]
    checkpoint = Checkpoint.open(out)
    if checkpoint.expert_bytes % ALIGN == 0:  # as in K3: none between experts, or before the trunk
        assert not any(PADDING in name for name in names[: -len(checkpoint.globals()) - 2])


def test_the_folder_is_a_model_that_every_check_accepts(packed: tuple[Path, Path, Packed]) -> None:
    source, out, _ = packed
    assert check(out, full=True) == check(source, full=True)
    facts, before = inspect(out), inspect(source)
    assert (facts.packed, before.packed) == (True, False)
    assert facts.sizes == before.sizes
    assert facts.bytes_by_group == before.bytes_by_group
    assert "a pack with a trunk of bfloat16" in render(facts)
    assert "a pack" not in render(before)
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"] == {name: place.file for name, place in places(out).items()}
    assert index["metadata"]["total_size"] == facts.total_bytes


def test_the_safetensors_library_reads_every_tensor(packed: tuple[Path, Path, Packed]) -> None:
    source, out, _ = packed
    wanted = tensors(source)
    seen = set()
    for path in shards(out):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                if name.startswith(PADDING):
                    continue
                tensor = file.get_tensor(name)
                seen.add(name)
                assert tuple(tensor.shape) == wanted[name].shape
                flat = tensor.reshape(-1).view(torch.uint8)
                assert flat.numpy().tobytes() == wanted[name].data
    assert seen == set(wanted)


def test_config_and_side_files(packed: tuple[Path, Path, Packed]) -> None:
    source, out, _ = packed
    after = json.loads((out / "config.json").read_text())
    field = after.pop("k3offload_pack")
    assert after == json.loads((source / "config.json").read_text())
    assert field == {"version": 1, "trunk": "bfloat16", "source": field["source"]}
    assert len(field["source"]) == 64
    others = {p.name for p in source.iterdir()} - {p.name for p in shards(source)}
    others -= {"make_tiny.json"}  # the mark of a folder that make-tiny may erase
    assert {p.name for p in out.iterdir()} - {p.name for p in shards(out)} == others
    for name in others - {"config.json", INDEX}:
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_a_pack_of_a_pack_is_the_same(packed: tuple[Path, Path, Packed], tmp_path: Path) -> None:
    _, out, _ = packed
    pack(out, tmp_path / "again")
    first, second = digests(out), digests(tmp_path / "again")
    assert first.pop("config.json") != second.pop("config.json")  # another source
    assert first == second


def test_small_shards(tmp_path: Path) -> None:
    """Only whole experts and whole runs, none above the limit, filled up, in the same order."""
    source = tiny(tmp_path / "m", **BRIEF, experts=48)
    whole, cut, limit = tmp_path / "whole", tmp_path / "cut", 450_000
    pack(source, whole)
    result = pack(source, cut, shard_size=limit)
    assert tensors(cut) == tensors(source)
    sizes = [path.stat().st_size for path in shards(cut)]
    assert max(sizes) <= limit
    assert len(sizes) == result.shards > len(shards(whole))
    first_of_layer_1 = sizes[1]
    assert first_of_layer_1 > limit - 2 * 16_384 - 2 * ALIGN  # one more expert would not fit
    checkpoint = Checkpoint.open(cut)
    assert checkpoint.one_read_experts == checkpoint.spec.expert_count
    names = [[name for name in places(folder) if PADDING not in name] for folder in (whole, cut)]
    assert names[0] == names[1]
    with pytest.raises(UsageError, match=r"Shards of 400,000 bytes are too small") as refusal:
        pack(source, tmp_path / "no", shard_size=400_000)
    least = int(re.findall(r"--shard-size (\d+)", str(refusal.value))[0])
    pack(source, tmp_path / "least", shard_size=least)
    assert max(path.stat().st_size for path in shards(tmp_path / "least")) > least - 2 * ALIGN
    assert not (tmp_path / "no").exists()
    assert not (tmp_path / "no.k3pack-partial").exists()


def test_sources_as_people_have_them(tmp_path: Path) -> None:
    """R26, R35, R66: links of a hub cache, shards in two folders, experts in pieces over many
    shards; the pack is the same each time, and every source is left as it was."""
    source = tiny(tmp_path / "m", **BRIEF)
    pack(source, tmp_path / "out")
    wanted = {n: d for n, d in digests(tmp_path / "out").items() if n != "config.json"}

    snapshot = hub_cache(source, tmp_path / "hub")
    before = stamp(tmp_path / "hub")
    pack(snapshot, tmp_path / "of_links")
    assert stamp(tmp_path / "hub") == before
    assert digests(tmp_path / "of_links") == digests(tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "of_links").iterdir())

    (tmp_path / "second").mkdir()
    moved = shards(source)[1]
    os.rename(moved, tmp_path / "second" / moved.name)
    pack(source, tmp_path / "of_two", extra_folders=[tmp_path / "second"])
    assert digests(tmp_path / "of_two") == digests(tmp_path / "out")
    os.rename(tmp_path / "second" / moved.name, moved)

    split(source, 37)
    before = stamp(source)
    assert Checkpoint.open(source).one_read_experts < 64
    pack(source, tmp_path / "of_pieces")
    assert stamp(source) == before
    assert {n: d for n, d in digests(tmp_path / "of_pieces").items() if n in wanted} == wanted


def test_a_read_only_source(tmp_path: Path) -> None:
    """R66."""
    source = tiny(tmp_path / "m", **BRIEF)
    for path in source.iterdir():
        path.chmod(0o400)
    source.chmod(0o500)
    before = stamp(source)
    pack(source, tmp_path / "out")
    assert stamp(source) == before
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "out").iterdir())
    source.chmod(0o700)


def test_spellings_of_the_source_are_kept(tmp_path: Path) -> None:
    """What transformers writes: other shapes of vectors, other names, tensors of no elements; and
    F16 and F32 where the release has BF16."""
    source = tiny(tmp_path / "m", **BRIEF)

    def change(held: dict[str, Raw]) -> dict[str, Raw]:
        out = {}
        for name, raw in held.items():
            shape, data, dtype = raw.shape, raw.data, raw.dtype
            if name.endswith("A_log"):
                shape = (1, 1, *raw.shape, 1)
            if name.endswith("q_proj.weight"):
                wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
                data, dtype = wide.tobytes(), "F32"
            out[name.replace(".mlp.", ".block_sparse_moe.")] = Raw(dtype, shape, data)
        nothing = f"{next(iter(held)).rpartition('.')[0]}.none.weight"
        return {**out, nothing: Raw("BF16", (0, 8), b"")}

    change_shard(shards(source)[0], change)
    reindex(source)
    pack(source, tmp_path / "out")
    assert tensors(tmp_path / "out") == tensors(source)
    assert check(tmp_path / "out", full=True) == check(source, full=True)
    assert any(name.endswith(".none.weight") for name in tensors(tmp_path / "out"))


def test_a_tied_head_stored_or_not(tmp_path: Path) -> None:
    source = tiny(tmp_path / "m", **BRIEF)
    config(source, lambda c: c.__setitem__("tie_word_embeddings", True))
    config(source, lambda c: c["text_config"].__setitem__("tie_word_embeddings", True))
    pack(source, tmp_path / "stored", "int8")
    assert "language_model.lm_head.weight_int8" in tensors(tmp_path / "stored")
    assert "the stored head is used" in inspect(tmp_path / "stored").notes[0]
    head = "language_model.lm_head.weight"
    for path in shards(source):
        if head in read_shard(path):
            change_shard(path, lambda held: {n: r for n, r in held.items() if n != head})
    reindex(source)
    pack(source, tmp_path / "tied", "int8")
    assert not any("lm_head" in name for name in tensors(tmp_path / "tied"))
    assert check(tmp_path / "tied", full=True) == []


def test_what_stays_behind_is_said(tmp_path: Path) -> None:
    source = tiny(tmp_path / "m", **BRIEF)
    (source / "figures").mkdir()
    with (source / "other.gguf").open("wb") as file:
        file.truncate(1 << 28)
    (source / "chat_template.jinja").write_text("{{ 'żółć' }}", "utf-8")
    (source / ".gitattributes").write_text("*")
    (source / "stray.safetensors").write_bytes(b"x")
    result = pack(source, tmp_path / "out")
    assert "figures, other.gguf" in result.notes[0]
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert "chat_template.jinja" in there
    assert not there & {"figures", "other.gguf", ".gitattributes", "stray.safetensors"}


@pytest.mark.parametrize("name", ["my models/Żółć 通义 #1 100%", "-p", "x" * 200, "\udcff\udcfe"])
def test_odd_names(tmp_path: Path, name: str) -> None:
    """R67: of the source and of the pack."""
    source = tiny(tmp_path / name / "m", **{**BRIEF, "layers": 2})
    out = tmp_path / name / f"pack {name[-10:]}"
    pack(source, out)
    assert tensors(out) == tensors(source)


def test_the_release_needs_no_padding() -> None:
    """Its experts, its embedding and its head are whole blocks of 4096 bytes."""
    spec = ModelSpec.load(Path(k3offload.spec.__file__).parent / "released")
    assert spec.expert_bytes == 4284 * ALIGN
    ends = [t for t in spec.global_tensors() if math.prod(t.shape) > spec.hidden]
    assert [t.nbytes % ALIGN for t in ends] == [0, 0]
