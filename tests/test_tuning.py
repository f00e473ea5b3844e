"""How kernels are launched on which GPU: the table, and what its entries may hold."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from benchmarks.gpu_cases import SMALL, Case, cases
from benchmarks.gpu_tune import USES, entry_text, tune
from k3offload.kernels import tuning
from k3offload.kernels.choose import OPS, TRITON, Kernels
from k3offload.kernels.triton_run import interpreted
from k3offload.kernels.tuning import CANDIDATES, Tuning, entry_of, table, trying, tuned
from k3offload.kernels.workers import Workers

CPU = torch.device("cpu")


def test_the_table_holds_candidates_alone() -> None:
    """What a GPU was never compiled with must not stand there; the default names every field."""
    assert set(table()["default"]) == set(Tuning._fields) == set(CANDIDATES) == set(USES)
    for entry in table().values():
        assert all(value in CANDIDATES[name] for name, value in entry.items())


def test_the_longest_beginning_of_a_name_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {
        "default": {"decode_stages": 4, "tile_stages": 3, "attend_stages": 2, "expand_stages": 3},
        "NVIDIA GeForce RTX 40": {"decode_stages": 3},
        "NVIDIA GeForce RTX 4090": {"tile_stages": 2},
    }
    monkeypatch.setattr(tuning, "table", lambda: stored)
    assert entry_of("NVIDIA GeForce RTX 4080") == Tuning(3, 3, 2, 3)
    assert entry_of("NVIDIA GeForce RTX 4090 D") == Tuning(4, 2, 2, 3)
    assert entry_of("Something else") == entry_of("") == Tuning(4, 3, 2, 3)


def test_trying_ends() -> None:
    usual = tuned(CPU)
    with trying(usual._replace(decode_stages=3)):
        assert tuned(CPU).decode_stages == 3
    assert tuned(CPU) == usual


def fixed_times(times: list[float]) -> Any:
    left = itertools.cycle(times)
    return lambda work: next(left)


@pytest.mark.skipif(not interpreted(), reason="Triton is not installed")
def test_the_fastest_candidates_make_the_entry() -> None:
    """The default is measured first, then the others in their order."""
    kernels = Kernels(Workers(1), dict.fromkeys(OPS, TRITON))
    values = [4, *(v for v in CANDIDATES["decode_stages"] if v != 4)]
    took = {4: 2.0, 3: 1.0, 5: 3.0}
    only = [case for case in cases(SMALL, 0, 64) if case.name == "linear int8 1"]
    got = tune(only, kernels, CPU, fixed_times([took[v] for v in values]), lambda: 1.0)
    assert got["entry"] == {"decode_stages": 3}
    assert got["ratios"]["decode_stages"] == pytest.approx({3: 0.5, 4: 1.0, 5: 1.5})
    assert entry_text("GPU", got["entry"]) == '"GPU": {"decode_stages": 3}'


def test_a_candidate_that_changes_bits_is_refused() -> None:
    def call(kernels: Kernels, inputs: Any) -> list[torch.Tensor]:
        return [torch.tensor([float(tuned(CPU).decode_stages)])]

    with pytest.raises(AssertionError, match="decode_stages=3 changes bits of linear int8 1"):
        tune([Case("linear int8 1", {}, call, 1, 1)], Kernels(Workers(1)), CPU,
             fixed_times([1.0]), lambda: 1.0)  # fmt: skip


def test_what_was_measured_is_told_before_a_candidate_is_refused() -> None:
    """Some loops cannot be loaded as far ahead on a GPU: the others are measured all the same."""

    def call(kernels: Kernels, inputs: Any) -> list[torch.Tensor]:
        if tuned(CPU).decode_stages == 3:
            raise RuntimeError("no shared memory left")
        return [torch.ones(1)]

    told: list[dict[str, Any]] = []
    every = [Case(name, {}, call, 1, 1) for name in ("linear int8 1", "linear int8 64")]
    with pytest.raises(AssertionError, match=r"decode_stages=3 cannot run linear int8 1 \(Runtime"):
        tune(every, Kernels(Workers(1)), CPU, fixed_times([1.0]), lambda: 1.0, told.append)
    assert [(line["case"], line["field"]) for line in told] == [
        ("linear int8 1", "decode_stages"), ("linear int8 64", "tile_stages"),
    ]  # fmt: skip
    assert told[0]["ratios"] == {4: 1.0, 5: 1.0}
