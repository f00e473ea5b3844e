"""Token-major arrays that are longer than their memory: a hot window in RAM, the rest on NVMe.

An array grows by whole blocks of 256 tokens that never change again.  The newest blocks of all
arrays stay in slots of RAM.  When slots run short a thread writes the oldest ones to scratch files
(``spill_files.py``), and their slots are used again once they are safely there.  Whoever reads an
array gets its blocks in pieces: those in RAM where they lie, the others through one of two buffers
while the next piece is being read into the other one.

A block is let go of when nobody has it any more; copies of a sequence share blocks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from ..config import LATENT_BLOCK
from ..errors import ReadError, ScratchError
from .base import Buffer, Location, Priority, Ticket
from .scratch import Scratch
from .spill_files import File, Folder, Layout, SpillCounts
from .spill_room import Room, stride
from .tier_disk import DiskTier
from .tier_ram import Slab

T = TypeVar("T")
READ = 2 << 20  #: most bytes of one read of several blocks, so that several are in flight
BEHIND = 32 << 20  #: most bytes that wait for their slots to be free while they are written
LOST = (
    "The sequence's state is lost, others go on: reset it, or go back to a snapshot that is in "
    "memory."
)
REMEDY = f"{LOST} Give the scratch folder room (--scratch DIR, --latents SIZE)."


class _Place:
    """Where a block lies: in ``slot`` if that is not None, and as number ``at`` of ``file`` once it
    is ``safe``."""

    __slots__ = ("at", "file", "gone", "safe", "slot")

    def __init__(self, slot: int, file: File, at: int) -> None:
        self.slot: int | None = slot
        self.file, self.at, self.safe = file, at, False
        self.gone = False  # nobody has it any more


class Block:
    """A full block of an array, for as long as anybody has it."""

    __slots__ = ("__weakref__", "place")

    def __init__(self, place: _Place) -> None:
        self.place = place


class SpillArray:
    """A growing array.  Made by ``Spill.array``."""

    def __init__(self, folder: Folder, spill: Spill[Any]) -> None:
        self._folder, self._spill = folder, spill

    def append(self, data: Buffer) -> Block:
        """Add a block, copied from ``data``.  May wait for a slot.  Raises ``ScratchError``."""
        return self._spill.add(self._folder, data)

    def begin(self) -> tuple[Block, Buffer]:
        """Add a block, and its memory, which somebody has to fill before ``Spill.ready(block)``;
        until then nobody may read it.  May wait for a slot.  Raises ``ScratchError``."""
        return self._spill.begin(self._folder)


def _landed(ticket: Ticket) -> None:
    try:
        ticket.wait()
    except ReadError as error:
        raise ScratchError(error.problem, REMEDY) from error


def again(error: ScratchError) -> ScratchError:
    """``error`` without the frames that it was raised through before; they keep states alive."""
    return ScratchError(error.problem, error.remedy)


class Spill(Generic[T]):
    """Memory and files of arrays with one layout.  Reads go through ``disk``.  One thread at a
    time appends and reads; blocks may be let go of anywhere.

    ``view`` makes what readers get of a block's memory; it is called once for each place there.
    """

    def __init__(
        self,
        scratch: Scratch,
        disk: DiskTier,
        layout: Layout,
        room: Room,
        view: Callable[[Buffer], T],
    ) -> None:
        self._scratch, self._disk, self.layout, self.room = scratch, disk, layout, room
        self._stride = stride(layout.block)
        self._memory = Slab((room.slots + 2 * room.piece) * self._stride).bytes
        self.view, places = view, range(room.slots + 2 * room.piece)
        self._views = [view(self._slot_memory(place)) for place in places]
        self._under_way: list[Ticket | None] = [None, None]  # of the buffers behind the slots
        self.counts = SpillCounts()
        self._numbers = count()
        # What nobody has any more, told by finalizers: they run anywhere, and may take no lock.
        self._gone: deque[_Place | Folder] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()  # tells the writer to look
        self._change = threading.Condition()
        self._free = list(range(room.slots))
        self._dirty: dict[_Place, None] = {}  # in slots alone, oldest first
        self._writing: _Place | None = None
        self._safe: dict[_Place, None] = {}  # in slots and on disk, oldest first
        self._failed: dict[_Place, ScratchError] = {}  # in slots, and cannot be written
        self._ahead = max(1, min(room.slots // 2, BEHIND // self._stride))
        self._flushing = self._closed = False
        self._writer = threading.Thread(target=self._write_behind, name="k3-spill", daemon=True)
        self._writer.start()

    @property
    def memory(self) -> Buffer:
        """All of it, for whoever wants it locked in place."""
        return self._memory

    def array(self, name: str, first: int = 0) -> SpillArray:
        """An empty array, the first row of which will be token ``first`` of a sequence."""
        path = self._scratch.folder / f"{name}-{next(self._numbers)}"
        folder = Folder(path, self.layout, first, self._scratch)
        made = SpillArray(folder, self)
        weakref.finalize(made, self._let_go, folder).atexit = False
        return made

    def check(self, blocks: int) -> None:
        """Raises ``ScratchError`` if ``blocks`` more blocks have no room in RAM or on disk."""
        with self._change:
            self._tidy()
            free = len(self._free)
        if blocks > free:
            size = (blocks - free) * self.layout.block
            self._scratch.check(size, f"{blocks * LATENT_BLOCK:,} more tokens")

    # ---- growing ----

    def add(self, folder: Folder, data: Buffer) -> Block:
        block, memory = self.begin(folder)
        memory[:] = data
        self.ready(block)
        return block

    def begin(self, folder: Folder) -> tuple[Block, Buffer]:
        with self._change:
            while (slot := self._slot(folder)) is None:
                begun = time.perf_counter()
                self._change.wait()
                self.counts.full_seconds += time.perf_counter() - begun
            place = _Place(slot, *folder.place())
            block = Block(place)  # if it is never ready, its end gives the slot back
            weakref.finalize(block, self._let_go, place).atexit = False
        self._wake.put(None)  # slots may have run short with it
        return block, self._slot_memory(slot)

    def ready(self, block: Block) -> None:
        """The memory of ``block`` holds its bytes; all but one slot at most may wait for this."""
        with self._change:
            self._dirty[block.place] = None
        self._wake.put(None)

    def _slot_memory(self, slot: int) -> Buffer:
        begin = slot * self._stride
        return self._memory[begin : begin + self.layout.block]

    def _slot(self, folder: Folder) -> int | None:
        """A slot to use; None if one will come free.  Raises if none ever will, or where
        ``folder`` has lost a block."""
        self._tidy()
        if folder.error is not None:
            raise again(folder.error)
        if self._free:
            return self._free.pop()
        if self._safe:
            place = next(iter(self._safe))
            del self._safe[place]
            slot, place.slot = place.slot, None
            return slot
        if not self._dirty and self._writing is None:
            raise again(next(iter(self._failed.values())))
        return None

    def _let_go(self, what: _Place | Folder) -> None:
        self._gone.append(what)
        self._wake.put(None)

    def _tidy(self) -> None:
        """Take back the slots and files of what nobody has any more."""
        touched: dict[Folder, None] = {}
        while self._gone:
            what = self._gone.popleft()
            if isinstance(what, Folder):
                what.ended = True
                touched[what] = None
                continue
            what.gone = True
            if what is self._writing:  # comes back here when it is written
                continue
            for kind in (self._dirty, self._safe, self._failed):
                kind.pop(what, None)
            if what.slot is not None:
                self._free.append(what.slot)
            what.file.live -= 1
            touched[what.file.folder] = None
        for folder in touched:
            folder.tidy(self._disk)

    # ---- writing behind ----

    def _write_behind(self) -> None:
        while True:
            self._wake.get()
            with self._change:
                self._tidy()
                if self._closed:
                    return
                self._writing = self._next()
                self._change.notify_all()
            while (place := self._writing) is not None:
                error = self._write(place)
                with self._change:
                    self._written(place, error)
                    self._writing = self._next()
                    self._change.notify_all()

    def _next(self) -> _Place | None:
        """The block to write now, if any has to be."""
        enough = len(self._free) + len(self._safe) >= self._ahead
        if self._closed or not self._dirty or (enough and not self._flushing):
            return None
        place = next(iter(self._dirty))
        del self._dirty[place]
        return place

    def _write(self, place: _Place) -> ScratchError | None:
        """Bring a block to its file; returns what went wrong."""
        assert place.slot is not None
        data = self._slot_memory(place.slot)
        try:
            place.file.folder.write(place.file, place.at, data, self._disk)
        except ScratchError as error:
            return ScratchError(error.problem, REMEDY)
        except Exception as error:  # whatever it was, the thread goes on for others
            return ScratchError(f"Writing {place.file.path} failed: {error}.", REMEDY)
        return None

    def _written(self, place: _Place, error: ScratchError | None) -> None:
        if error is None:
            place.safe = True
            self._safe[place] = None
            self.counts.written_bytes += self.layout.block
        else:
            self._failed[place] = error
            place.file.folder.error = place.file.folder.error or error
        self._writing = None
        if place.gone:
            self._gone.append(place)
        self._tidy()

    def flush(self) -> None:
        """Wait until every block is on disk and the arrays say so; for whoever reads the files."""
        with self._change:
            self._flushing = True
            self._wake.put(None)
            while (self._dirty or self._writing is not None) and not self._closed:
                self._change.wait()
            self._flushing = False
            for folder in {place.file.folder: None for place in self._safe}:
                folder.describe()

    # ---- reading ----

    def pieces(self, blocks: Sequence[Block], tail: Sequence[T] = ()) -> Iterator[list[T]]:
        """Views of ``blocks`` in runs, ``tail`` at the end of the last one.  A run may be
        overwritten once the next one is asked for.  Raises ``ScratchError``."""
        runs = self._runs(blocks)
        if not runs:
            yield list(tail)
            return
        for i, held in enumerate(self._read(runs), 1):
            yield held + list(tail if i == len(runs) else ())

    def copy(self, block: Block) -> Buffer:
        """The bytes of ``block``, for any thread at any time.  Raises ``ScratchError``."""
        place, data = block.place, np.empty(self.layout.block, np.uint8)
        with self._change:
            if self._closed:
                raise ScratchError("The engine of this sequence is closed.", "Load it again.")
            if place.slot is not None:
                data[:] = self._slot_memory(place.slot)
                return data
        number = place.file.number  # out of memory: on disk for good
        assert number is not None
        here = Location(number, place.at * data.size, data.size)
        _landed(self._disk.read_scatter([(here, data)]))
        return data

    def tiles(self, tiles: Sequence[Sequence[Block]]) -> Iterator[list[T]]:
        """As ``pieces``, but each of ``tiles``, at most ``room.piece`` blocks, is a run."""
        return self._read([[block.place for block in tile] for tile in tiles])

    def _read(self, runs: Sequence[Sequence[_Place]]) -> Iterator[list[T]]:
        """The blocks of each run; the next run is read meanwhile."""
        if runs:
            self._start(runs[0], 0)
        for i, run in enumerate(runs):
            self._wait(i % 2)
            if i + 1 < len(runs):
                self._start(runs[i + 1], (i + 1) % 2)
            cold = count(self._first(i % 2))
            yield [self._views[next(cold) if p.slot is None else p.slot] for p in run]

    def _first(self, which: int) -> int:
        """The first slot of a buffer."""
        return self.room.slots + which * self.room.piece

    def _runs(self, blocks: Sequence[Block]) -> list[list[_Place]]:
        """``blocks`` cut so that the cold ones of a run fit into a buffer."""
        runs: list[list[_Place]] = []
        cold = self.room.piece
        for block in blocks:
            if cold == self.room.piece and (not runs or block.place.slot is None):
                runs.append([])
                cold = 0
            cold += block.place.slot is None
            runs[-1].append(block.place)
        return runs

    def _start(self, run: Sequence[_Place], which: int) -> None:
        """Begin to read the cold blocks of ``run`` into a buffer."""
        if (before := self._under_way[which]) is not None:  # of a reader that gave up
            self._under_way[which] = None
            before.cancel()
            before.settle()
        cold = [place for place in run if place.slot is None]
        if cold:
            reads = list(self._reads(cold, self._first(which) * self._stride))
            self._under_way[which] = self._disk.read_scatter(reads, Priority.TRUNK)
            self.counts.reads += 1
            self.counts.read_bytes += len(cold) * self.layout.block

    def _reads(self, cold: Sequence[_Place], to: int) -> Iterator[tuple[Location, Buffer]]:
        """Where ``cold`` lies, and its memory from byte ``to`` on; what lies next to one another
        here and there is one read."""
        size, joins = self.layout.block, self._stride == self.layout.block
        begin = 0
        for i, place in enumerate(cold, 1):
            after = cold[i] if i < len(cold) else None
            together = after is not None and after.file is place.file and after.at == place.at + 1
            if together and joins and (i - begin + 1) * size <= READ:
                continue
            first, number = cold[begin], place.file.number
            assert number is not None and place.safe
            where, length = to + begin * self._stride, (i - begin) * size
            yield Location(number, first.at * size, length), self._memory[where : where + length]
            begin = i

    def _wait(self, which: int) -> None:
        ticket, self._under_way[which] = self._under_way[which], None
        if ticket is None:
            return
        begun = time.perf_counter()
        ticket.raise_to(Priority.DEMAND)
        try:
            _landed(ticket)
        finally:
            self.counts.wait_seconds += time.perf_counter() - begun

    def close(self) -> None:
        """Stop writing and let go of the memory.  What was not written is lost with the files."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._wake.put(None)
        self._writer.join()
        for ticket in self._under_way:  # of a reader that gave up
            if ticket is not None:
                ticket.cancel()
                ticket.settle()
        self._views.clear()
        self._memory = self._memory[:0].copy()
