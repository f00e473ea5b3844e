"""Reader threads of each drive and the queue they take from.

This file knows pieces (something to run, a number of bytes, a drive) and their order: demand
before trunk before prefetch, inside a priority a whole earlier request before a later one, inside
a request the order in which the pieces were given.  It knows nothing of files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from .base import Cancelled, Priority, Ticket

#: told under the queue's lock that a piece of this priority begins (1), or has ended (-1)
Watch = Callable[[Priority | None, int], None]


class Piece(NamedTuple):
    """A part of a request: ``run`` moves ``size`` bytes of ``drive``, ``useful`` of them asked."""

    drive: Hashable
    size: int
    useful: int
    run: Callable[[], object]


class _Request(Ticket):
    """A ticket that can reach those of its pieces that still wait in the queue."""

    def __init__(
        self, queue: ReadQueue, parts: int, look: Callable[[], object] | None = None
    ) -> None:
        super().__init__(parts, look)
        self._queue = queue
        self.waiting: set[_Entry] = set()

    def cancel(self) -> bool:
        dropped = self._queue.drop(self)
        if dropped:
            self.finish(Cancelled("nobody wants these bytes any more"), parts=dropped)
        return dropped > 0

    def raise_to(self, priority: Priority) -> None:
        self._queue.raise_to(self, priority)


class _Entry:
    """A piece in the queue.  It stands in the heap once for each priority it has had; only the
    place of its present one counts, and none once its request waits for it no more."""

    __slots__ = ("drive", "order", "piece", "priority", "request")

    def __init__(
        self, piece: Piece, request: _Request, drive: _Drive, order: tuple[int, int]
    ) -> None:
        self.piece, self.request, self.drive, self.order = piece, request, drive, order
        self.priority: Priority | None = None

    def queue(self, priority: Priority) -> None:
        self.priority = priority
        heappush(self.drive.heap, (priority, self.order, self))


class _Drive:
    """One drive's queue and readers."""

    def __init__(self, lock: threading.Lock) -> None:
        self.change = threading.Condition(lock)
        self.heap: list[tuple[Priority, tuple[int, int], _Entry]] = []
        self.threads: list[threading.Thread] = []
        self.in_flight = 0


class ReadQueue:
    """``readers`` threads a drive, which together have at most ``in_flight`` bytes under way there
    (or one piece, should a single one be larger).  A guess begins only while no more than
    ``beside_guesses`` are, its own among them: what is asked for shares the drive with little, and
    a guess in vain is given up before much of it was read."""

    def __init__(self, readers: int, in_flight: int, beside_guesses: int | None = None) -> None:
        self._readers, self._bound = readers, in_flight
        self._beside_guesses = in_flight if beside_guesses is None else beside_guesses
        self._lock = threading.Lock()
        self._drives: dict[Hashable, _Drive] = {}
        self._requests = 0
        self._closed = False
        self.watch: Watch | None = None

    def submit(
        self,
        pieces: Sequence[Piece],
        priority: Priority,
        look: Callable[[], object] | None = None,
    ) -> Ticket:
        """Queue the pieces of one request; ``look``: see `Ticket`.  Raises ``Cancelled`` when
        closed."""
        request = _Request(self, len(pieces), look)
        with self._lock:
            if self._closed:
                raise Cancelled("the files are closed")
            self._requests += 1
            entries = []
            for i, piece in enumerate(pieces):
                drive = self._drives.get(piece.drive)
                if drive is None:
                    drive = self._drives[piece.drive] = _Drive(self._lock)
                if len(drive.threads) < self._readers:
                    self._start_reader(drive)
                entries.append(_Entry(piece, request, drive, (self._requests, i)))
            # No reader can take one of them before the lock is free: all are queued, or none.
            try:
                for entry in entries:
                    request.waiting.add(entry)
                    entry.queue(priority)
                    entry.drive.change.notify()
            except BaseException:
                request.waiting.clear()
                raise
        return request

    def drop(self, request: _Request) -> int:
        """Forget the pieces of ``request`` that have not begun; how many there were."""
        with self._lock:
            dropped = len(request.waiting)
            request.waiting.clear()
        return dropped

    def raise_to(self, request: _Request, priority: Priority) -> None:
        with self._lock:
            for entry in request.waiting:
                assert entry.priority is not None
                if priority < entry.priority:
                    entry.queue(priority)
                    entry.drive.change.notify()  # the bound of guesses holds it back no more

    def close(self) -> None:
        """Give up what waits, let what runs end, and stop the threads."""
        with self._lock:
            self._closed = True
            drives = list(self._drives.values())
            requests = {entry.request for drive in drives for *_, entry in drive.heap}
            for drive in drives:
                drive.heap.clear()
                drive.change.notify_all()
        for request in requests:
            request.cancel()
        for drive in drives:
            for thread in drive.threads:
                thread.join()

    # ---- a reader ----

    def _start_reader(self, drive: _Drive) -> None:
        thread = threading.Thread(target=self._serve, args=(drive,), name="k3-read", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads; those that run will do
            if not drive.threads:
                raise
            return
        drive.threads.append(thread)

    def _serve(self, drive: _Drive) -> None:
        while True:
            with self._lock:
                while (entry := self._take(drive)) is None:
                    if self._closed:
                        return
                    drive.change.wait()
                watch = self.watch  # who hears of a begin hears of its end
                if watch is not None:
                    watch(entry.priority, 1)
            error: BaseException | None = None
            try:
                entry.piece.run()
            except BaseException as caught:
                error = caught
            with self._lock:
                drive.in_flight -= entry.piece.size
                if watch is not None:
                    watch(entry.priority, -1)
                if drive.heap:
                    drive.change.notify()  # another reader may have waited for the bound
            if error is None:
                entry.request.finish(None, entry.piece.useful)
            else:  # a request of which one piece failed needs its other pieces no more
                entry.request.finish(error, parts=1 + self.drop(entry.request))
            del entry, error, watch  # an idle reader keeps no buffer alive

    def _take(self, drive: _Drive) -> _Entry | None:
        """The most urgent piece, if the bound on bytes in flight allows it."""
        heap = drive.heap
        while heap:
            priority, _, entry = heap[0]
            if entry not in entry.request.waiting or entry.priority != priority:
                heappop(heap)
                continue
            size = entry.piece.size
            bound = self._beside_guesses if priority is Priority.PREFETCH else self._bound
            if drive.in_flight and drive.in_flight + size > bound:
                return None
            heappop(heap)
            entry.request.waiting.remove(entry)
            drive.in_flight += size
            if heap:
                drive.change.notify()  # the bound may allow one more
            return entry
        return None
