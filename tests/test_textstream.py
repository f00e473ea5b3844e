"""Streaming text: split characters, broken bytes, stop strings over every split (R10 R23)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3offload.errors import TokenizerError, UsageError
from k3offload.textstream import TextStream
from k3offload.tokenizer import Tokenizer
from tests.helpers_tokenizer import NANO, Spec

TOKENIZER = Tokenizer.load(NANO, Spec(2304))
BYTE_ID = {TOKENIZER.token_bytes(i): i for i in range(2048)}

MIXED = [
    "é",  # two bytes
    "天地",  # three
    "👍",  # four
    "👩\u200d👩\u200d👧",  # joined emoji
    "👍🏽",
    "Tie\u0302\u0301ng Vie\u0323\u0302t",  # Vietnamese, combining marks
    "Tiếng Việt",
    "a\u0000b\n",
]


class PieceDecoder:
    """A vocabulary that is exactly the pieces of one test; token i is piece i."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def is_special(self, token: int) -> bool:
        return False


def stream(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """What each piece gives out, the flush last; and the stream."""
    made = TextStream(PieceDecoder(pieces), stop)
    out = [made.push(i) for i in range(len(pieces))]
    out.append(made.flush())
    return out, made


def splits(data: bytes, most: int) -> list[list[bytes]]:
    """Every way to cut ``data`` into at most ``most`` pieces."""
    found = []
    for n in range(min(most, len(data))):
        for cuts in itertools.combinations(range(1, len(data)), n):
            edges = [0, *cuts, len(data)]
            found.append([data[a:b] for a, b in itertools.pairwise(edges)])
    return found


@pytest.mark.parametrize("text", MIXED)
def test_every_split_gives_the_whole_text(text: str) -> None:
    """R10: cut at every byte, in up to four pieces: no replacement, nothing lost, nothing twice."""
    for pieces in splits(text.encode(), 4):
        out, made = stream(pieces)
        assert "".join(out) == text
        assert made.text == text
        assert not made.stopped


def test_each_character_comes_with_its_last_byte() -> None:
    """R10: nothing waits longer than it must."""
    out, _ = stream([bytes([b]) for b in "aé天👍".encode()])
    assert out == ["a", "", "é", "", "", "天", "", "", "", "👍", ""]


def test_real_tokens_one_by_one() -> None:
    """R10: the embedded vocabulary splits these characters into several tokens."""
    for text in MIXED:
        made = TextStream(TOKENIZER)
        ids = TOKENIZER.encode(text)
        assert "".join([made.push(i) for i in ids]) + made.flush() == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xff\xfe\xc0", "\ufffd\ufffd\ufffd"),
        (b"\xe5\xa4b", "\ufffdb"),  # cut short: one character's worth of bytes, one replacement
        (b"\x80", "\ufffd"),
        (b"ok\xf0\x9f\x91", "ok\ufffd"),
    ],
)
def test_invalid_bytes_become_replacements_and_do_not_stall(data: bytes, text: str) -> None:
    """R10: a broken byte shows up at once, an incomplete end shows up at the flush."""
    for pieces in splits(data, 5):
        out, _ = stream(pieces)
        assert "".join(out) == text
    later = [*(bytes([b]) for b in data), b"next"]
    out, _ = stream(later)
    assert out[-2].endswith("next")


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_any_bytes_equal_the_full_decode(pieces: list[bytes]) -> None:
    """R10: whatever the bytes and the split, the stream equals decoding all at once."""
    out, made = stream(pieces)
    assert "".join(out) == b"".join(pieces).decode(errors="replace") == made.text


STOPS: list[tuple[str, tuple[str, ...], str | None]] = [
    ("well done now. Good bye all", ("Good bye",), "well done now. "),
    ("one\nJohn: two", ("\nJohn:",), "one"),
    ("aabxab", ("x",), "aab"),
    ("abcabcabd!", ("abcabd",), "abc"),  # the stop begins inside a false start
    ("aaab", ("aab",), "a"),
    ("no such thing Goo", ("Good",), None),
    ("abcd", ("bcd", "abcd"), ""),  # both end together: the longer one begins earlier
    ("abcd", ("abcd", "bc"), "a"),  # the one that is complete first decides
    ("xx<|end", ("<|end|>",), None),
    ("日本語です", ("語",), "日本"),
    ("stop", ("stop",), ""),
]


@pytest.mark.parametrize(("text", "stop", "cut"), STOPS)
def test_stop_strings_over_all_splits(text: str, stop: tuple[str, ...], cut: str | None) -> None:
    """R23: the text ends right before the stop, whatever the tokens; none of it leaks before."""
    data = text.encode()
    every_byte = [bytes([b]) for b in data]
    for pieces in [*splits(data, 3), every_byte]:
        out, made = stream(pieces, stop)
        assert "".join(out) == (text if cut is None else cut)
        assert made.stopped == (cut is not None)
        assert made.text == "".join(out)


def test_stop_is_seen_with_its_last_character() -> None:
    """R23: not one extra decode step; and a tail is given out as soon as it cannot be a stop."""
    made = TextStream(TOKENIZER, stop=["Good bye"])
    ids = [BYTE_ID[bytes([b])] for b in b"a Good byX Good bye"]
    out = [made.push(i) for i in ids]
    assert out == ["a", " ", *[""] * 7, "Good byX", " ", *[""] * 8]
    assert made.stopped
    assert made.push(ids[0]) == ""
    assert made.flush() == ""
    assert made.text == "a Good byX "


@given(
    st.text(alphabet="abé", max_size=12),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=20),
)
def test_stops_never_depend_on_the_split(text: str, stops: list[str], sizes: list[int]) -> None:
    """R23: equal to the definition over characters, for random texts, stops and splits."""
    cut = None
    for end in range(1, len(text) + 1):
        matches = [end - len(s) for s in stops if text[:end].endswith(s)]
        if matches:
            cut = text[: min(matches)]
            break
    pieces, rest = [], text.encode()
    for size in itertools.cycle(sizes):
        if not rest:
            break
        pieces.append(rest[:size])
        rest = rest[size:]
    out, made = stream(pieces, stops)
    assert "".join(out) == (text if cut is None else cut)
    assert made.stopped == (cut is not None)


def test_special_tokens_leave_no_text() -> None:
    """Special tokens are dropped on request only; the marks of a message's structure stay."""
    ids = TOKENIZER.encode("[BOS]a<|open|>[EOT]", specials=True)
    dropped, shown = TextStream(TOKENIZER), TextStream(TOKENIZER, skip_specials=False)
    assert "".join([dropped.push(i) for i in ids]) == "a<|open|>"
    assert "".join([shown.push(i) for i in ids]) == "[BOS]a<|open|>[EOT]"


@pytest.mark.parametrize("stop", ["text", ("a", ""), [""]])
def test_wrong_stops(stop: Sequence[str]) -> None:
    with pytest.raises(UsageError, match="not a list of non-empty strings"):
        TextStream(TOKENIZER, stop)


def test_token_outside_the_vocabulary() -> None:
    with pytest.raises(TokenizerError, match="5000 is outside the vocabulary"):
        TextStream(TOKENIZER).push(5000)
