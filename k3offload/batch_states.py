"""Documents that a batch had under way when it was killed: a note each, and a folder for its state.

    OUT.state/NAME.json     id, digest and what the caller wants to know, published in one step
    OUT.state/NAME/         whatever the caller saved before it wrote the note

``NAME`` is a hash of the id, so that any id will do.  Only such names are ever deleted.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .batch_index import KEY, key_of
from .batch_lines import encode
from .durable import UNFINISHED, sync, write_file
from .paths import show_path

_NAME: Final = re.compile(rf"([0-9a-f]{{{2 * KEY}}})(|\.json|\.json{re.escape(UNFINISHED)})")


@dataclass(frozen=True)
class State:
    """What was kept of a document: ``folder`` is there if the caller saved something in it."""

    id: str
    digest: str
    extra: dict[str, Any]
    folder: Path


class States:
    """The notes and folders in ``folder``, which somebody else makes, locks and removes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[bytes, State] = {}

    def load(self, warn: Callable[[str], None]) -> None:
        """Take up what an earlier run left; what is damaged or has no note is dropped."""
        for key in self._found():
            note = self._folder / f"{key.hex()}.json"
            try:
                self._states[key] = self._read(note, key)
            except FileNotFoundError:  # killed between the folder and its note
                self.drop(key)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                warn(f"{show_path(note)} is damaged: its document is computed from its beginning")
                self.drop(key)

    def _read(self, note: Path, key: bytes) -> State:
        content = json.loads(note.read_bytes())
        made = State(content["id"], content["digest"], content["extra"], self._folder / key.hex())
        kinds = isinstance(made.id, str), isinstance(made.digest, str), isinstance(made.extra, dict)
        if not all(kinds) or key_of(made.id) != key:
            raise ValueError
        return made

    def folder(self, id: str) -> Path:
        """Where the state of document ``id`` belongs; the folder is the caller's to make."""
        return self._folder / key_of(id).hex()

    def get(self, key: bytes) -> State | None:
        """What is kept of the document of that hash."""
        return self._states.get(key)

    def running(self) -> list[State]:
        """All that is kept, by id."""
        return sorted(self._states.values(), key=lambda state: state.id)

    def keep(self, id: str, digest: str, extra: Mapping[str, Any]) -> None:
        """Write the note of document ``id``; its folder is on the drive already."""
        key, folder = key_of(id), self.folder(id)
        note = encode({"id": id, "digest": digest, "extra": dict(extra)})
        write_file(folder.with_name(f"{folder.name}.json"), [note])
        sync(self._folder)
        self._states[key] = State(id, digest, dict(extra), folder)

    def drop(self, key: bytes) -> None:
        """Delete what is kept of a document: the note first, so that none is without its state."""
        self._states.pop(key, None)
        folder = self._folder / key.hex()
        for ending in (".json", f".json{UNFINISHED}"):
            with suppress(OSError):
                folder.with_name(folder.name + ending).unlink(missing_ok=True)
        if folder.is_symlink():
            with suppress(OSError):
                folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Delete all that is kept."""
        for key in self._found():
            self.drop(key)

    def _found(self) -> list[bytes]:
        """Hashes of all documents of which anything lies there."""
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted({bytes.fromhex(name[1]) for name in names if name})
