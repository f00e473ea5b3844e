"""experts: several MLPs over their own rows, against float64 and in any company (R72)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from k3offload.kernels.experts_reference import Job
from k3offload.kernels.glu_reference import Activation
from k3offload.kernels.linear_reference import Weight
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import backends, dense, each_job, mxfp4, randn, weight_exact

Experts = Callable[..., torch.Tensor]
Draw = Callable[[torch.Generator, int, int], Weight]

MODULES = backends("experts")
SOLO = Workers(1)
WIDE, NARROW, ROWS = 96, 64, 70
FORMATS: dict[str, Draw] = {
    "mxfp4": lambda g, n, k: mxfp4(g, n, k),
    "bfloat16": lambda g, n, k: dense(g, torch.bfloat16, n, k),
}
ACTS = [Activation("situ", 4.0, 25.0), Activation("situ", 4.0, None), Activation("silu")]


def make(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, list[Job]]:
    """Rows and four jobs: all rows, one, several in any order and twice, 64."""
    g = generator(3)
    chosen: list[list[int] | None] = [None, [5], [40, 2, 2, 69, 0], list(range(3, 67))]
    jobs = [
        Job(
            FORMATS[kind](g, NARROW, WIDE),
            FORMATS[kind](g, NARROW, WIDE),
            FORMATS[kind](g, WIDE, NARROW),
            rows,
        )
        for rows in chosen
    ]
    return randn(g, ROWS, WIDE, dtype=dtype) / 8, jobs


def exact(x: torch.Tensor, job: Job, act: Activation) -> torch.Tensor:
    """Rounded where the model rounds; the products in float64."""
    dtype = x.dtype
    rows = (x if job.rows is None else x[job.rows]).double()
    a = (rows @ weight_exact(job.gate).T).to(dtype).double()
    b = (rows @ weight_exact(job.up).T).to(dtype).double()
    if act.name == "silu":
        y = a * torch.sigmoid(a) * b
    else:
        cap = act.linear_beta
        capped = b if cap is None else cap * torch.tanh(b / cap)
        y = act.beta * torch.tanh(a / act.beta) * torch.sigmoid(a) * capped
    return y.to(dtype).double() @ weight_exact(job.down).T


def check(f: Experts, kind: str, act: Activation, dtype: torch.dtype, decode: bool) -> None:
    x, jobs = make(kind, dtype)
    with poisoned():
        got = each_job(f, x, jobs, act, SOLO, decode)
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    for job, y in zip(jobs, got, strict=True):
        want = exact(x, job, act)
        assert y.shape == want.shape
        assert y.dtype == dtype
        assert (y.double() - want).abs().max() <= rounding * want.abs().max()


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("backend", MODULES)
def test_experts(
    backend: str, kind: str, act: Activation, dtype: torch.dtype, decode: bool
) -> None:
    check(MODULES[backend].experts, kind, act, dtype, decode)


@pytest.mark.parametrize("backend", MODULES)
def test_results_go_where_they_are_wanted(backend: str) -> None:
    f, (x, jobs) = MODULES[backend].experts, make("mxfp4", torch.bfloat16)
    with poisoned():
        y = f(x, jobs, ACTS[0], SOLO)
        memory = torch.full((len(y) + 2, WIDE), 7.0, dtype=y.dtype)
        f(x, jobs, ACTS[0], SOLO, False, memory[1:-1])
    assert same_bits(memory[1:-1], y)
    assert (memory[0] == 7).all() and (memory[-1] == 7).all()


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", MODULES)
def test_a_row_has_the_same_bits_in_any_call(
    backend: str, dtype: torch.dtype, decode: bool
) -> None:
    """Alone, with other rows, other experts and any number of threads."""
    f, act = MODULES[backend].experts, ACTS[0]
    x, jobs = make("mxfp4", dtype)
    with poisoned():
        together = each_job(f, x, jobs, act, SOLO, decode)
        for threads in (1, 2, 3):
            workers = Workers(threads)
            for job, y in zip(jobs, together, strict=True):
                rows = range(ROWS) if job.rows is None else job.rows
                for i in (0, len(rows) // 2, len(rows) - 1):
                    alone = job._replace(rows=rows[i : i + 1])
                    again = f(x, [alone], act, workers, decode)
                    assert same_bits(again[0], y[i])
            workers.close()


def test_planted_wrong_experts_are_refused() -> None:
    right = MODULES["reference"].experts

    def swapped(x: torch.Tensor, jobs: list[Job], *rest: object) -> torch.Tensor:
        other = [job._replace(gate=job.up, up=job.gate) for job in jobs]
        return right(x, other, *rest)  # type: ignore[no-any-return]

    def unrounded(x: torch.Tensor, jobs: list[Job], *rest: object) -> torch.Tensor:
        return right(x, jobs, *rest) * 1.02  # type: ignore[no-any-return]

    for wrong in (swapped, unrounded):
        with pytest.raises(AssertionError):
            check(wrong, "mxfp4", ACTS[0], torch.float32, False)
