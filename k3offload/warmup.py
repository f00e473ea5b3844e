"""Make libraries take the memory they will take anyway, before the plan is made.

Matrix libraries load code, start pools and build tables at first use.  Calling every operator once
on small shapes, on every compute thread, puts that into the measured base, and the plan can keep
its word.
"""

from __future__ import annotations

import threading

import torch

from .config import LATENT_BLOCK
from .kernels.choose import Kernels
from .kernels.experts_reference import Job
from .kernels.glu_reference import Activation
from .kernels.linear_reference import DenseWeight
from .kernels.mixer import MixerRows, MixerWeights
from .kernels.mla_prefill_reference import Query
from .kernels.mxfp4 import Mxfp4Weight
from .kernels.workers import Workers, single_threaded

SIZE = 64


def warm_up(kernels: Kernels, dtype: torch.dtype) -> None:
    """Run each operator once on every compute thread."""
    threads = kernels.workers.threads
    meet = threading.Barrier(threads)
    alone = Kernels(Workers(1), kernels.chosen, kernels.isa)

    def task(i: int) -> None:
        meet.wait(60)  # so that each thread takes exactly one task
        with alone.in_force():
            for decode in (True, False):
                _matrices(dtype, alone, decode)
            _rows(dtype, alone)
            _attention(dtype, alone)

    with single_threaded(), kernels.in_force():
        kernels.workers.map(task, threads)
        for decode in (True, False):
            _matrices(dtype, kernels, decode)


def _matrices(dtype: torch.dtype, kernels: Kernels, decode: bool) -> None:
    codes = torch.zeros(SIZE, SIZE // 2, dtype=torch.uint8)
    packed = Mxfp4Weight(codes, codes[:, :2] + 127)
    dense = DenseWeight(torch.ones(SIZE, SIZE, dtype=torch.bfloat16))
    for kind in (dtype, torch.float32):
        x = torch.ones(SIZE, SIZE, dtype=kind)
        for weight in (packed, dense):
            kernels.linear(x, weight, decode)
            kernels.experts(x, [Job(weight, weight, weight)], Activation("silu"), decode)
    x = torch.ones(SIZE, SIZE, dtype=dtype)
    kernels.router(x, DenseWeight(torch.ones(SIZE, SIZE)), torch.ones(SIZE), 2, True, 1.0, decode)


def _rows(dtype: torch.dtype, kernels: Kernels) -> None:
    x, one = torch.ones(SIZE, SIZE, dtype=dtype), torch.ones(SIZE)
    kernels.rms_norm(x, one, 1e-5)
    for act in (Activation("situ", 4.0, 25.0), Activation("silu")):
        dense = DenseWeight(torch.ones(SIZE, SIZE, dtype=torch.bfloat16))
        kernels.experts(x, [Job(dense, dense, dense)], act)
    kernels.attnres([x, x], one, one, 1e-5)
    kernels.combine(x, torch.zeros(SIZE, 2, dtype=torch.int64), torch.ones(SIZE, 2))
    torch.isfinite(x).all()


def _attention(dtype: torch.dtype, kernels: Kernels) -> None:
    wide, one, state = torch.ones(SIZE, 64, dtype=dtype), torch.ones(64), torch.zeros(2, 32, 32)
    fixed = MixerWeights((torch.ones(64, 4),) * 3, one[:2], one, one[:32], -5.0, 1e-5)
    tails = [torch.zeros(3, 64, dtype=dtype) for _ in range(3)]
    for count, decode in ((SIZE, False), (1, True)):
        some = wide[:count]
        beta = some[:, :2].contiguous()
        kernels.mixer(MixerRows([some] * 3, some, beta, some), tails, state, fixed, decode)
    up = DenseWeight(torch.ones(2 * SIZE, 32, dtype=torch.bfloat16))
    block, q = torch.ones(LATENT_BLOCK, 48, dtype=dtype), torch.ones(SIZE, 2, 48, dtype=dtype)
    kernels.mla_prefill([Query(q, 0)], [[block]], SIZE, up, 32, 32, 1.0)
    kernels.mla_decode(q[0], [[block]], SIZE, up, 32, 32, 1.0)
