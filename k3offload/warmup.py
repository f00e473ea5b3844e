"""Make libraries take the memory they will take anyway, before the plan is made.

Matrix libraries load code, start pools and build their tables at first use.  Doing that on small
shapes first means that the measured base holds it, and the plan can keep its word.
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F

from .kernels.kda_reference import kda_chunk
from .kernels.workers import Workers, single_threaded


def warm_up(workers: Workers, dtype: torch.dtype) -> None:
    """Run each kind of operator once on every compute thread."""
    meet = threading.Barrier(workers.threads)

    def task(i: int) -> None:
        meet.wait()  # so that each thread takes exactly one task
        _operators(dtype)

    with torch.inference_mode(), single_threaded():
        workers.map(task, workers.threads)


def _operators(dtype: torch.dtype) -> None:
    for kind in {dtype, torch.float32}:
        x = torch.ones(64, 256, dtype=kind)
        y = F.linear(x, torch.ones(256, 256, dtype=kind))
        (torch.sigmoid(y.float()) + torch.tanh(y.float()) + torch.exp(-y.float())).sum(-1)
    rows = torch.ones(2, 64, 32)
    kda_chunk(rows, rows, rows, -rows, rows[..., 0], torch.zeros(2, 32, 32))
    torch.sort(torch.ones(64, 64), dim=-1, descending=True, stable=True)
