"""The native operators that treat each row alone (native/seq_rows.h), on every instruction set
that runs here: values, and bits that depend on the row alone.

KDA and attention have their own file: tests/test_native_kda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from k3offload.kernels import native
from k3offload.kernels.attnres_native import attnres
from k3offload.kernels.glu_native import silu, situ
from k3offload.kernels.kda_gate_native import gated_norm, kda_gate, l2_norm
from k3offload.kernels.rms_norm_native import rms_norm
from k3offload.kernels.router_native import route
from k3offload.kernels.short_conv_native import short_conv
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import randn

if not native.available():
    pytest.skip(native.why_not(), allow_module_level=True)

Tensors = tuple[torch.Tensor, ...]
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
#: Those of tiles have no code of their own here.
ISAS = [isa for isa in native.isas() if isa not in native.TILES]
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """``make`` gives the inputs: the first ``rows`` of them have a row for each row of the outputs;
    ``call`` runs the operator, ``exact`` is its definition in float64."""

    rows: int
    make: Callable[[int, torch.Generator, torch.dtype], Tensors]
    call: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor]
    dtypes: Sequence[torch.dtype] = (F32, BF16)
    roundings: int = 1  # to the activations' dtype


def scales(rows: int) -> torch.Tensor:
    """[rows, 1] from 1 down to 1e-4, where an epsilon shows."""
    return 10.0 ** -(torch.arange(rows) % 5)[:, None]


def _root(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _norm(width: int, weight_type: torch.dtype | None = None) -> Case:
    def make(rows: int, g: torch.Generator, dtype: torch.dtype) -> Tensors:
        x = (randn(g, rows, width) * scales(rows)).to(dtype)
        return x, randn(g, width, dtype=weight_type or dtype)

    def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _root(x) * w

    return Case(1, make, lambda x, w, t=None: rms_norm(x, w, EPS, t), exact, roundings=3)


def _pair(width: int) -> Callable[[int, torch.Generator, torch.dtype], Tensors]:
    return lambda rows, g, dtype: (
        randn(g, rows, width, dtype=dtype) * 8,
        randn(g, rows, width, dtype=dtype) * 30,
    )


def _situ(width: int, cap: float | None) -> Case:
    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        capped = b if cap is None else cap * torch.tanh(b / cap)
        return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * capped

    return Case(2, _pair(width), lambda a, b, t=None: situ(a, b, 4.0, cap, t), exact)


def _attnres(width: int, count: int) -> Case:
    def make(rows: int, g: torch.Generator, dtype: torch.dtype) -> Tensors:
        entries = [randn(g, rows, width, dtype=dtype) * (j + 1) for j in range(count)]
        return (*entries, randn(g, width, dtype=BF16), randn(g, 1, width) / width**0.5 * 2)

    def call(*args: torch.Tensor, t: Workers | None = None) -> torch.Tensor:
        return attnres(args[:-2], args[-2], args[-1], EPS, t)

    def exact(*args: torch.Tensor) -> torch.Tensor:
        values = torch.stack(args[:-2])
        scores = (_root(values) * (args[-2] * args[-1][0])).sum(-1)
        return (torch.softmax(scores, 0)[..., None] * values).sum(0)

    return Case(count, make, lambda *a, t=None: call(*a, t=t), exact)


def _gate(heads: int, dim: int, lower: float | None) -> Case:
    def make(rows: int, g: torch.Generator, dtype: torch.dtype) -> Tensors:
        raw = randn(g, rows, heads * dim, dtype=dtype) * 6
        return raw, randn(g, heads), randn(g, heads * dim)

    def exact(raw: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        z, rate = (raw + bias).view(-1, heads, dim), torch.exp(a_log)[:, None]
        if lower is not None:
            return lower / (1 + torch.exp(-rate * z))
        return -rate * torch.log1p(torch.exp(z))

    return Case(1, make, lambda r, a, b, t=None: kda_gate(r, a, b, lower, t), exact)


def _unit(heads: int, dim: int) -> Case:
    def make(rows: int, g: torch.Generator, dtype: torch.dtype) -> Tensors:
        return (randn(g, rows, heads, dim, dtype=dtype) * scales(rows)[..., None],)

    def exact(x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    return Case(1, make, lambda x, t=None: l2_norm(x, workers=t), exact, (F32,))


def _gated(heads: int, dim: int) -> Case:
    def make(rows: int, g: torch.Generator, dtype: torch.dtype) -> Tensors:
        x = randn(g, rows, heads, dim) * scales(rows)[..., None]
        return x, randn(g, rows, heads * dim, dtype=dtype) * 3, randn(g, dim)

    def exact(x: torch.Tensor, gate: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (_root(x) * w).flatten(1) * torch.sigmoid(gate)

    return Case(2, make, lambda x, g, w, t=None: gated_norm(x, g, w, EPS, t), exact)


def _exact_silu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * torch.sigmoid(a) * b


CASES = {
    "rms_norm-7": _norm(7),
    "rms_norm-160": _norm(160),
    "rms_norm-1001": _norm(1001),
    "rms_norm-weight-float32": _norm(160, F32),
    "rms_norm-weight-float16": _norm(160, torch.float16),
    "situ-5": _situ(5, 25.0),
    "situ-160": _situ(160, 25.0),
    "situ-uncapped": _situ(56, None),
    "silu-100": Case(2, _pair(100), lambda a, b, t=None: silu(a, b, t), _exact_silu),
    "attnres-2": _attnres(160, 2),
    "attnres-9": _attnres(1001, 9),
    "kda_gate": _gate(3, 40, -5.0),
    "kda_gate-softplus": _gate(17, 7, None),
    "l2_norm": _unit(3, 40),
    "l2_norm-7": _unit(2, 7),
    "gated_norm": _gated(3, 40),
    "gated_norm-128": _gated(2, 128),
}
WHICH = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name, case in CASES.items()
        for dtype in case.dtypes
    ],
)


def run(case: Case, inputs: Sequence[torch.Tensor], workers: Workers | None = None) -> torch.Tensor:
    with poisoned():
        return case.call(*inputs, t=workers).clone()


def check_values(case: Case, dtype: torch.dtype, call: Callable[..., torch.Tensor]) -> None:
    inputs = case.make(20, generator(0), dtype)
    kept = [x.clone() for x in inputs]
    with poisoned():
        got = call(*inputs)
    want = case.exact(*(x.double() for x in inputs))
    assert got.shape == want.shape
    rounding = case.roundings * 2.0**-8 if got.dtype == BF16 else 0.0
    allowed = (2e-6 + rounding) * want.abs().amax(-1, keepdim=True)
    assert ((got.double() - want).abs() <= allowed).all()
    assert all(same_bits(x, y) for x, y in zip(inputs, kept, strict=True)), "an input was changed"


@pytest.mark.parametrize("isa", ISAS)
@WHICH
def test_values(name: str, dtype: torch.dtype, isa: str) -> None:
    with native.using(isa):
        check_values(CASES[name], dtype, CASES[name].call)


@pytest.mark.parametrize(
    "name", ["rms_norm-160", "situ-160", "attnres-2", "kda_gate", "gated_norm"]
)
def test_planted_wrong_values_are_refused(name: str) -> None:
    """One number of one row too large by a hundred-thousandth."""
    case = CASES[name]

    def wrong(*inputs: torch.Tensor) -> torch.Tensor:
        out = case.call(*inputs).clone()
        out[3].view(-1)[out[3].abs().argmax()] *= 1 + 1e-5
        return out

    with pytest.raises(AssertionError):
        check_values(case, F32, wrong)


@WHICH
def test_every_instruction_set_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    inputs = CASES[name].make(20, generator(1), dtype)
    results = []
    for isa in native.isas():
        with native.using(isa):
            results.append(run(CASES[name], inputs))
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("isa", ISAS)
@WHICH
def test_a_row_alone_has_the_bits_of_a_row_in_company(
    name: str, dtype: torch.dtype, isa: str
) -> None:
    """Whatever the others hold, whichever place it has, wherever in memory it lies."""
    case, count = CASES[name], 9
    inputs = case.make(count, generator(2), dtype)
    with native.using(isa):
        base = run(case, inputs)
        for row in range(count):
            own, rest = [x[row : row + 1] for x in inputs[: case.rows]], inputs[case.rows :]
            assert same_bits(base[row : row + 1], run(case, [*own, *rest]))
            moved = [torch.cat((x.flatten()[:3], x.flatten()))[3:].view(x.shape) for x in own]
            assert same_bits(base[row : row + 1], run(case, [*moved, *rest]))
        for fill in (0.0, 1e30, float("inf"), float("nan")):
            company = [torch.full_like(x, fill) for x in inputs[: case.rows]]
            for x, y in zip(company, inputs, strict=False):
                x[4] = y[4]
            again = run(case, [*company, *inputs[case.rows :]])
            assert same_bits(base[4], again[4])
            if fill != fill:
                assert again[:4].isnan().all()


@WHICH
def test_threads_change_no_bit(name: str, dtype: torch.dtype) -> None:
    """Enough rows that they are shared out."""
    case = CASES[name]
    inputs = case.make(3000, generator(3), dtype)
    base = run(case, inputs)
    for threads in (2, 3, 4):
        workers = Workers(threads)
        assert same_bits(base, run(case, inputs, workers))
        workers.close()


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_is_float32_rounded_once(isa: str) -> None:
    """To the nearest, ties to even, as torch rounds."""
    g = generator(4)
    with native.using(isa):
        for name in ("situ-160", "silu-100", "attnres-9"):
            inputs = CASES[name].make(50, g, BF16)
            exact = run(CASES[name], [x.float() for x in inputs])
            assert same_bits(run(CASES[name], inputs), exact.to(BF16))
        ties = torch.arange(0x3F800000, 0x3F820000, 0x800, dtype=torch.int32).view(F32)[:, None]
        huge, none = torch.full((1, 64), 2.0**60, dtype=BF16), torch.zeros(0, 64, dtype=BF16)
        conv, _ = short_conv(huge, none, ties)  # y = 2^60 ties, whose sigmoid is 1
        assert same_bits(conv, (ties.T * 2.0**60).to(BF16).float())
        lost = torch.full((1, 5), float("nan"), dtype=BF16)
        assert silu(lost, torch.ones_like(lost)).isnan().all()


# ---- functions ----


def ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error in units in the last place of ``want`` (float64)."""
    size = want.abs().float()
    step = torch.nextafter(size, torch.tensor(torch.inf)).double() - size.double()
    return float(((got.double() - want).abs() / step).max())


def line(low: float, high: float) -> torch.Tensor:
    """[1, 4000] around zero and up to the ends, finer where numbers are small."""
    fine = torch.logspace(-30, 0, 1000).flip(0)
    return torch.cat((fine * low, fine * high, torch.linspace(low, high, 2000)))[None]


@pytest.mark.parametrize("isa", ISAS)
def test_functions_are_within_two_ulps(isa: str) -> None:
    z = line(-87, 87)
    zero = torch.zeros(4000)
    with native.using(isa):
        sigmoid = kda_gate(z, torch.zeros(1), zero, -1.0).view(1, -1)
        assert ulps(-sigmoid, torch.sigmoid(z.double())) <= 2.5  # exp, a sum and a quotient
        softplus = kda_gate(z, torch.zeros(1), zero, None).view(1, -1)
        assert ulps(-softplus, torch.log1p(torch.exp(z.double()))) <= 2.5
        x = line(-12, 12)  # sigmoid(100) and tanh(100) are 1
        tanh = situ(torch.full_like(x, 100.0), x, 1.0, 1.0)
        assert ulps(tanh, torch.tanh(x.double())) <= 2
        ends = torch.tensor([[float("-inf"), -200.0, 0.0, 200.0, float("inf"), float("nan")]])
        got = kda_gate(ends, torch.zeros(1), torch.zeros(6), -1.0).view(-1)
        assert got[:5].tolist() == [0, 0, -0.5, -1, -1]
        assert got[5].isnan()


# ---- router ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("count", "k"), [(896, 16), (40, 6), (8, 8), (3, 1), (17, 5)])
def test_route(count: int, k: int, isa: str) -> None:
    """As torch sorts: equal scores to the lower number, NaN before every number.  Scores have the
    bias in them, to the bit as torch adds it; weights do not."""
    g = generator(count)
    logits, bias = randn(g, 30, count) * 2, randn(g, count) / 10
    logits[3] = 0.5
    logits[4] = logits[4].round()
    logits[5, count // 2] = float("nan")
    logits[6] = float("nan")
    bias[: count // 2] = 0.25
    workers = Workers(2)
    with native.using(isa), poisoned():
        experts, weights, scores = route(logits, bias, k, True, 2.5)
        again = route(logits.repeat(40, 1), bias, k, True, 2.5, workers)
        plain = route(logits, bias, k, False, 1.0)
        sigmoids = route(logits, torch.zeros(count), k, False, 1.0)[2]
    workers.close()
    exact = torch.sigmoid(logits.double())
    torch.testing.assert_close(sigmoids.double(), exact, rtol=1e-6, atol=0, equal_nan=True)
    assert same_bits(scores, sigmoids + bias)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    want = order[:, :k].sort(-1).values
    assert torch.equal(experts, want)
    chosen = exact.gather(1, want)
    normed = chosen / chosen.sum(1, keepdim=True) * 2.5
    torch.testing.assert_close(weights.double(), normed, rtol=2e-6, atol=0, equal_nan=True)
    assert same_bits(plain[1], sigmoids.gather(1, want))
    for one, many in zip((experts, weights, scores), again, strict=True):
        assert same_bits(one.repeat(40, 1), many)


# ---- short_conv ----


def conv_exact(x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    window, taps = torch.cat((tail, x)).double(), weight.shape[1]
    y = sum((weight[:, j].double() * window[j : j + len(x)] for j in range(taps)), torch.zeros(()))
    return y * torch.sigmoid(y)


@pytest.mark.parametrize("isa", ISAS)
@DTYPES
@pytest.mark.parametrize(("channels", "taps"), [(120, 4), (7, 2), (300, 5), (64, 1), (33, 3)])
def test_short_conv(channels: int, taps: int, dtype: torch.dtype, isa: str) -> None:
    """Values, the tail that is handed on, pieces that give the bits of the whole."""
    g = generator(taps)
    x, tail = randn(g, 70, channels, dtype=dtype), randn(g, taps - 1, channels, dtype=dtype)
    weight, workers = randn(g, channels, taps), Workers(3)
    with native.using(isa), poisoned():
        y, moved = short_conv(x, tail, weight, workers)
        want = conv_exact(x, tail, weight)
        rounding = 2.0**-8 if dtype == BF16 else 2e-6
        assert ((y.double() - want).abs() <= rounding * want.abs() + 1e-6).all()
        assert same_bits(y, y.to(dtype).float()), "in the activations' precision"
        assert same_bits(moved, torch.cat((tail, x))[70:])
        for cut in (1, 2, 3, 64):
            first, between = short_conv(x[:cut], tail, weight)
            rest, last = short_conv(x[cut:], between, weight)
            assert same_bits(y, torch.cat((first, rest)))
            assert same_bits(moved, last)
        x[9:] = float("nan")
        assert same_bits(y[:9], short_conv(x, tail, weight)[0][:9]), (
            "later rows reach no earlier one"
        )
    workers.close()
