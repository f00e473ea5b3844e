"""Routing as it happened: which experts each row of each sweep chose, and by how much.

A ``Recorder`` listens to an engine's hooks and writes a folder of numbered npz files, each holding
a bounded number of rows; ``read_trace`` joins them.  It knows routing only: no texts, no tokens.

Arrays of a file, for T rows (tokens) in the order they were computed, L MoE layers and the M best
experts of a row (its top k and as many near misses):

    version [] = 1      layers [L]      experts [], top_k []
    chosen [T, L, k] u16                the experts that ran, by rising number
    best, ahead_best [T, L, M] u16      experts by falling score, lower number first among equals
    codes, ahead_codes [T, L, M] u8     their scores as ``scheduler.hints.quantise`` gives them
    latent [T, L, Z] f16                what the experts were given; Z is 0 unless it was wanted
    sweep, sequence, position [T] i32   decode [T] bool

``ahead_*`` is what the layer's router said before the layer began, at the end of the layer above;
codes of all 0 where nobody asked it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .scheduler.hints import Codes, quantise

if TYPE_CHECKING:
    import torch

    from .scheduler.sweep import Group

VERSION = 1
CHUNK = 16 << 20  #: bytes that a recorder holds before it writes a file, about
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Trace:
    """A recorded trace; the arrays are those at the top of this file."""

    layers: npt.NDArray[np.int32]
    experts: int
    top_k: int
    chosen: npt.NDArray[np.uint16]
    best: npt.NDArray[np.uint16]
    codes: Codes
    ahead_best: npt.NDArray[np.uint16]
    ahead_codes: Codes
    latent: npt.NDArray[np.float16]
    sweep: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    decode: npt.NDArray[np.bool_]

    def head(self, rows: int | None) -> Trace:
        """The first ``rows`` rows, all for None."""
        return replace(self, **{name: getattr(self, name)[:rows] for name in _ROWS})

    def dense(self) -> Codes:
        """[T, L, E]: the codes of all experts; 0 for those that were far from being chosen."""
        codes = np.zeros((*self.codes.shape[:2], self.experts), np.uint8)
        np.put_along_axis(codes, self.best.astype(np.int64), self.codes, axis=2)
        return codes

    def ahead(self, row: int, place: int) -> Codes | None:
        """[1, E]: codes of layer number ``place`` guessed for ``row``; None where nobody did."""
        if not self.ahead_codes[row, place].any():
            return None
        dense = np.zeros((1, self.experts), np.uint8)
        dense[0, self.ahead_best[row, place]] = self.ahead_codes[row, place]
        return dense


_ROWS = [f.name for f in fields(Trace) if f.name not in ("layers", "experts", "top_k")]


class Recorder:
    """Writes what ``on_route`` and ``on_ahead`` hear into ``folder``, new or empty.

    ``sequences`` may be set before a sweep: the number of the sequence of each of its runs (else
    the number of the run).  ``latent``: the width Z of latents to record, 0 for none.  A sweep that
    did not pass all layers is left out.
    """

    def __init__(
        self, folder: str | Path, layers: Sequence[int], experts: int, top_k: int, latent: int = 0
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            raise UsageError(f"{self.folder} is not empty.", "Record into a new folder.")
        self.sequences: Sequence[int] = ()
        self._layers, self._experts, self._top_k = tuple(layers), experts, top_k
        self._wide, self._latent = min(2 * top_k, experts), latent
        self._ahead: dict[int, tuple[Array, Codes]] = {}  # by the layer it is about
        self._sweep: list[dict[str, Array]] = []  # of the sweep under way, for each group
        self._missing: set[tuple[int, int]] = set()  # layer and first row not heard of yet
        self._rows: list[dict[str, Array]] = []
        self._bytes = self._sweeps = self._files = 0

    def on_ahead(
        self, layer: int, next_layer: int, scores: Array | None, latent: Array | None = None
    ) -> None:
        """At the end of ``layer`` of a decode sweep: the ``scores`` [rows, E] that the router of
        ``next_layer`` gives now, and the ``latent`` [rows, Z] of ``layer``, if they are known."""
        if scores is not None:
            self._ahead[next_layer] = self._best(scores)
        if self._latent and latent is not None and layer in self._layers:
            place = self._layers.index(layer)
            for rows in self._sweep:
                begin = int(rows["row"])
                rows["latent"][:, place] = latent[begin : begin + len(rows["decode"])]

    def on_route(
        self,
        layer: int,
        group: Group,
        experts: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """``layer`` chose ``experts`` [n, k] by the biased ``scores`` [n, E] for ``group``."""
        if layer == self._layers[0]:
            if group.begin == 0:
                self._begin()
            self._sweep.append(self._room(group))
            self._missing |= {(la, group.begin) for la in self._layers}
        rows = next((r for r in self._sweep if r["row"] == group.begin), None)
        if rows is None:  # recording began within this sweep
            return
        place = self._layers.index(layer)
        rows["chosen"][:, place] = experts.numpy()
        rows["best"][:, place], rows["codes"][:, place] = self._best(scores.cpu().numpy())
        guess = self._ahead.get(layer)
        if guess is not None and group.decode and group.end <= len(guess[0]):
            rows["ahead_best"][:, place] = guess[0][group.rows]
            rows["ahead_codes"][:, place] = guess[1][group.rows]
        self._missing.discard((layer, group.begin))
        if layer == self._layers[-1] and not self._missing:
            self._keep()

    def close(self) -> None:
        """Write what is left.  A sweep under way is left out."""
        self._write()

    def _begin(self) -> None:
        self._sweep, self._missing = [], set()

    def _best(self, scores: Array) -> tuple[Array, Codes]:
        codes = quantise(scores, self._top_k)
        order = np.argsort(255 - codes, axis=1, kind="stable")[:, : self._wide]
        return order, np.take_along_axis(codes, order, axis=1)

    def _room(self, group: Group) -> dict[str, Array]:
        n, depth = group.end - group.begin, len(self._layers)
        rows: dict[str, Array] = {
            "row": np.array(group.begin),
            "chosen": np.zeros((n, depth, self._top_k), np.uint16),
            "latent": np.zeros((n, depth, self._latent), np.float16),
            "sequence": np.zeros(n, np.int32),
            "position": np.zeros(n, np.int32),
            "decode": np.full(n, group.decode),
        }
        for kind in ("", "ahead_"):
            rows[f"{kind}best"] = np.zeros((n, depth, self._wide), np.uint16)
            rows[f"{kind}codes"] = np.zeros((n, depth, self._wide), np.uint8)
        for part in group.parts:
            own = group.own(part)
            rows["sequence"][own] = self.sequences[part.run] if self.sequences else part.run
            rows["position"][own] = np.arange(part.start, part.start + part.count)
        return rows

    def _keep(self) -> None:
        for rows in self._sweep:
            del rows["row"]
            rows["sweep"] = np.full(len(rows["decode"]), self._sweeps, np.int32)
            self._bytes += sum(a.nbytes for a in rows.values())
            self._rows.append(rows)
        self._sweeps += 1
        self._ahead.clear()
        self._begin()
        if self._bytes >= CHUNK:
            self._write()

    def _write(self) -> None:
        if not self._rows:
            return
        arrays: dict[str, Any] = {
            name: np.concatenate([rows[name] for rows in self._rows]) for name in _ROWS
        }
        arrays["layers"] = np.array(self._layers, np.int32)
        facts = {"version": VERSION, "experts": self._experts, "top_k": self._top_k}
        arrays |= {name: np.array(value) for name, value in facts.items()}
        self._files += 1
        with (self.folder / f"trace-{self._files:06d}.npz").open("xb") as file:
            np.savez_compressed(file, **arrays)
        self._rows, self._bytes = [], 0


def read_trace(path: str | Path) -> Trace:
    """The trace in a recorder's folder, or in one of its files.  Raises ``UsageError``."""
    path = Path(path)
    files = sorted(path.glob("trace-*.npz")) if path.is_dir() else [path]
    parts: list[dict[str, Array]] = []
    try:
        for name in files:
            with np.load(name, allow_pickle=False) as file:
                parts.append({key: file[key] for key in file.files})
        if {int(part["version"]) for part in parts} != {VERSION}:
            raise ValueError("no file of it, or of another version")
        first = parts[0]
        rows = {name: np.concatenate([part[name] for part in parts]) for name in _ROWS}
        return Trace(first["layers"], int(first["experts"]), int(first["top_k"]), **rows)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{path} is no routing trace: {error}.", "Record one; see k3offload/trace.py."
        ) from error
