"""Make libraries take the memory they will take anyway, before the plan is made.

Matrix libraries load code, start pools and build tables at first use.  Calling every operator once
on small shapes, on every compute thread, puts that into the measured base, and the plan can keep
its word.
"""

from __future__ import annotations

import threading

import torch

from .kernels.attend_reference import Partial, attend
from .kernels.attnres_reference import attnres
from .kernels.glu_reference import silu, situ
from .kernels.kda_gate_reference import gated_norm, kda_gate, l2_norm
from .kernels.kda_reference import kda_chunk, kda_step
from .kernels.linear_reference import DenseWeight, linear
from .kernels.mxfp4 import Mxfp4Weight
from .kernels.rms_norm_reference import rms_norm
from .kernels.router_reference import router
from .kernels.short_conv_reference import short_conv
from .kernels.workers import Workers, single_threaded

SIZE = 64


def warm_up(workers: Workers, dtype: torch.dtype) -> None:
    """Run each operator once on every compute thread."""
    meet = threading.Barrier(workers.threads)
    alone = Workers(1)

    def task(i: int) -> None:
        meet.wait(60)  # so that each thread takes exactly one task
        _matrices(dtype, alone)
        _rows(dtype, alone)
        _attention()

    with single_threaded():
        workers.map(task, workers.threads)


def _matrices(dtype: torch.dtype, workers: Workers) -> None:
    codes = torch.zeros(SIZE, SIZE // 2, dtype=torch.uint8)
    for kind in (dtype, torch.float32):
        x = torch.ones(SIZE, SIZE, dtype=kind)
        linear(x, Mxfp4Weight(codes, codes[:, :2] + 127), workers)
        linear(x, DenseWeight(torch.ones(SIZE, SIZE, dtype=torch.bfloat16)), workers)


def _rows(dtype: torch.dtype, workers: Workers) -> None:
    x, one = torch.ones(SIZE, SIZE, dtype=dtype), torch.ones(SIZE)
    rms_norm(x, one, 1e-5)
    situ(x, x, 4.0, 25.0)
    silu(x, x)
    attnres([x, x], one, one, 1e-5)
    router(x, DenseWeight(torch.ones(SIZE, SIZE)), one, 2, True, 1.0, workers)
    short_conv(x, x[:3], torch.ones(SIZE, 4), SIZE)
    decay = kda_gate(x, one[:2], one, -5.0)
    gated_norm(l2_norm(decay), x, one[:32], 1e-5)
    torch.argsort(torch.arange(SIZE), stable=True)
    torch.isfinite(x).all()


def _attention() -> None:
    heads = torch.ones(2, SIZE, 32)
    state = torch.zeros(2, 32, 32)
    kda_chunk(heads, heads, heads, -heads, heads[..., 0], state)
    kda_step(heads[:, 0], heads[:, 0], heads[:, 0], -heads[:, 0], heads[:, 0, 0], state)
    partial = Partial(2, SIZE, 32)
    attend(heads, heads, heads, torch.ones(SIZE, SIZE, dtype=torch.bool), 1.0, partial)
    partial.result()
