"""The forecast: the released model's known figures, limits it keeps, and sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3offload.forecast import (
    ARITHMETIC,
    DISK,
    MEMORY,
    OVERHEAD,
    Setup,
    decode,
    prefill,
    prompt_seconds,
)
from k3offload.forecast_sizes import (
    distinct,
    longer,
    tiled,
    token_macs,
    trunk_elements,
    weight_of,
)
from k3offload.plan_report import spec_of
from k3offload.precision import stored_bytes
from k3offload.rates import EXPERTS, KINDS, Rates, assumed, scaled
from k3offload.scheduler.plan import Plan
from k3offload.spec import ModelSpec

GB = 1e9
K3 = spec_of(Path("released"))
#: A machine on which nothing but the disk takes time.
INSTANT = Rates(
    disk=7 * GB,
    ram=1e30,
    stream=dict.fromkeys(KINDS, 1e30),
    extra=dict.fromkeys(KINDS, 1e30),
    ready=dict.fromkeys(KINDS, 1e30),
    macs=dict.fromkeys(KINDS, 1e30),
    tile=1,
    macs32=1e30,
    attention=1e30,
    recurrence=1e30,
    numbers=1e30,
    layer=0.0,
    chunk=0.0,
)


def plan_with(
    spec: ModelSpec,
    streamed: int = 0,
    slots: int = 0,
    head: bool = True,
    rows: int = 512,
    buffers: int = 2,
    latents: int | None = None,
    summaries: int | None = None,
) -> Plan:
    """A plan whose last ``streamed`` layers are read anew for each sweep."""
    layers = len(spec.layers)
    made: Any = SimpleNamespace(
        resident_layers=frozenset(range(layers - streamed)),
        slots=slots,
        head_resident=head,
        sweep_rows=rows,
        ring_buffers=buffers,
        latents=latents,
        summaries=summaries,
    )
    plan: Plan = made
    return plan


def setup(rates: Rates = INSTANT, spec: ModelSpec = K3, **how: Any) -> Setup:
    plan_options = {
        k: how.pop(k)
        for k in ("streamed", "slots", "head", "rows", "buffers", "latents", "summaries")
        if k in how
    }
    return Setup(spec, plan_with(spec, **plan_options), rates, **how)


# ---- the known figures of the full model ----


def test_cold_decode_reads_25_83_gb_a_token() -> None:
    step = decode(setup())
    assert step.expert_bytes == pytest.approx(25_829_572_608)
    assert step.experts == pytest.approx(1472)
    assert step.seconds == pytest.approx(3.69, abs=0.005)
    assert decode(setup(replace(INSTANT, disk=14 * GB))).seconds == pytest.approx(1.845, abs=0.005)
    assert decode(setup(replace(INSTANT, disk=25 * GB))).seconds == pytest.approx(1.033, abs=0.005)


def test_a_sweep_of_every_expert_takes_207_s() -> None:
    sweep = prefill(setup(rows=32_768), tokens=32_768)
    assert sweep.experts == pytest.approx(92 * 896)
    assert sweep.seconds == pytest.approx(206.6, abs=0.1)
    assert sweep.expert_bytes / sweep.rows == pytest.approx(44e6, rel=0.01)


def test_trunk_and_head_by_precision() -> None:
    """Numbers alone: 111 GB at 16 bits, 55.6 at 8, 29.5 at 4.25."""
    elements = trunk_elements(K3)
    assert elements * 2 == pytest.approx(111.1e9, rel=0.001)
    assert elements == pytest.approx(55.6e9, rel=0.001)
    assert elements * 4.25 / 8 == pytest.approx(29.5e9, rel=0.001)


@pytest.mark.parametrize(("trunk", "bits"), [("bfloat16", 16), ("int8", 8.25), ("mxfp4", 4.25)])
def test_a_decode_step_reads_the_trunk_once(trunk: str, bits: float) -> None:
    """What stays in bfloat16 (routers, kv_b, the low-rank gates) adds a few per cent."""
    step = decode(setup(trunk=trunk))
    read = step.weight_bytes - step.expert_bytes
    least = trunk_elements(K3) * bits / 8
    assert least * 0.999 <= read <= least + 3.5e9


def test_arithmetic_of_a_token() -> None:
    assert 2 * token_macs(K3) == pytest.approx(208e9, rel=0.002)
    assert decode(setup()).macs == token_macs(K3)


def test_state_and_latents() -> None:
    assert K3.kda_state_bytes() == pytest.approx(449e6, rel=0.001)
    assert K3.latent_bytes_per_token() == 27_648


# ---- routing ----


def test_distinct_experts() -> None:
    assert distinct(896, 16, 1) == pytest.approx(16)
    assert distinct(4, 4, 3) == 4
    assert distinct(896, 16, 2) == pytest.approx(16 + 16 * (1 - 16 / 896))
    assert distinct(896, 16, 10_000) == pytest.approx(896)


def test_slots_take_their_share_of_a_decode_step_and_none_of_a_prompt() -> None:
    half = setup(slots=K3.expert_count // 2)
    assert decode(half).hit_rate == pytest.approx(0.5)
    assert decode(half).expert_bytes == pytest.approx(25_829_572_608 / 2)
    assert prefill(half, tokens=512).hit_rate == 0
    all_there = setup(slots=K3.expert_count)
    assert decode(all_there).expert_bytes == prefill(all_there, tokens=512).expert_bytes == 0
    assert decode(replace(half, hit_rate=0.75)).expert_bytes == pytest.approx(25_829_572_608 / 4)


def test_sessions_share_what_they_both_ask_for() -> None:
    two = decode(setup(), rows=2)
    assert two.experts == pytest.approx(92 * distinct(896, 16, 2))
    assert two.weight_bytes - two.expert_bytes == pytest.approx(
        decode(setup()).weight_bytes - decode(setup()).expert_bytes
    )


# ---- overlap ----


def one_second_layers(buffers: int, layer: float, **how: Any) -> float:
    """K3's layers that compute ``layer`` seconds each, all but the first two streamed; the disk
    reads the trunk of them in one second a layer on average."""
    spec = K3
    streamed = len(spec.layers) - 2
    trunk = sum(spec.layer_trunk_bytes(i) for i in range(2, len(spec.layers)))
    rates = replace(INSTANT, disk=trunk / streamed, layer=layer)
    none = setup(rates, streamed=streamed, buffers=buffers, slots=spec.expert_count, **how)
    return decode(none).seconds


def test_one_buffer_reads_and_computes_in_turn() -> None:
    assert one_second_layers(1, 0.25) == pytest.approx(91 * 1 + 93 * 0.25, abs=2)


def test_two_buffers_read_while_computing() -> None:
    assert one_second_layers(2, 0.25) == pytest.approx(91, abs=2)  # the disk never rests
    assert one_second_layers(2, 4.0) == pytest.approx(93 * 4, abs=1)  # hidden behind computing


def test_experts_are_waited_for_after_the_router() -> None:
    """Computing before the router cannot hide reads; computing after it can, but for that of the
    last four of sixteen pages, which come together."""
    disk_alone = decode(setup()).seconds
    rates = replace(INSTANT, layer=0.01)
    unguessed = setup(rates, guesses=False)
    assert decode(unguessed).seconds == pytest.approx(disk_alone + 93 * 0.01)
    slow = replace(INSTANT, stream={**INSTANT.stream, "experts": 7 * GB})
    assert decode(setup(slow, guesses=False)).seconds == pytest.approx(disk_alone * (1 + 4 / 16))
    slower = replace(INSTANT, stream={**INSTANT.stream, "experts": 3.5 * GB})
    assert decode(setup(slower, guesses=False)).seconds == pytest.approx(2 * disk_alone)


def test_chance_makes_some_layers_wait_longer_than_others_can_hide() -> None:
    """As many seconds of reading as of computing, half of the pages missed: of two pages none,
    one or both, with chances of 1, 2 and 1 in 4."""
    both = max(1.0, 2 * 1.0 + 2 * 0.1)
    one = max(1.0, 1.0 + 0.1)
    assert longer(1.0, 1.0, 0.1, 1.0, 2.0) == pytest.approx((1.0 + 2 * one + both) / 4)
    assert longer(1.0, 1.0, 0.1, 1.0, None) == pytest.approx(1.1)
    assert longer(1.0, 0.0, 0.1, 0.0, 2.0) == 1.0


def test_guesses_are_read_while_the_disk_would_idle() -> None:
    """As far as they come true, and no more than half of what is missed; not where the trunk of
    streamed layers keeps the disk busy, nor in prompts."""
    rates = replace(INSTANT, layer=0.001)
    without = decode(setup(rates, guesses=False))
    guessed = decode(setup(rates))
    assert guessed.seconds == pytest.approx(without.seconds - 92 * 0.7 * 0.001)
    assert guessed.expert_bytes == without.expert_bytes
    slow = decode(setup(replace(INSTANT, layer=1.0)))
    assert slow.seconds == pytest.approx(93 + slow.disk_seconds / 2)
    streams: dict[str, Any] = {"streamed": 93, "buffers": 2}
    assert decode(setup(rates, **streams)) == decode(setup(rates, **streams, guesses=False))
    prompts = [prefill(setup(rates, guesses=g), tokens=512) for g in (True, False)]
    assert prompts[0] == prompts[1]
    assert longer(1.0, 2.0, 0.1, 2.0, 2.0, 0.2) == pytest.approx(2.0 - 0.7 * 0.4 + 0.2)


def test_never_less_than_the_disk_or_the_computing_alone_nor_more_than_both() -> None:
    for rates in (assumed(), assumed(disk=1 * GB), assumed(ram=5 * GB), assumed(macs=1e10)):
        every: list[dict[str, Any]] = [
            {},
            {"streamed": 93, "head": False},
            {"streamed": 40, "slots": 10_000},
        ]
        for how in every:
            for step in (
                decode(setup(rates, **how), position=4096),
                decode(setup(rates, **how), rows=8),
                prefill(setup(rates, **how), tokens=512),
            ):
                alone = max(step.disk_seconds, step.compute_seconds)
                assert alone * 0.999 <= step.seconds
                assert step.seconds <= (step.disk_seconds + step.compute_seconds) * 1.001


# ---- rates ----


@pytest.mark.parametrize("part", ["disk", "ram", "macs"])
def test_each_rate_counts(part: str) -> None:
    how: dict[str, Any] = {"streamed": 20, "slots": 1000}
    slow, fast = assumed(), scaled(assumed(), **{part: 2.0})
    steps = [
        (
            decode(setup(r, **how), position=4096).seconds,
            prefill(setup(r, **how), tokens=512).seconds,
        )
        for r in (slow, fast)
    ]
    assert steps[1][0] < steps[0][0]
    assert steps[1][1] < steps[0][1]


def test_limits_are_named() -> None:
    cached: dict[str, Any] = {"slots": K3.expert_count}
    assert decode(setup()).limit == DISK
    assert decode(setup(assumed(), **cached)).limit == MEMORY
    assert prefill(setup(assumed(), **cached), tokens=512).limit == ARITHMETIC
    assert decode(setup(replace(INSTANT, layer=1.0), **cached)).limit == OVERHEAD


def test_a_packed_trunk_is_read_smaller_and_an_unpacked_one_is_not() -> None:
    how: dict[str, Any] = {"streamed": 93, "head": False}
    plain, quantised = (decode(setup(trunk=t, **how)).trunk_bytes for t in ("bfloat16", "int8"))
    packed = decode(setup(trunk="int8", packed=True, **how)).trunk_bytes
    assert plain == quantised
    assert packed == pytest.approx(plain * 8.25 / 16, rel=0.03)


def test_longer_sequences_take_longer() -> None:
    cached = setup(assumed(), slots=K3.expert_count)
    assert decode(cached, position=100_000).seconds > decode(cached, position=1000).seconds * 1.5
    late, early = (prefill(cached, tokens=512, position=p).seconds for p in (100_000, 0))
    assert late > early


def test_a_prompt_is_the_sum_of_its_sweeps() -> None:
    cached = setup(assumed(), slots=K3.expert_count)
    tokens = 5 * 512 + 100
    sweeps = [prefill(cached, tokens=512, position=i * 512).seconds for i in range(5)]
    rest = prefill(cached, tokens=100, position=5 * 512).seconds
    assert prompt_seconds(cached, tokens) == pytest.approx(sum(sweeps) + rest, rel=1e-6)


def test_weights_by_format() -> None:
    layer = {t.name.rpartition("layers.4.")[2]: t for t in K3.layer_tensors(4)}
    wide = layer["self_attn.q_proj.weight"]
    assert weight_of(wide, "bfloat16") == ("bfloat16", wide.nbytes)
    assert weight_of(wide, "int8") == ("int8", stored_bytes(wide.shape, "int8"))
    gate = layer["block_sparse_moe.gate.weight"]
    assert weight_of(gate, "mxfp4") == ("bfloat16", gate.nbytes)


def test_latents_on_disk_are_read_back() -> None:
    """A decode row reads once what stands before it and RAM has no room for, a prompt once for each
    group of 512 rows."""
    every = 1_000_000 * 27_648
    assert decode(setup(), position=1_000_000).scratch_bytes == 0
    step = decode(setup(slots=82_432, latents=every // 4), position=1_000_000)
    assert step.scratch_bytes == pytest.approx(0.75 * every)
    assert step.seconds == pytest.approx(step.disk_seconds)
    assert decode(setup(latents=every // 4), position=100_000).scratch_bytes == 0
    two = decode(setup(latents=every // 4), rows=2, position=1_000_000)
    assert two.scratch_bytes == pytest.approx(1.75 * every)
    sweep = prefill(setup(rows=1024, latents=every // 4), tokens=1024, position=1_000_000)
    assert sweep.scratch_bytes == pytest.approx(0.75 * (2 * every + 512 * 27_648))


def test_block_summaries_on_disk_are_read_twice_a_layer() -> None:
    """K3: 93 layers in blocks of 12, 14,336 bytes a sum; a part of them stays in RAM."""
    sums = sum(1 + layer // 12 for layer in range(93))
    rows = 8192
    whole = rows * 8 * 14_336
    sweep = prefill(setup(rows=rows, summaries=whole // 4), tokens=rows)
    assert sweep.scratch_bytes == pytest.approx(0.75 * 2 * rows * 14_336 * sums)
    assert prefill(setup(rows=rows), tokens=rows).scratch_bytes == 0
    assert decode(setup(summaries=whole // 4)).scratch_bytes == 0


def test_experts_of_a_prompt_compute_whole_tiles() -> None:
    """What a tile costs is paid once for few rows, and half a tile too much for many."""
    assert tiled(1.5, 16) == tiled(8.5, 16) == 16
    assert tiled(73, 16) == 80.5
    assert tiled(73, 1) == 73
    m = K3.moe
    assert m is not None
    macs = 3 * m.width * m.io
    slow = replace(INSTANT, macs={**INSTANT.macs, EXPERTS: 1e12})
    there: dict[str, Any] = {"slots": K3.expert_count}
    for tokens, rows in ((1, 16.0), (8960, 160 + 7.5)):
        of_rows, of_tiles = (
            prefill(setup(replace(slow, tile=tile), rows=tokens, **there), tokens=tokens)
            for tile in (1, 16)
        )
        assert of_rows.arithmetic_seconds == pytest.approx(tokens * 16 * 92 * macs / 1e12)
        assert of_tiles.arithmetic_seconds == pytest.approx(of_tiles.experts * rows * macs / 1e12)
        assert of_tiles.macs == of_rows.macs  # that count for something
    step = [decode(setup(replace(slow, tile=tile), **there)).seconds for tile in (1, 16)]
    assert step[0] == step[1]
