"""Triton kernels of a KDA layer: rounding, number formats, and launches that compile offline."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from k3offload import registry
from k3offload.kernels import triton_run
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, same_bits
from tests.helpers_ops import backends, randn

pytestmark = pytest.mark.skipif(not triton_run.interpreted(), reason="there is no Triton")
SOLO = Workers(1)
OPS = ("short_conv", "kda_gate", "kda", "mixer")


@pytest.mark.parametrize("op", OPS)
def test_every_argument_of_a_launch_has_a_type_or_a_value(op: str) -> None:
    module = registry.implementation("kernels", op, "triton")
    launches = module.compiled(triton_run.Sizes())
    source = ast.parse(Path(str(module.__file__)).read_text())
    defined = {n.name for n in ast.walk(source) if isinstance(n, ast.FunctionDef)}
    kernels = {name for name in defined if name.endswith("_kernel")}
    assert {launch.kernel.fn.__name__ for launch in launches} == kernels
    for launch in launches:
        given = {**launch.signature, **launch.constants}
        assert set(given) == set(launch.kernel.arg_names)
        assert not set(launch.signature) & set(launch.constants)


def test_results_round_to_nearest_even() -> None:
    """Numbers half-way between two of bfloat16, on both sides of it, and what overflows."""
    ties = torch.tensor([1 + k * 2.0**-8 for k in range(1, 256, 2)])
    up = torch.nextafter(ties, torch.tensor(9.0))
    down = torch.nextafter(ties, torch.tensor(0.0))
    x = torch.cat([ties, up, down, -ties, torch.tensor([3.4e38, 0.0, -0.0])])
    gate = torch.full((1, x.shape[0]), 100.0, dtype=torch.bfloat16)  # its sigmoid is 1
    # rows of one channel whose norm is 1 times the weight: what is rounded is the weight
    norm = backends("kda_gate")["triton"].gated_norm
    for value in x.tolist():
        got = norm(torch.ones(1, 1, 1), gate[:, :1], torch.tensor([value]), 0.0)
        assert same_bits(got, torch.tensor([[value]]).to(torch.bfloat16)), value


@pytest.mark.parametrize("z", [-80.0, -30.0, -5.0, -1e-3, 0.0, 1.0, 19.99, 20.0, 20.01, 80.0, 1e30])
def test_softplus_everywhere(z: float) -> None:
    gate = backends("kda_gate")["triton"].kda_gate
    got = gate(torch.tensor([[z]]), torch.zeros(1), torch.zeros(1), None)
    want = -torch.nn.functional.softplus(torch.tensor(z, dtype=torch.float64), threshold=20.0)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double()[0, 0, 0], want, rtol=1e-6, atol=0)


def test_a_decay_that_ends_everything() -> None:
    """An unbounded gate may say -1e30: nothing of the state is left, and nothing is NaN."""
    g = generator(3)
    q, k, v = (randn(g, 20, 2, 24) for _ in range(3))
    decay, beta = torch.full((20, 2, 24), -1e30), torch.ones(20, 2)
    state = randn(g, 2, 24, 24)
    kda = backends("kda")
    want_state = state.clone()
    k = k / k.norm(dim=-1, keepdim=True)
    want = kda["reference"].kda_chunk(q, k, v, decay, beta, want_state, SOLO)
    got = kda["triton"].kda_chunk(q, k, v, decay, beta, state, SOLO)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(state, want_state)
