"""What the engine knows of an accelerator: memory, copies that run beside it, and marks.

There are two streams.  Kernels run on the *compute stream*, in the order in which they are called;
pages are copied on *copy streams*, in any order.  A ``Mark`` names a point of the compute stream; a
copy may be told to begin only after one, which is what keeps a page's memory alive for the kernels
that read it.  ``device_cuda.py`` is the real thing, ``device_fake.py`` one on the CPU that delays,
reorders, fails and poisons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..errors import K3Error
from .base import Buffer

Landed = Callable[[BaseException | None], None]  #: called once, on a thread of the device


class DeviceError(K3Error):
    """A copy failed, or memory of the device ran out."""


class Mark(Protocol):
    """A point of the compute stream."""

    def passed(self) -> bool:
        """Whether everything before it has ended."""
        ...


class Device(Protocol):
    """An accelerator.  Thread-safe, but for ``mark``: that belongs to the thread that computes."""

    name: str
    where: torch.device  #: where its tensors live

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

    def mark(self) -> Mark:
        """Everything that the compute stream has been given so far."""
        ...

    def handed_out(self, memory: torch.Tensor) -> None:
        """Kernels that are called from now on read ``memory``; for devices that check."""
        ...

    def close(self) -> None:
        """Wait for copies under way and let go of what is pinned."""
        ...
