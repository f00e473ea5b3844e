"""An NVIDIA GPU through torch: a compute stream, a copy stream, events, locked host memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from ..config import show_size
from .base import Buffer
from .device import DeviceError, Landed, Mark, Watch, heard

PIN_PIECE = 256 << 20  #: bytes that are locked at a time, so that a refusal costs no more
_REGISTERED = 0  #: what cudaHostRegister returns when it worked


class CudaMark:
    """An event of the compute stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def passed(self) -> bool:
        return bool(self.event.query())


class CudaDevice:
    """GPU number ``index``.  Its compute stream is the current stream of the calling thread."""

    def __init__(self, index: int = 0) -> None:
        self.where = torch.device("cuda", index)
        self.name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        # Without a second stream an expert that is waited for would stand behind a layer's trunk.
        self._streams = (_Stream(self, "k3-later", 0), _Stream(self, "k3-urgent", -1))
        self._back = _Stream(self, "k3-back", 0)  # the bus goes both ways at once
        self._pinned: list[Buffer] = []
        self._closed = False
        self.watch: Watch | None = None

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()  # what torch keeps for itself is free for us
        return int(torch.cuda.mem_get_info(self.where)[0])

    def allocate(self, size: int) -> torch.Tensor:
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self.where)
            torch.cuda.synchronize(self.where)  # no kernel uses what was here before
            return memory
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self.name} was asked for {show_size(size)} and has "
                f"{show_size(self.free_bytes())} left.",
                "Give a smaller --vram, or end what else uses the GPU.",
            ) from error

    def pin(self, memory: Buffer) -> bool:
        """All of it or nothing: a copy must not cross from what is locked to what is not."""
        runtime, locked = torch.cuda.cudart(), list[Buffer]()
        with torch.cuda.device(self.where):
            for begin in range(0, memory.nbytes, PIN_PIECE):
                piece = memory[begin : begin + PIN_PIECE]
                failed = runtime.cudaHostRegister(piece.ctypes.data, piece.nbytes, 0)
                if int(failed) != _REGISTERED:
                    for done in locked:
                        runtime.cudaHostUnregister(done.ctypes.data)
                    with suppress(RuntimeError):  # the next launch reports it, once
                        torch.zeros(1, device=self.where).add_(1)
                    return False
                locked.append(piece)
        self._pinned += locked
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
        pairs = [(torch.from_numpy(source), to)]
        self._streams[urgent].copy(pairs, after, heard(self.watch, landed))

    def copy_all(
        self, pairs: Sequence[tuple[Buffer, torch.Tensor]], after: Mark, landed: Landed
    ) -> None:
        given = [(torch.from_numpy(source), to) for source, to in pairs]
        self._streams[True].copy(given, after, heard(self.watch, landed))

    def fetch(self, source: torch.Tensor, to: Buffer, after: Mark, landed: Landed) -> None:
        assert source.nbytes == to.nbytes, (source.nbytes, to.nbytes)
        self._back.copy([(source, torch.from_numpy(to))], after, landed)

    def mark(self) -> CudaMark:
        mark = CudaMark()
        mark.event.record(torch.cuda.current_stream(self.where))
        return mark

    def handed_out(self, memory: torch.Tensor) -> None:
        """Nothing is checked here."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in (*self._streams, self._back):
            stream.close()
        with torch.cuda.device(self.where):
            for piece in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(piece.ctypes.data)
            self._pinned.clear()
            torch.cuda.empty_cache()


class _Stream:
    """A copy stream, and a thread that says when its copies have landed, in their order."""

    def __init__(self, device: CudaDevice, name: str, priority: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device.where, priority=priority)
        self._under_way: queue.SimpleQueue[tuple[torch.cuda.Event, Landed] | None]
        self._under_way = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def copy(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Mark | None,
        landed: Landed,
    ) -> None:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        try:
            with self._lock, torch.cuda.stream(self._stream):
                if after is not None:
                    assert isinstance(after, CudaMark)
                    self._stream.wait_event(after.event)
                for source, to in pairs:
                    to.copy_(source, non_blocking=True)
                event.record(self._stream)
                self._under_way.put((event, landed))
        except RuntimeError as error:
            landed(_failed(self._device.name, error))

    def close(self) -> None:
        self._under_way.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (one := self._under_way.get()) is not None:
            event, landed = one
            try:
                event.synchronize()
            except RuntimeError as error:
                landed(_failed(self._device.name, error))
            else:
                landed(None)


def _failed(name: str, error: RuntimeError) -> DeviceError:
    return DeviceError(
        f"A copy to or from {name} failed: {error}.", "The driver's log (dmesg) may say more."
    )
