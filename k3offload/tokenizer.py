"""Text to token ids and back, from the files a checkpoint ships.

The released models hold a rank file, ``tiktoken.model``, and no ``tokenizer.json``.  This file
knows that rank file, the split pattern that goes with it, the names of the special tokens and
every place that may declare an end id.  It reads data only: code that lies in a model folder is
never imported.  It knows nothing of chat messages, of weights, or of torch.

Two rules people rely on: ordinary text never becomes a special token, whatever it spells, unless
the caller asks for it, and no begin or end token is ever added.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from .errors import TokenizerError
from .paths import show_path
from .tokenizer_json import JsonCodec, optional_json

RANK_FILE: Final = "tiktoken.model"
SPECIALS: Final = 256  #: ids kept for special tokens, at the end of the vocabulary
CUT_TEXT: Final = 400_000  #: characters encoded in one call
CUT_RUN: Final = 25_000  #: characters of one run of blanks or of non-blanks encoded in one call

#: Names of the special tokens, by offset from the first of the 256; the others are reserved.
NAMES: Final = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
#: Structural markers that the released tokenizer does not flag as special: their text stays.
SHOWN: Final = frozenset({"<|open|>", "<|close|>", "<|sep|>"})
#: Names that end a message whatever the config files declare.
END_NAMES: Final = ("[EOS]", "<|end_of_msg|>")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: Where text is cut before merging, first alternative that matches (syntax of fancy-regex).
PATTERN: Final = "|".join(
    (
        r"\p{Han}+",
        _LEAD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _LEAD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_RUN = re.compile(r"\s+|\S+")
_SURROGATE = re.compile("[\ud800-\udfff]")


class VocabSpec(Protocol):
    """The part of a model's spec a tokenizer needs; ``ModelSpec`` has it."""

    @property
    def vocab(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> tuple[int, ...]: ...


class Codec(Protocol):
    """Bytes and ids of one vocabulary, without names of special tokens that nobody asked for."""

    specials: dict[str, int]  #: spelling -> id
    hidden: frozenset[int]  #: ids whose text ``skip_specials`` leaves out

    def encode(self, text: str, specials: bool) -> list[int]: ...
    def token_bytes(self, token: int) -> bytes | None: ...
    def token_id(self, name: str) -> int | None: ...


class Tokenizer:
    """Encodes and decodes for one model folder.  Make one with :meth:`load`.

    ``vocab`` is the number of ids the model knows, ``bos`` the declared begin id or None (never
    added to anything), ``end_ids`` the union of every id some file of the folder declares as an
    end, ``specials`` the id of every special token by its spelling.
    """

    def __init__(self, codec: Codec, vocab: int, bos: int | None, end_ids: Iterable[int]) -> None:
        self._codec = codec
        self.vocab = vocab
        self.bos = bos
        self.end_ids = frozenset(end_ids)
        self.specials = codec.specials

    @classmethod
    def load(cls, folder: Path, spec: VocabSpec) -> Tokenizer:
        """The tokenizer of a model folder; reads no weight and writes nothing.

        Raises TokenizerError when neither ``tiktoken.model`` nor ``tokenizer.json`` is there, or
        when one is damaged (named with its line), ConfigError for JSON that cannot be read.
        """
        settings = optional_json(folder / "tokenizer_config.json") or {}
        codec: Codec
        if os.path.lexists(folder / RANK_FILE):  # a link to nowhere is an error of its own
            codec = RankCodec(folder / RANK_FILE, spec.vocab, settings)
        elif (folder / "tokenizer.json").exists():
            codec = JsonCodec(folder / "tokenizer.json", spec.vocab)
        else:
            raise TokenizerError(
                f"{show_path(folder)} holds no {RANK_FILE}, so text cannot become tokens.",
                f"Copy {RANK_FILE} into it from the repository the weights came from "
                "(for Kimi K3: moonshotai/Kimi-K3, a file of 2.8 MB).",
            )
        return cls(codec, spec.vocab, spec.bos, _end_ids(folder, spec, codec, settings))

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Token ids of ``text``; nothing is added in front or behind.

        With ``specials=False`` every character is ordinary text, also ``<|end_of_msg|>``; with
        True the spellings in ``specials`` become their ids.  Raises TokenizerError for a lone
        surrogate, which no UTF-8 text can hold.
        """
        bad = _SURROGATE.search(text)
        if bad:
            raise TokenizerError(
                f"The text holds U+{ord(bad[0]):04X} at character {bad.start()}, half of a "
                "surrogate pair, which is not text.",
                "Read the text as UTF-8, or with errors='replace'.",
            )
        ids: list[int] = []
        for piece in cut_text(text):
            ids += self._codec.encode(piece, specials)
        return ids

    def decode(self, ids: Iterable[int], skip_specials: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, one for each broken character.

        ``skip_specials`` leaves out special tokens (not ``<|open|> <|close|> <|sep|>``, which
        carry the structure of a message and are not flagged special in the release).
        """
        if skip_specials:
            ids = [i for i in ids if not self.is_special(i)]
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes ``ids`` stand for, special tokens as their names."""
        return b"".join(self.token_bytes(i) for i in ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token.

        An id no file gives a meaning decodes to ``<|reserved_token_ID|>`` with the absolute id.
        Raises TokenizerError for an id outside 0..vocab-1.
        """
        found = self._lookup(token)
        return reserved(token).encode() if found is None else found

    def name(self, token: int) -> str:
        """A printable name: a special token's spelling, else its text, odd bytes as ``\\xNN``."""
        return self.token_bytes(token).decode("utf-8", errors="backslashreplace")

    def is_special(self, token: int) -> bool:
        """Whether ``skip_specials`` leaves this id out; ids without a meaning count as special."""
        return self._lookup(token) is None or token in self._codec.hidden

    def _lookup(self, token: int) -> bytes | None:
        if not 0 <= token < self.vocab:
            raise TokenizerError(
                f"Token id {token} is outside the vocabulary 0..{self.vocab - 1}.",
                "Check that these ids were made with this model's tokenizer.",
            )
        return self._codec.token_bytes(int(token))


class RankCodec:
    """Byte pairs merged by rank: the lowest rank of two neighbours first."""

    def __init__(self, path: Path, vocab: int, settings: dict[str, Any]) -> None:
        import tiktoken  # here, so that size reports need not wait for it

        self.base = vocab - SPECIALS
        ranks = read_ranks(path, self.base)
        names, self.hidden = _names(path.parent, settings, len(ranks), vocab)
        self.specials = {name: token for token, name in names.items()}
        self._names = names
        self._encoding = tiktoken.Encoding(
            "k3offload", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.specials
        )

    def encode(self, text: str, specials: bool) -> list[int]:
        ids: list[int] = (
            self._encoding.encode(text, allowed_special="all")
            if specials
            else self._encoding.encode_ordinary(text)
        )
        return ids

    def token_bytes(self, token: int) -> bytes | None:
        try:
            found: bytes = self._encoding.decode_single_token_bytes(token)
        except KeyError:
            return None
        return found

    def token_id(self, name: str) -> int | None:
        return self.specials.get(name)


def reserved(token: int) -> str:
    """The documented name of an id without one: its absolute id, not its place in the range."""
    return f"<|reserved_token_{token}|>"


def cut_text(text: str) -> Iterator[str]:
    """``text`` in pieces short enough to encode, cut where the released tokenizer cuts.

    Every 400,000 characters, and inside each of those after every 25,000 characters of one run
    of blanks or of non-blanks.  Matters for giant strings only, but there it decides the ids.
    """
    for start in range(0, len(text), CUT_TEXT):
        part = text[start : start + CUT_TEXT]
        last = 0
        for run in _RUN.finditer(part) if len(part) > CUT_RUN else ():
            for cut in range(run.start() + CUT_RUN, run.end(), CUT_RUN):
                yield part[last:cut]
                last = cut
        yield part[last:]


def read_ranks(path: Path, limit: int) -> dict[bytes, int]:
    """The rank of every byte string of a rank file, lines ``BASE64 RANK``.

    ``limit`` is the first id that belongs to special tokens.  Raises TokenizerError naming the
    file and the line for anything that is not a dense list 0..n-1 with all 256 single bytes.
    """
    ranks: dict[bytes, int] = {}
    line_of: dict[int, int] = {}
    for number, line in _lines(path):
        token, rank = _rank_line(path, number, line, limit)
        if rank in line_of:
            raise _damaged(path, number, f"rank {rank} stands on line {line_of[rank]} too")
        if token in ranks:
            first = line_of[ranks[token]]
            raise _damaged(path, number, f"the bytes {token!r} stand on line {first} too")
        ranks[token] = rank
        line_of[rank] = number
    gap = next((r for r in range(len(ranks)) if r not in line_of), None)
    if gap is not None:
        after = min(r for r in line_of if r > gap)
        raise _damaged(path, line_of[after], f"rank {after} follows, but rank {gap} is missing")
    absent = next((b for b in range(256) if bytes([b]) not in ranks), None)
    if absent is not None:
        last = max(line_of.values(), default=0)
        raise _damaged(path, last, f"the file ends and the single byte 0x{absent:02X} has no rank")
    return ranks


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from ((i, line) for i, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise TokenizerError(
            f"{show_path(path)} cannot be read: {error.strerror}.",
            "Mend its permissions or its link, or fetch it again.",
        ) from None


def _rank_line(path: Path, number: int, line: bytes, limit: int) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit() or len(fields[1]) > 9:
        raise _damaged(path, number, "a line must be BASE64, a space and a rank")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise _damaged(path, number, f"this is not base64 ({error})") from None
    if not token:
        raise _damaged(path, number, "the token is empty")
    rank = int(fields[1])
    if rank >= limit:
        raise _damaged(
            path,
            number,
            f"rank {rank} is not below {limit}, where the special tokens of config.json's "
            f"vocab_size {limit + SPECIALS} begin",
        )
    return token, rank


def _damaged(path: Path, line: int, what: str) -> TokenizerError:
    return TokenizerError(
        f"{show_path(path)}, line {line}: {what}.",
        "Fetch this file again from the repository the weights came from.",
    )


def _names(
    folder: Path, settings: dict[str, Any], ranks: int, vocab: int
) -> tuple[dict[int, str], frozenset[int]]:
    """Names of all special ids, and which of them hide; ``tokenizer_config.json`` wins."""
    base = vocab - SPECIALS
    names = {base + i: reserved(base + i) for i in range(SPECIALS)}
    declared = settings.get("added_tokens_decoder")
    if not declared:
        names.update({base + i: name for i, name in NAMES.items()})
        return names, frozenset(i for i, name in names.items() if name not in SHOWN)
    shown = set()
    path = folder / "tokenizer_config.json"
    for key, entry in declared.items() if isinstance(declared, dict) else [("", None)]:
        if not (isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise _bad_entry(path, key, "is not an object with a content")
        if not (key.isdigit() and ranks <= int(key) < vocab):
            raise _bad_entry(path, key, f"is not an id from {ranks} to {vocab - 1}")
        names[int(key)] = entry["content"]
        if entry.get("special") is False:
            shown.add(int(key))
    if len(set(names.values())) != len(names) or "" in names.values():
        raise _bad_entry(path, "", "names two ids alike, or one not at all")
    return names, frozenset(names) - shown


def _bad_entry(path: Path, key: str, what: str) -> TokenizerError:
    return TokenizerError(
        f"{show_path(path)}: the entry {key!r} of added_tokens_decoder {what}.",
        "Fetch this file again from the repository the weights came from.",
    )


def _end_ids(folder: Path, spec: VocabSpec, codec: Codec, settings: dict[str, Any]) -> set[int]:
    """Every declared end id: the files name different ones and the model uses them all."""
    generation = optional_json(folder / "generation_config.json") or {}
    declared = [
        ("config.json", spec.eos),  # of both its levels
        ("generation_config.json", generation.get("eos_token_id")),
        ("tokenizer", [codec.token_id(name) for name in END_NAMES]),
    ]
    ends: set[int] = set()
    for source, value in declared:
        for token in value if isinstance(value, Sequence) else [value]:
            if token is None:
                continue
            if type(token) is not int or not 0 <= token < spec.vocab:
                raise TokenizerError(
                    f"{show_path(folder / source)}: eos_token_id {token!r} is not an id of "
                    f"the vocabulary 0..{spec.vocab - 1}.",
                    "Correct it, or fetch this file again.",
                )
            ends.add(token)
    word = settings.get("eos_token")
    word = word.get("content") if isinstance(word, dict) else word
    if word is not None:
        token = codec.token_id(word)
        if token is None:
            raise TokenizerError(
                f"{show_path(folder / 'tokenizer_config.json')}: eos_token {word!r} is no token.",
                "Correct it, or fetch this file again.",
            )
        ends.add(token)
    return ends
