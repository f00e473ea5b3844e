"""experts: y = down(act(gate x, up x)) for a list of jobs, by the native library.

One call for all pages that have arrived.  Each weight is decoded once for all rows of its job.
The two halves of the work are shared out over all jobs, so one expert or sixteen keep every
thread busy.  Rounding: see `experts_reference`; families: see `linear_native`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from . import native
from .c_function import CFunction, dtype_of
from .experts_reference import Job
from .glu_reference import Activation
from .linear_native import place_of
from .workers import Workers

ACTIVATIONS = {"silu": 0, "situ": 1}  #: by number, see native/linear.h

_experts = CFunction("k3_experts", "pipqqpqiffi")


def experts(
    x: torch.Tensor,
    jobs: Sequence[Job],
    act: Activation,
    workers: Workers,
    decode: bool = False,
) -> list[torch.Tensor]:
    """``x`` [R, K]; a job takes its rows of x (None: all) -> a [n_j, K'] tensor a job, in ``x``'s
    dtype."""
    x = x.contiguous()
    total, k = x.shape
    fields = array("q")  # JOB_FIELDS of native/api_linear.cpp
    outputs, kept = [], []  # kept: alive until the call has ended
    for job in jobs:
        rows = job.rows
        if rows is None:
            count, address = total, 0
        else:
            assert rows.dtype == torch.int64, rows.dtype
            rows = rows.contiguous()
            kept.append(rows)
            count, address = rows.shape[0], rows.data_ptr()
        inner, out = job.gate.shape[0], x.new_empty(count, job.down.shape[0])
        assert job.gate.shape == job.up.shape == (inner, k) and job.down.shape[1] == inner
        fields.extend((address, count, *place_of(job.gate), *place_of(job.up)))
        fields.extend((*place_of(job.down), inner, out.shape[1], out.data_ptr()))
        outputs.append(out)
    if not any(map(len, outputs)):
        return outputs
    _experts(
        native.pool(workers), dtype_of(x), x.data_ptr(), total, k, fields.buffer_info()[0],
        len(jobs), ACTIVATIONS[act.name], act.beta, act.linear_beta or 0.0, decode,
    )  # fmt: skip
    return outputs
