"""The memory plan: what gets how many bytes, decided once, before anything is loaded.

Pure arithmetic on byte counts.  Order of claims: what cannot be avoided (the interpreter, state,
working set, one expert slot), then the trunk, then expert slots.  The sum never exceeds the limit.

Every sweep over a prompt reads the experts that its rows ask for, and the trunk that streams, once:
the longer the sweep, the fewer of them, and the less memory for what decoding would find in RAM.
Where it is known how a prompt and its answer will be (`Use`), the sweep is as long as makes both
together read least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..config import ROW_TILE, SWEEP, align_up, show_size
from ..errors import DoesNotFit

ANSWER = 256  #: tokens of an answer whose length nobody knows


@dataclass(frozen=True)
class Demand:
    """Byte counts of a model on this machine.  ``working(rows)`` is the working set of a sweep."""

    base: int  # interpreter, libraries, page index, tokenizer: measured
    tiles: int  # decoding tables and weight tiles of all compute threads
    staging: int  # read buffers
    layers: Sequence[int]  # trunk of each layer, as it lies in memory
    small: int  # norms and other global tensors, always resident
    embed: int
    head: int  # 0 if tied to the embedding
    head_block: int  # buffer of a streamed head
    state: int  # sequence state: KDA and latents, all sessions
    working: Callable[[int], int]
    slot: int  # one expert slot
    experts: int  # routed experts in all
    top_k: int
    extra: int = 0  # what the caller keeps beside the engine
    tables: int = 0  # what the cache policy remembers
    slot_objects: int = 0  # what the engine remembers about the page in a slot
    head_away: bool = False  # a device holds the head; it only passes through here
    #: bytes of the experts that a sweep of so many rows asks for
    asked: Callable[[int], float] = lambda rows: 0.0
    longest: int | None = None  # rows of a sweep that takes longer to compute than to read anyhow

    @property
    def place(self) -> int:
        """Bytes that one more expert in RAM takes."""
        return self.slot + self.slot_objects


class Use(NamedTuple):
    """What for: a prompt of ``prompt`` tokens, then ``answer`` decoded ones."""

    prompt: int
    answer: int


def use_of(sweep: int | None, context: int, answer: int | None = None) -> Use | None:
    """What for, where nobody has chosen the ``sweep``: a session of ``context`` tokens, ``answer``
    of them decoded; if nobody knows, a prompt of that length and a short answer."""
    if sweep is not None:
        return None
    if answer is None:
        return Use(context, min(ANSWER, context // 2))
    return Use(max(0, context - answer), answer)


@dataclass(frozen=True)
class Limits:
    """What the user and the machine allow.  ``cache`` caps the expert slots, ``rows`` a sweep;
    with ``use`` a sweep may be shorter, and None is no cap."""

    total: int
    cache: int | None = None
    rows: int | None = SWEEP
    notes: tuple[str, ...] = ()
    use: Use | None = None


@dataclass(frozen=True)
class Plan:
    """The decided plan.  ``purposes`` lists every byte under a name; ``total`` is their sum."""

    limit: int
    purposes: tuple[tuple[str, int], ...]
    resident_layers: frozenset[int]
    embed_resident: bool
    head_resident: bool
    ring_bytes: int  # of one streaming buffer
    ring_buffers: int  # 2: the next streamed layer is read while one is computed
    resident_bytes: int
    slots: int
    slot_bytes: int
    sweep_rows: int
    state_bytes: int
    experts: int
    layer_sizes: tuple[int, ...]
    notes: tuple[str, ...] = ()
    device: Plan | None = None  # of an accelerator's memory
    place: str = "RAM"  # what this plan is of

    @property
    def total(self) -> int:
        return sum(size for _, size in self.purposes)


@dataclass
class _Trunk:
    """One way to hold the trunk: what is resident and what the streamed rest needs."""

    layers: frozenset[int]
    ring: int
    count: int  # of buffers of ``ring`` bytes
    head: bool
    embed: bool
    bytes: int  # resident
    buffers: int = field(default=0)  # rings and head block


def make_plan(demand: Demand, limits: Limits) -> Plan:
    """The plan for ``demand`` under ``limits``; raises ``DoesNotFit`` with the missing bytes."""
    fixed = demand.base + demand.tiles + demand.staging + demand.small
    fixed += demand.state + demand.extra + demand.tables
    one = demand.place if demand.experts else 0
    ring = max(demand.layers, default=0)
    beside = fixed + one + ring + _head_buffer(demand)
    least = beside + demand.working(ROW_TILE)
    if least > limits.total:
        raise DoesNotFit(
            f"The smallest plan needs {least:,} bytes ({show_size(least)}) and "
            f"{limits.total:,} ({show_size(limits.total)}) are allowed: "
            f"{least - limits.total:,} are missing.",
            f"Give --ram {-(-least // 10**6)}M or more, or fewer tokens (and sessions) at a time.",
            missing=least - limits.total,
        )
    ways = []
    for rows in _lengths(limits, demand.longest):
        while rows > ROW_TILE and beside + demand.working(rows) > limits.total:
            rows -= ROW_TILE
        room = limits.total - fixed - demand.working(rows)
        trunk = _beside_slots(demand, limits, room)
        slots = _slots(demand, limits, room - trunk.bytes - trunk.buffers)
        ways.append((_reads(demand, limits.use, rows, trunk, slots), rows, trunk, slots))
    _, rows, trunk, slots = min(ways, key=lambda way: way[:2])
    return _plan(demand, limits, rows, trunk, slots)


def _lengths(limits: Limits, longest: int | None) -> list[int]:
    """Rows of a sweep that are worth a thought, in rising order."""
    if limits.use is None:
        return [align_up(max(1, limits.rows or SWEEP), ROW_TILE)]
    caps = [max(1, limits.use.prompt), limits.rows, longest and max(SWEEP, longest)]
    most = align_up(min(cap for cap in caps if cap is not None), ROW_TILE)
    lengths, parts = [most], 1
    while lengths[0] > SWEEP:  # the prompt in one part, in two, in three, ...
        parts += -(-parts // 4)
        lengths.insert(0, max(SWEEP, align_up(-(-most // parts), ROW_TILE)))
    return lengths


def _reads(demand: Demand, use: Use | None, rows: int, trunk: _Trunk, slots: int) -> float:
    """Bytes that the prompt and the answer read from disk; 0 if nobody knows them.  Decoding finds
    an expert in RAM as often as one lies there; sweeps of a prompt find all of them or none."""
    if use is None:
        return 0.0
    sizes = demand.layers
    streamed = sum(size for i, size in enumerate(sizes) if i not in trunk.layers)
    streamed += 0 if trunk.head or demand.head_away else demand.head or demand.embed
    missing = 1 - slots / demand.experts if demand.experts else 0.0
    sweeps = -(-use.prompt // rows)
    whole = demand.asked(rows) if missing else 0.0
    return sweeps * (streamed + whole) + use.answer * (streamed + missing * demand.asked(1))


def _plan(demand: Demand, limits: Limits, rows: int, trunk: _Trunk, slots: int) -> Plan:
    purposes = (
        ("interpreter, libraries, page index", demand.base),
        ("decoding tables and weight tiles", demand.tiles),
        ("read buffers", demand.staging),
        ("trunk, resident", demand.small + trunk.bytes),
        ("trunk, streaming buffers", trunk.buffers),
        ("sequence state and latents", demand.state),
        ("kept for the caller", demand.extra),
        ("cache policy", demand.tables),
        (f"working set of a sweep of {rows} tokens", demand.working(rows)),
        (f"{slots} expert slots", slots * demand.place),
    )
    return Plan(
        limit=limits.total,
        purposes=purposes,
        resident_layers=trunk.layers,
        embed_resident=trunk.embed,
        head_resident=trunk.head,
        ring_bytes=trunk.ring,
        ring_buffers=trunk.count,
        resident_bytes=trunk.bytes,
        slots=slots,
        slot_bytes=demand.slot,
        sweep_rows=rows,
        state_bytes=demand.state,
        experts=demand.experts,
        layer_sizes=tuple(demand.layers),
        notes=limits.notes,
    )


def _beside_slots(demand: Demand, limits: Limits, room: int) -> _Trunk:
    """The trunk beside the slots of one token's experts, or as many of them as fit; slots that
    ``limits.cache`` forbids leave their room to the trunk."""
    slots = min(demand.top_k, demand.experts)
    if limits.cache is not None and slots:
        slots = max(1, min(slots, limits.cache // demand.slot))
    for count in range(slots, min(1, slots) - 1, -1):
        trunk = _hold_trunk(demand, room - count * demand.place)
        if trunk is not None:
            return trunk
    raise AssertionError("the smallest plan was checked to fit")


def _head_buffer(demand: Demand) -> int:
    return min(demand.head_block, demand.head or demand.embed)


def _slots(demand: Demand, limits: Limits, free: int) -> int:
    if not demand.experts:
        return 0
    most = min(demand.experts, free // demand.place)
    if limits.cache is None:
        return most
    if limits.cache < demand.slot:
        raise DoesNotFit(
            f"An expert cache of {limits.cache:,} bytes holds not one expert of "
            f"{demand.slot:,} bytes.",
            f"Give --cache {demand.slot} or more.",
            missing=demand.slot - limits.cache,
        )
    return min(most, limits.cache // demand.slot)


def _hold_trunk(demand: Demand, room: int) -> _Trunk | None:
    """The best way to hold the trunk in ``room``; None if none fits.

    Two buffers let the disk read the next layer while one is computed, which is worth more than
    the layer that a second buffer displaces; one buffer is for where two do not fit.
    """
    return _with_buffers(demand, room, 2) or _with_buffers(demand, room, 1)


def _with_buffers(demand: Demand, room: int, count: int) -> _Trunk | None:
    """The way with ``count`` buffers that keeps most bytes of the trunk resident in ``room``.

    The streamed layers take turns in buffers as large as the largest of them, so for each
    possible buffer size all larger layers must be resident.
    """
    best: _Trunk | None = None
    for ring in sorted({0, *demand.layers}):
        layers = [i for i, size in enumerate(demand.layers) if size > ring]
        used = sum(demand.layers[i] for i in layers)
        rest = [i for i, size in enumerate(demand.layers) if size <= ring]
        for head in (False,) if demand.head_away else (True, False):
            buffers = count * ring + (0 if head else _head_buffer(demand))
            resident = used + ((demand.head or demand.embed) if head else 0)
            if resident + buffers > room:
                continue
            way = _Trunk(frozenset(layers), ring, count, head, False, resident, buffers)
            _fill(way, demand, rest, room)
            if best is None or way.bytes > best.bytes:
                best = way
    return best


def _fill(way: _Trunk, demand: Demand, rest: list[int], room: int) -> None:
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
