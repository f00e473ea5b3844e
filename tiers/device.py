"""What the engine knows of an accelerator: memory, copies that run beside it, and marks.

There are two streams.  Kernels run on the *compute stream*, in the order in which they are called;
pages are copied on *copy streams*, in any order, and blocks of latents both ways.  A ``Mark`` names
a point of the compute stream; a copy may be told to begin only after one, which is what keeps a
page's memory alive for the kernels that read it.  ``device_cuda.py`` is the real thing,
``device_fake.py`` one on the CPU that delays, reorders, fails and poisons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ..errors import K3Error
from .base import Buffer

Landed = Callable[[BaseException | None], None]  #: called once, on a thread of the device
Watch = Callable[[int], None]  #: told that a copy is under way (1), or has landed (-1)


class DeviceError(K3Error):
    """A copy or a kernel failed, or memory of the device ran out."""


@contextmanager
def blamed(name: str) -> Iterator[None]:
    """What torch and Triton raise inside the block about the device ``name`` becomes a
    ``DeviceError``; everything else stays as it is."""
    try:
        yield
    except K3Error:
        raise
    except torch.OutOfMemoryError as error:
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        raise DeviceError(
            f"{name} ran out of memory: {asked[1] if asked else 'more'} was asked for beyond what "
            "is in use.",
            "Give a smaller --vram or a smaller --sweep, or end what else uses the GPU.",
        ) from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(".")
        if type(error).__module__.startswith("triton."):
            raise DeviceError(
                f"A kernel cannot be made for {name} ({text}).",
                "Use --device cpu; k3offload kernels says what each kernel needs.",
            ) from error
        if isinstance(error, RuntimeError) and re.search("CUDA|CUBLAS", text):
            raise DeviceError(
                f"{name} failed ({text}).",
                "It may not answer this process any more: start again. The driver's log (dmesg) "
                "may say more.",
            ) from error
        raise


def heard(watch: Watch | None, landed: Landed) -> Landed:
    """``landed`` of a copy that is asked for now, of which ``watch`` hears, and of its end too."""
    if watch is None:
        return landed
    watch(1)

    def ends(error: BaseException | None) -> None:
        watch(-1)
        landed(error)

    return ends


class Mark(Protocol):
    """A point of the compute stream."""

    def passed(self) -> bool:
        """Whether everything before it has ended."""
        ...


class Device(Protocol):
    """An accelerator.  Thread-safe, but for ``mark``: that belongs to the thread that computes."""

    name: str
    where: torch.device  #: where its tensors live
    watch: Watch | None  #: hears of copies to the device, on any thread

    def free_bytes(self) -> int:
        """Bytes of its memory that nobody uses now."""
        ...

    def allocate(self, size: int) -> torch.Tensor:
        """``size`` bytes of its memory, [size] uint8; ``DeviceError`` if there are not as many."""
        ...

    def pin(self, memory: Buffer) -> bool:
        """Lock host memory in place, so that copies from it run beside everything else.  False
        where the system refuses; copies then work all the same."""
        ...

    def copy(
        self,
        source: Buffer,
        to: torch.Tensor,
        after: Mark | None,
        landed: Landed,
        urgent: bool = True,
    ) -> None:
        """Copy host bytes into device memory of the same size, not before ``after``.  ``source``
        must stay as it is until ``landed(error)`` is called.  Copies that are not ``urgent`` give
        way to those that are, one whole copy at a time."""
        ...

    def copy_all(
        self, pairs: Sequence[tuple[Buffer, torch.Tensor]], after: Mark, landed: Landed
    ) -> None:
        """As ``copy`` of each pair, urgent, but said once when all of them have landed."""
        ...

    def fetch(self, source: torch.Tensor, to: Buffer, after: Mark, landed: Landed) -> None:
        """Copy device memory to host memory of the same size, not before ``after``.  Both must
        stay as they are until ``landed(error)`` is called."""
        ...

    def mark(self) -> Mark:
        """Everything that the compute stream has been given so far."""
        ...

    def handed_out(self, memory: torch.Tensor) -> None:
        """Kernels that are called from now on read ``memory``; for devices that check."""
        ...

    def close(self) -> None:
        """Wait for copies under way and let go of what is pinned."""
        ...
