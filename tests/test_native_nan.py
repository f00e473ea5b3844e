"""Numbers that are none, through the native linear: no instruction set loses one."""

from __future__ import annotations

import pytest
import torch

from k3offload.kernels import native
from k3offload.kernels.linear_native import linear
from k3offload.kernels.linear_reference import Weight
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator
from tests.helpers_native import draw, exact

pytestmark = pytest.mark.skipif(not native.isas(), reason="there is no native library")
KINDS = ("mxfp4", "int8", "bfloat16", "float32", "float16")
DTYPES = (torch.float32, torch.bfloat16)
NAN, INF = float("nan"), float("inf")
SOLO = Workers(1)


def ran(isa: str, x: torch.Tensor, weight: Weight, decode: bool) -> torch.Tensor:
    with native.using(isa):
        return linear(x, weight, SOLO, decode)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_none_reaches_every_result(isa: str, kind: str, decode: bool) -> None:
    """Or an infinite one: in one column of one row, wherever in a chunk it stands."""
    k = 192
    weight = draw(kind, 40, k)
    numbers = exact(weight)
    for dtype in DTYPES:
        for column in (0, 1, 17, 33, 126, 129, k - 1):
            x = torch.randn(3, k, generator=generator(1)).to(dtype)
            x[1, column] = NAN
            got = ran(isa, x, weight, decode)
            assert got[1].isnan().all() and got[[0, 2]].isfinite().all()
            x[1, column] = INF
            got = ran(isa, x, weight, decode)[1]
            assert torch.equal(got.isnan(), numbers[:, column] == 0)
            infinite = got[numbers[:, column] != 0].double()
            signs = numbers[numbers[:, column] != 0, column].sign()
            assert torch.equal(infinite, signs * INF)
