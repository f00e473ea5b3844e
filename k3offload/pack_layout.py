"""Where everything lies in a pack: which shards there are, what each holds and in which order.

One shard or several for each layer: its experts in order of number, then its trunk in one run;
then embedding, head and final norms, then vision.  Every expert, every trunk run, the embedding and
the head begin at a multiple of 4096 bytes.  The format allows no holes, so where the tensor before
ends elsewhere, a tensor of zeros named ``k3offload.padding.N`` fills up; K3 needs none, since its
experts, its embedding and its head are multiples of 4096 bytes.

This file counts bytes.  It reads nothing and writes nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from .checkpoint import Checkpoint
from .config import READ_ALIGN, align_up
from .errors import UsageError
from .inventory import DTYPE_BITS, PADDING
from .pack_source import Source, Sources
from .precision import CODES, Part, parts
from .spec import Precision
from .tiers.base import Location

METADATA: Final = {"__metadata__": {"format": "pt"}}  #: some readers insist on it
_HEADER: Final = 100  #: bytes of a header without entries, at most, before it is aligned
_ENTRY: Final = 110  #: bytes of a header entry beside its name and shape, at most


class Entry(NamedTuple):
    """A piece of a shard: a tensor as it is in the source, one that becomes two by quantising
    (codes, then scales), or, without a source, padding."""

    stored: tuple[Part, ...]
    source: Source | None

    @property
    def nbytes(self) -> int:
        """Bytes in the pack."""
        return sum(stored.nbytes for stored in self.stored)


class Run(NamedTuple):
    """Entries back to back, never cut; ``aligned`` ones begin at a multiple of 4096."""

    entries: tuple[Entry, ...]
    aligned: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes in the pack."""
        return sum(entry.nbytes for entry in self.entries)


class Shard(NamedTuple):
    """Experts ``first`` to before ``end`` of ``layer``, then ``runs``."""

    layer: int = -1
    first: int = 0
    end: int = 0
    runs: tuple[Run, ...] = ()
    name: str = ""
    padding: int = 0  #: number of its first padding tensor
    size: int = 0  #: bytes of the file
    entries: int = 0  #: tensors of its header, padding included
    text: int = 0  #: bytes of their names as JSON
    tensors: int = 0  #: without padding
    payload: int = 0  #: bytes of these


class Layout:
    """The shards of a pack of ``checkpoint`` with a trunk of ``precision``; none is larger than
    ``limit`` bytes.  Raises ``UsageError`` when something that is never cut exceeds that."""

    def __init__(
        self, checkpoint: Checkpoint, sources: Sources, precision: Precision, limit: int
    ) -> None:
        self._checkpoint, self._limit = checkpoint, limit
        trunks = [_run(_entry(source, precision) for source in trunk) for trunk in sources.layers]
        ends = _ends([_entry(source, precision) for source in sources.top])
        rest = _run(_entry(source, precision) for source in sources.rest)
        self._refuse_large([*trunks, *ends, *(Run((entry,)) for entry in rest.entries)])
        drafts: list[Shard] = []
        for layer, trunk in enumerate(trunks):
            drafts += self._cut_layer(layer, trunk)
        drafts += self._cut(ends)
        drafts += self._cut([Run((entry,), aligned=False) for entry in rest.entries])
        self.shards: list[Shard] = []
        padding = 0
        for number, draft in enumerate(drafts):
            name = f"model-{number + 1:05d}-of-{len(drafts):06d}.safetensors"
            shard = draft._replace(name=name, padding=padding)
            entries = list(self.entries(shard))
            padding += sum(1 for entry in entries if entry.source is None)
            self.shards.append(_measured(shard, entries))

    @property
    def payload(self) -> int:
        """Bytes of all tensors without padding."""
        return sum(shard.payload for shard in self.shards)

    def entries(self, shard: Shard) -> Iterator[Entry]:
        """What ``shard`` holds, in the order of its data, padding included."""
        at, number = 0, shard.padding
        experts = (self._expert(shard.layer, e) for e in range(shard.first, shard.end))
        for run in itertools.chain(experts, shard.runs):
            gap = -at % READ_ALIGN if run.aligned else 0
            if gap:
                yield Entry((Part(f"{PADDING}{number}", "U8", (gap,)),), None)
                number += 1
            yield from run.entries
            at += gap + run.nbytes

    def _expert(self, layer: int, expert: int) -> Run:
        checkpoint = self._checkpoint
        tensors = checkpoint.spec.expert_tensors(layer, expert)
        page = checkpoint.expert(layer, expert)
        entries = []
        for tensor, part in zip(tensors, page.parts, strict=True):
            extent = page.extents[part.extent]
            where = Location(extent.file, extent.offset + part.delta, part.nbytes)
            stored = Part(tensor.name, checkpoint.expert_dtype, tensor.shape)
            entries.append(Entry((stored,), Source(*stored, where, None)))
        return Run(tuple(entries))

    # ---- cutting: by an upper bound of the header, so that no shard is above the limit ----
    def _refuse_large(self, runs: list[Run]) -> None:
        """Raise ``UsageError`` for the largest of all runs and experts when it is too large."""
        experts = [self._expert(layer, 0) for layer in self._checkpoint.spec.moe_layers[:1]]
        largest = max([*runs, *experts], key=_room)
        size = READ_ALIGN + _HEADER + _room(largest)
        if size > self._limit:
            tensor = largest.entries[0].stored[0].name
            raise UsageError(
                f"Shards of {self._limit:,} bytes are too small: {tensor} and what lies in one run "
                f"with it need {size:,} bytes.",
                f"Give --shard-size {size} or more.",
            )

    def _cut_layer(self, layer: int, trunk: Run) -> list[Shard]:
        spec = self._checkpoint.spec
        if layer not in spec.moe_layers:
            return self._cut([trunk], Shard(layer))
        assert spec.moe is not None
        count = spec.moe.experts
        each = _room(self._expert(layer, count - 1))  # no name is longer
        most = (self._limit - READ_ALIGN - _HEADER) // each
        first = (count - 1) // most * most
        shards = [Shard(layer, begin, begin + most) for begin in range(0, first, most)]
        return shards + self._cut([trunk], Shard(layer, first, count), (count - first) * each)

    def _cut(self, runs: Iterable[Run], shard: Shard | None = None, taken: int = 0) -> list[Shard]:
        """Put ``runs`` into ``shard``, which is filled with ``taken`` bytes, and into new ones."""
        done: list[Shard] = []
        shard = shard or Shard()
        for run in runs:
            if taken and READ_ALIGN + _HEADER + taken + _room(run) > self._limit:
                done.append(shard)
                shard, taken = Shard(shard.layer), 0
            shard = shard._replace(runs=(*shard.runs, run))
            taken += _room(run)
        return [*done, shard] if taken else done


def header(entries: Iterable[Entry]) -> bytes:
    """Length and JSON of a shard's header, filled up with spaces so that data begins at a multiple
    of 4096."""
    head: dict[str, object] = dict(METADATA)
    at = 0
    for entry in entries:
        for part in entry.stored:
            end = at + part.nbytes
            offsets = (at, end)
            head[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": offsets}
            at = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % READ_ALIGN)
    return len(text).to_bytes(8, "little") + text


def _entry(source: Source, precision: Precision) -> Entry:
    """``source`` as the pack holds it; names keep the spelling of the source."""
    known, own = source.known, Part(source.name, source.dtype, source.shape)
    held = () if known is None else parts(known.name, known.dtype, known.shape, precision)
    if known is None or len(held) == 1:
        return Entry((own,), source)
    cut = len(known.name)
    return Entry(tuple(p._replace(name=source.name + p.name[cut:]) for p in held), source)


def _unit(entry: Entry) -> int:
    """Bytes that a reader may want each tensor of ``entry`` aligned to.  The codes of int8 count as
    the scales that follow them do: their length is a multiple of 64."""
    first, last = entry.stored[0], entry.stored[-1]
    return 2 if first.name.endswith(CODES["int8"]) else DTYPE_BITS[last.dtype] // 8


def _run(entries: Iterable[Entry]) -> Run:
    """One run, largest elements first, so that every tensor lies at a multiple of its element."""
    return Run(tuple(sorted(entries, key=lambda entry: -_unit(entry))))


def _ends(top: list[Entry]) -> list[Run]:
    """Embedding, head, and the small rest."""
    runs: dict[int, list[Entry]] = {0: [], 1: [], 2: []}
    for entry in top:
        assert entry.source is not None and entry.source.known is not None
        name = entry.source.known.name
        runs[0 if ".embed_tokens." in name else 1 if "lm_head." in name else 2].append(entry)
    return [_run(entries) for entries in runs.values() if entries]


def _room(run: Run) -> int:
    """Upper bound of what ``run`` adds to a shard, with padding before it: data and header."""
    stored = [part for entry in run.entries for part in entry.stored]
    names = sum(len(json.dumps(p.name)) + 21 * len(p.shape) + _ENTRY for p in stored)
    return align_up(run.nbytes, READ_ALIGN) + names + 2 * _ENTRY


def _measured(shard: Shard, entries: list[Entry]) -> Shard:
    every = [part for entry in entries for part in entry.stored]
    real = [part for entry in entries if entry.source for part in entry.stored]
    return shard._replace(
        size=len(header(entries)) + sum(entry.nbytes for entry in entries),
        entries=len(every),
        text=sum(len(json.dumps(part.name)) for part in every),
        tensors=len(real),
        payload=sum(part.nbytes for part in real),
    )
