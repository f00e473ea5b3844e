"""MXFP4 matrices in plain torch: two codes a byte and one power of two for 32 columns.

Dequantised when used, four codes a look-up, into memory that is used again: two passes over the
result and nothing else of its size.  Knows the format and torch, nothing of models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _quads() -> Tensor:
    """[65536] int64: the four numbers of two bytes as bfloat16, by these bytes as an int16 plus
    32768.  The low four bits of a byte are the first of its two columns."""
    both = torch.arange(65536) - 32768
    numbers = torch.stack([_E2M1[both >> shift & 15] for shift in (0, 4, 8, 12)], -1)
    return numbers.bfloat16().view(torch.int64).reshape(65536)


_QUADS = _quads()
#: 2 ** (s - 127) by s; all of them are bfloat16 numbers, 255 is none
_POWERS = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).bfloat16()
_POWERS[255] = torch.nan
_scratch: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}


def dequantised(packed: Tensor, scale: Tensor) -> Tensor:
    """[rows, cols] bfloat16 of ``packed`` [rows, cols / 2] and ``scale`` [rows, cols / 32], uint8.
    Exact.  It lies in memory that the next call for as many numbers writes to."""
    rows, cols, device = len(packed), 2 * packed.shape[1], packed.device
    quads, powers = _tables.setdefault(device, (_QUADS.to(device), _POWERS.to(device)))
    count = rows * cols // 4
    if (count, device) not in _scratch:
        _scratch[count, device] = (
            torch.empty(count, dtype=torch.int32, device=device),
            torch.empty(count, dtype=torch.int64, device=device),
        )
    index, out = _scratch[count, device]
    index.copy_(packed.reshape(-1).view(torch.int16)).add_(32768)
    torch.index_select(quads, 0, index, out=out)
    numbers = out.view(torch.bfloat16).view(rows, cols // GROUP, GROUP)
    return numbers.mul_(powers[scale.int()][..., None]).view(rows, cols)


class Mxfp4Linear(nn.Module):
    """A linear layer without bias, its weight as the checkpoint has it."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        for name, columns in (("weight_packed", inp // 2), ("weight_scale", inp // GROUP)):
            codes = torch.empty(out, columns, dtype=torch.uint8)
            setattr(self, name, nn.Parameter(codes, requires_grad=False))
        self.weight_packed: nn.Parameter
        self.weight_scale: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantised(self.weight_packed, self.weight_scale).to(x.dtype))
