"""A vocabulary from ``tokenizer.json``, for checkpoints that ship that instead of a rank file.

Knows the ``tokenizers`` library and the byte alphabet of byte-level vocabularies; only those are
accepted, because every other kind cannot give back the bytes of a single token.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from .config_fields import CONFIG_LIMIT, read_json
from .errors import TokenizerError
from .paths import show_path

JSON_LIMIT: Final = 200_000_000  #: bytes of a tokenizer.json
_ADVICE = "Fetch this file again from the repository the weights came from."


def optional_json(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any] | None:
    """The object in a JSON file, or None where the folder has no such entry.

    Raises ConfigError when the file is damaged, larger than ``limit`` bytes, or a link to nowhere.
    """
    return read_json(path, limit) if os.path.lexists(path) else None


class JsonCodec:
    """Encodes through the ``tokenizers`` library; see ``tokenizer.Codec`` for the methods."""

    def __init__(self, path: Path, vocab: int) -> None:
        import tokenizers  # rarely needed and slow to import

        data = read_json(path, JSON_LIMIT)
        if not _is_byte_level(data):
            raise TokenizerError(
                f"{show_path(path)} is not a byte-level vocabulary.",
                "Use the tiktoken.model of the model instead.",
            )
        added = data.get("added_tokens") or []
        try:
            self._full = tokenizers.Tokenizer.from_str(json.dumps(data))
            # Without its added tokens the library cannot turn text into one: this one encodes
            # what users write.
            self._plain = tokenizers.Tokenizer.from_str(json.dumps({**data, "added_tokens": []}))
            self.specials = {str(t["content"]): int(t["id"]) for t in added}
            self.hidden = frozenset(int(t["id"]) for t in added if t.get("special"))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{show_path(path)} cannot be used: {error}.", _ADVICE) from None
        self._names = {token: name for name, token in self.specials.items()}
        self._bytes_of = _alphabet()
        largest = max(self._full.get_vocab().values(), default=0)
        if largest >= vocab:
            raise TokenizerError(
                f"{show_path(path)} names token {largest}, "
                f"but config.json's vocab_size is {vocab}.",
                _ADVICE,
            )

    def encode(self, text: str, specials: bool) -> list[int]:
        encoder = self._full if specials else self._plain
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes | None:
        if token in self._names:
            return self._names[token].encode()
        word: str | None = self._full.id_to_token(token)
        return None if word is None else bytes(self._bytes_of[c] for c in word)

    def token_id(self, name: str) -> int | None:
        token: int | None = self._full.token_to_id(name)
        return token


def _is_byte_level(data: dict[str, Any]) -> bool:
    decoder = data.get("decoder")
    model = data.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    if not (isinstance(decoder, dict) and isinstance(words, dict)):
        return False
    parts = [decoder, *(decoder.get("decoders") or [])]
    letters = _alphabet()
    added = {t.get("content") for t in data.get("added_tokens") or [] if isinstance(t, dict)}
    return any(part.get("type") == "ByteLevel" for part in parts if isinstance(part, dict)) and all(
        word in added or all(c in letters for c in word) for word in words
    )


def _alphabet() -> dict[str, int]:
    """The byte each letter of a byte-level vocabulary stands for.

    Printable Latin-1 letters stand for themselves; the 68 other bytes take U+0100, U+0101, ...
    in order.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(others)}
