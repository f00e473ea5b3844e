"""MXFP4 (R49): nibble order, the sixteen codes, scales, position; router rules that values hide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from k3offload.kernels.linear_reference import DenseWeight, linear
from k3offload.kernels.mxfp4 import Mxfp4Weight, decode
from k3offload.kernels.router_reference import router
from k3offload.kernels.workers import Workers
from tests.contract.test_kernel import generator, poisoned, same_bits
from tests.helpers_ops import mxfp4, mxfp4_exact

SOLO = Workers(1)
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_rows(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the matrix product sees."""
    with poisoned():
        n = packed.shape[0]
        return Mxfp4Weight(packed, scale).rows(0, n, torch.bfloat16, SOLO).clone()


def by_rows_float32(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    with poisoned():
        n = packed.shape[0]
        return Mxfp4Weight(packed, scale).rows(0, n, torch.float32, SOLO).bfloat16()


DECODERS: dict[str, Decode] = {
    "definition": decode,
    "rows": by_rows,
    "rows-float32": by_rows_float32,
}


def every_code(scales: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One row for each scale; columns 0..15 are the codes in order, 16..31 backwards."""
    codes = [*range(16), *range(15, -1, -1)]
    row = [codes[i] | codes[i + 1] << 4 for i in range(0, 32, 2)]
    packed = torch.tensor([row] * len(scales), dtype=torch.uint8)
    return packed, torch.tensor(scales, dtype=torch.uint8)[:, None]


def check_codes(decoder: Decode) -> None:
    """All codes at all scales, from 2**-127 to 2**127; what bfloat16 cannot hold is infinite."""
    scales = [0, 1, 2, 64, 110, 121, 126, 127, 128, 200, 251, 252, 253, 254]
    got = decoder(*every_code(scales))
    for row, s in zip(got, scales, strict=True):
        values = torch.tensor([*CODES, *CODES[::-1]], dtype=torch.float64) * 2.0 ** (s - 127)
        assert same_bits(row, values.bfloat16()), s


def check_example(decoder: Decode) -> None:
    """The first eight weights of layer 1, expert 0, w1 of the released model."""
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :4] = torch.tensor([22, 185, 206, 35])
    got = decoder(packed, torch.tensor([[121]], dtype=torch.uint8))
    want = [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]
    assert got[0, :8].tolist() == want
    assert (got[0, 8:] == 0).all()


def check_tensor(decoder: Decode) -> None:
    weight = mxfp4(generator(0), 37, 192)
    assert same_bits(decoder(weight.packed, weight.scale), mxfp4_exact(weight).bfloat16())


@pytest.mark.parametrize("check", [check_codes, check_example, check_tensor])
@pytest.mark.parametrize("decoder", DECODERS)
def test_r49_decode(decoder: str, check: Callable[[Decode], None]) -> None:
    check(DECODERS[decoder])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r49_one_hot_inputs_prove_position(dtype: torch.dtype) -> None:
    """Input e_i gives column i: each weight stands where it belongs, not only in distribution."""
    n, k = 40, 128
    weight = mxfp4(generator(1), n, k)
    with poisoned():
        x = torch.eye(k, dtype=dtype)
        got = linear(x, weight, SOLO).clone()
    assert torch.equal(got.double().T, mxfp4_exact(weight))


def test_r49_packed_bytes_may_lie_anywhere() -> None:
    """Bytes of a page start at odd addresses; every residue gives the same weights."""
    weight = mxfp4(generator(2), 9, 64)
    want = by_rows(weight.packed, weight.scale)
    for shift in range(1, 17):
        moved = []
        for part in (weight.packed, weight.scale):
            memory = torch.zeros(part.numel() + shift, dtype=torch.uint8)
            moved.append(memory[shift:].view(part.shape).copy_(part))
        assert moved[0].data_ptr() % 16 == (weight.packed.data_ptr() + shift) % 16
        assert same_bits(by_rows(moved[0], moved[1]), want)


def test_rows_of_a_part() -> None:
    weight = mxfp4(generator(3), 50, 96)
    want = mxfp4_exact(weight)
    for begin, end in ((0, 50), (0, 1), (13, 40), (49, 50)):
        for dtype in (torch.bfloat16, torch.float32):
            with poisoned():
                got = weight.rows(begin, end, dtype, SOLO).double()
            assert torch.equal(got, want[begin:end])


# ---- planted wrong decoders ----


def nibbles_swapped(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return decode(packed >> 4 | packed << 4, scale)


def halves_apart(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Low nibbles in front, high nibbles behind: the right numbers in the wrong places."""
    straight = decode(packed, scale)
    n, k = straight.shape
    groups = straight.view(n, k // 32, 16, 2)
    return groups.transpose(2, 3).reshape(n, k)


def scale_as_number(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    plain = decode(packed, torch.full_like(scale, 127))
    return plain * scale.repeat_interleave(32, dim=1)


def group_of_16(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    columns = packed.shape[1] * 2
    wide = scale.repeat_interleave(16, dim=1).repeat(1, 2)[:, :columns]
    return decode(packed, torch.full_like(scale, 127)) * torch.exp2(wide.float() - 127).bfloat16()


def flushes_subnormals(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    got = decode(packed, scale)
    return torch.where(got.abs() < 2.0**-126, torch.zeros_like(got), got)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (nibbles_swapped, check_example),
        (nibbles_swapped, check_codes),
        (halves_apart, check_codes),
        (scale_as_number, check_example),
        (scale_as_number, check_codes),
        (group_of_16, check_tensor),
        (flushes_subnormals, check_codes),
    ],
)
def test_planted_wrong_decoders_are_refused(wrong: Decode, check: Callable[[Decode], None]) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


# ---- router ----


def route(
    logits: list[float], bias: list[float], top_k: int, renormalize: bool = True, scale: float = 1.0
) -> tuple[list[int], list[float]]:
    """The choice for one row whose router logits are these."""
    gate = DenseWeight(torch.tensor(logits)[:, None])
    x = torch.zeros(64, 1)
    x[5] = 1.0
    with poisoned():
        experts, weights, _ = router(x, gate, torch.tensor(bias), top_k, renormalize, scale, SOLO)
    assert torch.isfinite(weights).all()
    return experts[5].tolist(), weights[5].tolist()


def sigmoid(x: float) -> float:
    return float(torch.sigmoid(torch.tensor(x)))


def test_router_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = [2.0, 1.0, 0.0, -1.0]
    assert route(logits, [0, 0, 0, 0], 2)[0] == [0, 1]
    experts, weights = route(logits, [0, 0, 0, 9], 2, renormalize=False)
    assert experts == [0, 3]
    assert weights == [sigmoid(2.0), sigmoid(-1.0)]
    _, shares = route(logits, [0, 0, 0, 9], 2)
    total = sigmoid(2.0) + sigmoid(-1.0)
    assert shares == pytest.approx([sigmoid(2.0) / total, sigmoid(-1.0) / total], rel=1e-6)


def test_router_ties_go_to_the_lower_expert() -> None:
    assert route([1.0] * 7, [0.0] * 7, 3)[0] == [0, 1, 2]
    assert route([1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5, 3)[0] == [0, 1, 3]
    assert route([0.0] * 6, [0, 0.25, 0, 0.25, 0.25, 0], 2)[0] == [1, 3]
    assert route([5.0] * 300, [0.0] * 300, 16)[0] == list(range(16))


def test_router_all_experts_and_saturated_scores() -> None:
    assert route([3.0, -3.0, 0.0], [0, 0, 0], 3)[0] == [0, 1, 2]
    experts, weights = route([-200.0, -200.0, -200.0], [0, 0, 0], 2)
    assert experts == [0, 1]
    assert weights == [0.0, 0.0], "no division of zero by zero"
    assert route([500.0, -500.0], [0, 0], 1, scale=2.5) == ([0], [2.5])


def test_router_scale_multiplies_the_weights() -> None:
    one, three = (route([1.0, 0.5, -0.5], [0, 0, 0], 2, scale=s)[1] for s in (1.0, 3.0))
    assert sum(one) == pytest.approx(1.0)
    assert three == pytest.approx([3 * w for w in one])
