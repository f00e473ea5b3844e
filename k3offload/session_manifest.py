"""The folder of a saved session: which files it has, and the manifest that makes them one save.

    PATH/manifest.json              names one save, its files with sizes and checksums
    PATH/save-000003/state.bin      KDA states and conv tails by layer, then the last logits
    PATH/save-000003/tokens.bin     token ids, int32
    PATH/save-000003/latents/       a zarr v3 group: an array [tokens, width] for each MLA layer,
                                    whole chunks only
    PATH/save-000003/open/3.bin     the latents of layer 3 behind its last whole chunk

The manifest is replaced in one step, after everything it names is on the disk, so a reader sees one
save or the next and never a mix.  Saves share files by hard links.  ``tokens.bin`` and ``open`` may
grow in place: what a save does not know of is behind the bytes that it names, and not looked at.

This file knows files and nothing of engines.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .config import LATENT_BLOCK
from .durable import sync
from .errors import SessionError, UsageError
from .kernels.latent_format import LatentFormat
from .paths import show_path
from .spec import ModelSpec

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
STATE, TOKENS, LATENTS, OPEN = "state.bin", "tokens.bin", "latents", "open"
CHUNK: Final = 16 * LATENT_BLOCK  #: tokens of a chunk file: 4.7 MB of K3's latents in bfloat16
_SAVE = re.compile(r"save-(\d{6,})")
_PIECE = 1 << 20  #: bytes read at a time


@dataclass(frozen=True)
class Manifest:
    """What one save holds.  ``files``: name below the save's folder -> (bytes, crc32)."""

    save: str
    identity: dict[str, Any]
    computed_by: dict[str, Any]
    position: int  #: tokens that the state covers
    tokens: int  #: tokens in all
    sampled: int  #: how many at the end were sampled and are not computed
    cold: bool  #: ``SequenceState.cold``
    logits: bool  #: whether the logits after ``position`` are there
    files: dict[str, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(size for size, _ in self.files.values())


def layer_chunk(layer: int, chunk: int) -> str:
    """Name of a chunk of an MLA layer's latents below the save's folder."""
    return f"{LATENTS}/{layer}/c.{chunk}.0"


def layer_open(layer: int) -> str:
    """Name of the rows behind the last whole chunk of an MLA layer."""
    return f"{OPEN}/{layer}.bin"


def file_sizes(spec: ModelSpec, form: LatentFormat, manifest: Manifest) -> dict[str, int | None]:
    """Every file that such a save has, and its bytes where they are known; ``form``: of the state's
    latents."""
    item, row, position = form.item, form.row, manifest.position
    sizes: dict[str, int | None] = {
        STATE: spec.kda_state_bytes(item) + (spec.vocab * 4 if manifest.logits else 0),
        TOKENS: manifest.tokens * 4,
        f"{LATENTS}/zarr.json": None,
    }
    for layer in spec.mla_layers:
        sizes |= {layer_chunk(layer, i): CHUNK * row for i in range(position // CHUNK)}
        sizes[layer_open(layer)] = position % CHUNK * row
        sizes[f"{LATENTS}/{layer}/zarr.json"] = None
    return sizes


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def read_manifest(path: Path) -> Manifest:
    """The manifest of the session in folder ``path``.

    Raises ``SessionError`` naming the file if there is none, if it is damaged, or if its format is
    of another number.
    """
    place = path / MANIFEST
    try:
        data = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SessionError(
            f"{show_path(path)} holds no saved session: there is no {MANIFEST}.",
            "Save one there first.",
        ) from error
    except OSError as error:
        raise damaged(place, f"it cannot be read ({error.strerror})") from error
    try:
        content = json.loads(data)
        number = content["format"]
        if type(number) is int and number != FORMAT:
            raise SessionError(
                f"{show_path(place)} has format {number}, and this version reads {FORMAT}.",
                "Use the version of k3offload that wrote it, or start the session anew.",
            )
        check = content.pop("crc32")
        if check != zlib.crc32(_line(content).encode()):
            raise ValueError("its checksum is wrong")
        if data != _line({**content, "crc32": check}).encode():
            raise ValueError("it is not as it was written")
        del content["format"]
        files = {name: (int(size), int(crc)) for name, (size, crc) in content.pop("files").items()}
        made = Manifest(files=files, **content)
        fine = 0 <= made.position <= made.tokens and 0 <= made.sampled <= 1
        if not _SAVE.fullmatch(made.save) or not fine:
            raise ValueError("its fields contradict each other")
        return made
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(place, str(error)) from error


def damaged(place: Path, what: str) -> SessionError:
    """The error of a file of a saved session that is not as it was written."""
    return SessionError(
        f"{show_path(place)} is damaged: {what}.",
        "It is left as it is. Copy it again from where it is whole, or start the session anew.",
    )


def publish(path: Path, manifest: Manifest) -> int:
    """Make ``manifest`` the one of folder ``path``; all its files are on the disk already.

    Returns the bytes written.
    """
    content: dict[str, Any] = {"format": FORMAT, **asdict(manifest)}
    data = _line({**content, "crc32": zlib.crc32(_line(content).encode())}).encode()
    partial = path / f"{MANIFEST}.{manifest.save}"
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path / MANIFEST)
    sync(path)
    return len(data)


def next_save(path: Path) -> str:
    """A name for a save that folder ``path`` has not seen yet."""
    found = [_SAVE.fullmatch(entry.name) for entry in path.iterdir()]
    return f"save-{max((int(m[1]) for m in found if m), default=0) + 1:06d}"


def sweep_out(path: Path, keep: str | None) -> None:
    """Delete what interrupted or older saves left in folder ``path``, all but the save ``keep``."""
    for entry in path.iterdir():
        if entry.name.startswith(f"{MANIFEST}.save-"):
            entry.unlink(missing_ok=True)
        elif _SAVE.fullmatch(entry.name) and entry.name != keep:
            shutil.rmtree(entry, ignore_errors=True)


def is_ours(path: Path) -> bool:
    """Whether folder ``path`` holds nothing but what saves put there."""
    known = {STATE, TOKENS, LATENTS, OPEN}
    for entry in path.iterdir():
        if _SAVE.fullmatch(entry.name):
            if not entry.is_dir() or not known >= {part.name for part in entry.iterdir()}:
                return False
        elif not entry.name.startswith(MANIFEST):
            return False
    return True


def refuse_in_model(path: Path, model: Path) -> None:
    """Raise ``UsageError`` if ``path`` lies in the folder ``model``."""
    home, real = Path(os.path.realpath(model)), Path(os.path.realpath(path))
    if home == real or home in real.parents:
        raise UsageError(
            f"{show_path(path)} is in the model's folder, which is left as it is.",
            "Choose a place outside of it.",
        )


def need_zarr(what: str = "Saved sessions") -> None:
    """Raise ``SessionError`` where zarr is not installed."""
    if find_spec("zarr") is None:
        raise SessionError(
            f"{what} need zarr, which is not installed.", "Use Python 3.11 or later."
        )


def check_place(folder: Path, model: Path) -> None:
    """Raise ``UsageError`` if no session can be saved to ``folder``, ``SessionError`` if none can
    be saved anywhere."""
    refuse_in_model(folder, model)
    shown = show_path(folder)
    need_zarr()
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise UsageError(f"{shown} is no folder.", "Name one that is new or holds a session.")
        if not folder.parent.is_dir():
            parent = show_path(folder.parent)
            raise UsageError(f"{shown}: {parent} is not a folder.", "Make it first.")
    elif not is_ours(folder):
        raise UsageError(
            f"{shown} holds something else than a saved session.",
            "Name a folder that is empty or not there yet.",
        )
    if not os.access(folder if folder.is_dir() else folder.parent, os.W_OK):
        raise UsageError(f"{shown} cannot be written.", "Choose another place.")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else saves into folder ``path`` meanwhile; the lock ends with the process."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def in_use(path: Path) -> bool:
    """Whether somebody is saving into folder ``path``."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(number)


def check_files(path: Path, manifest: Manifest, wanted: dict[str, int | None]) -> None:
    """Read every file of ``manifest`` and compare it with its checksum.

    Raises ``SessionError`` naming the first that is missing, cut or damaged, or the manifest if it
    has others than ``wanted``, which may know their bytes.
    """
    for name in sorted(set(wanted) ^ set(manifest.files)):
        raise damaged(path / MANIFEST, f"{name} should {'' if name in wanted else 'not '}be there")
    for name, (size, crc) in sorted(manifest.files.items()):
        place = path / manifest.save / name
        if wanted[name] not in (None, size):
            raise damaged(path / MANIFEST, f"{name} has {size:,} bytes instead of {wanted[name]:,}")
        try:
            found, total = crc_of(place, size)
        except OSError as error:
            raise SessionError(
                f"{show_path(place)} cannot be read: {error.strerror}.",
                "The saved session is not complete; copy it again or start anew.",
            ) from error
        if total != size:
            raise damaged(place, f"it has {total:,} bytes and was written with {size:,}")
        if found != crc:
            raise damaged(place, "its checksum is wrong")


def crc_of(place: Path, most: int) -> tuple[int, int]:
    """Checksum and length of the first ``most`` bytes of a file.  Raises ``OSError``."""
    crc, total = 0, 0
    with place.open("rb", buffering=0) as file:
        while piece := file.read(min(_PIECE, most - total)):
            crc, total = zlib.crc32(piece, crc), total + len(piece)
    return crc, total
