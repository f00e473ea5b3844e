"""experts: several gated MLPs, each over its own rows; routed experts, shared and dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .glu_reference import Activation, activate
from .linear_reference import Weight, linear
from .workers import Workers


class Job(NamedTuple):
    """One MLP and the rows it takes: numbers of rows of ``x``; None takes them all."""

    gate: Weight
    up: Weight
    down: Weight
    rows: Sequence[int] | None = None


def experts(
    x: torch.Tensor,
    jobs: Sequence[Job],
    act: Activation,
    workers: Workers,
    decode: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """down(act(gate x, up x)) of each job's rows of ``x`` [R, K], one job's after another's, in
    ``x``'s dtype: [rows of all jobs, K'], written to ``out`` if it is given.

    The results of gate, up and activation are rounded to that dtype, as in the released model.
    """
    results = []
    for job in jobs:
        rows = x if job.rows is None else x[torch.tensor(job.rows, dtype=torch.int64)]
        gate = linear(rows, job.gate, workers, decode)
        up = linear(rows, job.up, workers, decode)
        results.append(linear(activate(gate, up, act), job.down, workers, decode))
    return torch.cat(results, out=out)
