"""The memory plan: what gets how many bytes, decided once, before anything is loaded.

Pure arithmetic on byte counts.  Order of claims: what cannot be avoided (the interpreter, state,
working set, one expert slot), then the trunk, then latents where they do not all fit, then expert
slots.  The sum never exceeds the limit.

Every sweep over a prompt reads the experts that its rows ask for, and the trunk that streams, once:
the longer the sweep, the fewer of them, and the less memory for what decoding would find in RAM.
Where it is known how a prompt and its answer will be (`Use`), the sweep is as long as makes both
together read least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..config import ROW_TILE, SWEEP, align_up, show_size
from ..errors import DoesNotFit, UsageError
from .plan_trunk import Trunk, head_buffer, hold_trunk, streamed_bytes

WORTH = 64 << 20  #: bytes of latents that are moved to disk by themselves rather than refused


@dataclass(frozen=True)
class Latents:
    """Bytes of the latents of all sessions, and of holding only the newest of them in RAM."""

    whole: int  # all of them, as they lie in RAM; part of ``Demand.state``
    open: int  # blocks that are not full, which never leave RAM
    carried: int  # what prompt attention keeps from one piece to the next
    least: int  # slots and buffers without which nothing works
    good: int  # below which reads are too short to be quick
    must: bool = False  # they come from a device without room, and always by way of slots

    def least_cap(self) -> int:
        """The smallest ``Limits.latents`` that can be kept."""
        return self.open + self.carried + self.least


@dataclass(frozen=True)
class Summaries:
    """Bytes of the block summaries of a sweep, and of holding only a part of them in RAM."""

    row: int  # of one row; part of ``Demand.working``
    least: int  # slots and buffers without which nothing works


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
    prefixes: int = 0  # snapshots that sequences share
    prefixes_spilled: int = 0  # the same where latents spill
    extra: int = 0  # what the caller keeps beside the engine
    tables: int = 0  # what the cache policy remembers
    slot_objects: int = 0  # what the engine remembers about the page in a slot
    head_away: bool = False  # a device holds the head; it only passes through here
    latents: Latents | None = None  # None: there are none, or they cannot be moved to disk
    summaries: Summaries | None = None  # the same
    sealed: int = 0  # for summaries that are moved to disk
    #: bytes of the experts that a sweep of so many rows asks for
    asked: Callable[[int], float] = lambda rows: 0.0
    longest: int | None = None  # rows of a sweep that takes longer to compute than to read anyhow

    @property
    def place(self) -> int:
        """Bytes that one more expert in RAM takes."""
        return self.slot + self.slot_objects


class Use(NamedTuple):
    """What for: prompts of ``prompt`` tokens together, then ``answer`` decoded tokens of each of
    ``sessions`` sequences, which share their sweeps."""

    prompt: int
    answer: int
    sessions: int = 1


def use_of(
    sweep: int | None, context: int, sessions: int = 1, answer: int | None = None
) -> Use | None:
    """What for, where nobody has chosen the ``sweep``: ``sessions`` of ``context`` tokens, which
    share sweeps, ``answer`` of them decoded; if nobody knows, prompts of that length and short
    answers."""
    if sweep is not None:
        return None
    if answer is None:
        return Use(sessions * context, min(ANSWER, context // 2), sessions)
    return Use(sessions * max(0, context - answer), answer, sessions)


@dataclass(frozen=True)
class Limits:
    """What the user and the machine allow.  ``cache`` caps the expert slots, ``rows`` a sweep,
    ``latents`` the latents in RAM, ``summaries`` the block summaries of a sweep there.  With
    ``use`` a sweep may be shorter, and ``rows`` None is no cap."""

    total: int
    cache: int | None = None
    rows: int | None = SWEEP
    notes: tuple[str, ...] = ()
    latents: int | None = None
    summaries: int | None = None
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
    prefixes: int = 0  # bytes of shared snapshots
    device: Plan | None = None  # of an accelerator's memory
    place: str = "RAM"  # what this plan is of
    latents: int | None = None  # bytes for the newest ones and for buffers; None: all stay in RAM
    all_latents: int = 0  # bytes of all of them, where they do not all stay in RAM
    summaries: int | None = None  # bytes for a part of a sweep's; None: all stay in RAM
    reads: float = 0.0  # bytes from disk for what it is for (``Limits.use``); 0 if nobody knows

    @property
    def spills(self) -> bool:
        """Whether a scratch folder is needed."""
        return self.latents is not None or self.summaries is not None

    @property
    def total(self) -> int:
        return sum(size for _, size in self.purposes)


def make_plan(demand: Demand, limits: Limits) -> Plan:
    """The plan for ``demand`` under ``limits``; raises ``DoesNotFit`` with the missing bytes.

    All latents stay in RAM if they fit there and ``limits.latents`` does not forbid it.  Otherwise
    the newest of them do, in what the trunk leaves, and the plan says how many.  Block summaries
    stay in RAM unless ``limits.summaries`` forbids it.
    """
    for name, cap, held_ in (
        ("--latents", limits.latents, demand.latents),
        ("--summaries", limits.summaries, demand.summaries),
    ):
        if cap is not None and held_ is None:
            raise UsageError(
                f"{name} has nothing to act on: the model has none, or a GPU's memory holds them.",
                "Leave it out; --device cpu has everything in RAM.",
            )
    demand = _summaries_moved(demand, limits)
    held, cap = demand.latents, limits.latents
    if held is None:
        return _make_plan(demand, limits, 0)
    refused: DoesNotFit | None = None
    if not held.must and (cap is None or cap >= held.whole):
        try:
            return _make_plan(demand, limits, 0)
        except DoesNotFit as error:
            refused = error
    elif cap is not None and cap < held.least_cap():
        raise DoesNotFit(
            f"{cap:,} bytes of latents in RAM are too few: blocks that are not full, the sums of "
            f"prompt attention and buffers take {held.least_cap():,}.",
            f"Give --latents {-(-held.least_cap() // 10**6)}M or more, or fewer sessions.",
            missing=held.least_cap() - cap,
        )
    most = held.whole if cap is None else cap - held.open - held.carried
    if refused is not None and held.whole < WORTH:
        raise refused
    state, tiles = demand.state - held.whole + held.open, demand.tiles + held.carried
    prefixes = demand.prefixes_spilled
    spilled = replace(demand, state=state, tiles=tiles, prefixes=prefixes)
    for least in (held.whole, held.good) if held.must else (held.good,):
        if least <= most:
            try:
                return _make_plan(spilled, limits, least, most)
            except DoesNotFit:  # with less, perhaps
                pass
    return _make_plan(spilled, limits, held.least, most)


def _summaries_moved(demand: Demand, limits: Limits) -> Demand:
    """``demand`` with ``limits.summaries`` bytes for summaries, if a sweep has more of them."""
    held, cap = demand.summaries, limits.summaries
    if held is None or cap is None:
        return demand
    row = held.row
    if _lengths(limits, demand.longest)[-1] * row <= cap:
        return demand
    if cap < held.least:
        raise DoesNotFit(
            f"{cap:,} bytes of block summaries in RAM are too few: buffers take {held.least:,}.",
            f"Give --summaries {-(-held.least // 10**6)}M or more.",
            missing=held.least - cap,
        )

    def working(rows: int) -> int:  # few rows keep them, whatever the plan
        return demand.working(rows) - max(0, rows - ROW_TILE) * row

    return replace(demand, working=working, sealed=cap)


def _make_plan(demand: Demand, limits: Limits, latents: int, most: int = 0) -> Plan:
    """``latents``: bytes of those that are kept in RAM beside ``demand.state``, at least; as far as
    there is room ``most``."""
    fixed = demand.base + demand.tiles + demand.staging + demand.small
    fixed += demand.state + demand.prefixes + demand.extra + demand.tables + demand.sealed + latents
    one = demand.place if demand.experts else 0
    ring = max(demand.layers, default=0)
    beside = fixed + one + ring + head_buffer(demand)
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
        trunk, token = _beside_slots(demand, limits, room)
        free = room - trunk.bytes - trunk.buffers
        more = max(0, min(most - latents, free - token * demand.place))
        slots = _slots(demand, limits, free - more)
        ways.append((_reads(demand, limits.use, rows, trunk, slots), rows, trunk, slots, more))
    reads, rows, trunk, slots, more = min(ways, key=lambda way: way[:2])
    return Plan(
        limit=limits.total,
        purposes=_purposes(demand, trunk, rows, slots, latents + more),
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
        prefixes=demand.prefixes,
        experts=demand.experts,
        layer_sizes=tuple(demand.layers),
        notes=limits.notes,
        latents=latents + more if latents else None,
        summaries=demand.sealed or None,
        reads=reads,
        all_latents=demand.latents.whole if latents and demand.latents else 0,
    )


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


def _reads(demand: Demand, use: Use | None, rows: int, trunk: Trunk, slots: int) -> float:
    """Bytes that the prompt and the answer read from disk; 0 if nobody knows them.  Decoding finds
    an expert in RAM as often as one lies there; sweeps of a prompt find all of them or none."""
    if use is None:
        return 0.0
    streamed = streamed_bytes(demand, trunk)
    missing = 1 - slots / demand.experts if demand.experts else 0.0
    sweeps = -(-use.prompt // rows)
    whole = demand.asked(rows) if missing else 0.0
    step = streamed + missing * demand.asked(use.sessions)
    return sweeps * (streamed + whole) + use.answer * step


def _purposes(
    demand: Demand, trunk: Trunk, rows: int, slots: int, latents: int
) -> tuple[tuple[str, int], ...]:
    """Every byte under a name."""
    return (
        ("interpreter, libraries, page index", demand.base),
        ("decoding tables and weight tiles", demand.tiles),
        ("read buffers", demand.staging),
        ("trunk, resident", demand.small + trunk.bytes),
        ("trunk, streaming buffers", trunk.buffers),
        ("sequence state" if latents else "sequence state and latents", demand.state),
        ("latents, the newest, and buffers", latents),
        ("block summaries, a part of them", demand.sealed),
        ("shared prefixes", demand.prefixes),
        ("kept for the caller", demand.extra),
        ("cache policy", demand.tables),
        (f"working set of a sweep of {rows} tokens", demand.working(rows)),
        (f"{slots} expert slots", slots * demand.place),
    )


def _beside_slots(demand: Demand, limits: Limits, room: int) -> tuple[Trunk, int]:
    """The trunk beside the slots of one token's experts, or as many of them as fit, and how many;
    slots that ``limits.cache`` forbids leave their room to the trunk."""
    slots = min(demand.top_k, demand.experts)
    if limits.cache is not None and slots:
        slots = max(1, min(slots, limits.cache // demand.slot))
    for count in range(slots, min(1, slots) - 1, -1):
        trunk = hold_trunk(demand, room - count * demand.place)
        if trunk is not None:
            return trunk, count
    raise AssertionError("the smallest plan was checked to fit")


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
