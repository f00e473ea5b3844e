"""Routing as it happened: which experts each row of each sweep chose, and by how much.

A trace is a zarr v3 group, a folder or one zip file.  This file knows its layout, reads it and
writes it in bounded memory; it knows no engine, no text and no token.

Attributes of the group: ``format`` "k3offload trace", ``version`` 4, ``layers`` (numbers of the L
MoE layers), ``experts`` E, ``top_k`` k, ``page_bytes`` of one expert, ``source`` (who wrote it),
``about`` (whatever it wanted to say), ``rows`` T and ``events`` N that are complete: arrays may be
longer after a kill, and what lies behind is not read.

    order [L, E] u16            place of an expert among those of its layer in the file
    best [T, L, M] u16          experts by falling score, the k that ran before all others, then up
                                to 4 near misses (M = k + 4; k where nobody knows the others)
    codes [T, L, M] u8          their scores as ``scheduler.hints.quantise`` gives them: from 128 on
                                chosen; all 128 where nobody knows the scores
    sweep, sequence, position [T] i32; decode [T] bool

Sweeps are numbered as they begin.  One that failed, or that a row has left, has no rows and keeps
its number.  Rows (tokens) stand in the order in which they were computed; those of one sweep passed
the layers together and shared reads.  10,000 tokens of 92 layers and k = 16 are 55 MB before
compression.  ``benchmarks/record_cost.py`` measures what recording them takes of a step, and each
of the further arrays too.  ``mixing`` takes long: its shares are computed a second time.

Further arrays, each only where it was asked for, with what it adds to these 55 MB:

    ahead   ahead_best, ahead_codes [T, L, M]: what the layer's router said at the end of the layer
            above, codes of 0 where nobody asked it; 55 MB
    latent  [T, L, Z] f16: what the experts were given; 2 Z bytes a token and layer, gigabytes
    margin  [T, L] f16: biased score of the last that was chosen less that of the best that was not;
            2 MB
    mixing  [T, 2 * layers of the model, entries] u8: shares (times 255) that the residual attention
            of a sublayer gave to block summaries and, last, the running sum, all 0 where there is
            but one of them; 17 MB
    tiers   event_sweep i32 (that began last, -1 before any), event_tier u8 (0 RAM, 1 a device),
            event_kind u8 (``scheduler.lease.Event``), event_layer i16, event_expert i16,
            event_bytes u32, event_time f64 (seconds) [N]: what the stores of experts did, each in
            the order of its lock; 22 bytes an event, one event for a hit and about three for a
            read: 320 MB to 1 GB
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .scheduler.hints import NEAR, Codes, spread
from .scheduler.replay import Leases
from .scheduler.replay_timed import Guessed
from .session_manifest import need_zarr

FORMAT, VERSION = "k3offload trace", 4
READ: Final = (2, 3, VERSION)  #: 2 counted a sweep before its last layer's events; see LoggedTier
#: bytes of all chunks of the same rows, at most, about: to write a small one takes as long
CHUNKS: Final = 4 << 20
EVENTS: Final = 1 << 17  #: of a chunk
#: bit by bit, for few of a number's bits are in use; zstd takes thrice as long for as many bytes
PACKED: Final = {"cname": "lz4", "clevel": 1, "shuffle": "bitshuffle"}
PARTS: Final = ("ahead", "latent", "margin", "mixing", "tiers")  #: that may be asked for
Array = npt.NDArray[Any]
EVENT: Final[dict[str, str]] = {
    "event_sweep": "i4", "event_tier": "u1", "event_kind": "u1", "event_layer": "i2",
    "event_expert": "i2", "event_bytes": "u4", "event_time": "f8",
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """A trace in memory; the arrays are those at the top of this file."""

    layers: npt.NDArray[np.int32]
    experts: int
    top_k: int
    page_bytes: int
    order: npt.NDArray[np.uint16]
    best: npt.NDArray[np.uint16]
    codes: Codes
    sweep: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    decode: npt.NDArray[np.bool_]
    more: Mapping[str, Array] = field(default_factory=dict)  #: further arrays with rows
    events: Mapping[str, Array] = field(default_factory=dict)  #: those of ``tiers``
    source: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def chosen(self) -> npt.NDArray[np.uint16]:
        """[T, L, k]: the experts that ran, by rising number."""
        return np.sort(self.best[..., : self.top_k], axis=2)

    def rows(self, which: slice | npt.NDArray[Any]) -> Trace:
        """Some rows; events are left out, for they are of all."""
        picked = {name: getattr(self, name)[which] for name in _BASE}
        more = {name: array[which] for name, array in self.more.items()}
        return replace(self, **picked, more=more, events={})

    def dense(self) -> Codes:
        """[T, L, E]: the codes of all experts; 0 for those that were far from being chosen."""
        tokens, depth, wide = self.best.shape
        best, codes = self.best.reshape(-1, wide), self.codes.reshape(-1, wide)
        return spread(best, codes, self.experts).reshape(tokens, depth, self.experts)

    def ahead(self, row: int, place: int) -> Codes | None:
        """[1, E]: codes of layer number ``place`` guessed for ``row``; None where nobody did."""
        if "ahead_codes" not in self.more or not self.more["ahead_codes"][row, place].any():
            return None
        one = slice(row, row + 1), place
        return spread(self.more["ahead_best"][one], self.more["ahead_codes"][one], self.experts)

    def leases(self) -> Leases:
        """The sweeps as a cache sees them.  Policies heard of the scores in sweeps that only
        decode, as the engine tells them."""
        return Leases(
            self.layers.tolist(), self.best[..., : self.top_k], self.sweep,
            (self.best, self.codes), self.decode, self.order,
        )  # fmt: skip

    @property
    def guessed(self) -> Guessed:
        """What predictors are told in replay."""
        names = ("ahead_best", "ahead_codes", "latent")
        return Guessed(*(self.more.get(name) for name in names))

    @property
    def digest(self) -> str:
        """Names what was routed: equal for equal layers, rows and scores, however it is stored."""
        whole = hashlib.sha256(f"{self.experts} {self.top_k} {self.page_bytes}".encode())
        for name in ("layers", "order", *_BASE):
            whole.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return whole.hexdigest()[:16]


_BASE: Final = ("best", "codes", "sweep", "sequence", "position", "decode")


class Writer:
    """Writes a trace into ``folder``, new or empty, chunk by chunk.

    ``more``: shape of a row and dtype of further arrays, by name.
    """

    def __init__(
        self,
        folder: str | Path,
        layers: Sequence[int],
        experts: int,
        top_k: int,
        *,
        order: Array | None = None,
        page_bytes: int = 1,
        near: int = NEAR,
        more: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
        events: bool = False,
        source: str = "",
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = new_folder(folder)
        import zarr

        depth, wide = len(layers), min(top_k + near, experts)
        rows = {"best": ((depth, wide), "u2"), "codes": ((depth, wide), "u1"), "decode": ((), "?")}
        rows |= dict.fromkeys(("sweep", "sequence", "position"), ((), "i4")) | dict(more or {})
        row = sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in rows.values())
        self.step = max(1, CHUNKS // row)  #: rows of a chunk
        every = {name: ((), kind) for name, kind in EVENT.items()} if events else {}
        self._group = zarr.create_group(self.folder, zarr_format=3, overwrite=True)
        self._row = _Growing(self._group, "rows", rows, self.step)
        self._event = _Growing(self._group, "events", every, EVENTS)
        if order is None:
            order = np.tile(np.arange(experts, dtype=np.uint16), (depth, 1))
        self._group.create_array("order", data=order.astype(np.uint16))
        self._group.attrs.update(
            {
                "format": FORMAT, "version": VERSION, "layers": [int(la) for la in layers],
                "experts": experts, "top_k": top_k, "page_bytes": page_bytes,
                "source": source, "about": dict(about or {}),
                "rows": 0, "events": 0,
            }
        )  # fmt: skip

    def append(self, **arrays: Array) -> None:
        """Rows of all arrays, any number of them."""
        self._row.append(arrays)

    def append_events(self, **arrays: Array) -> None:
        self._event.append(arrays)

    def close(self) -> None:
        """Write what is left."""
        self._row.close()
        self._event.close()


def new_folder(folder: str | Path) -> Path:
    """``folder``, made if need be.  Raises ``UsageError`` if it is not empty."""
    need_zarr("Traces")
    path = Path(folder)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} is not an empty folder.", "Record into a new one.")
    path.mkdir(parents=True, exist_ok=True)
    return path


class _Growing:
    """Arrays that grow together by whole chunks.  ``name``: the attribute that counts rows.  They
    grow ahead of their rows, for that rewrites a file of each."""

    def __init__(
        self, group: Any, name: str, arrays: Mapping[str, tuple[tuple[int, ...], str]], step: int
    ) -> None:
        from zarr.codecs import BloscCodec

        self._group, self._name, self._step = group, name, step
        self._done = self._room = 0
        self._waiting: dict[str, list[Array]] = {key: [] for key in arrays}
        self._count = 0
        # chunks that are all 0 are written too: one that is missing is damage
        self._arrays = {
            key: group.create_array(
                key, shape=(0, *shape), chunks=(step, *(max(1, n) for n in shape)), dtype=kind,
                compressors=BloscCodec(**PACKED),
                config={"write_empty_chunks": True},
            )
            for key, (shape, kind) in arrays.items()
        }  # fmt: skip

    def append(self, arrays: Mapping[str, Array]) -> None:
        assert arrays.keys() == self._waiting.keys(), arrays.keys() ^ self._waiting.keys()
        for key, array in arrays.items():
            self._waiting[key].append(array)
        self._count += len(array)
        if self._count >= self._step:
            self._flush(self._count // self._step * self._step)

    def close(self) -> None:
        self._flush(self._count)
        if self._room > self._done:
            self._resize(self._done)

    def _flush(self, count: int) -> None:
        """Write the first ``count`` rows of those that wait."""
        if not count:
            return
        end = self._done + count
        if end > self._room:
            self._resize(max(end, 2 * self._room))
        for key, array in self._arrays.items():
            whole = np.concatenate(self._waiting[key])
            array[self._done : end] = whole[:count].astype(array.dtype, copy=False)
            self._waiting[key] = [whole[count:].copy()]
        self._done, self._count = end, self._count - count
        self._group.attrs[self._name] = end  # from here on it is part of the trace

    def _resize(self, rows: int) -> None:
        self._room = rows
        for array in self._arrays.values():
            array.resize((rows, *array.shape[1:]))


def read_some(path: Path, rows: int | None) -> Trace:
    """The first ``rows`` tokens of the trace at ``path`` (all if None), with what predictors ask
    for.  Raises ``UsageError``, also where it has no tokens."""
    trace = read_trace(path, ["ahead", "latent"]).rows(slice(rows))
    if not len(trace.best):
        raise UsageError(f"{path} holds no tokens.", "Record a run that comes to its end.")
    return trace


def read_trace(path: str | Path, parts: Sequence[str] = PARTS) -> Trace:
    """The trace at ``path``, with those of its further ``parts`` that it has.  Raises
    ``UsageError``."""
    need_zarr("Traces")
    import zarr
    from zarr.storage import ZipStore

    path = Path(path)
    try:
        # absolute, for zarr takes the name of a relative folder out of those of its arrays too
        store = ZipStore(path, mode="r") if path.is_file() else path.absolute()
        group = zarr.open_group(store, mode="r", zarr_format=3)
        facts = dict(group.attrs)
        if facts.get("format") != FORMAT or facts.get("version") not in READ:
            raise ValueError(f"it has format {facts.get('format')!r} {facts.get('version')}")
        rows = {name: _read(group[name], facts["rows"]) for name in _BASE}
        more, events = {}, {}
        for name in sorted(set(group.array_keys()) - {*_BASE, "order"}):
            if name.startswith("event_"):
                if "tiers" in parts:
                    events[name] = _read(group[name], facts["events"])
            elif name.partition("_")[0] in parts:
                more[name] = _read(group[name], facts["rows"])
        layers = np.array(facts["layers"], np.int32)
        if events and facts["version"] == 2:
            events["event_sweep"] -= events["event_layer"] == layers[-1]
        return Trace(
            layers, facts["experts"], facts["top_k"], facts["page_bytes"], group["order"][:],
            **rows, more=more, events=events, source=facts["source"], about=facts["about"],
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, BadZipFile) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"{path} is no routing trace that this version reads: {reason}.",
            "Record one with --trace, or see k3offload trace --help.",
        ) from error


def facts(trace: Trace) -> dict[str, Any]:
    """What ``trace`` holds, in numbers."""
    run = trace.leases()
    parts = sorted({name.partition("_")[0] for name in trace.more})
    return {
        "digest": trace.digest, "source": trace.source, "about": dict(trace.about),
        "rows": len(trace.best), "decode_rows": int(trace.decode.sum()),
        "sweeps": len(set(trace.sweep.tolist())), "sequences": len(set(trace.sequence.tolist())),
        "layers": len(trace.layers), "experts": trace.experts, "top_k": trace.top_k,
        "near": trace.best.shape[2] - trace.top_k, "page_bytes": trace.page_bytes,
        "requests": sum(len(step.pages) for step in run.steps(False)), "distinct": run.distinct,
        "parts": parts + ["tiers"] * bool(trace.events),
    }  # fmt: skip


def _read(array: Any, rows: int) -> Array:
    if array.shape[0] < rows or array.nchunks_initialized * array.chunks[0] < rows:
        raise ValueError(f"chunks of {array.basename} are missing")
    found: Array = array[:rows]
    return found
