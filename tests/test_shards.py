"""Where shards are: index, missing and truncated files, hub caches with links, several folders."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from k3offload.checkpoint import Checkpoint
from k3offload.errors import CheckpointError, UsageError
from k3offload.shards import read_index, safe_shard_name
from tests.helpers_checkpoint import INDEX, hub_cache, read_shard, shards, split, tiny

SHARD3 = "model-00003-of-000012.safetensors"


def refused(folder: Path, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder, **kwargs)
    assert error.value.remedy
    return error.value.problem


# ---- R05: what is missing ----
def test_missing_shard_is_named_with_its_tensors(tmp_path: Path) -> None:
    """R05: exactly the missing file and how many tensors it held, stray files or not."""
    folder = tiny(tmp_path / "m")
    count = len(read_shard(folder / SHARD3))
    (folder / SHARD3).rename(folder / "extra-00001.safetensors")
    problem = refused(folder)
    assert "1 of 12 shards is missing" in problem
    assert f"{SHARD3} ({count} tensors)" in problem
    assert problem.count("model-0") == 1
    assert "extra-00001" not in problem


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    gone = shards(folder)[2:5]
    for path in gone:
        path.unlink()
    problem = refused(folder)
    assert "3 of 12 shards are missing" in problem
    assert all(path.name in problem for path in gone)


def test_stray_file_is_noted(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    shutil.copy(folder / SHARD3, folder / "extra-00001.safetensors")
    (note,) = Checkpoint.open(folder).notes
    assert "extra-00001.safetensors" in note.what


def test_missing_vision_shards_do_not_matter_to_text(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    for path in shards(folder)[-2:]:
        path.unlink()
    checkpoint = Checkpoint.open(folder)
    assert [note.level for note in checkpoint.notes] == ["warning", "warning"]
    assert all(path.is_file() for path in checkpoint.files)
    assert len(checkpoint.files) == 10


def test_missing_numbered_shard_without_an_index(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    (folder / INDEX).unlink()
    (folder / SHARD3).unlink()
    assert SHARD3 in refused(folder)


def test_half_finished_download(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    (folder / SHARD3).rename(folder / f"{SHARD3}.incomplete")
    assert f"only {SHARD3}.incomplete is there" in refused(folder)


def test_empty_folder(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    for path in (*shards(folder), folder / INDEX):
        path.unlink()
    assert "holds no safetensors file" in refused(folder)


# ---- R06: what is too short or too long ----
@pytest.mark.parametrize("cut", [1, 4096, -1, -4096])
def test_file_of_the_wrong_length(tmp_path: Path, cut: int) -> None:
    """R06: file, expected and real size; bytes too many are refused as well."""
    folder = tiny(tmp_path / "m")
    size = (folder / SHARD3).stat().st_size
    os.truncate(folder / SHARD3, size - cut)
    problem = refused(folder)
    assert SHARD3 in problem
    assert str(size) in problem
    assert str(size - cut) in problem


# ---- R26: hub caches ----
@pytest.mark.parametrize("relative", [True, False])
def test_hub_cache_with_links(tmp_path: Path, relative: bool) -> None:
    """R26: snapshot entries are links to blobs; ``files`` are the blobs themselves."""
    cache = tmp_path / "models--k3"
    snapshot = hub_cache(tiny(tmp_path / "m"), cache, relative)
    checkpoint = Checkpoint.open(snapshot)
    assert {path.parent for path in checkpoint.files} == {cache / "blobs"}
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert Checkpoint.open(link).files == checkpoint.files
    here = os.getcwd()
    os.chdir(snapshot)
    try:
        assert Checkpoint.open(".").files == checkpoint.files
    finally:
        os.chdir(here)


def test_dangling_link_names_entry_and_blob(tmp_path: Path) -> None:
    snapshot = hub_cache(tiny(tmp_path / "m"), tmp_path / "c")
    blob = tmp_path / "c" / "blobs" / f"sha-{SHARD3}"
    blob.rename(f"{blob}.incomplete")
    problem = refused(snapshot)
    assert str(snapshot / SHARD3) in problem
    assert str(blob) in problem
    assert f"only {blob.name}.incomplete is there" in problem


def test_zero_byte_blob_names_entry_and_blob(tmp_path: Path) -> None:
    snapshot = hub_cache(tiny(tmp_path / "m"), tmp_path / "c")
    blob = tmp_path / "c" / "blobs" / f"sha-{SHARD3}"
    os.truncate(blob, 0)
    problem = refused(snapshot)
    assert str(snapshot / SHARD3) in problem
    assert str(blob) in problem
    assert "empty" in problem


def test_link_to_an_unfinished_blob(tmp_path: Path) -> None:
    snapshot = hub_cache(tiny(tmp_path / "m"), tmp_path / "c")
    blob = tmp_path / "c" / "blobs" / f"sha-{SHARD3}"
    partial = blob.rename(f"{blob}.incomplete")
    (snapshot / SHARD3).unlink()
    (snapshot / SHARD3).symlink_to(partial)
    problem = refused(snapshot)
    assert str(snapshot / SHARD3) in problem
    assert partial.name in problem
    assert "never finished" in problem


def test_link_to_itself(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    (folder / SHARD3).unlink()
    (folder / SHARD3).symlink_to(folder / SHARD3)
    assert "leads back to itself" in refused(folder)


def test_truncated_blob_names_the_entry(tmp_path: Path) -> None:
    snapshot = hub_cache(tiny(tmp_path / "m"), tmp_path / "c")
    blob = tmp_path / "c" / "blobs" / f"sha-{SHARD3}"
    os.truncate(blob, blob.stat().st_size - 1)
    problem = refused(snapshot)
    assert SHARD3 in problem
    assert str(blob) in problem


def test_dangling_index(tmp_path: Path) -> None:
    snapshot = hub_cache(tiny(tmp_path / "m"), tmp_path / "c")
    (tmp_path / "c" / "blobs" / f"sha-{INDEX}").unlink()
    assert INDEX in refused(snapshot)


def test_cache_root_gets_a_hint(tmp_path: Path) -> None:
    snapshot = hub_cache(tiny(tmp_path / "m"), tmp_path / "c")
    shutil.copy(snapshot / "config.json", tmp_path / "c" / "config.json")
    with pytest.raises(CheckpointError, match="point at the folder inside snapshots/"):
        Checkpoint.open(tmp_path / "c")


def test_a_folder_in_a_shards_place(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    (folder / SHARD3).unlink()
    (folder / SHARD3).mkdir()
    assert "is not a file" in refused(folder)


# ---- several folders ----
def test_shards_over_several_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path / "m")
    drives = [tmp_path / "drive a", tmp_path / "drive-b"]
    every = shards(folder)
    for number, drive in enumerate(drives):
        drive.mkdir()
        for path in every[number::2]:
            path.rename(drive / path.name)
    assert "10 of 12 shards are missing" in refused(folder)  # two hold vision only
    checkpoint = Checkpoint.open(folder, extra_folders=drives)
    assert {path.parent for path in checkpoint.files} == set(drives)
    monkeypatch.setenv("K3_MODEL_FOLDERS", os.pathsep.join(map(str, drives)))
    assert Checkpoint.open(folder).files == checkpoint.files
    monkeypatch.setenv("K3_MODEL_FOLDERS", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        Checkpoint.open(folder)


def test_model_folder_comes_first(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert {p.parent for p in Checkpoint.open(folder, extra_folders=[other]).files} == {folder}


def test_two_versions_of_a_shard_are_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / SHARD3).write_bytes(b"different")
    problem = refused(folder, extra_folders=[tmp_path / "other"])
    assert SHARD3 in problem
    assert "different sizes" in problem


def test_shards_in_subfolders(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    (folder / "part").mkdir()
    (folder / SHARD3).rename(folder / "part" / SHARD3)
    for name, shard in index["weight_map"].items():
        if shard == SHARD3:
            index["weight_map"][name] = f"part/{SHARD3}"
    (folder / INDEX).write_text(json.dumps(index))
    assert folder / "part" / SHARD3 in Checkpoint.open(folder).files


# ---- hostile indexes ----
@pytest.mark.parametrize(
    "name",
    [
        "/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "..\\x.safetensors",
        "C:\\x.safetensors", "a//x.safetensors", "./x.safetensors", "x.bin", "", "x\0.safetensors",
        "\ud800.safetensors",
    ],
)  # fmt: skip
def test_unsafe_shard_names(tmp_path: Path, name: str) -> None:
    """An index may not lead out of the model folder."""
    assert not safe_shard_name(name)
    if name.startswith("\ud800"):
        return  # the parser replaces it before the name gets here
    folder = tiny(tmp_path / "m")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.b": name}}))
    problem = refused(folder)
    assert "'a.b'" in problem
    assert INDEX in problem


def test_safe_shard_names() -> None:
    assert safe_shard_name("model-00001-of-000096.safetensors")
    assert safe_shard_name("part/Żółć 通义.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", "7", '{"weight_map": []}', '{"weight_map": {}}', "\xff",
        '{"weight_map": {"a": 1}}', '{"weight_map": {"a": {"b": "c"}}}', '{"weight_map": {"a":0}}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "[" * 100_000,
        '{"weight_map": {"a": "x.safetensors"', '{"weight_map": {"a": ' + "[" * 100_000,
        '{"weight_map": {"a": "x.safetensors"}} 7', '{"x": 1, "x": 2}',
    ],
    ids=range(17),
)  # fmt: skip
def test_malformed_index(tmp_path: Path, text: str) -> None:
    path = tmp_path / INDEX
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as error:
        read_index(path)
    assert INDEX in error.value.problem


def test_index_is_kept_as_hashes(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    split(folder, 5)
    index = read_index(folder / INDEX)
    assert sum(index.text.values()) + sum(index.vision.values()) == len(index.hashes)
    assert dict(index.tensors()) == json.loads((folder / INDEX).read_text())["weight_map"]
