"""How a trunk is held in so many bytes: which layers stay, and buffers for those that stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Demand


@dataclass
class Trunk:
    """One way to hold the trunk: what is resident and what the streamed rest needs."""

    layers: frozenset[int]
    ring: int
    count: int  # of buffers of ``ring`` bytes
    head: bool
    embed: bool
    bytes: int  # resident
    buffers: int = field(default=0)  # rings and head block


def head_buffer(demand: Demand) -> int:
    return min(demand.head_block, demand.head or demand.embed)


def hold_trunk(demand: Demand, room: int) -> Trunk | None:
    """The best way to hold the trunk in ``room``; None if none fits.

    Two buffers let the disk read the next layer while one is computed, which is worth more than
    the layer that a second buffer displaces; one buffer is for where two do not fit.
    """
    return _with_buffers(demand, room, 2) or _with_buffers(demand, room, 1)


def _with_buffers(demand: Demand, room: int, count: int) -> Trunk | None:
    """The way with ``count`` buffers that keeps most bytes of the trunk resident in ``room``.

    The streamed layers take turns in buffers as large as the largest of them, so for each
    possible buffer size all larger layers must be resident.
    """
    best: Trunk | None = None
    for ring in sorted({0, *demand.layers}):
        layers = [i for i, size in enumerate(demand.layers) if size > ring]
        used = sum(demand.layers[i] for i in layers)
        rest = [i for i, size in enumerate(demand.layers) if size <= ring]
        for head in (False,) if demand.head_away else (True, False):
            buffers = count * ring + (0 if head else head_buffer(demand))
            resident = used + ((demand.head or demand.embed) if head else 0)
            if resident + buffers > room:
                continue
            way = Trunk(frozenset(layers), ring, count, head, False, resident, buffers)
            _fill(way, demand, rest, room)
            if best is None or way.bytes > best.bytes:
                best = way
    return best


def _fill(way: Trunk, demand: Demand, rest: list[int], room: int) -> None:
    """Make more layers resident, largest first, then the embedding, as far as ``room`` goes."""
    layers = set(way.layers)
    for i in sorted(rest, key=lambda i: (-demand.layers[i], i)):
        if way.bytes + way.buffers + demand.layers[i] <= room:
            layers.add(i)
            way.bytes += demand.layers[i]
    streamed = set(range(len(demand.layers))) - layers
    if len(streamed) <= way.count:  # a buffer for each of them is the layer's own place
        layers |= streamed
        way.bytes += sum(demand.layers[i] for i in streamed)
        way.buffers -= way.count * way.ring
        way.ring = way.count = 0
    way.layers = frozenset(layers)
    tied = way.head and not demand.head
    way.embed = tied or way.bytes + way.buffers + demand.embed <= room
    if way.embed and not tied:
        way.bytes += demand.embed


def streamed_bytes(demand: Demand, trunk: Trunk) -> int:
    """Bytes of the trunk that every sweep reads anew."""
    layers = sum(size for i, size in enumerate(demand.layers) if i not in trunk.layers)
    return layers + (0 if trunk.head or demand.head_away else demand.head or demand.embed)
