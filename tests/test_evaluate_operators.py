"""``k3offload evaluate operators``: what is covered, what is found, what is said to be slow."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import k3offload.evaluate_operators as evaluate_operators
import k3offload.kernels.int8 as int8
from k3offload.cli_operators import render
from k3offload.evaluate_operators import Checked, Operators, _both, operators, relative_error
from k3offload.kernels import native, router_reference
from k3offload.kernels.choose import OPS, REFERENCE, TRITON
from k3offload.kernels.triton_run import interpreted
from k3offload.registry import implementation
from k3offload.tiers.device_fake import FakeDevice
from tests.helpers_engine import BRIEF, call, checkpoint

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")
PARTS = {part for parts in OPS.values() for part in parts} | {"mixer"}
MATRICES = {"linear", "experts"}


def formats(found: Operators, part: str) -> set[str]:
    return {row.weights for row in found.rows if row.part == part}


@pytest.mark.parametrize(
    ("trunk", "dtype"), [(None, "bfloat16"), ("int8", "bfloat16"), ("mxfp4", "float32")]
)
def test_every_operator_and_format(trunk: str | None, dtype: str) -> None:
    found = operators("nano", trunk=trunk, dtype=dtype, device="cpu")
    assert found.fine, render(found)
    assert {row.part for row in found.rows} == PARTS
    large = trunk or "bfloat16"
    assert formats(found, "linear") == {large, "bfloat16", f"{large}, head"}
    assert formats(found, "experts") == {large, "mxfp4, routed"}
    assert formats(found, "unpack") == {"int8", "fp8"}
    for part in ("linear", "experts", "router", "mixer"):
        assert {row.kind for row in found.rows if row.part == part} == {"decode", "prompt"}
    if native.available():
        assert {row.served_by for row in found.rows} == {"native"} and not found.slow
        # nothing passes because nothing was compared
        assert all(row.error > 0 for row in found.rows if row.part in MATRICES)


def test_experts_that_are_not_packed() -> None:
    found = operators(checkpoint(**BRIEF, expert_format="bf16"), device="cpu")
    assert found.fine and "bfloat16, routed" in formats(found, "experts")


@pytest.mark.parametrize(
    "other",
    [
        {"size": "odd"},
        {"attn_res": 0, "q_lora": 0, "latent": 0, "activation": "silu", "bounded_decay": False,
         "full_rank_gate": False, "mla_gate": False, "renormalize": False},
        {"shared": 0, "edge_scales": True},
    ],
)  # fmt: skip
def test_other_models(other: dict[str, Any]) -> None:
    found = operators(checkpoint(**{**BRIEF, **other}), device="cpu")
    assert found.fine, render(found)
    assert "router" in {row.part for row in found.rows}


def _scaled(real: Callable[..., Any]) -> Callable[..., Any]:
    """One percent and a bit too much."""

    def wrong(*args: Any, **more: Any) -> Any:
        got = real(*args, **more)
        return tuple(t * 1.03 for t in got) if isinstance(got, tuple) else got * 1.03

    return wrong


def _nothing(*args: Any, **more: Any) -> None:
    """Leaves what it should fill as it is."""


def _other_choice(real: Callable[..., Any]) -> Callable[..., Any]:
    """The bias takes no part in the choice."""

    def wrong(x: Any, gate: Any, bias: torch.Tensor, *rest: Any) -> Any:
        return real(x, gate, torch.zeros_like(bias), *rest)

    return wrong


PLANTED = [
    ("linear", "linear", _scaled),
    ("experts", "experts", _scaled),
    ("combine", "combine", _scaled),
    ("rms_norm", "rms_norm", _scaled),
    ("attnres", "attnres", _scaled),
    ("short_conv", "short_conv", _scaled),
    ("kda_gate", "kda_gate", _scaled),
    ("kda_gate", "l2_norm", _scaled),
    ("kda_gate", "gated_norm", _scaled),
    ("kda", "kda_step", _scaled),
    ("kda", "kda_chunk", _scaled),
    ("mla_decode", "mla_decode", _scaled),
    ("latents", "unpack", lambda real: _nothing),
    ("router", "router", _other_choice),
]


@needs_native
@pytest.mark.parametrize(("op", "part", "plant"), PLANTED)
def test_planted_mistakes_are_found(
    op: str, part: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = implementation("kernels", op, "native")
    monkeypatch.setattr(module, part, plant(getattr(module, part)))
    found = operators("nano", device="cpu")
    wrong = {row.part for row in found.rows if not row.fine}
    # router and experts call no other operator's function; the mixer is fused
    assert wrong == {part}


@needs_native
def test_a_mistake_in_one_format_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch path of int8 reads scales wrongly; bfloat16 is not touched, nor is what is native.
    The command fails, and names operator and format."""
    real = int8.Int8Weight.rows

    def rows(self: Any, begin: int, end: int, dtype: torch.dtype, workers: Any) -> torch.Tensor:
        made = real(self, begin, end, dtype, workers)
        return made * 1.03 if dtype == torch.bfloat16 else made

    monkeypatch.setattr(int8.Int8Weight, "rows", rows)
    found = operators("nano", trunk="int8", device="cpu", kernels={"linear": REFERENCE})
    assert {(r.part, r.weights) for r in found.rows if not r.fine} == {("linear", "int8")}
    wrong = [line for line in render(found).splitlines() if line.startswith("wrong: ")]
    assert wrong
    for line in wrong:  # which one is worst is chance: all are 3 % off
        assert re.fullmatch(r"wrong: linear by reference, int8 [\w.]+\.weight", line), line


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    base = ["evaluate", "operators", "nano", "--device", "cpu", "--kernel", "router=reference"]
    code, out, _ = call(base, capsys)
    assert code == 0 and "slow path: " in out and "router" in out and "itself" in out
    real = router_reference.router

    def wrong(*args: Any) -> Any:
        chosen, share, scores = real(*args)
        return chosen, share if args[0].dtype == torch.float32 else share * 1.03, scores

    monkeypatch.setattr(router_reference, "router", wrong)
    code, out, _ = call([*base, "--json"], capsys)
    facts = json.loads(out)
    assert code == 1 and not facts["fine"]
    assert {r["part"] for r in facts["rows"] if not r["fine"]} == {"router"}
    code, out, _ = call(base, capsys)
    assert code == 1 and "TOO LARGE" in out and "wrong: router by reference" in out
    code, _, err = call([*base, "--seed", "-1"], capsys)
    assert code == 2 and "The seed is -1" in err


def test_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is right and slow, and that is said."""
    monkeypatch.setattr(native, "_load", lambda: (None, "The library is elsewhere."))
    found = operators("nano", device="cpu")
    assert found.fine and {row.served_by for row in found.rows} == {REFERENCE}
    assert found.slow == ("all operators: the torch path, which is slow: The library is elsewhere",)


@needs_native
def test_a_mixer_of_parts_and_an_old_processor_are_slow() -> None:
    found = operators("nano", device="cpu", kernels={"kda": REFERENCE}, isa="portable")
    assert [line.split(":")[0].split(" run")[0] for line in found.slow] == [
        "kda",
        "mixer",
        "native kernels",
    ]


#: little for an interpreter to do
BRIEFER: dict[str, Any] = {
    "heads": 2, "kda_heads": 2, "experts": 4, "topk": 2, "dense_inter": 64, "q_lora": 32,
    "moe_inter": 32, "mla_layers": (2,), "layers": 3, "vision": False,
}  # fmt: skip


@pytest.mark.skipif(not interpreted(), reason="Triton is not installed")
def test_what_a_device_computes_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_operators, "LONG", 0.0)  # one call each
    found = operators(
        checkpoint(**BRIEFER), device=FakeDevice(60_000_000), vram=60_000_000, dtype="float32",
        kernels=dict.fromkeys(OPS, TRITON),
    )  # fmt: skip
    assert found.fine, render(found)
    there = [row for row in found.rows if row.where == "gpu"]
    assert {row.part for row in there} == PARTS
    assert {row.served_by for row in there} == {TRITON}


def test_the_worst_weight_of_a_format_counts() -> None:
    good = Checked("linear", "linear", "int8", "decode", "cpu", "native", 0.1, 0.2, 1.0, 3.0, "a")
    for error in (0.3, float("nan")):
        bad = replace(good, error=error, worst="b")
        for both in (_both(good, bad), _both(bad, good)):
            assert both.worst == "b" and not both.fine
            assert (both.seconds, both.reference_seconds, both.speed) == (2.0, 6.0, 3.0)


def test_errors_are_relative_and_nan_is_one() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    assert relative_error((a,), (b,)) == 0.5
    assert relative_error((a, b), (a, b)) == 0
    for wrong in (float("nan"), float("inf")):
        assert not relative_error((torch.tensor([1.0, wrong]),), (b,)) <= sys.float_info.max
