"""Text to ids and back: split pattern, merges, special tokens, giant texts (R10 R40 R42)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload.errors import TokenizerError
from k3offload.tokenizer import PATTERN, Tokenizer, cut_text, read_ranks
from tests.helpers_tokenizer import NANO, SINGLE, Spec, make_folder

NANO_BASE = 2048


LOADED = Tokenizer.load(NANO, Spec(2304, 2048, (2050,)))
RANKS = read_ranks(NANO / "tiktoken.model", NANO_BASE)


@pytest.fixture
def nano() -> Tokenizer:
    return LOADED


def own_split(text: str) -> list[str]:
    """The rule in the words of another regex library, Han kept out by lookahead, not by sets."""
    upper = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
    lower = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
    tail = r"(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?"
    lead = r"(?:(?![\r\n\p{L}\p{N}]).)?"
    rule = (
        rf"\p{{Han}}+|{lead}{upper}*{lower}+{tail}|{lead}{upper}+{lower}*{tail}|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return [m[0] for m in regex.finditer(rule, text, flags=regex.DOTALL)]


def own_merge(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Merges the neighbours of lowest joint rank until none are left; slow and plain."""
    parts = [bytes([b]) for b in piece]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts))
                 if a + b in ranks]  # fmt: skip
        if not pairs:
            return [ranks[p] for p in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


GOLDEN: dict[str, list[int]] = {
    "And Jesus said unto him,": [296, 664, 390, 321, 334, 44],
    "In the beginning God created the heaven": [
        1168,
        258,
        1816,
        1242,
        385,
        280,
        559,
        283,
        258,
        743,
    ],
    "The seal of Ammiel is 4719.": [406, 594, 268, 824, 109, 1215, 326, 32, 52, 55, 49, 57, 46],
    "太初有道 and the Word, 道 was God's.": [
        229,
        164,
        170,
        229,
        136,
        157,
        230,
        156,
        137,
        233,
        129,
        147,
        267,
        258,
        983,
        376,
        44,
        32,
        233,
        129,
        147,
        369,
        385,
        499,
        46,
    ],
    "they'Ll don't 1234567\r\n\r\n  x": [
        256,
        1606,
        39,
        76,
        108,
        286,
        284,
        39,
        116,
        32,
        49,
        50,
        51,
        52,
        53,
        54,
        55,
        13,
        10,
        13,
        10,
        32,
        32,
        120,
    ],
}

GOLDEN_PIECES = [
    ("Hello world", ["Hello", " world"]),
    ("天地玄黄abc", ["天地玄黄", "abc"]),
    ("abc天地", ["abc", "天地"]),
    (" 天地", [" ", "天地"]),
    ("x天y", ["x", "天", "y"]),
    ("天's", ["天", "'s"]),
    ("it's WE'LL they'Re", ["it's", " WE'LL", " they'Re"]),
    ("don't'd", ["don't", "'d"]),
    ("1234567", ["123", "456", "7"]),
    ("a1234", ["a", "123", "4"]),
    ("HelloWorld", ["Hello", "World"]),
    ("HTTPServer", ["HTTPServer"]),  # upper run, then one lower run: the first form takes it whole
    ("a\r\n\r\nb", ["a", "\r\n\r\n", "b"]),
    ("end.\n\nNext", ["end", ".\n\n", "Next"]),
    ("a  \n b", ["a", "  \n", " b"]),
    ("a   b", ["a", "  ", " b"]),
    ("a   ", ["a", "   "]),
    ("x / y//", ["x", " /", " y", "//"]),
    ("//\n/", ["//\n", "/"]),  # no slash in the tail of the fifth form
    ("#tag", ["#tag"]),
    ("\tTab", ["\tTab"]),
    ("naïve é", ["naïve", " é"]),
    ("e\u0301a", ["e\u0301a"]),
    ("カタカナ漢字", ["カタカナ", "漢字"]),
    ("한국어 여기", ["한국어", " 여기"]),
    ("👍🏽!", ["👍🏽!"]),
    ("३४५६", ["३४५", "६"]),
    ("$ 5", ["$", " ", "5"]),
]


@pytest.mark.parametrize(("text", "pieces"), GOLDEN_PIECES)
def test_split_pattern_golden(text: str, pieces: list[str], tmp_path: Path) -> None:
    """R42: Han, Han beside Latin, contractions, digits, line ends, blanks."""
    assert own_split(text) == pieces
    # Give every piece and every forbidden join a rank of its own: a piece is then one token, and
    # a pattern that cuts elsewhere gives other ids.
    wanted = {p.encode() for p in pieces}
    joins = {a.encode() + b.encode() for a, b in itertools.pairwise(pieces)}
    grown = {t[:n] for t in wanted | joins for n in range(2, len(t) + 1)}
    grown |= {p[:n] for p in wanted for n in range(2, len(p) + 1)}
    tokens = [*SINGLE, *sorted(grown, key=len)]
    tokenizer = Tokenizer.load(make_folder(tmp_path, tokens), Spec(len(tokens) + 256))
    ranks = {t: i for i, t in enumerate(tokens)}
    expected = [i for p in pieces for i in own_merge(p.encode(), ranks)]
    assert tokenizer.encode(text) == expected


ALPHABET = (
    "aZéÉʰªֿ天漢ー々カん한א1३½ \t\r\n\u00a0\u3000'streSVdlL\u2019.-/_👍🏽\u200d\u0301\u0000\u01c5"
)


@settings(max_examples=300)
@given(st.text(alphabet=ALPHABET, max_size=40))
def test_encode_equals_plain_implementation(text: str) -> None:
    """R42: another regex library and the plainest form of the merge rule agree."""
    expected = [i for piece in own_split(text) for i in own_merge(piece.encode(), RANKS)]
    assert LOADED.encode(text) == expected


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    ids = LOADED.encode(text)
    assert LOADED.decode(ids) == text
    assert max(ids, default=0) < NANO_BASE


def test_nano_golden_ids(nano: Tokenizer) -> None:
    """R42: fixed ids of the embedded vocabulary; nothing is added in front or behind."""
    assert nano.encode("And Jesus said unto him,") == GOLDEN["And Jesus said unto him,"]
    for text, ids in GOLDEN.items():
        assert nano.encode(text) == ids
        assert nano.decode(ids) == text
    assert nano.encode("") == []


def test_text_that_spells_special_tokens_stays_text(nano: Tokenizer) -> None:
    """R40: every special spelling and reserved name is ordinary text, and comes back unchanged."""
    text = " ".join([*nano.specials, "<|reserved_token_2060|>", "<|reserved_token_7|>"]) + "<|end"
    ids = nano.encode(text)
    assert max(ids) < NANO_BASE
    assert nano.decode(ids) == text
    assert nano.end_ids.isdisjoint(ids)
    on_request = nano.encode("a<|open|>b[EOS]", specials=True)
    assert on_request == [*nano.encode("a"), 2051, *nano.encode("b"), 2049]


def test_every_id_decodes_singly_and_in_pairs(nano: Tokenizer) -> None:
    """R42: no id raises; ordinary ids are stable under encoding again; names are absolute."""
    for i in range(nano.vocab):
        raw = nano.token_bytes(i)
        assert raw
        assert nano.decode_bytes([i, (i * 7 + 3) % nano.vocab]).startswith(raw)
        assert nano.name(i)
        text = nano.decode([i])
        if i < NANO_BASE and "\ufffd" not in text:
            again = nano.encode(text)
            assert nano.decode(again) == text
            assert nano.encode(nano.decode(again)) == again
    names = [nano.name(i) for i in range(NANO_BASE, 2304)]
    assert names[:6] == ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
    assert names[8] == "<|reserved_token_2056|>"
    assert (names[18], names[21], names[65]) == (
        "<|media_begin|>",
        "<|media_pad|>",
        "<osagent_mode>",
    )
    assert names[254:] == ["[UNK]", "[PAD]"]
    assert len(set(names)) == 256


def test_gap_ids_take_their_absolute_reserved_name(tmp_path: Path) -> None:
    """R42: 256 ranks in a vocabulary of 640 leave ids 256..383 without bytes."""
    tokenizer = Tokenizer.load(make_folder(tmp_path), Spec(640))
    assert tokenizer.name(255) == "\\xff"
    assert [tokenizer.name(i) for i in (256, 383, 384)] == [
        "<|reserved_token_256|>",
        "<|reserved_token_383|>",
        "[BOS]",
    ]
    assert tokenizer.is_special(300)
    assert tokenizer.encode("<|reserved_token_300|>", specials=True) == list(
        b"<|reserved_token_300|>"
    )


@pytest.mark.parametrize("token", [-1, 2304, 10**12])
def test_id_outside_vocabulary(nano: Tokenizer, token: int) -> None:
    with pytest.raises(TokenizerError, match=rf"{token} is outside the vocabulary 0\.\.2303"):
        nano.decode([token])


def test_skip_specials_keeps_structure_marks(nano: Tokenizer) -> None:
    ids = nano.encode("[BOS]a<|open|>b<|sep|>c<|end_of_msg|>", specials=True)
    assert nano.decode(ids) == "[BOS]a<|open|>b<|sep|>c<|end_of_msg|>"
    assert nano.decode(ids, skip_specials=True) == "a<|open|>b<|sep|>c"


def test_invalid_utf8_becomes_replacement(nano: Tokenizer) -> None:
    """R10: one U+FFFD for each byte that belongs to no character."""
    byte_id = {nano.token_bytes(i): i for i in range(NANO_BASE)}
    ids = [byte_id[bytes([b])] for b in b"a\xff\xfeb\xe2\x82c"]
    assert nano.decode(ids) == "a\ufffd\ufffdb\ufffdc"
    assert nano.decode_bytes(ids) == b"a\xff\xfeb\xe2\x82c"


def test_lone_surrogate_is_refused_with_its_place(nano: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"U\+DC80 at character 2"):
        nano.encode("ab\udc80")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("a" * 24_999, [24_999]),
        ("a" * 25_001, [25_000, 1]),
        ("a" * 60_000, [25_000, 25_000, 10_000]),
        (" " * 25_001 + "b" * 25_001, [25_000, 25_001, 1]),
        ("ab " * 200_000, [400_000, 200_000]),
        ("a" * 410_000, [25_000] * 16 + [10_000]),
    ],
)
def test_giant_text_is_cut_where_the_release_cuts(text: str, sizes: list[int]) -> None:
    """Every 400,000 characters, and after each 25,000 of one run; a cut restarts the run."""
    pieces = list(cut_text(text))
    assert [len(p) for p in pieces] == sizes
    assert "".join(pieces) == text


def test_giant_runs_encode_in_pieces(nano: Tokenizer) -> None:
    for letter in ("a", " ", "天", "\n", "!"):
        text = letter * 50_001
        ids = nano.encode(text)
        assert ids == nano.encode(letter * 25_000) * 2 + nano.encode(letter)
        assert nano.decode(ids) == text


def test_pattern_has_the_documented_alternatives() -> None:
    """The whole pattern, so that no edit goes unseen."""
    assert PATTERN.split("|")[0] == r"\p{Han}+"
    assert PATTERN.endswith(r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
