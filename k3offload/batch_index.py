"""What a batch remembers of each document: about 60 bytes, however long its id is.

A dictionary of a million strings takes three times what its run may use, so rows lie in arrays and
are found by a table of row numbers: a hash of 128 bits in place of the id, looked for from slot to
slot.  This file knows ids as hashes; it reads no file.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Final

KEY: Final = 16  #: bytes of a hash
HAVE, ASKED, RETRY, FAILED = 1, 2, 4, 8  #: bits of ``Index.flags``


def key_of(text: str) -> bytes:
    """The hash that stands for an id or a digest.

    UTF-16 takes lone surrogates, and two that make a pair are there what they become in JSON.
    """
    return hashlib.blake2b(text.encode("utf-16-le", "surrogatepass"), digest_size=KEY).digest()


class Index:
    """A row for each document, in the order of their first ``put``.

    ``begin`` and ``length``: where the newest line of the document lies in the file, in bytes,
    if ``flags`` has ``HAVE``.
    """

    def __init__(self) -> None:
        self.flags = bytearray()
        self.begin, self.length = array("q"), array("q")
        self._keys, self._digests = bytearray(), bytearray()
        self._slots = array("i", [-1]) * 1024

    def __len__(self) -> int:
        return len(self.flags)

    def put(self, key: bytes) -> int:
        """The row of ``key``; a new one if it has none yet."""
        slot = self._slot(key)
        if self._slots[slot] >= 0:
            return self._slots[slot]
        if 2 * len(self) >= len(self._slots):
            self._grow()
            slot = self._slot(key)
        row = self._slots[slot] = len(self)
        self._keys += key
        self._digests += bytes(KEY)
        self.flags.append(0)
        self.begin.append(0)
        self.length.append(0)
        return row

    def find(self, key: bytes) -> int:
        """The row of ``key``, -1 if it has none."""
        return self._slots[self._slot(key)]

    def key(self, row: int) -> bytes:
        """The hash of the id of ``row``."""
        return bytes(self._keys[KEY * row : KEY * (row + 1)])

    def digest(self, row: int) -> bytes:
        """The hash of the digest of ``row``."""
        return bytes(self._digests[KEY * row : KEY * (row + 1)])

    def set_digest(self, row: int, digest: bytes) -> None:
        """Let ``row`` have another digest."""
        self._digests[KEY * row : KEY * (row + 1)] = digest

    def count(self, flags: int) -> int:
        """Rows with all bits of ``flags``."""
        every = range(2 * max(HAVE, ASKED, RETRY, FAILED))
        return sum(self.flags.count(one) for one in every if one & flags == flags)

    def _slot(self, key: bytes) -> int:
        """Where ``key`` is, or the free slot where it would be put."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = int.from_bytes(key[:8], "little") & mask
        while (row := slots[slot]) >= 0 and self._keys[KEY * row : KEY * (row + 1)] != key:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        self._slots = array("i", [-1]) * (2 * len(self._slots))
        for row in range(len(self)):
            self._slots[self._slot(self.key(row))] = row
