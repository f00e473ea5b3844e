"""``Session.save``: a session becomes a folder, whole or not at all; later saves add to it.

A save is a folder of its own whose full chunks of latents are hard links to those of the save
before it, where the session still holds the very blocks that were written then.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

try:  # here and not at the first save: memory that it takes is in the plan
    import zarr
except ImportError:  # it needs Python 3.11
    zarr = None

from .config import LATENT_BLOCK
from .errors import K3Error, SessionError, UsageError
from .latents import Latents, SpilledLatents
from .paths import show_path
from .session_identity import computed_by, identity
from .session_manifest import (
    CHUNK,
    LATENTS,
    MANIFEST,
    STATE,
    TOKENS,
    Manifest,
    check_place,
    crc_of,
    layer_chunk,
    layer_open,
    locked,
    need_zarr,
    next_save,
    publish,
    read_manifest,
    sweep_out,
    sync,
)
from .state import SequenceState

if TYPE_CHECKING:
    from .session import Session

Bytes = npt.NDArray[np.uint8]


class Saved(NamedTuple):
    """What a session remembers of its last save: where, which, and the blocks written then."""

    folder: Path
    save: str
    blocks: list[int]


def zarr_library() -> Any:
    """The zarr module; raises ``SessionError`` where it is not installed."""
    need_zarr()
    return zarr


def save(session: Session, path: str | os.PathLike[str], last: Saved | None) -> tuple[Saved, int]:
    """Write ``session`` to the folder ``path``; returns what to remember, and the bytes written.
    ``last``: what it remembers of the save before.

    Raises ``UsageError`` for a folder of something else, ``SessionError`` if it cannot be written:
    the save that was there before is then still the one that is loaded.
    """
    state, folder = session.state.usable(), Path(os.path.abspath(os.fsdecode(path)))
    session.engine.check_open()
    try:
        check_place(folder, session.engine.checkpoint.folder)
        folder.mkdir(exist_ok=True)
        with locked(folder):
            check_place(folder, session.engine.checkpoint.folder)  # it may have changed
            return _Writer(session, state, folder, last).write()
    except OSError as error:
        raise SessionError(
            f"The session could not be saved to {show_path(folder)}: {error.strerror or error}"
            f"{'' if error.filename is None else f' ({show_path(Path(error.filename))})'}.",
            "What was saved there before is left as it is, and the session goes on in memory. Make "
            "room or choose another place.",
        ) from error
    except ValueError as error:  # a name with a zero byte
        raise UsageError(f"No folder can be named so: {error}.", "Choose another name.") from error


class _Writer:
    """One save under way: the files so far, and how many bytes they took.

    ``before`` is the save that lies in ``folder``, ``same`` how many leading tokens of its latents
    are those of ``state``.
    """

    def __init__(
        self, session: Session, state: SequenceState, folder: Path, last: Saved | None
    ) -> None:
        self._session, self._state, self._folder = session, state, folder
        self._before, self._same = _earlier(state, folder, last)
        sweep_out(folder, self._before.save if self._before else None)
        self._save = next_save(folder)
        self._place = folder / self._save
        self._files: dict[str, tuple[int, int]] = {}
        self._written = 0

    def write(self) -> tuple[Saved, int]:
        """All files, then the manifest; on any error the new files are gone again."""
        session, state = self._session, self._state
        try:
            self._place.mkdir()
            self._write_state()
            self._write_tokens()
            self._write_latents()
            for folder in (self._place, *(p for p in self._place.rglob("*") if p.is_dir())):
                sync(folder)
            manifest = Manifest(
                self._save, identity(session.engine), computed_by(session.engine),
                state.position, session.length, session.sampled, state.cold,
                session.known_logits is not None, self._files,
            )  # fmt: skip
            sync(self._folder)
            self._written += publish(self._folder, manifest)
        except BaseException:
            if not self._published():
                shutil.rmtree(self._place, ignore_errors=True)
            raise
        with suppress(OSError):  # what is left over goes at the next save
            sweep_out(self._folder, self._save)
        return Saved(self._folder, self._save, blocks_of(state)), self._written

    def _published(self) -> bool:
        """Whether this save is the folder's, in spite of an interruption."""
        with suppress(OSError, K3Error):
            return read_manifest(self._folder).save == self._save
        return False

    def _write_state(self) -> None:
        parts = [_bytes(part) for part in state_parts(self._state)]
        if (logits := self._session.known_logits) is not None:
            parts.append(logits.view(np.uint8))
        self._put(STATE, parts)

    def _write_tokens(self) -> None:
        tokens, before, kept = np.array(self._session.tokens, "<i4"), self._before, 0
        if before is not None and 0 < before.tokens <= len(tokens) and self._whole(TOKENS):
            old = np.fromfile(self._folder / before.save / TOKENS, "<i4", before.tokens)
            kept = before.tokens if np.array_equal(old, tokens[: before.tokens]) else 0
        self._put(TOKENS, [tokens[kept:].view(np.uint8)], TOKENS if kept else None)

    def _write_latents(self) -> None:
        library, root = zarr_library(), self._place / LATENTS
        # "overwrite" lets zarr do without hard links, which not every file system has
        library.create_group(root, zarr_format=3, overwrite=True)
        (self._place / layer_open(0)).parent.mkdir()
        names = [f"{LATENTS}/zarr.json"]
        for layer, latents in self._state.latents.items():
            library.create_array(
                root / str(layer),
                overwrite=True,
                shape=(latents.length // CHUNK * CHUNK, latents.width),
                chunks=(CHUNK, latents.width),
                dtype=f"uint{8 * latents.dtype.itemsize}",
                filters=None,
                compressors=None,
                fill_value=0,
                chunk_key_encoding={"name": "default", "separator": "."},
                attributes={"dtype": str(latents.dtype).removeprefix("torch.")},
            )
            names.append(f"{LATENTS}/{layer}/zarr.json")
            for chunk in range(latents.length // CHUNK):
                self._write_rows(layer_chunk(layer, chunk), layer, chunk)
            self._write_rows(layer_open(layer), layer, latents.length // CHUNK)
        for name in names:
            size = (self._place / name).stat().st_size
            self._keep(name, size, crc_of(self._place / name, size)[0], size)

    def _write_rows(self, name: str, layer: int, chunk: int) -> None:
        """The rows of a chunk: those of the save before by a link, new ones behind them."""
        latents, before, old = self._state.latents[layer], self._before, None
        begin, end = chunk * CHUNK, min((chunk + 1) * CHUNK, self._state.position)
        start, open_one = begin, layer_open(layer)
        if before is not None and end - begin == CHUNK and end <= self._same:
            if self._whole(name):
                start, old = end, name
        elif (
            before is not None
            and begin < self._same == before.position
            and self._whole(open_one, by_content=True)
        ):
            start, old = self._same, open_one  # its open chunk, which may only grow
        self._put(name, _rows(latents, start, end), old)

    def _whole(self, name: str, by_content: bool = False) -> bool:
        """Whether the save before has the file ``name`` as it was written: its length, or also its
        content.  If not, the rows are written from memory."""
        assert self._before is not None
        place, known = self._folder / self._before.save / name, self._before.files.get(name)
        try:
            if known is None or place.stat().st_size < known[0]:
                return False
            return not by_content or crc_of(place, known[0]) == (known[1], known[0])
        except OSError:
            return False

    def _put(self, name: str, parts: Iterable[Bytes], old: str | None = None) -> None:
        """A file of ``parts``, behind what the save before has as ``old``."""
        place, size, crc, new = self._place / name, 0, 0, 0
        if old is not None:
            assert self._before is not None
            size, crc = self._before.files[old]
            source = self._folder / self._before.save / old
            try:
                os.link(source, place)
            except OSError:  # a file system without links: the bytes are written once more
                shutil.copyfile(source, place)
                new = size
        file: BinaryIO | None = None
        try:
            for part in parts:
                if file is None:
                    file = place.open("r+b" if old else "xb")
                    file.seek(size)  # an interrupted save may have left something behind it
                file.write(part.data)
                crc, new, size = zlib.crc32(part.data, crc), new + part.nbytes, size + part.nbytes
        finally:
            if file is not None:
                file.close()
        if file is None and old is None:
            place.touch()
        self._keep(name, size, crc, new)

    def _keep(self, name: str, size: int, crc: int, new: int) -> None:
        if new:
            sync(self._place / name)
        self._files[name] = (size, crc)
        self._written += new


def _earlier(state: SequenceState, folder: Path, last: Saved | None) -> tuple[Manifest | None, int]:
    """The save that lies in ``folder``, and how many leading tokens of its latents are still
    those of ``state``.  Raises ``SessionError`` rather than replace one that cannot be read."""
    if not (folder / MANIFEST).exists():
        return None, 0
    before = read_manifest(folder)
    if last is None or (last.folder, last.save) != (folder, before.save):
        return before, 0
    same = 0
    for old, new in zip(last.blocks, blocks_of(state), strict=False):
        if old != new:
            break
        same = min(same + LATENT_BLOCK, before.position, state.position)
    return before, same


def blocks_of(state: SequenceState) -> list[int]:
    """Serials of the latent blocks; all layers have theirs for the same tokens."""
    return next((latents.serials for latents in state.latents.values()), [])


def state_parts(state: SequenceState) -> list[torch.Tensor]:
    """Everything of ``state`` but its latents, in the order of the file."""
    return [part for layer in state.kda for part in (state.kda[layer], state.conv[layer])]


def _rows(latents: Latents | SpilledLatents, start: int, end: int) -> Iterator[Bytes]:
    """Rows ``start`` to before ``end`` as bytes, block by block."""
    while start < end:
        block, first = divmod(start, LATENT_BLOCK)
        stop = min(end, (block + 1) * LATENT_BLOCK)
        yield _bytes(latents.rows(block)[first : first + stop - start])
        start = stop


def _bytes(part: torch.Tensor) -> Bytes:
    return part.contiguous().cpu().view(-1).view(torch.uint8).numpy()
