"""MLA latents of a layer that a device computes, where not all of them have room there.

As ``SpilledLatents``; full blocks lie in memory of the device first (``tiers/device_spill.py``).
"""

from __future__ import annotations

import torch

from .kernels.pieces import Pieces
from .latents import Home, SpilledLatents
from .tiers.device_spill import DeviceBlock, DeviceSpill
from .tiers.spill import SpillArray


class DeviceLatents(SpilledLatents):
    """``window``: where full blocks go first.  The open block lies where ``home`` says: on the
    device, or for snapshots that sessions share in RAM."""

    def __init__(self, window: DeviceSpill, home: Home, width: int, dtype: torch.dtype) -> None:
        super().__init__(home, width, dtype)
        self._window = window

    def _put(self, array: SpillArray) -> DeviceBlock:
        return self._window.append(array, self._open.data)

    def _read(self, block: DeviceBlock) -> torch.Tensor:
        return self._window.rows(block)

    def _pieces(self, tail: list[torch.Tensor]) -> Pieces:
        return self._window.pieces(self._full, tail)
