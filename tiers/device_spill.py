"""Arrays that grow by blocks: the newest in a device's memory, the older ones as ``spill.py`` has
them, in RAM and on NVMe.

A full block is put into a slot of the device.  When slots run short the oldest blocks are copied to
slots of RAM, beside the kernels, and theirs are used again once they are safely there.  Whoever
reads an array gets its blocks in pieces: those on the device where they lie, the others through one
of two buffers there, while the next piece comes into the other one.

Kernels of the compute stream write to slots and read slots and buffers, in their order.  Hence a
block leaves only after a mark that follows its making, and a buffer is copied into only after a
mark that follows all who read it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

import torch

from ..errors import ScratchError
from .base import Buffer, Ticket
from .device import Device, DeviceError
from .spill import LOST, Block, Spill, SpillArray, again
from .spill_files import SpillCounts
from .spill_room import PIECE, Room, stride

Run = list[int | torch.Tensor]  #: what is read together: slots of the device, views of RAM


class _Place:
    """Where a block lies: in ``slot`` of the device if that is not None, otherwise ``below``."""

    __slots__ = ("array", "below", "error", "slot", "ticket")

    def __init__(self, slot: int, array: SpillArray) -> None:
        self.slot: int | None = slot
        self.array: SpillArray | None = array  # that it will be added to
        self.below: Block | None = None
        self.ticket = Ticket(1)  # of its copy to RAM
        self.error: ScratchError | None = None  # why it is lost


class DeviceBlock:
    """A full block, for as long as anybody has it."""

    __slots__ = ("__weakref__", "place")

    def __init__(self, place: _Place) -> None:
        self.place = place


class DeviceSpill:
    """Memory of ``device`` for blocks that later go to ``below``: ``room.slots`` slots and two
    buffers of ``room.piece`` blocks.  One thread at a time, the one that computes, appends and
    reads; blocks may be let go of anywhere.

    Raises ``DeviceError`` if the device has not as much memory.
    """

    def __init__(self, below: Spill[torch.Tensor], device: Device, room: Room) -> None:
        self.below, self.room, self._device = below, room, device
        self._size, self._stride = below.layout.block, stride(below.layout.block)
        places = range(room.slots + 2 * room.piece)
        self._memory = device.allocate(len(places) * self._stride)
        like = below.view(below.memory[: self._size])
        self._views = [self._bytes(i).view(like.dtype).view(like.shape) for i in places]
        self.counts = SpillCounts()  # "written" to RAM, and "read" from there
        self._free = list(range(room.slots))
        self._held: dict[_Place, None] = {}  # on the device alone, oldest first
        self._leaving: deque[_Place] = deque()  # being copied to RAM, in the order they began
        self._gone: deque[_Place] = deque()  # told by finalizers, which may take no lock
        # in flight to RAM at most; a slot there has to be left for who waits for one
        self._ahead = max(1, min(room.slots // 2, PIECE // self._stride, below.room.slots - 1))
        self._under_way: list[Ticket | None] = [None, None]  # of the buffers
        self._lock = threading.Lock()  # that a slot stays what it is while somebody copies it
        self._closed = False

    def _bytes(self, place: int, count: int = 1) -> torch.Tensor:
        """Memory of ``count`` blocks from ``place`` on, the last one's padding left out."""
        begin = place * self._stride
        return self._memory[begin : begin + (count - 1) * self._stride + self._size]

    # ---- growing ----

    def append(self, array: SpillArray, data: torch.Tensor) -> DeviceBlock:
        """Add a block, copied from ``data`` by the compute stream; it will go to ``array``, which
        it belongs to.  May wait for a slot."""
        slot = self._slot()
        self._views[slot].copy_(data)
        place = _Place(slot, array)
        self._free.pop()  # only now: an interruption loses no slot
        self._held[place] = None
        block = DeviceBlock(place)
        weakref.finalize(block, self._gone.append, place).atexit = False
        while self._held and len(self._free) + len(self._leaving) < self._ahead:
            self._leave()
        return block

    def _slot(self) -> int:
        """The slot to use next, the last of the free ones."""
        self._tidy()
        self._arrived()
        while not self._free:
            if not self._leaving:
                self._leave()
            self._arrived(wait=True)
        return self._free[-1]

    def _tidy(self) -> None:
        """Take back the slots of what nobody has any more; what is leaving gives its own back."""
        while self._gone:
            place = self._gone.popleft()
            if place in self._held:
                self._give_back(place)

    def _leave(self) -> None:
        """Begin to copy the oldest block to RAM.  One that has no place there is lost to its owner,
        who need not be the one who makes room now."""
        place = next(iter(self._held))
        assert place.array is not None and place.slot is not None
        try:
            if place.below is not None:  # nobody knows how far it came
                raise ScratchError("A copy to RAM was interrupted.", LOST)
            place.below, memory = place.array.begin()
        except ScratchError as error:
            self._give_back(place, error)
            return
        source, ready = self._bytes(place.slot), self._device.mark()
        self._device.fetch(source, memory, ready, place.ticket.finish)
        place.array = None
        del self._held[place]
        self._leaving.append(place)
        self.counts.written_bytes += self._size

    def _arrived(self, wait: bool = False) -> None:
        """Take back the slots of blocks that have come to RAM; with ``wait`` of one at least."""
        while self._leaving and (wait or self._leaving[0].ticket.done()):
            place = self._leaving[0]
            error = _ended(place.ticket)
            if error is None:
                assert place.below is not None
                self.below.ready(place.below)
            self._leaving.popleft()
            self._give_back(place, error)
            wait = False

    def _give_back(self, place: _Place, error: ScratchError | None = None) -> None:
        """The slot of ``place`` is free: it is in RAM, or nobody has it, or ``error`` lost it."""
        with self._lock:
            if error is not None:
                place.error, place.below = again(error), None
            slot, place.slot = place.slot, None
            assert slot is not None
            self._held.pop(place, None)
            self._free.append(slot)

    # ---- reading ----

    def rows(self, block: DeviceBlock) -> torch.Tensor:
        """A copy of ``block`` in RAM, for any thread at any time.  Raises ``ScratchError``."""
        place = block.place
        with self._lock:
            if self._closed:
                raise ScratchError("The engine of this sequence is closed.", "Load it again.")
            if place.slot is not None:
                return self._views[place.slot].to("cpu", copy=True)
        return self.below.view(self.below.copy(_below(place)))

    def pieces(
        self, blocks: Sequence[DeviceBlock], tail: Sequence[torch.Tensor] = ()
    ) -> Iterator[list[torch.Tensor]]:
        """Views of ``blocks`` on the device in runs, ``tail`` at the end of the last one.  A run
        may be overwritten once the next one is asked for.  Raises ``ScratchError``."""
        runs, which = self._runs([block.place for block in blocks]), 0
        run = next(runs, None)
        if run is None:
            yield list(tail)
            return
        self._start(run, which)
        while run is not None:
            self._wait(which)  # a run of RAM must have been copied before the next one comes there
            following = next(runs, None)
            if following is not None:
                self._start(following, 1 - which)
            yield self._handed_out(run, which) + list(tail if following is None else ())
            run, which = following, 1 - which

    def _runs(self, places: Sequence[_Place]) -> Iterator[Run]:
        """``places`` cut so that what is in RAM fits into a buffer and comes from one run there."""
        left = deque(places)
        below = [_below(place) for place in places if place.slot is None]
        for held in self.below.pieces(below) if below else ():
            for begin in range(0, len(held), self.room.piece):
                run: Run = []
                for view in held[begin : begin + self.room.piece]:
                    while (slot := left.popleft().slot) is not None:
                        run.append(slot)
                    run.append(view)
                yield run
        if left:
            yield [place.slot for place in left if place.slot is not None]

    def _start(self, run: Run, which: int) -> None:
        """Begin to copy what is in RAM of ``run`` into a buffer."""
        if (before := self._under_way[which]) is not None:  # of a reader that gave up
            self._under_way[which] = None
            before.settle()
        views = [view for view in run if isinstance(view, torch.Tensor)]
        if views:
            pairs, ticket = list(self._pairs(views, self._first(which))), Ticket(1)
            # whoever has read the buffer so far was called before this mark
            self._device.copy_all(pairs, self._device.mark(), ticket.finish)
            self._under_way[which] = ticket
            self.counts.reads += 1
            self.counts.read_bytes += len(views) * self._size

    def _first(self, which: int) -> int:
        """The first place of a buffer."""
        return self.room.slots + which * self.room.piece

    def _pairs(
        self, views: Sequence[torch.Tensor], to: int
    ) -> Iterator[tuple[Buffer, torch.Tensor]]:
        """The bytes of ``views``, and theirs from place ``to`` on; what lies next to one another
        here and there is one copy."""
        memory, joins = self.below.memory, self._stride == self._size
        at = [view.data_ptr() - memory.ctypes.data for view in views]
        begin = 0
        for end in range(1, len(at) + 1):
            if end < len(at) and joins and at[end] == at[end - 1] + self._size:
                continue
            target = self._bytes(to + begin, end - begin)
            yield memory[at[begin] : at[begin] + target.nbytes], target
            begin = end

    def _wait(self, which: int) -> None:
        ticket, self._under_way[which] = self._under_way[which], None
        if ticket is None:
            return
        begun = time.perf_counter()
        error = _ended(ticket)
        self.counts.wait_seconds += time.perf_counter() - begun
        if error is not None:
            raise error

    def _handed_out(self, run: Run, which: int) -> list[torch.Tensor]:
        """The blocks of ``run`` on the device; kernels are about to read them."""
        self._device.handed_out(self._bytes(self._first(which), self.room.piece))
        cold = count(self._first(which))
        return [self._views[one if isinstance(one, int) else next(cold)] for one in run]

    def close(self) -> None:
        """Wait for copies under way and let go of the memory."""
        for ticket in (*self._under_way, *(place.ticket for place in self._leaving)):
            if ticket is not None:
                ticket.settle()
        with self._lock:
            self._closed = True
            self._views.clear()
            self._memory = self._memory[:0].clone()


def _ended(ticket: Ticket) -> ScratchError | None:
    """Wait for a copy; what went wrong.  Its own error is never raised: who made the copy may keep
    it for long, and with it the frames that it passed, and their states."""
    ticket.settle()
    if ticket.error is None:
        return None
    if isinstance(ticket.error, DeviceError):
        return ScratchError(ticket.error.problem, LOST)
    raise ticket.error


def _below(place: _Place) -> Block:
    """The block in RAM or on disk.  Raises ``ScratchError`` if it is lost."""
    if place.error is not None:
        raise again(place.error)
    assert place.below is not None
    return place.below
