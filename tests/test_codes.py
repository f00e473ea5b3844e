"""Router scores in 8 bits by the native library: to the byte what numpy makes of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from k3offload.kernels import native
from k3offload.kernels.codes import coded
from k3offload.kernels.workers import Workers
from k3offload.scheduler.hints import NEAR, nearest, quantise

if not native.available():
    pytest.skip(native.why_not(), allow_module_level=True)

ROWS = 40
ISAS = [isa for isa in native.isas() if isa not in native.TILES]
#: Experts and how many of them run; beyond 128 another way is taken.
SIZES = [
    (48, 4), (896, 16), (256, 8), (129, 8), (128, 8), (17, 8), (16, 3), (12, 2), (5, 1), (4, 4),
    (3, 2), (1, 1), (1000, 40),
]  # fmt: skip


def scores_of(kind: str, experts: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng([experts, len(kind)])
    s = rng.random((ROWS, experts), np.float32)
    if kind == "ties":
        return (np.round(s * 4) / 4).astype(np.float32)
    if kind == "all the same":
        return np.full_like(s, 0.5)
    if kind == "close to zero":
        s = (s - 0.5) * np.float32(1e-4)
        s[:, ::3] = -0.0
    elif kind == "not finite":
        for value in (np.nan, np.inf, -np.inf):
            s[rng.random(s.shape) < 0.1] = value
    elif kind == "far apart":
        return (-np.exp(s * 40)).astype(np.float32)
    return s


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kind", ["any", "ties", "all the same", "close to zero", "not finite", "far apart"]
)
def test_bytes_are_those_of_numpy(kind: str, isa: str) -> None:
    for experts, top_k in SIZES:
        scores = scores_of(kind, experts)
        rng = np.random.default_rng(experts)
        anyone = rng.permuted(np.tile(np.arange(experts), (ROWS, 1)), axis=1)[:, :top_k]
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        for chosen in (None, np.sort(best, axis=1), np.sort(anyone, axis=1)):
            with np.errstate(over="ignore"):
                wanted = nearest(quantise(scores, top_k), top_k, chosen)
            ran = None if chosen is None else torch.from_numpy(chosen)
            with native.using(isa):
                found = coded(torch.from_numpy(scores), top_k, NEAR, ran)
            assert found[0].dtype == np.uint16 and found[1].dtype == np.uint8
            assert (found[0] == wanted[0]).all() and (found[1] == wanted[1]).all(), experts


def test_threads_and_company_change_nothing() -> None:
    scores = torch.rand(5000, 48, generator=torch.Generator().manual_seed(0))
    whole = coded(scores, 4, NEAR)
    with_help = coded(scores, 4, NEAR, workers=Workers(3))
    one = coded(scores[4321:4322], 4, NEAR)
    strided = coded(scores[::2], 4, NEAR)
    for i in range(2):
        assert (whole[i] == with_help[i]).all()
        assert (whole[i][4321:4322] == one[i]).all() and (whole[i][::2] == strided[i]).all()
