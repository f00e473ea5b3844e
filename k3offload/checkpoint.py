"""From a model folder to the place of every page: ``Location(file, offset, length)``.

This file knows which bytes belong to which page.  It reads headers only, keeps no file open, maps
nothing into memory, writes nothing, and runs no code from the folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import CheckpointError, K3Error
from .findings import Finding, Report
from .inventory import GROUPS
from .paths import show_path
from .shards import find_shards, search_folders
from .spec import ModelSpec
from .survey import LayerExperts, Survey, Tensor, scan
from .tiers.base import Location

__all__ = ["Checkpoint", "ExpertPage", "Part", "Tensor", "check_trunk_values"]


class Part(NamedTuple):
    """One tensor of an expert: ``nbytes`` at ``delta`` of extent number ``extent`` of its page."""

    key: str
    extent: int
    delta: int
    nbytes: int


class ExpertPage(NamedTuple):
    """One routed expert: one extent when its tensors lie back to back, several otherwise."""

    extents: tuple[Location, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the page without any alignment."""
        return sum(extent.length for extent in self.extents)


@dataclass
class _LayerPages:
    """Pages of one layer.  ``template[e]`` indexes the shared part lists; -1 means scattered."""

    start: npt.NDArray[np.int64]
    file: npt.NDArray[np.int32]
    template: npt.NDArray[np.int32]
    scattered: LayerExperts | None


@dataclass
class Checkpoint:
    """A checked model folder.  ``files`` are real paths (links resolved), indexed by
    ``Location.file``; ``notes`` are the findings that do not keep it from running."""

    spec: ModelSpec
    folder: Path
    files: tuple[Path, ...]
    notes: tuple[Finding, ...]
    expert_dtype: str  #: "U8" for MXFP4, else BF16, F16 or F32; the same for all experts
    part_bytes: tuple[int, ...]  #: bytes of each tensor of an expert, in the order of its keys
    bytes_by_group: dict[str, int]  #: as stored
    tensor_count: int
    _globals: dict[str, Tensor] = field(repr=False)
    _trunk: list[list[Tensor]] = field(repr=False)
    _pages: dict[int, _LayerPages] = field(repr=False)
    _templates: list[tuple[Part, ...]] = field(repr=False)
    _keys: tuple[str, ...] = field(repr=False)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        extra_folders: Sequence[str | os.PathLike[str]] = (),
    ) -> Checkpoint:
        """Check the folder ``path`` (or a hub cache's snapshot folder) and find every page.

        Shards are looked for in ``path``, then ``extra_folders``, then the folders of the variable
        ``K3_MODEL_FOLDERS``.  Raises ``ConfigError`` or ``CheckpointError`` on the first error.
        """
        folder = Path(os.path.abspath(path))
        report = Report(strict=True)
        survey, shards_paths = look(folder, extra_folders, report)
        assert survey is not None
        return _build(folder, survey, shards_paths, report)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert as stored; 0 without experts."""
        return sum(self.part_bytes)

    @property
    def one_read_experts(self) -> int:
        """Experts whose tensors lie back to back, so that one read brings them."""
        return sum(int((pages.template >= 0).sum()) for pages in self._pages.values())

    def trunk(self, layer: int) -> list[Tensor]:
        """The tensors of one layer without its routed experts, in the order of the spec."""
        return self._trunk[layer]

    def globals(self) -> dict[str, Tensor]:
        """Embedding, norms, output mix and head, by local name."""
        return self._globals

    def expert(self, layer: int, expert: int) -> ExpertPage:
        """Where expert ``expert`` of layer ``layer`` lies.  Raises ``KeyError`` when the layer has
        no experts, ``IndexError`` when it has fewer."""
        pages = self._pages[layer]
        if not 0 <= expert < len(pages.template):
            raise IndexError(f"layer {layer} has {len(pages.template)} experts, not {expert}")
        template = pages.template[expert]
        if template >= 0:
            where = Location(int(pages.file[expert]), int(pages.start[expert]), self.expert_bytes)
            return ExpertPage((where,), self._templates[template])
        assert pages.scattered is not None
        files, offsets = pages.scattered.files()[expert], pages.scattered.offsets()[expert]
        return _scattered(self._keys, self.part_bytes, files.tolist(), offsets.tolist())


def look(
    folder: Path, extra_folders: Sequence[str | os.PathLike[str]], report: Report
) -> tuple[Survey | None, list[Path | None]]:
    """Everything that headers can tell about ``folder``; errors go to ``report``.

    Returns the survey (None when the config was refused) and the real path of every shard.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{show_path(folder)} is not a folder.", "Point at the folder that holds config.json."
        )
    spec = ModelSpec.load(folder) if report.strict else _load_reported(folder, report)
    shards = find_shards(search_folders(folder, extra_folders), report)
    survey = Survey(spec, report) if spec else None
    excused = scan(shards, survey, report)
    if survey is not None and excused is not None:
        survey.finish(excused)
    return survey, shards.paths


def _load_reported(folder: Path, report: Report) -> ModelSpec | None:
    try:
        return ModelSpec.load(folder)
    except K3Error as error:
        report.error(error.problem, error.remedy)
        return None


def _build(folder: Path, survey: Survey, paths: list[Path | None], report: Report) -> Checkpoint:
    spec = survey.spec
    keys = tuple(survey.part_numbers)
    sizes = survey.part_bytes()
    templates: list[tuple[Part, ...]] = []
    known: dict[bytes, int] = {}
    pages = {
        layer: _layer_pages(place, np.array(sizes, np.int64), keys, templates, known)
        for layer, place in survey.experts.items()
    }
    trunk = [
        [have[n] for n in survey.wanted(i) if n in have] for i, have in enumerate(survey.trunk)
    ]
    return Checkpoint(
        spec=spec,
        folder=folder,
        files=tuple(path for path in paths if path is not None),
        notes=tuple(report.findings),
        expert_dtype=survey.expert_dtype,
        part_bytes=sizes,
        bytes_by_group={name: survey.bytes[name] for name in GROUPS if survey.bytes[name]},
        tensor_count=sum(survey.counts.values()),
        _globals=survey.globals,
        _trunk=trunk,
        _pages=pages,
        _templates=templates,
        _keys=keys,
    )


def _layer_pages(
    place: LayerExperts,
    sizes: npt.NDArray[np.int64],
    keys: tuple[str, ...],
    templates: list[tuple[Part, ...]],
    known: dict[bytes, int],
) -> _LayerPages:
    """Which experts of a layer are one extent, and in which order their parts lie."""
    offsets, files = place.offsets(), place.files()
    order = np.argsort(offsets, axis=1, kind="stable")
    sorted_offsets = np.take_along_axis(offsets, order, 1)
    joined = (sorted_offsets[:, 1:] == (sorted_offsets + sizes[order])[:, :-1]).all(1)
    joined &= (files == files[:, :1]).all(1)
    start = sorted_offsets[:, 0].copy()
    template = np.full(len(offsets), -1, np.int32)
    for expert in np.nonzero(joined)[0]:
        pattern = order[expert].tobytes()
        if pattern not in known:
            known[pattern] = len(templates)
            deltas = offsets[expert] - start[expert]
            templates.append(
                tuple(
                    Part(k, 0, int(d), int(n)) for k, d, n in zip(keys, deltas, sizes, strict=True)
                )
            )
        template[expert] = known[pattern]
    return _LayerPages(start, files[:, 0].copy(), template, None if joined.all() else place)


def _scattered(
    keys: tuple[str, ...], sizes: tuple[int, ...], files: list[int], offsets: list[int]
) -> ExpertPage:
    """A page of several extents, ordered by file and offset, neighbours merged."""
    extents: list[Location] = []
    parts: dict[int, Part] = {}
    for i in sorted(range(len(keys)), key=lambda i: (files[i], offsets[i])):
        last = extents[-1] if extents else None
        if last and (last.file, last.offset + last.length) == (files[i], offsets[i]):
            parts[i] = Part(keys[i], len(extents) - 1, last.length, sizes[i])
            extents[-1] = Location(last.file, last.offset, last.length + sizes[i])
        else:
            parts[i] = Part(keys[i], len(extents), 0, sizes[i])
            extents.append(Location(files[i], offsets[i], sizes[i]))
    return ExpertPage(tuple(extents), tuple(parts[i] for i in range(len(keys))))


def check_trunk_values(name: str, values: npt.NDArray[Any], heads: int) -> None:
    """Refuse values no released model has: non-finite numbers, or a used tail of ``A_log``.

    ``name`` is the tensor's full or local name, ``values`` its float array; ``heads`` is the number
    of KDA heads, beyond which ``A_log`` must be exactly zero.  Raises ``CheckpointError``.
    """
    if not np.isfinite(values).all():
        where = int(np.argmin(np.isfinite(values).reshape(-1)))
        raise CheckpointError(
            f"The tensor {name} holds a value that is not finite, first at element {where}.",
            "Download or copy its shard again.",
        )
    if name.endswith("A_log") and values.reshape(-1)[heads:].any():
        raise CheckpointError(
            f"The tensor {name} is not zero beyond its {heads} heads.",
            "The config.json and the shards do not belong together, or the shard is damaged.",
        )
