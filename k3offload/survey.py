"""Compare what the headers hold with what the spec predicts; keep the places compactly.

This file knows names, shapes, dtypes and offsets.  It reads headers one shard at a time and keeps
a few numbers per tensor, not an object: 494,592 expert tensors cost about 6 MB.
"""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import CheckpointError
from .findings import Report, count_of, listing
from .headers import HeaderEntry, read_header
from .inventory import (
    BF16_KEYS,
    DTYPE_BITS,
    FLOATS,
    MXFP4_KEYS,
    PADDING,
    PROJECTOR,
    ROUTED,
    TOWER,
    VISION_PREFIXES,
    TensorSpec,
    expert_rows,
)
from .paths import show_path
from .precision import CODES, SCALE
from .shards import Index, Shards, mix
from .spec import ModelSpec
from .tiers.base import Location

BATCH: Final = 20_000  #: header entries held at a time
EXPERTS: Final = "block_sparse_moe.experts."
QUANTISED: Final = (*CODES.values(), SCALE)  #: how names in a quantised trunk end
_REMEDY: Final = "Use the files of one release together: config.json, index and all shards."
_DAMAGED: Final = "Download or copy the shard that should hold it again."


class Tensor(NamedTuple):
    """One trunk tensor.  ``name`` is local to its layer (``self_attn.q_proj.weight``), ``shape`` as
    the spec predicts it whatever dimensions of size 1 the file has; ``A_log`` keeps its stored
    width as one dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    location: Location


class LayerExperts:
    """Where the routed experts of one layer lie: file and offset of every part, -1 where unseen."""

    def __init__(self, experts: int, parts: int) -> None:
        self.parts = parts
        self.offset = array("q", b"\xff" * (8 * experts * parts))
        self.file = array("i", b"\xff" * (4 * experts * parts))

    def offsets(self) -> npt.NDArray[np.int64]:
        """Byte offsets, [experts, parts]."""
        return np.frombuffer(self.offset, np.int64).reshape(-1, self.parts)

    def files(self) -> npt.NDArray[np.int32]:
        """File numbers, [experts, parts]."""
        return np.frombuffer(self.file, np.int32).reshape(-1, self.parts)


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` without dimensions of size 1: the same numbers in the same order."""
    return tuple(n for n in shape if n != 1)


def _number(text: str, below: int) -> int:
    """A layer or expert number as names spell it, -1 when it is none below ``below``."""
    if text.isascii() and text.isdigit() and len(text) < 7 and str(int(text)) == text:
        return int(text) if int(text) < below else -1
    return -1


class Survey:
    """What the headers of a checkpoint hold, matched against ``spec``."""

    def __init__(self, spec: ModelSpec, report: Report) -> None:
        self.spec, self.report = spec, report
        self.globals: dict[str, Tensor] = {}
        self.trunk: list[dict[str, Tensor]] = [{} for _ in spec.layers]
        self.experts: dict[int, LayerExperts] = {}
        self.bytes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.expert_dtype = "U8" if spec.moe and spec.moe.format == "mxfp4" else ""
        self._layer_prefix = f"{spec.prefix}model.layers."
        self._wanted_layers: dict[tuple[str, str], dict[str, TensorSpec]] = {}
        # a head that is stored although the config ties it is used: transformers does the same
        whole = replace(spec, tie_embeddings=False).global_tensors()
        self._wanted_global = {self._global_name(t.name): t for t in whole}
        self._vision = {t.name: t for t in spec.vision_tensors()}
        self._vision_seen: set[str] = set()
        self._rows = expert_rows(spec) if spec.moe else []
        keys = MXFP4_KEYS if spec.moe and spec.moe.format == "mxfp4" else BF16_KEYS
        self.part_numbers = {key: number for number, key in enumerate(keys)}
        self._other_dtype: Counter[str] = Counter()
        self._unexpected: list[str] = []
        self._ignored: Counter[str] = Counter()

    # ---- one tensor ----
    def add(self, entry: HeaderEntry, file: int) -> None:
        """Put one header entry where it belongs, or report what is wrong with it."""
        name = entry.name
        if name.startswith(self._layer_prefix):
            number, _, local = name[len(self._layer_prefix) :].partition(".")
            layer = _number(number, len(self.spec.layers))
            if layer < 0:
                self._not_ours(entry)
            elif local.startswith(EXPERTS) and self.spec.layers[layer].ffn == "moe":
                self._add_expert(entry, file, layer, local)
            else:
                self._add_trunk(entry, file, layer, local)
        elif self.spec.family == "kimi_k3" and name.startswith(VISION_PREFIXES):
            self._add_vision(entry)
        elif self._global_name(name) in self._wanted_global and name.startswith(self.spec.prefix):
            local = self._global_name(name)
            self._keep(self.globals, local, self._wanted_global[local], entry, file)
        elif not (self.spec.pack_version and name.startswith(PADDING)):
            self._not_ours(entry)

    def _not_ours(self, entry: HeaderEntry) -> None:
        if entry.end > entry.begin:
            self._unexpected.append(entry.name)
        else:  # transformers writes a shared expert of width 0 where there is none
            self._ignored["of no elements"] += 1

    def _global_name(self, name: str) -> str:
        local = name[len(self.spec.prefix) :]
        return local[6:] if local.startswith("model.") else local

    def wanted(self, layer: int) -> dict[str, TensorSpec]:
        """Predicted trunk tensors of one layer by local name, in the order of the spec."""
        kind = self.spec.layers[layer]
        key = (kind.attention, kind.ffn)
        if key not in self._wanted_layers:
            cut = len(f"{self._layer_prefix}{layer}.")
            found = self.spec.layer_tensors(layer)
            self._wanted_layers[key] = {t.name[cut:]: t for t in found}
        return self._wanted_layers[key]

    def _add_trunk(self, entry: HeaderEntry, file: int, layer: int, local: str) -> None:
        wanted = self.wanted(layer)
        if local not in wanted and self.spec.layers[layer].ffn == "dense":
            # transformers writes a dense layer's MLP under the name of an MoE layer's
            local = local.replace("block_sparse_moe.", "mlp.", 1)
        if local in wanted:
            self._keep(self.trunk[layer], local, wanted[local], entry, file)
        else:
            self._not_ours(entry)

    def _keep(
        self, place: dict[str, Tensor], local: str, want: TensorSpec, entry: HeaderEntry, file: int
    ) -> None:
        shape = want.shape
        if local in place:
            self.report.error(f"The tensor {entry.name} lies in two shards.", _REMEDY)
            return
        if local == "self_attn.A_log":
            width, heads = math.prod(entry.shape), self.spec.kda.heads
            shape = (width,)
            good = len(squeezed(entry.shape)) <= 1 and width >= heads
            expected = f"one row of at least {heads}"
        else:
            good = squeezed(entry.shape) == squeezed(shape)
            expected = str(list(shape))
        if not good:
            self.report.error(
                f"The tensor {entry.name} has shape {list(entry.shape)}; expected {expected}.",
                _REMEDY,
            )
        if not (self._exact if want.name.endswith(QUANTISED) else self._float)(entry, want.dtype):
            return
        location = Location(file, entry.begin, entry.end - entry.begin)
        place[local] = Tensor(local, entry.dtype, shape, location)
        self.bytes[want.group] += location.length
        self.counts[want.group] += 1

    def _exact(self, entry: HeaderEntry, dtype: str) -> bool:
        if entry.dtype != dtype:
            self.report.error(
                f"The tensor {entry.name} is stored as {entry.dtype}; expected {dtype}.", _REMEDY
            )
        return entry.dtype == dtype

    def _float(self, entry: HeaderEntry, usual: str) -> bool:
        if entry.dtype not in FLOATS:
            self.report.error(
                f"The tensor {entry.name} is stored as {entry.dtype}; "
                f"expected {usual} (or {', '.join(FLOATS)}).",
                _REMEDY,
            )
            return False
        if entry.dtype != usual:
            self._other_dtype[f"{entry.dtype} instead of {usual}"] += 1
        return True

    def _add_expert(self, entry: HeaderEntry, file: int, layer: int, local: str) -> None:
        moe = self.spec.moe
        assert moe is not None
        number, _, key = local[len(EXPERTS) :].partition(".")
        expert, part = _number(number, moe.experts), self.part_numbers.get(key, -1)
        if expert < 0 or part < 0:
            if expert >= 0 and moe.format == "mxfp4" and key.endswith(".weight_shape"):
                self._ignored["weight_shape, since the config says the shapes"] += 1
            else:
                self._not_ours(entry)
            return
        _, dtype, shape = self._rows[part]
        if entry.shape != shape and squeezed(entry.shape) != squeezed(shape):
            self.report.error(
                f"The tensor {entry.name} has shape {list(entry.shape)}; expected {list(shape)}.",
                _REMEDY,
            )
            return
        if moe.format == "bf16":
            if not self._float(entry, dtype):
                return
            dtype = self.expert_dtype = self.expert_dtype or entry.dtype
        if not self._exact(entry, dtype):
            return
        place = self.experts.get(layer)
        if place is None:
            place = self.experts[layer] = LayerExperts(moe.experts, len(self._rows))
        at = expert * place.parts + part
        if place.offset[at] >= 0:
            self.report.error(f"The tensor {entry.name} lies in two shards.", _REMEDY)
            return
        place.offset[at], place.file[at] = entry.begin, file
        self.bytes[ROUTED] += entry.end - entry.begin
        self.counts[ROUTED] += 1

    def _add_vision(self, entry: HeaderEntry) -> None:
        group = PROJECTOR if entry.name.startswith("mm_projector.") else TOWER
        self.bytes[group] += entry.end - entry.begin
        self.counts[group] += 1
        want = self._vision.get(entry.name)
        self._vision_seen.add(entry.name)
        if self._vision and (want is None or squeezed(want.shape) != squeezed(entry.shape)):
            self.report.warn(
                f"The vision tensor {entry.name} {list(entry.shape)} is not the one the config "
                "predicts.",
                "Nothing to do for text, which never reads it.",
            )

    # ---- after the last one ----
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of one expert as stored."""
        bits = DTYPE_BITS[self.expert_dtype or "BF16"]
        return tuple(math.prod(shape) * bits // 8 for _, _, shape in self._rows)

    def missing(self) -> Iterator[str]:
        """Full names of every text tensor that no header held."""
        spec = replace(self.spec, tie_embeddings=self.spec.tie_embeddings and not self._head_seen)
        for tensor in spec.global_tensors():
            if self._global_name(tensor.name) not in self.globals:
                yield tensor.name
        for layer in spec.layers:
            prefix = f"{self._layer_prefix}{layer.index}."
            for local in self.wanted(layer.index):
                if local not in self.trunk[layer.index]:
                    yield prefix + local
            if layer.ffn == "moe":
                yield from self._missing_experts(layer.index, prefix + EXPERTS)

    @property
    def _head_seen(self) -> bool:
        return any(name.startswith("lm_head.") for name in self.globals)

    def _missing_experts(self, layer: int, prefix: str) -> Iterator[str]:
        assert self.spec.moe is not None
        place = self.experts.get(layer)
        if place is None:
            place = LayerExperts(self.spec.moe.experts, len(self._rows))
        keys = list(self.part_numbers)
        for expert, part in np.argwhere(place.offsets() < 0):
            yield f"{prefix}{expert}.{keys[part]}"

    def finish(self, excused: set[int]) -> None:
        """Report missing and unexpected tensors; ``excused`` holds hashes of names whose shard is
        already reported."""
        missing = (name for name in self.missing() if hash(name) not in excused)
        self.report.each(
            "error",
            (f"The tensor {name} is missing from the shards." for name in missing),
            _DAMAGED,
        )
        self.report.each(
            "error",
            (f"The tensor {name!r} is not part of this model." for name in self._unexpected),
            "The config.json and the shards do not belong together, or this model has a part that "
            "this version does not know.",
        )
        vision = [n for n in self._vision if n not in self._vision_seen and hash(n) not in excused]
        if vision:
            self.report.warn(
                f"{count_of(len(vision), 'vision tensor')} missing: {listing(vision, 3)}.",
                "Nothing to do for text, which never reads them.",
            )
        if self.spec.tie_embeddings and self._head_seen:
            self.report.note("The config ties the head to the embedding; the stored head is used.")
        for what, count in sorted(self._ignored.items()):
            self.report.note(f"Ignored: {count_of(count, 'tensor')}, {what}.")
        for what, count in sorted(self._other_dtype.items()):
            self.report.note(f"Used as stored: {count_of(count, 'tensor')} in {what}.")


def compare_index(
    index: Index, shards: Shards, seen: npt.NDArray[np.uint64], bad_files: set[int], report: Report
) -> set[int]:
    """Index against headers.  ``seen`` holds one number per (tensor, file) met in a header; files
    in ``bad_files`` could not be read.  Returns the hashes of the names accounted for."""
    position = {name: number for number, name in enumerate(shards.names)}
    to_file = np.array([position[name] for name in index.names], np.int32)
    files = to_file[index.file_of]
    readable = ~np.isin(files, np.array(sorted(bad_files), np.int32))
    excused = set(index.hashes[~readable].tolist())
    mixed = mix(index.hashes, files)
    absent = readable & ~np.isin(mixed, seen)
    if absent.any():
        lost = set(index.hashes[absent].tolist())
        names = [(t, s) for t, s in index.tensors() if hash(t) in lost]
        report.each(
            "error",
            (
                f"The index says that tensor {t!r} lies in {s}; {s} does not hold it."
                for t, s in names
            ),
            _REMEDY,
        )
        excused |= lost
    extra = np.nonzero(~np.isin(seen, mixed))[0]
    if len(extra):
        report.warn(
            f"In the shards but not in the index: {count_of(len(extra), 'tensor')}.",
            "The headers count; the index may be out of date.",
        )
    return excused


def scan(shards: Shards, survey: Survey | None, report: Report) -> set[int] | None:
    """Read every header once; returns hashes of names whose absence is already explained, or None
    when nobody can say what an unreadable shard held (there is no index)."""
    seen: list[npt.NDArray[np.uint64]] = []
    bad: set[int] = set()
    file = -1  # counts only the shards that are there, as ``Checkpoint.files`` does
    for number, path in enumerate(shards.paths):
        if path is None:
            bad.add(number)
            continue
        file += 1
        hashes = array("q")
        try:
            for entries in _batches(read_header(path, _shown(shards.names[number], path))):
                hashes.extend(hash(entry.name) for entry in entries)
                if survey is not None:
                    for entry in entries:
                        survey.add(entry, file)
        except CheckpointError as error:
            if report.strict:
                raise
            report.error(error.problem, error.remedy)
            bad.add(number)
            continue
        of_file = np.full(len(hashes), number, np.int32)
        seen.append(mix(np.array(hashes, np.int64), of_file))
    if shards.index is None:
        return None if bad else set()
    every = np.concatenate(seen) if seen else np.zeros(0, np.uint64)
    return compare_index(shards.index, shards, every, bad, report)


def _batches(entries: Iterator[HeaderEntry]) -> Iterator[list[HeaderEntry]]:
    """Lists of entries: a released shard is one list, so its layout is checked before it is used;
    a single file with half a million tensors comes in pieces."""
    while batch := list(itertools.islice(entries, BATCH)):
        yield batch


def _shown(name: str, path: Path) -> str:
    """Name the snapshot entry and, behind a link, the file it leads to."""
    if path.name == os.path.basename(name):
        return show_path(path)
    return f"{show_path(name)} ({show_path(path)})"
