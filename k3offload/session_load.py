"""``Engine.load_session``: a saved folder becomes a session, or is refused by name.

Everything is checked before any state is made: whose it is, then every file against its checksum.
The state that is filled then belongs to nobody until it is complete.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .config import show_size
from .errors import SessionError
from .latents import Latents, SpilledLatents
from .paths import show_path
from .session import Session
from .session_identity import computed_by, identity
from .session_manifest import (
    CHUNK,
    LATENTS,
    STATE,
    TOKENS,
    Manifest,
    check_files,
    damaged,
    file_sizes,
    layer_open,
    read_manifest,
)
from .session_save import Saved, blocks_of, state_parts, zarr_library
from .state import SequenceState

if TYPE_CHECKING:
    from .engine import Engine

_TRIES = 3  #: a save may replace what is being read; then it is read again


def load_session(engine: Engine, path: str | os.PathLike[str]) -> tuple[Session, list[str]]:
    """The session in folder ``path``, and in words what will round differently from now on.

    Raises ``SessionError`` naming the field that differs or the file that is damaged,
    ``UsageError`` if it is longer than the context, ``DoesNotFit`` if the plan has no room.
    """
    folder = Path(os.path.abspath(path))
    manifest = read_manifest(folder)
    for left in reversed(range(_TRIES)):
        try:
            with engine.lock:  # spilled latents have one writer at a time
                return _read(engine, folder, manifest), _differences(engine, manifest)
        except (SessionError, OSError, KeyError, ValueError, TypeError) as error:
            newer = read_manifest(folder)
            if newer.save == manifest.save or not left:
                if isinstance(error, SessionError):
                    raise
                raise damaged(folder / manifest.save, str(error)) from error
            manifest = newer
    raise AssertionError("the last try raises")


def refuse_other(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """Raise ``SessionError`` with the first field in which ``manifest`` is not of ``engine``."""
    ours = identity(engine)
    for field in [*ours, *(set(manifest.identity) - set(ours))]:
        theirs, own = manifest.identity.get(field), ours.get(field)
        if theirs != own:
            raise SessionError(
                f"The saved session {show_path(folder)} is of another {field}: "
                f"{_short(theirs)} there, {_short(own)} here.",
                "Load the model and the options that it was saved with.",
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"


def _differences(engine: Engine, manifest: Manifest) -> list[str]:
    ours, theirs = computed_by(engine), manifest.computed_by
    other = [field for field in ours if theirs.get(field) != ours[field]]
    if not other:
        return []
    return [
        f"the session was computed with another {' and '.join(other)}: it goes on, but not with "
        "the bits that it would have had there."
    ]


def _read(engine: Engine, folder: Path, manifest: Manifest) -> Session:
    refuse_other(engine, folder, manifest)
    engine.check_context(manifest.tokens)
    spec, place = engine.spec, folder / manifest.save
    check_files(folder, manifest, file_sizes(spec, engine.latent_form, manifest))
    tokens = np.fromfile(place / TOKENS, "<i4", manifest.tokens)
    if len(tokens) != manifest.tokens or ((tokens < 0) | (tokens >= spec.vocab)).any():
        raise damaged(place / TOKENS, f"it does not hold {manifest.tokens:,} tokens")
    state = engine.new_state()
    state.reserve(manifest.position)
    logits = _fill(state, place / STATE, spec.vocab if manifest.logits else 0)
    zarr = zarr_library()
    group = zarr.open_group(place / LATENTS, mode="r", zarr_format=3)
    for layer, latents in state.latents.items():
        array, raw = group[str(layer)], np.dtype(f"uint{8 * latents.dtype.itemsize}")
        whole = manifest.position // CHUNK * CHUNK
        layout = ((whole, latents.width), raw)
        if not isinstance(array, zarr.Array) or (array.shape, array.dtype) != layout:
            raise damaged(place / LATENTS / str(layer) / "zarr.json", "it is of another layout")
        for begin in range(0, whole, CHUNK):
            _append(latents, np.ascontiguousarray(array[begin : begin + CHUNK]))
        rest = (manifest.position - whole) * latents.width
        _append(latents, np.fromfile(place / layer_open(layer), raw, rest))
    state.position, state.cold = manifest.position, manifest.cold
    session = Session(engine, state)
    saved = Saved(folder, manifest.save, blocks_of(state))
    session.restore(tokens.tolist(), manifest.sampled, logits, saved)
    return session


def _append(latents: Latents | SpilledLatents, rows: npt.NDArray[Any]) -> None:
    """``rows``: as the file has them, unsigned numbers of the latents' size."""
    if rows.size:
        latents.append(torch.from_numpy(rows).view(latents.dtype).view(-1, latents.width))


def _fill(state: SequenceState, place: Path, vocab: int) -> npt.NDArray[np.float32] | None:
    """Read KDA states and conv tails into ``state``; returns the ``vocab`` logits behind them."""
    with place.open("rb") as file:
        for part in state_parts(state):
            data = np.fromfile(file, np.uint8, part.nbytes)
            if data.nbytes != part.nbytes:
                raise damaged(place, f"it ends within a state of {show_size(part.nbytes)}")
            part.copy_(torch.from_numpy(data).view(part.dtype).view(part.shape))
        logits = np.fromfile(file, "<f4", vocab)
        if len(logits) != vocab or file.read(1):
            raise damaged(place, "it is of another length")
    return logits if vocab else None
