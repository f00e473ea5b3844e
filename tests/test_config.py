"""Sizes as people type them, exactly; and back."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3offload.config import align_up, parse_size, show_size
from k3offload.errors import UsageError

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "t": 10**12, "Ki": 2**10, "gib": 2**30}


@pytest.mark.parametrize(
    ("given_size", "size"),
    [
        ("16G", 16 * 10**9), ("16GiB", 2**34), ("512M", 512 * 10**6), (" 1.5 kB ", 1500),
        ("2000000000", 2 * 10**9), ("0", 0), ("16e9", 16 * 10**9), ("1b", 1),
        (7, 7), (0, 0), (16e9, 16 * 10**9), (1.5, 1), (2**63 - 1, 2**63 - 1),
        ("9007199254740993", 2**53 + 1),  # what a float would round
        ("9223372.036854775807T", 2**63 - 1),
    ],
)  # fmt: skip
def test_sizes(given_size: str | float, size: int) -> None:
    found = parse_size(given_size)
    assert found == size and type(found) is int


@given(st.integers(0, 10**12), st.integers(0, 6), st.sampled_from(sorted(UNITS)))
def test_sizes_are_exact(digits: int, decimals: int, unit: str) -> None:
    text = str(digits).zfill(decimals + 1)
    text = f"{text[:-decimals]}.{text[-decimals:]}" if decimals else text
    exact = math.floor(Fraction(digits, 10**decimals) * UNITS[unit])
    if exact < 2**63:
        assert parse_size(text + unit) == exact


@pytest.mark.parametrize(
    "wrong",
    ["", "lots", "16X", "-5", "+5", "1e", "1e-3", "G", "1.G", ".5G", "0x10", "1_000", "1 2",
     "\uff19",     "nan", "inf", "9" * 400, "9" * 6000, "1e99", "9223373T", -1, -0.5, 2**63, 1e300,
     math.nan, math.inf, True, False, None, b"16G", [16]],
)  # fmt: skip
def test_what_is_no_size(wrong: object) -> None:
    """Refused in a short sentence, whatever its length."""
    with pytest.raises(UsageError, match="is not a size") as refusal:
        parse_size(wrong)  # type: ignore[arg-type]
    assert len(str(refusal.value)) < 120


def test_a_number_too_long_to_print_is_no_size() -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(10**5000)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (17_547_264, "17.5 MB"), (123e9, "123 GB"),
     (1_560_860_324_864, "1.56 TB"), (-2e6, "-2 MB")],
)  # fmt: skip
def test_shown_sizes(size: float, text: str) -> None:
    assert show_size(size) == text


def test_align_up() -> None:
    assert [align_up(n, 64) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
