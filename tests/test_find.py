"""What MODEL means, and where outputs may go: R26, R66."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from k3offload.errors import UsageError
from k3offload.find import EMBEDDED, find_model, find_output, published


def test_a_folder_called_nano_hides_the_embedded_model_only_if_it_holds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    embedded = find_model(EMBEDDED)
    assert (embedded / "config.json").is_file()
    (tmp_path / "nano").mkdir()
    assert find_model(EMBEDDED) == embedded
    assert find_model("./nano").resolve() == tmp_path / "nano"
    (tmp_path / "nano" / "config.json").write_text("{}")
    assert find_model(EMBEDDED).resolve() == tmp_path / "nano"


def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("no-model", "some/model", str(tmp_path / "a" / "b" / "c")):
        with pytest.raises(UsageError, match=name):
            find_model(name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder whose shard is a link to a blob elsewhere, as in a hub cache."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"weights")
    (folder / "shard").symlink_to(tmp_path / "blobs" / "abc")
    return folder


def test_outputs_that_would_touch_the_model_r66(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "l.npy").symlink_to(model / "l.npy")
    os.link(tmp_path / "blobs" / "abc", tmp_path / "hard")
    for place in (
        model / "l.npy",
        model / "sub" / "l.npy",
        model / "sub" / ".." / "l.npy",
        tmp_path / "link" / "l.npy",
        tmp_path / "l.npy",
        tmp_path / "blobs" / "abc",
        tmp_path / "hard",
        model / "config.json",
    ):
        with pytest.raises(UsageError, match="into the model"):
            find_output(place, tmp_path / "link")
    assert find_output(tmp_path / "model2.npy", model) == tmp_path / "model2.npy"


def test_places_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place, why in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "l.npy", "none is not a folder"),
        (tmp_path / "pipe", "no regular file"),
        (Path("/dev/full"), "no regular file"),
        (Path("/dev/null/l.npy"), "not a folder"),
        (Path("/proc/l.npy"), r"/proc/l\.npy cannot be written: "),
    ):
        with pytest.raises(UsageError, match=why):
            find_output(place, model)


def test_a_link_is_followed_and_stays(model: Path, tmp_path: Path) -> None:
    (tmp_path / "real.npy").write_text("old")
    (tmp_path / "link.npy").symlink_to("real.npy")
    with published(find_output(tmp_path / "link.npy", model)) as file:
        file.write(b"fresh")
    assert (tmp_path / "link.npy").is_symlink()
    assert (tmp_path / "real.npy").read_text() == "fresh"


def test_a_file_appears_when_it_is_complete_and_has_the_usual_rights(tmp_path: Path) -> None:
    place = tmp_path / "l.npy"
    (tmp_path / "l.npy.partial").write_text("mine")
    with published(place) as file:
        file.write(b"x")
        assert not place.exists()
        assert len(list(tmp_path.iterdir())) == 2
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(place.stat().st_mode) == 0o666 & ~mask
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l.npy", "l.npy.partial"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_what_is_not_complete_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    place = tmp_path / "l.npy"
    place.write_text("old")

    def write() -> None:
        with published(place) as file:
            file.write(b"x")
            raise error

    with pytest.raises(error):
        write()
    assert [p.name for p in tmp_path.iterdir()] == ["l.npy"]
    assert place.read_text() == "old"


def test_a_failed_write_names_the_file(tmp_path: Path) -> None:
    place, limits = tmp_path / "l.npy", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught, published(place) as file:
            file.write(bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(place)
    assert list(tmp_path.iterdir()) == []
