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
from .c_function import CFunction, dense, dtype_of
from .experts_reference import Job
from .glu_reference import Activation
from .linear_native import place_of
from .linear_reference import Weight
from .workers import Workers

ACTIVATIONS = {"silu": 0, "situ": 1}  #: by number, see native/linear.h

_experts = CFunction("k3_experts", "pipqqpqiffi")


def experts(
    x: torch.Tensor,
    jobs: Sequence[Job],
    act: Activation,
    workers: Workers,
    decode: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each job's rows of ``x`` [R, K], one job's after another's -> [rows of all jobs, K'], in
    ``x``'s dtype, written to ``out`` if it is given."""
    x = dense(x)
    total, k = x.shape
    width = jobs[0].down.shape[0]
    rows = array("q", [row for job in jobs if job.rows is not None for row in job.rows])
    count = len(rows) + total * sum(job.rows is None for job in jobs)
    if out is None:
        out = x.new_empty(count, width)
    assert out.shape == (count, width) and out.dtype == x.dtype and out.is_contiguous()
    if not count:
        return out
    assert not rows or 0 <= min(rows) <= max(rows) < total, (min(rows), max(rows), total)
    fields = array("q")  # JOB_FIELDS of native/api_linear.cpp
    row_at, out_at = rows.buffer_info()[0], out.data_ptr()
    row_bytes = width * x.element_size()
    for job in jobs:
        own = total if job.rows is None else len(job.rows)
        places = _places(job, k, width)
        fields.extend((0 if job.rows is None else row_at, own, *places, out_at))
        out_at += own * row_bytes
        row_at += 0 if job.rows is None else own * rows.itemsize
    _experts(
        native.pool(workers), dtype_of(x), x, total, k, fields,
        len(jobs), ACTIVATIONS[act.name], act.beta, act.linear_beta or 0.0, decode,
        also=(rows, out, jobs),
    )  # fmt: skip
    return out


def _places(job: Job, k: int, width: int) -> tuple[int, ...]:
    """Where the weights of ``job`` lie, the width between them and ``width``; remembered with them,
    because a decode step asks for as many as it has experts."""
    known: tuple[Weight, Weight, tuple[int, ...]] | None = vars(job.gate).get("native_expert")
    if known is None or known[0] is not job.up or known[1] is not job.down:
        inner = job.gate.shape[0]
        assert job.gate.shape == job.up.shape == (inner, k) and job.down.shape == (width, inner)
        places = (*place_of(job.gate), *place_of(job.up), *place_of(job.down), inner, width)
        known = job.up, job.down, places
        vars(job.gate)["native_expert"] = known
    return known[2]
