"""Smaller trunk precisions: which tensors, which codes, and what becomes of the numbers.

The codes are judged by independent definitions in float64 that know no integers and no blocks;
planted mistakes show that the judges can fail.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from k3offload.errors import UsageError
from k3offload.kernels import int8 as int8_format
from k3offload.kernels import mxfp4 as mxfp4_format
from k3offload.kernels import quantize
from k3offload.kernels.int8 import Int8Weight
from k3offload.kernels.linear_reference import DenseWeight, linear
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.kernels.workers import Workers
from k3offload.precision import (
    PRECISIONS,
    choose_precision,
    parts,
    quantised,
    stored_bytes,
    stored_precision,
)
from k3offload.spec import ModelSpec
from tests.helpers_checkpoint import ROOT

RELEASED = ModelSpec.load(ROOT / "k3offload" / "released")
F64 = NDArray[np.float64]
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Codes = tuple[torch.Tensor, torch.Tensor]


def numbers(dtype: torch.dtype, rows: int = 24, columns: int = 384, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with groups of zeros and of one number, and with exact ties."""
    noise = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=noise)
    w *= torch.logspace(-2, 2, rows)[:, None]
    w[1, :64] = 0
    w[2, 64:128] = 0
    w[2, 70] = -0.3
    w[3] = torch.randint(-56, 57, (columns,), generator=noise) / 8  # ties of E2M1, and 7
    w[4] = -0.0
    w[5, ::3] *= 1e-4
    return w.to(dtype)


# ---- judges ----


def int8_faults(w: torch.Tensor, made: Codes) -> list[str]:
    """What is wrong with int8 codes of ``w``, by the definition."""
    x = w.double().numpy().reshape(w.shape[0], -1, 64)
    q = made[0].double().numpy().reshape(x.shape)
    scale = made[1].double().numpy()
    largest = np.abs(x).max(-1)
    faults = []
    if (np.abs(q) > 127).any():
        faults.append("code")
    # The least bfloat16 not below the quotient; its neighbour below is 2**-7 or 2**-8 less.
    if (scale < largest / 127 * (1 - 2**-23)).any():
        faults.append("scale too small")
    if (scale * (1 - 2**-7) > np.maximum(largest / 127, 2.0**-126)).any():
        faults.append("scale too large")
    if (np.abs(q - x / scale[..., None]) > 0.5 + 1e-4).any():
        faults.append("not the nearest")
    return faults


def mxfp4_faults(w: torch.Tensor, made: Codes) -> list[str]:
    """What is wrong with MXFP4 codes of ``w``, by the definition."""
    x = w.double().numpy().reshape(w.shape[0], -1, 32)
    packed, scale = made[0].numpy().astype(int), made[1].double().numpy() - 127
    code = np.stack((packed & 15, packed >> 4), -1).reshape(x.shape)
    largest = np.abs(x).max(-1)
    faults = []
    if (scale < -124).any() or (largest > 7 * 2.0**scale).any():
        faults.append("exponent too small")
    if ((largest <= 7 * 2.0 ** (scale - 1)) & (scale > -124)).any():
        faults.append("exponent too large")
    size = np.abs(x) / 2.0 ** scale[..., None]
    distance = np.abs(size[..., None] - LEVELS)
    own = np.take_along_axis(distance, (code & 7)[..., None], -1)[..., 0]
    if (own > distance.min(-1)).any():
        faults.append("not the nearest")
    tie = (distance == distance.min(-1, keepdims=True)).sum(-1) > 1
    if (code[tie] & 1).any():
        faults.append("tie to odd")
    if ((code >= 8) != np.signbit(x)).any():
        faults.append("sign")
    return faults


JUDGES: dict[str, Callable[[torch.Tensor, Codes], list[str]]] = {
    "int8": int8_faults, "mxfp4": mxfp4_faults,
}  # fmt: skip
MAKERS = {"int8": quantize.int8, "mxfp4": quantize.mxfp4}


# ---- codes ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", list(MAKERS))
def test_codes_follow_the_definition(precision: str, dtype: torch.dtype) -> None:
    for seed, size in enumerate((1.0, 1e-4, 200.0)):
        w = numbers(dtype, seed=seed) * size
        assert JUDGES[precision](w, MAKERS[precision](w)) == []
    if dtype != torch.float16:
        for size in (1e-37, 1e-39, 1e-41, 1e34):
            w = (numbers(torch.float32) * size).to(dtype)
            assert JUDGES[precision](w, MAKERS[precision](w)) == [], size


@pytest.mark.parametrize(
    ("precision", "wrong", "fault"),
    [
        ("int8", lambda q, s: (q, (s.float() * 1.02).bfloat16()), "scale too large"),
        ("int8", lambda q, s: (q, (s.float() * 0.98).bfloat16()), "scale too small"),
        ("int8", lambda q, s: (q + (q == 5).to(torch.int8), s), "not the nearest"),
        ("int8", lambda q, s: (torch.where(q == 127, -128, q), s), "code"),
        ("mxfp4", lambda p, s: (p, s - 1), "exponent too small"),
        ("mxfp4", lambda p, s: (p, s + 1), "exponent too large"),
        ("mxfp4", lambda p, s: (p ^ 8, s), "sign"),
        ("mxfp4", lambda p, s: (torch.where(p & 7 == 3, p + 1, p), s), "not the nearest"),
        ("mxfp4", lambda p, s: (p >> 4 | p << 4, s), "not the nearest"),
    ],
)
def test_the_judges_can_fail(precision: str, wrong: Callable[..., Codes], fault: str) -> None:
    w = numbers(torch.float32)
    assert fault in JUDGES[precision](w, wrong(*MAKERS[precision](w)))


def test_a_tie_rounded_up_is_found() -> None:
    w = torch.full((1, 32), 2.5)
    w[0, 0] = 4
    packed, scale = quantize.mxfp4(w)
    assert mxfp4_faults(w, (packed, scale)) == []
    assert mxfp4_faults(w, (torch.where(packed == 0x44, 0x55, packed), scale)) == ["tie to odd"]


@pytest.mark.parametrize("precision", list(MAKERS))
def test_a_row_has_its_codes_whatever_stands_beside_it(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = numbers(torch.bfloat16, rows=50)
    codes, scale = MAKERS[precision](w)
    assert all(torch.equal(MAKERS[precision](w[i : i + 1])[0], codes[i : i + 1]) for i in range(50))
    workers = Workers(3)
    for chunk in (1, 384 * 7, 1 << 17):
        monkeypatch.setattr(quantize, "CHUNK", chunk)
        for some in (None, workers):
            made = torch.full_like(codes, 99), torch.full_like(scale, 99)
            quantize.quantize_into(w, precision, *made, some)
            assert torch.equal(made[0], codes) and torch.equal(made[1], scale)
    workers.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", list(MAKERS))
def test_what_is_not_finite_is_refused(precision: str, dtype: torch.dtype, value: float) -> None:
    w = numbers(dtype)
    w[7, 200] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        MAKERS[precision](w)
    MAKERS[precision](w[:7])


# ---- numbers ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_rows(dtype: torch.dtype) -> None:
    """``rows`` is the definition, rounded once; zeros stay zeros."""
    w = numbers(torch.bfloat16)
    weight, alone = Int8Weight(*quantize.int8(w)), Workers(1)
    exact = weight.q.double() * weight.scale.double().repeat_interleave(64, 1)
    assert torch.equal(int8_format.decode(weight.q, weight.scale).double(), exact)
    for begin, end in ((0, 24), (3, 4), (5, 20)):
        found = weight.rows(begin, end, dtype, alone)
        assert found.dtype == dtype and torch.equal(found, exact[begin:end].to(dtype))
    assert not weight.rows(1, 2, dtype, alone)[0, :64].any()
    assert ((exact - w.double()).abs() <= exact.abs().amax(1, keepdim=True) / 127 * 0.51).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", list(MAKERS))
def test_a_product_is_that_of_the_decoded_weight(precision: str, dtype: torch.dtype) -> None:
    codes, scale = MAKERS[precision](numbers(torch.bfloat16, rows=100))
    workers = Workers(2)
    weight = (Int8Weight if precision == "int8" else Mxfp4Weight)(codes, scale)
    if precision == "int8":
        decoded = int8_format.decode(codes, scale).to(dtype)
    else:
        decoded = mxfp4_format.decode(codes, scale).to(dtype)
    x = torch.randn(70, 384, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert weight.shape == (100, 384)
    assert torch.equal(linear(x, weight, workers), linear(x, DenseWeight(decoded), workers))
    workers.close()


def test_int8_is_closer_than_mxfp4_and_both_are_close() -> None:
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    near = int8_format.decode(*quantize.int8(w)) - w.float()
    far = mxfp4_format.decode(*quantize.mxfp4(w)).float() - w.float()
    size = w.float().norm()
    assert near.norm() < 0.007 * size
    assert 0.1 * size < far.norm() < 0.12 * size


# ---- the rule ----


def test_which_tensors_of_the_released_model() -> None:
    """Counted by hand from the design: every large matrix of a layer but the router and kv_b."""
    names: dict[str, set[str]] = {"kda": set(), "mla": set(), "left": set()}
    for layer in (1, 3):
        for tensor in RELEASED.layer_tensors(layer):
            kind = RELEASED.layers[layer].attention
            short = tensor.name.split(f"layers.{layer}.")[1]
            for precision in ("int8", "mxfp4"):
                assert not quantised(tensor.name, tensor.shape, "bfloat16")
                if quantised(tensor.name, tensor.shape, precision):
                    names[kind].add(short)
                elif len(tensor.shape) == 2 and tensor.shape[0] > 1:
                    names["left"].add(short)
    ffn = {f"block_sparse_moe.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")}
    ffn |= {f"block_sparse_moe.routed_expert_{n}_proj.weight" for n in ("down", "up")}
    own = {"kda": "q k v g o", "mla": "q_a q_b o g"}
    for attention, short_names in own.items():
        wanted = {f"self_attn.{n}_proj.weight" for n in short_names.split()}
        wanted |= {"self_attn.kv_a_proj_with_mqa.weight"} if attention == "mla" else set()
        assert names[attention] == wanted | ffn
    left = {f"self_attn.{n}_proj.weight" for n in ("f_a", "f_b", "b", "kv_b")}
    assert names["left"] == left | {"block_sparse_moe.gate.weight"}
    ends = {t.name: quantised(t.name, t.shape, "int8") for t in RELEASED.global_tensors()}
    assert [n for n, yes in ends.items() if yes] == ["language_model.lm_head.weight"]


def test_a_width_that_has_no_whole_groups_stays() -> None:
    name = "self_attn.q_proj.weight"
    assert quantised(name, (8, 128), "int8") and quantised(name, (8, 96), "mxfp4")
    assert not quantised(name, (8, 96), "int8") and not quantised(name, (8, 48), "mxfp4")
    assert [p.name for p in parts(name, "F32", (8, 96), "int8")] == [name]
    assert parts(name, "F32", (8, 96), "int8")[0].nbytes == 8 * 96 * 4


@pytest.mark.parametrize("precision", list(MAKERS))
def test_parts_are_what_the_quantiser_makes(precision: str) -> None:
    w = numbers(torch.bfloat16)
    made = MAKERS[precision](w)
    held = parts("x.q_proj.weight", "BF16", w.shape, precision)
    assert [p.shape for p in held] == [tuple(t.shape) for t in made]
    assert [p.nbytes for p in held] == [t.numel() * t.element_size() for t in made]
    assert stored_bytes(w.shape, precision) == sum(p.nbytes for p in held)
    bits = {"int8": 8.25, "mxfp4": 4.25}[precision]
    assert stored_bytes((7168, 7168), precision) == 7168 * 7168 * bits / 8


def test_the_precision_of_a_folder_and_of_a_run() -> None:
    experts = "model.layers.1.block_sparse_moe.experts.3.w1.weight_packed"
    assert stored_precision(["self_attn.q_proj.weight", experts]) == "bfloat16"
    assert stored_precision(["self_attn.q_proj.weight_int8", "x"]) == "int8"
    assert stored_precision(["lm_head.weight_packed"]) == "mxfp4"
    for stored in PRECISIONS:
        assert choose_precision(None, stored) == choose_precision(stored, stored) == stored
    assert choose_precision("int8", "bfloat16") == "int8"
    with pytest.raises(UsageError, match=r"packed in int8.*cannot be run in mxfp4"):
        choose_precision("mxfp4", "int8")
    with pytest.raises(UsageError, match=r"packed in int8.*cannot be run in bfloat16"):
        choose_precision("bfloat16", "int8")
    with pytest.raises(UsageError, match=r"'int4' is not known.*bfloat16, int8, mxfp4"):
        choose_precision("int4", "bfloat16")
