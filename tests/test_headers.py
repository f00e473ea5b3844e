"""R28: hostile, malformed and unusual safetensors headers."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3offload import headers
from k3offload.errors import CheckpointError
from k3offload.headers import HeaderEntry, read_header
from tests.helpers_checkpoint import problem_of, write_raw

F32_2 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def entry(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def read(path: Path) -> list[HeaderEntry]:
    return list(read_header(path))


BAD: dict[str, tuple[Any, bytes, str]] = {
    "end-before-begin": ({"t": entry(begin=8, end=0)}, b"\0" * 8, "t"),
    "past-the-end-of-file": ({"t": entry()}, b"\0" * 4, "t"),
    "gap-before-the-first": ({"t": entry(begin=8, end=16)}, b"\0" * 16, "t"),
    "gap": ({"a": entry(), "t": entry(begin=12, end=20)}, b"\0" * 20, "t"),
    "overlap": ({"a": entry(), "t": entry(begin=4, end=12)}, b"\0" * 12, "t"),
    "same-bytes-twice": ({"a": entry(), "t": entry()}, b"\0" * 8, "t"),
    "size-is-not-shape-times-dtype": ({"t": entry(shape=(3,))}, b"\0" * 8, "t"),
    "unknown-dtype": ({"t": entry(dtype="Q9")}, b"\0" * 8, "t"),
    "dtype-is-no-text": ({"t": entry(dtype=["F32"])}, b"\0" * 8, "t"),
    "negative-dimension": ({"t": entry(shape=(-2,))}, b"\0" * 8, "t"),
    "dimension-is-true": ({"t": entry(shape=(True, 2))}, b"\0" * 8, "t"),
    "dimension-is-fractional": ({"t": entry(shape=(2.0,))}, b"\0" * 8, "t"),
    "shape-whose-product-overflows": ({"t": entry(shape=(1 << 62, 1 << 62))}, b"\0" * 8, "t"),
    "offset-of-2**63": ({"t": entry("U8", (1 << 62,), 1 << 62, 1 << 63)}, b"", "t"),
    "three-offsets": ({"t": {**F32_2, "data_offsets": [0, 8, 8]}}, b"\0" * 8, "t"),
    "no-offsets": ({"t": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "t"),
    "entry-is-a-number": ({"t": 3}, b"\0" * 8, "t"),
    "trailing-bytes": ({"t": entry()}, b"\0" * 9, ""),
    "data-without-tensors": ({}, b"\0", ""),
    "metadata-is-a-list": ({"__metadata__": [1], "t": entry()}, b"\0" * 8, "__metadata__"),
    "metadata-holds-numbers": ({"__metadata__": {"a": 1}, "t": entry()}, b"\0" * 8, "__metadata__"),
}


@pytest.mark.parametrize("kind", BAD)
def test_malformed_header_is_refused_naming_file_and_tensor(tmp_path: Path, kind: str) -> None:
    header, data, name = BAD[kind]
    path = write_raw(tmp_path / "x.safetensors", json.dumps(header), data)
    with pytest.raises(CheckpointError) as error:
        read(path)
    assert "x.safetensors" in error.value.problem
    assert name in error.value.problem
    assert error.value.remedy


TEXTS: dict[str, str | bytes] = {
    "duplicate-tensor": '{"t": %s, "t": %s}' % ((json.dumps(F32_2),) * 2),
    "duplicate-field": '{"t": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0,8]}}',
    "not-json": "{nothing",
    "a-list": "[1, 2]",
    "a-number": "7",
    "empty": "",
    "not-utf-8": b'{"\xff": 1}',
    "too-deep": "[" * 200_000,
    "a-number-of-5000-digits": '{"t": {"dtype": "U8", "shape": [%s]}}' % ("9" * 5000),
    "text-after-the-object": json.dumps({"t": F32_2}) + "x",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_header_that_is_no_object_is_refused(tmp_path: Path, kind: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", TEXTS[kind], b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read(path)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 1 << 33])
def test_giant_declared_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = write_raw(tmp_path / "x.safetensors", "{}", length=length)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"x\.safetensors.*declares a header of"):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", "{}", length=5000)
    with pytest.raises(CheckpointError, match=r"truncated.*needs 5008 bytes, the file has 10"):
        read(path)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_file_too_short_for_a_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match="too short for a header"):
        read(path)


@pytest.mark.parametrize("metadata", ["absent", None, {}, {"format": "pt"}])
def test_metadata_may_be_absent_null_or_empty(tmp_path: Path, metadata: Any) -> None:
    head: dict[str, Any] = {} if metadata == "absent" else {"__metadata__": metadata}
    path = write_raw(tmp_path / "x.safetensors", json.dumps({**head, "t": F32_2}), b"\0" * 8)
    (found,) = read(path)
    start = path.stat().st_size - 8
    assert found == HeaderEntry("t", "F32", (2,), start, start + 8)


@pytest.mark.parametrize("length", range(99_994, 100_009))
def test_header_lengths_around_100000(tmp_path: Path, length: int) -> None:
    text = json.dumps({"t": F32_2}).ljust(length)
    (found,) = read(write_raw(tmp_path / "x.safetensors", text, b"\0" * 8))
    assert (found.begin, found.end) == (8 + length, 16 + length)


def test_unusual_but_valid(tmp_path: Path) -> None:
    """Scalars, empty tensors, any order in the header, names outside ASCII."""
    header = {
        "z": entry("U8", (4,), 4, 8), "scalar": entry("F32", (), 0, 4),
        "empty": entry("BF16", (0, 3), 4, 4), "żółć": entry("I64", (1,), 8, 16),
    }  # fmt: skip
    found = {e.name: e for e in read(write_raw(tmp_path / "x", json.dumps(header), b"\0" * 16))}
    assert found["scalar"].shape == ()
    assert found["empty"].end == found["empty"].begin
    assert found["żółć"].end - found["z"].end == 8
    assert read(write_raw(tmp_path / "none", "{}")) == []


def _huge(count: int, extra: str = "") -> str:
    rows = (
        f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(count)
    )
    return "{" + ",".join(rows) + extra + "}"


def test_streamed_headers_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_raw(tmp_path / "x.safetensors", _huge(500), b"\0" * 500)
    plain = read(path)
    monkeypatch.setattr(headers, "STREAM_ABOVE", 10)
    assert read(path) == plain
    assert len(plain) == 500


@pytest.mark.parametrize(
    "extra",
    [
        ',"t3":{"dtype":"U8","shape":[1],"data_offsets":[500,501]}',
        ',"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[500,501]}',
        ',"x":{"dtype":"U8","shape":[1],"data_offsets":[501,502]}',
        ',"x":',
    ],
)
def test_streamed_headers_refuse_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    monkeypatch.setattr(headers, "STREAM_ABOVE", 10)
    path = write_raw(tmp_path / "x.safetensors", _huge(500, extra), b"\0" * 501)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read(path)


@pytest.mark.parametrize("text", ["[]", "3", "[[[[[[[[[[[["])
def test_streamed_header_must_be_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(headers, "STREAM_ABOVE", 0)
    with pytest.raises(CheckpointError, match="malformed"):
        read(write_raw(tmp_path / "x.safetensors", text))


def test_large_header_stays_under_50_mb(tmp_path: Path) -> None:
    """A 90 MB header of blanks around little content is legal; it must not be held in memory."""
    path = write_raw(tmp_path / "x.safetensors", _huge(1000).ljust(90_000_000), b"\0" * 1000)
    tracemalloc.start()
    count = sum(1 for _ in read_header(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 1000
    assert peak < 50_000_000


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors cannot be read: No such file"):
        read(tmp_path / "gone.safetensors")


@given(blob=st.binary(max_size=300))
def test_any_bytes_give_entries_or_our_error(tmp_path_factory: Any, blob: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(blob)
    assert "x.safetensors" in (problem_of(lambda: read(path)) or "x.safetensors")


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-5, 1 << 70)
            | st.floats()
            | st.text(max_size=4),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4
                )
            ),
            max_leaves=12,
        ),
        max_size=4,
    )
)
def test_any_json_object_gives_entries_or_our_error(tmp_path_factory: Any, value: Any) -> None:
    path = write_raw(tmp_path_factory.mktemp("any") / "x.safetensors", json.dumps(value), b"\0" * 8)
    assert "x.safetensors" in (problem_of(lambda: read(path)) or "x.safetensors")
