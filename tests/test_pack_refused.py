"""R20, R66: where no pack may be written, and folders that say they are packs and are not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.check import check
from k3offload.checkpoint import Checkpoint
from k3offload.errors import CheckpointError, ConfigError, UsageError
from k3offload.pack import pack
from k3offload.spec import ModelSpec
from tests.helpers_checkpoint import (
    Raw,
    change_shard,
    config,
    hub_cache,
    problem_of,
    read_shard,
    reindex,
    shards,
    tiny,
)
from tests.helpers_engine import BRIEF
from tests.helpers_pack import PADDING, digests, stamp

ATTENTION = "language_model.model.layers.0.self_attn."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("refused") / "m", **BRIEF)


@pytest.fixture(scope="module")
def int8(source: Path) -> Path:
    out = source.parent / "int8"
    pack(source, out, "int8")
    return out


def copy(folder: Path, out: Path) -> Path:
    """A copy of a pack that may be changed."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    return out


# ---- places ----


def test_never_into_the_source(source: Path, tmp_path: Path) -> None:
    """R66: the source itself, inside it, by any link, in a hub's blobs, in a second folder."""
    snapshot = hub_cache(source, tmp_path / "hub")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "into").symlink_to(source / "new")  # dangling: writing would make the target
    (tmp_path / "second").mkdir()
    spread = tiny(tmp_path / "spread", **BRIEF)
    os.rename(shards(spread)[0], tmp_path / "second" / shards(spread)[0].name)
    before = [stamp(folder) for folder in (source, tmp_path / "hub", tmp_path / "second")]
    places = [
        (source, source), (source, source / "pack"), (source, source / "a" / ".." / "pack"),
        (source, tmp_path / "link"), (source, tmp_path / "link" / "pack"),
        (source, tmp_path / "into"), (snapshot, snapshot / "pack"),
        (snapshot, tmp_path / "hub" / "blobs" / "pack"), (spread, tmp_path / "second" / "pack"),
    ]  # fmt: skip
    for model, out in places:
        with pytest.raises(UsageError, match="lies inside the model"):
            pack(model, out, extra_folders=[tmp_path / "second"] if model == spread else ())
    after = [stamp(folder) for folder in (source, tmp_path / "hub", tmp_path / "second")]
    assert after == before
    assert not list(source.parent.glob("*partial")) + list(tmp_path.rglob("*partial"))


def test_only_to_a_new_or_empty_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"is not empty \(it holds mine\.txt\)"):
        pack(source, tmp_path / "full")
    with pytest.raises(UsageError, match="is a file"):
        pack(source, tmp_path / "file")
    with pytest.raises(UsageError, match="is not a folder"):
        pack(source, tmp_path / "none" / "out")
    (tmp_path / "disk").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: path == tmp_path / "disk")
        with pytest.raises(UsageError, match="a disk is mounted"):
            pack(source, tmp_path / "disk")
    assert (tmp_path / "full" / "mine.txt").read_text() == "x"
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file", "disk"}
    (tmp_path / "to_disk").symlink_to(tmp_path / "disk")
    pack(source, tmp_path / "to_disk")  # a link to an empty folder: that folder
    assert (tmp_path / "to_disk").is_symlink()
    assert shards(tmp_path / "disk")


def test_the_same_pack_again_does_nothing(source: Path, int8: Path, tmp_path: Path) -> None:
    out = copy(int8, tmp_path / "out")
    (out / "k3offload_pack.journal").write_bytes(b"{}\n")  # a kill left it
    assert pack(source, out, "int8").already
    assert digests(out) == digests(int8)
    with pytest.raises(UsageError, match="is not empty"):
        pack(source, out, "mxfp4")
    with shards(out)[1].open("ab") as file:
        file.write(b"x")
    with pytest.raises(UsageError, match="is not empty"):
        pack(source, out, "int8")


@pytest.mark.parametrize("stranger", ["notes.txt", "sub", "link", "model-1.safetensors"])
def test_nothing_of_others_in_the_folder_it_grows_in(
    source: Path, tmp_path: Path, stranger: str
) -> None:
    folder = tmp_path / "out.k3pack-partial"
    folder.mkdir()
    place = folder / stranger
    if stranger == "sub":
        place.mkdir()
    elif stranger == "link":
        place = folder / "config.json"
        place.symlink_to(source / "config.json")
    else:
        place.write_text("mine")
    with pytest.raises(UsageError, match="is not of a pack"):
        pack(source, tmp_path / "out")
    assert [path.name for path in folder.iterdir()] == [place.name]


def test_the_folder_it_grows_in_is_no_link(source: Path, tmp_path: Path) -> None:
    """R66."""
    before = stamp(source)
    (tmp_path / "out.k3pack-partial").symlink_to(source)
    with pytest.raises(UsageError, match="is a link"):
        pack(source, tmp_path / "out")
    assert stamp(source) == before


# ---- options and values ----


def test_precisions_that_make_no_sense(source: Path, int8: Path, tmp_path: Path) -> None:
    for model, trunk, says in [
        (source, "int4", "--trunk int4 is not known"),
        (int8, "mxfp4", "is int8 already"),
        (int8, "bfloat16", "is int8 already"),
    ]:
        assert says in str(problem_of(partial(pack, model, tmp_path / "out", trunk)))
    assert not (tmp_path / "out.k3pack-partial").exists()


def test_a_value_that_is_not_finite(tmp_path: Path) -> None:
    """Quantising would hide it in a scale; copied it is found by every reader."""
    source = tiny(tmp_path / "m", **BRIEF)

    def spoil(held: dict[str, Raw]) -> None:
        raw = held[ATTENTION + "q_proj.weight"]
        data = np.frombuffer(raw.data, np.uint16).copy()
        data[-1] = 0x7FC0
        held[ATTENTION + "q_proj.weight"] = raw._replace(data=data.tobytes())

    change_shard(shards(source)[0], spoil)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.weight"):
        pack(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


# ---- what a config may say ----


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"version": 2, "trunk": "int8"}, "k3offload_pack.version = 2: packs of version 1"),
        ({"version": 0, "trunk": "int8"}, "k3offload_pack.version = 0"),
        ({"version": "1", "trunk": "int8"}, 'k3offload_pack.version = "1"'),
        ({"version": True, "trunk": "int8"}, "k3offload_pack.version = true"),
        ({"trunk": "int8"}, "k3offload_pack.version is missing"),
        ({"version": 1}, "k3offload_pack.trunk is missing"),
        ({"version": 1, "trunk": "int4"}, 'k3offload_pack.trunk = "int4"'),
        ({"version": 1, "trunk": ["int8"]}, 'k3offload_pack.trunk = ["int8"]'),
        ({"version": 1, "trunk": "int8", "groups": 32}, "k3offload_pack.groups = 32"),
        ([1], "k3offload_pack must be an object"),
        ("int8", "k3offload_pack must be an object"),
    ],
)
def test_what_a_pack_may_say_of_itself(source: Path, field: Any, says: str) -> None:
    value = json.loads((source / "config.json").read_text())
    with pytest.raises(ConfigError) as refusal:
        ModelSpec.from_config({**value, "k3offload_pack": field})
    assert f"config.json: {says}" in str(refusal.value)


def test_where_a_pack_says_it(source: Path) -> None:
    value = json.loads((source / "config.json").read_text())
    field = {"version": 1, "trunk": "int8", "source": "x"}
    assert ModelSpec.from_config({**value, "k3offload_pack": field}).trunk_precision == "int8"
    released = ModelSpec.from_config({**value, "k3offload_pack": None})
    assert (released.pack_version, released.trunk_precision) == (0, "bfloat16")
    inside = {**value, "text_config": {**value["text_config"], "k3offload_pack": field}}
    with pytest.raises(ConfigError, match=r"text_config\.k3offload_pack"):
        ModelSpec.from_config(inside)


# ---- folders that contradict their config ----


def _rename(old: str, new: str) -> Callable[[dict[str, Raw]], dict[str, Raw]]:
    return lambda held: {(new if name == old else name): raw for name, raw in held.items()}


def _retype(name: str, dtype: str) -> Callable[[dict[str, Raw]], None]:
    return lambda held: held.__setitem__(name, held[name]._replace(dtype=dtype))


CODES, SCALE = ATTENTION + "q_proj.weight_int8", ATTENTION + "q_proj.weight_scale"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: {n: r for n, r in held.items() if n != SCALE}, f"{SCALE} is missing"),
        (lambda held: {n: r for n, r in held.items() if n != CODES}, f"{CODES} is missing"),
        (_retype(CODES, "U8"), f"{CODES} is stored as U8; expected I8"),
        (_retype(SCALE, "F16"), f"{SCALE} is stored as F16; expected BF16"),
        (_rename(CODES, ATTENTION + "q_proj.weight_packed"), f"{CODES} is missing"),
        (lambda held: {**held, ATTENTION + "q_proj.weight": held[CODES]._replace(dtype="U8")},
         "q_proj.weight' is not part of this model"),
        (lambda held: {n: r._replace(shape=r.shape[::-1]) if n == SCALE else r
                       for n, r in held.items()}, f"{SCALE} has shape"),
    ],
)  # fmt: skip
def test_quantised_tensors_are_checked_as_all_others(
    int8: Path, tmp_path: Path, change: Any, says: str
) -> None:
    folder = copy(int8, tmp_path / "m")
    change_shard(shards(folder)[0], change)
    reindex(folder)
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(folder)
    assert says in str(refusal.value)
    assert any(says in f.what for f in check(folder) if f.level == "error")


def test_config_and_shards_of_two_kinds(source: Path, int8: Path, tmp_path: Path) -> None:
    """The precision that the config names is the one that the tensors must have."""
    folder = copy(int8, tmp_path / "m")
    for trunk in ("bfloat16", "mxfp4"):
        field = {"version": 1, "trunk": trunk}
        config(folder, methodcaller("update", k3offload_pack=field))
        with pytest.raises(CheckpointError, match=r"\.weight\w* (is missing|has shape)"):
            Checkpoint.open(folder)
    config(folder, lambda c: c.pop("k3offload_pack"))
    with pytest.raises(CheckpointError, match="is missing from the shards"):
        Checkpoint.open(folder)
    plain = copy(source, tmp_path / "plain")
    field = {"version": 1, "trunk": "int8"}
    config(plain, lambda c: c.__setitem__("k3offload_pack", field))
    with pytest.raises(CheckpointError, match=r"weight_int8 is missing"):
        Checkpoint.open(plain)


def test_padding_belongs_to_packs_only(source: Path, tmp_path: Path) -> None:
    folder = copy(source, tmp_path / "m")
    extra = Raw("U8", (8,), bytes(8))
    change_shard(shards(folder)[0], lambda held: {**held, PADDING + "0": extra})
    reindex(folder)
    with pytest.raises(CheckpointError, match=r"k3offload\.padding\.0' is not part"):
        Checkpoint.open(folder)
    config(folder, lambda c: c.__setitem__("k3offload_pack", {"version": 1, "trunk": "bfloat16"}))
    assert len(read_shard(shards(folder)[0])) > 1
    Checkpoint.open(folder)
