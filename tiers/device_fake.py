"""An accelerator on the CPU that makes mistakes visible, for tests and for development.

* Copies land late and in any order, those to the host too; until then their memory holds 0xff,
  which is NaN as bfloat16 and float32 and no scale of MXFP4.  What a kernel reads too early is seen
  in the result.
* The source is read when the copy lands, not when it is asked for: a page that was given up too
  early arrives as something else.
* Kernels run at once (the CPU has one stream), so memory that is written while a kernel would
  still read it cannot be seen in a result.  It is checked instead: a copy into memory that was
  handed out must come after a mark that was made after the last use.
* A mark has passed only some time after it was made.
* Copies fail where that is asked for, by number or the next one, when they land or when they are
  asked for; memory ends where it is said to end.
* While it is held, no copy lands and no mark is passed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..config import show_size
from .base import Buffer, Ticket
from .device import DeviceError, Landed, Mark, Watch, heard

POISON = 0xFF


class FakeMark:
    """A point of the compute stream that is passed ``delay`` seconds after it was made."""

    def __init__(self, number: int, delay: float) -> None:
        self.number = number
        self._end = time.perf_counter() + delay

    def passed(self) -> bool:
        return time.perf_counter() >= self._end


@dataclass(eq=False)
class _Copy:
    source: torch.Tensor
    to: torch.Tensor
    after: FakeMark | None
    landed: Landed
    number: int
    not_before: float = field(default=0.0)

    def ready(self) -> bool:
        passed = self.after is None or self.after.passed()
        return passed and time.perf_counter() >= self.not_before


class FakeDevice:
    """``size`` bytes of device memory; copies take up to ``delay`` seconds.  ``failing``: numbers
    of copies, counted from 0, that fail; ``pinnable``: bytes that may be pinned."""

    def __init__(
        self,
        size: int,
        seed: int = 0,
        delay: float = 0.0005,
        failing: frozenset[int] = frozenset(),
        pinnable: int | None = None,
    ) -> None:
        self.name, self.where = "fake", torch.device("cpu")
        self._size, self._delay, self._failing = size, delay, failing
        self._pinnable, self._pinned = pinnable, list[tuple[int, int]]()
        self.unpinned = 0  #: copies from memory that is not pinned
        self._refused: set[int] = set()  # numbers of copies that fail when they are asked for
        self._held = False
        self.watch: Watch | None = None
        self._random = random.Random(seed)
        self._used = 0
        self._marks = self._copies = 0
        self._uses: dict[int, int] = {}  # address -> number of the first mark that covers its use
        self._sizes: dict[int, int] = {}
        self._waiting: list[_Copy] = []
        self._change = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="k3-fake-device", daemon=True)
        self._thread.start()

    def free_bytes(self) -> int:
        return self._size - self._used

    def allocate(self, size: int) -> torch.Tensor:
        with self._change:
            if self._used + size > self._size:
                raise DeviceError(
                    f"The device was asked for {show_size(size)} and has "
                    f"{show_size(self._size - self._used)} left.",
                    "Give a smaller --vram.",
                )
            self._used += size
        return torch.full((size,), POISON, dtype=torch.uint8)

    def pin(self, memory: Buffer) -> bool:
        if self._pinnable is not None:
            self._pinnable -= memory.nbytes
            if self._pinnable < 0:
                return False
        begin = memory.ctypes.data
        self._pinned.append((begin, begin + memory.nbytes))
        return True

    def copy(
        self,
        source: Buffer,
        to: torch.Tensor,
        after: Mark | None,
        landed: Landed,
        urgent: bool = True,
    ) -> None:
        assert source.nbytes == to.nbytes, (source.nbytes, to.nbytes)
        assert after is None or isinstance(after, FakeMark)
        with self._change:
            begin = to.data_ptr()
            uses = [a for a in self._uses if a < begin + to.nbytes and begin < a + self._sizes[a]]
            assert all(after is not None and after.number >= self._uses[a] for a in uses), (
                "device memory would be overwritten while kernels still read it"
            )
            for address in uses:  # what comes after this copy comes after those uses
                del self._uses[address]
        self._start(torch.from_numpy(source), to, source, after, heard(self.watch, landed))

    def copy_all(
        self, pairs: Sequence[tuple[Buffer, torch.Tensor]], after: Mark, landed: Landed
    ) -> None:
        every = Ticket(len(pairs))
        every.then(lambda: landed(every.error))
        for source, to in pairs:
            self.copy(source, to, after, every.finish)

    def fetch(self, source: torch.Tensor, to: Buffer, after: Mark, landed: Landed) -> None:
        assert source.nbytes == to.nbytes, (source.nbytes, to.nbytes)
        assert isinstance(after, FakeMark), "kernels may still write what is fetched"
        self._start(source, torch.from_numpy(to), to, after, landed)

    def _start(
        self,
        source: torch.Tensor,
        to: torch.Tensor,
        host: Buffer,
        after: FakeMark | None,
        landed: Landed,
    ) -> None:
        with self._change:
            assert not self._closing, "the device is closed"
            here = host.ctypes.data
            self.unpinned += not any(a <= here < b for a, b in self._pinned)
            to.fill_(POISON)
            one = _Copy(source, to, after, landed, self._copies)
            one.not_before = time.perf_counter() + self._random.random() * self._delay
            self._copies += 1
            refused = one.number in self._refused
            if not refused:
                self._waiting.append(one)
                self._change.notify_all()
        if refused:
            landed(_failed())

    def mark(self) -> FakeMark:
        with self._change:
            self._marks += 1
            return FakeMark(self._marks, self._random.random() * self._delay)

    def handed_out(self, memory: torch.Tensor) -> None:
        with self._change:
            self._uses[memory.data_ptr()] = self._marks + 1
            self._sizes[memory.data_ptr()] = memory.nbytes

    def heal(self) -> None:
        """From now on no copy fails."""
        self._failing, self._refused = frozenset(), set()

    def fail_next(self, at_once: bool) -> None:
        """Let the next copy fail: when it is asked for, or when it should have landed."""
        with self._change:
            if at_once:
                self._refused.add(self._copies)
            else:
                self._failing |= {self._copies}

    def hold(self) -> None:
        """Let nothing land until ``let_go``."""
        self._held = True

    def let_go(self) -> None:
        """Whatever was held lands now, in any order."""
        with self._change:
            self._held = False
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closing, self._held = True, False
            self._change.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                ready = [one for one in self._waiting if one.ready() and not self._held]
                if not ready:
                    if self._closing and not self._waiting:
                        return
                    self._change.wait(self._delay / 4 if self._waiting else None)
                    continue
                one = self._random.choice(ready)
                self._waiting.remove(one)
            error = None
            if one.number in self._failing:
                error = _failed()
            else:
                one.to.copy_(one.source)
            one.landed(error)


def _failed() -> DeviceError:
    return DeviceError("A copy to or from the device failed.", "Try again.")
