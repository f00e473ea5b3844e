"""Snapshots of prompts in a folder: they outlive the process, and processes may share them.

Each is a saved session of its own below the folder, which is bounded; the least recently used gives
way.  Those of another model, precision or kernels are left alone, and only count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .config import show_size
from .errors import DoesNotFit, K3Error, UsageError
from .paths import show_path
from .session import Session
from .session_identity import computed_by, identity
from .session_load import load_session
from .session_manifest import (
    MANIFEST,
    TOKENS,
    Manifest,
    in_use,
    is_ours,
    read_manifest,
    refuse_in_model,
)
from .state import SequenceState

if TYPE_CHECKING:
    from .engine import Engine


_FILE = 4096  #: bytes that a file takes beside its own, at most
_NAME = re.compile(r"[0-9a-f]{32}")  #: of an entry


class _Entry(NamedTuple):
    """A snapshot in the folder, last used at ``used``, a time of the file system."""

    place: Path
    size: int
    used: float


class PrefixFolder:
    """At most ``size`` bytes of snapshots below the folder ``path``, of ``prefix_place``.

    What is there is read once, now; a snapshot that another process deletes meanwhile is a miss.
    """

    def __init__(self, engine: Engine, path: str | os.PathLike[str], size: int) -> None:
        self._engine, self._path, self._size = engine, Path(os.path.abspath(path)), size
        self._ours = (identity(engine), computed_by(engine))
        self._known: dict[bytes, Path] = {}  # by tokens, int32
        for entry in self._entries():
            manifest = _manifest(entry.place)
            if manifest and (manifest.identity, manifest.computed_by) == self._ours:
                tokens = entry.place / manifest.save / TOKENS
                if tokens.is_file():
                    self._known[tokens.read_bytes()[: 4 * manifest.tokens]] = entry.place

    def keys(self) -> Iterable[bytes]:
        """The tokens of every snapshot of this engine's model."""
        return self._known.keys()

    def find(self, tokens: bytes) -> bytes:
        """The longest key that ``tokens`` begin with; empty if there is none."""
        return max((key for key in self._known if tokens.startswith(key)), key=len, default=b"")

    def load(self, session: Session, key: bytes) -> bool:
        """Let ``session`` go on from the snapshot ``key``.

        One that is damaged or gone is told and forgotten, and ``session`` is at its beginning.
        """
        place = self._known[key]
        try:
            session.go_on(lambda: load_session(self._engine, place)[0].state)
            os.utime(place / MANIFEST)
        except DoesNotFit:
            raise
        except (K3Error, OSError) as error:
            del self._known[key]
            self._engine.warn(f"A kept prefix is not used: {error}")
            return False
        return True

    def store(self, key: bytes, snapshot: SequenceState) -> None:
        """Write ``snapshot`` after the tokens ``key``, and make room for it before."""
        try:
            self._store(key, snapshot)
        except (K3Error, OSError) as error:  # without it a later prompt costs more, and that is all
            self._engine.warn(f"A prefix could not be kept on disk: {error}")

    def _store(self, key: bytes, snapshot: SequenceState) -> None:
        if key in self._known:
            return
        digest = hashlib.sha256(json.dumps(self._ours, sort_keys=True).encode() + key)
        place = self._path / digest.hexdigest()[:32]
        files = 4 + 3 * len(snapshot.latents)
        size = snapshot.nbytes + len(key) + files * _FILE
        if size > self._size:
            self._engine.warn(
                f"A prefix of {snapshot.position:,} tokens takes {show_size(size)}, and all of "
                f"{show_path(self._path)} may take {show_size(self._size)}."
            )
            return
        self._make_room(size)
        session = Session(self._engine, snapshot)
        session.append(np.frombuffer(key, "<i4").tolist())
        try:
            session.save(place)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self._known[key] = place

    def _make_room(self, size: int) -> None:
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total + size <= self._size:
                return
            shutil.rmtree(entry.place, ignore_errors=True)
            self._known = {k: place for k, place in self._known.items() if place != entry.place}
            total -= entry.size

    def _entries(self) -> list[_Entry]:
        """Every saved session below the folder, of whichever model; what a killed store has left is
        deleted."""
        found = []
        for place in self._path.iterdir():
            with suppress(FileNotFoundError):  # another process may make room, too
                manifest = _manifest(place)
                if manifest is not None:
                    used = (place / MANIFEST).stat().st_mtime
                    size = manifest.nbytes + len(manifest.files) * _FILE
                    found.append(_Entry(place, size, used))
                elif _NAME.fullmatch(place.name) and is_ours(place) and not in_use(place):
                    shutil.rmtree(place, ignore_errors=True)
        return found


def prefix_place(path: str | os.PathLike[str], model: Path) -> Path:
    """The folder ``path`` for snapshots, made if need be.

    Raises ``UsageError`` if it cannot be, or lies in the folder ``model``.
    """
    if not os.fspath(path):
        raise UsageError("The folder for prefixes has no name.", "Name one, or leave it out.")
    refuse_in_model(Path(path), model)
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{show_path(Path(path))} cannot hold prefixes: {error.strerror}.", "Name a folder."
        ) from error
    return Path(path)


def _manifest(place: Path) -> Manifest | None:
    """What is saved in ``place``; None if it is not a session, or cannot be read."""
    try:
        return read_manifest(place)
    except (K3Error, OSError):
        return None
