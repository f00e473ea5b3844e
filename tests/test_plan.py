"""The memory plan: never over the limit, exact about what is missing, memory to the trunk first."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload.config import ROW_TILE
from k3offload.errors import DoesNotFit
from k3offload.scheduler.plan import Demand, Latents, Limits, Plan, make_plan

GB = 10**9
MOE_KDA, MOE_MLA = 1_267_744_256, 844_335_616  # bytes of K3's layers, from its inventory
K3 = Demand(
    base=400_000_000,
    tiles=60_000_000,
    staging=33_554_432,
    layers=[2_341_213_184] + [MOE_MLA if i % 4 == 3 or i == 92 else MOE_KDA for i in range(1, 93)],
    small=43_008,
    embed=2_348_810_240,
    head=2_348_810_240,
    head_block=67_108_864,
    state=449_372_160 + 4096 * 27_648,
    working=lambda rows: 100_000_000 + rows * 900_000,
    slot=17_547_264 + 8192,
    experts=82_432,
    top_k=16,
)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    number = st.integers(1, 1000)
    small = st.integers(0, 300)
    a, b = draw(small), draw(st.integers(0, 3))
    experts = draw(st.sampled_from([0, 1, 7, 100]))
    return Demand(
        base=draw(small),
        tiles=draw(small),
        staging=draw(small),
        layers=draw(st.lists(number, min_size=1, max_size=7)),
        small=draw(small),
        embed=draw(number),
        head=draw(st.one_of(st.just(0), number)),
        head_block=draw(number),
        state=draw(small),
        working=lambda rows: a + b * rows,
        slot=draw(st.integers(1, 200)) if experts else 0,
        experts=experts,
        top_k=draw(st.integers(1, 8)) if experts else 0,
    )


def head_bytes(demand: Demand) -> int:
    return demand.head or demand.embed


def head_buffer(demand: Demand) -> int:
    return min(demand.head_block, head_bytes(demand))


def least(demand: Demand) -> int:
    """The smallest plan, added up independently: one slot, all of the trunk streamed."""
    fixed = demand.base + demand.tiles + demand.staging + demand.small + demand.state
    slot = demand.slot if demand.experts else 0
    return fixed + demand.working(ROW_TILE) + slot + max(demand.layers) + head_buffer(demand)


def check(plan: Plan, demand: Demand) -> None:
    """Every byte stands under one purpose and what the plan says agrees with what it promises."""
    assert plan.total == sum(size for _, size in plan.purposes) <= plan.limit
    assert all(size >= 0 for _, size in plan.purposes)
    held = sum(demand.layers[i] for i in plan.resident_layers)
    tied = not demand.head
    if plan.head_resident:
        held += head_bytes(demand)
        assert plan.embed_resident or not tied, "a resident tied head is the embedding"
    if plan.embed_resident and not (tied and plan.head_resident):
        held += demand.embed
    assert held == plan.resident_bytes
    streamed = [s for i, s in enumerate(demand.layers) if i not in plan.resident_layers]
    assert plan.ring_bytes >= max(streamed, default=0)
    assert plan.ring_bytes == 0 or streamed, "a buffer for nothing"
    named = dict(plan.purposes)
    assert named["trunk, resident"] == held + demand.small
    assert plan.ring_buffers in ((1, 2) if streamed else (0,))
    assert len(streamed) > plan.ring_buffers or not streamed, "a buffer each: they could stay"
    buffers = plan.ring_buffers * plan.ring_bytes
    buffers += 0 if plan.head_resident else head_buffer(demand)
    assert named["trunk, streaming buffers"] == buffers
    assert (plan.slots >= 1) == (demand.experts > 0)
    assert plan.slots <= demand.experts
    assert plan.sweep_rows % ROW_TILE == 0
    assert plan.sweep_rows >= ROW_TILE


@settings(max_examples=400)
@given(demand=demands(), spare=st.integers(0, 6000), rows=st.integers(1, 700))
def test_sum_never_exceeds_the_limit(demand: Demand, spare: int, rows: int) -> None:
    check(make_plan(demand, Limits(least(demand) + spare, rows=rows)), demand)


@settings(max_examples=200)
@given(demand=demands(), missing=st.integers(1, 2000))
def test_missing_bytes_are_exact(demand: Demand, missing: int) -> None:
    need = least(demand)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(demand, Limits(need - missing))
    assert caught.value.missing == missing
    assert f"{missing:,} are missing" in caught.value.problem
    check(make_plan(demand, Limits(need)), demand)


@settings(max_examples=200)
@given(demand=demands(), spare=st.integers(0, 6000), cache=st.integers(0, 6000))
def test_cache_caps_the_slots(demand: Demand, spare: int, cache: int) -> None:
    limits = Limits(least(demand) + spare, cache=cache)
    if demand.experts and cache < demand.slot:
        with pytest.raises(DoesNotFit) as caught:
            make_plan(demand, limits)
        assert caught.value.missing == demand.slot - cache
        return
    plan = make_plan(demand, limits)
    check(plan, demand)
    assert plan.slots * plan.slot_bytes <= cache or not demand.experts
    free = make_plan(demand, replace(limits, cache=None))
    trunk, other = (
        dict(p.purposes)["trunk, streaming buffers"] + p.resident_bytes for p in (plan, free)
    )
    assert trunk >= other, "what the cache may not use, the trunk may"


def test_slots_of_one_token_shrink_step_by_step() -> None:
    """A few bytes too few for all experts of a token cost one slot, not all but one."""
    for spare in (0, 1, 5, 14):
        plan = make_plan(K3, Limits(least(K3) + spare * K3.slot, rows=ROW_TILE))
        assert plan.slots == 1 + spare


def test_minimum_plan_has_one_slot_and_the_shortest_sweep() -> None:
    plan = make_plan(K3, Limits(least(K3), rows=4096))
    check(plan, K3)
    assert (plan.slots, plan.sweep_rows) == (1, ROW_TILE)
    assert not plan.resident_layers
    assert plan.ring_bytes == max(K3.layers)
    assert plan.total == plan.limit


def test_sweep_is_shortened_before_a_plan_is_refused() -> None:
    plan = make_plan(K3, Limits(least(K3) + 900_000 * 200, rows=4096))
    assert plan.sweep_rows == ROW_TILE + 192
    assert make_plan(K3, Limits(64 * GB, rows=100)).sweep_rows == 128


def most_resident(demand: Demand, room: int) -> int:
    """Most bytes of layers and head that can stay in ``room``, by trying every choice: beside two
    streaming buffers if there is room for any such way, else beside one."""
    two = _most_resident(demand, room, 2)
    return two if two >= 0 else _most_resident(demand, room, 1)


def _most_resident(demand: Demand, room: int, buffers: int) -> int:
    best = -1
    numbers = range(len(demand.layers))
    for chosen in chain.from_iterable(combinations(numbers, n) for n in range(len(numbers) + 1)):
        rest = [demand.layers[i] for i in numbers if i not in chosen]
        layers = sum(demand.layers[i] for i in chosen)
        for head, buffer in ((head_bytes(demand), 0), (0, head_buffer(demand))):
            if layers + head + buffer + buffers * max(rest, default=0) <= room:
                best = max(best, layers + head)
    return best


def room_of(demand: Demand, plan: Plan, slots: int) -> int:
    fixed = demand.base + demand.tiles + demand.staging + demand.small + demand.state
    return plan.limit - fixed - demand.working(plan.sweep_rows) - slots * demand.slot


def kept(demand: Demand, plan: Plan) -> int:
    layers = sum(demand.layers[i] for i in plan.resident_layers)
    return layers + (head_bytes(demand) if plan.head_resident else 0)


@settings(max_examples=200)
@given(
    demand=demands(),
    spare=st.integers(0, 8000),
    equal=st.booleans(),
)
def test_trunk_keeps_the_most(demand: Demand, spare: int, equal: bool) -> None:
    """All of it when it fits; the best of all choices for layers of one size; else short of the
    best by less than the largest layer (largest first is not always the best packing)."""
    demand = replace(demand, head=demand.embed if demand.head else 0)
    if equal:
        demand = replace(demand, layers=[demand.layers[0]] * len(demand.layers))
    plan = make_plan(demand, Limits(least(demand) + spare, rows=ROW_TILE))
    counts = range(min(demand.top_k, demand.experts), -1, -1)
    rooms = (room_of(demand, plan, count) for count in counts)
    best = next(most for room in rooms if (most := most_resident(demand, room)) >= 0)
    got = kept(demand, plan)
    if equal or best == sum(demand.layers) + head_bytes(demand):
        assert got >= best
    assert got > best - max(demand.layers)


def test_streaming_buffer_is_worth_its_size() -> None:
    """One layer is far larger than the others: keeping it makes the shared buffer smaller."""
    demand = replace(
        K3, layers=[1000, 10, 10, 10, 10], embed=5, head=5, head_block=1, experts=0, slot=0
    )
    plan = make_plan(demand, Limits(least(demand) + 25))
    assert plan.resident_layers == {0}
    assert (plan.ring_bytes, plan.ring_buffers) == (10, 2)


def test_r02_cache_request_is_lowered_to_what_is_left() -> None:
    """Trunk 0.6 X and a cache of 0.8 X asked for: the sum stays within X."""
    x = 1_000_000
    demand = Demand(
        base=50_000, tiles=0, staging=0, layers=[100_000] * 5, small=0, embed=50_000, head=50_000,
        head_block=10_000, state=10_000, working=lambda rows: 100 * rows, slot=5000, experts=500,
        top_k=4,
    )  # fmt: skip
    plan = make_plan(demand, Limits(x, cache=int(0.8 * x), rows=64))
    check(plan, demand)
    left = x - 50_000 - 600_000 - 10_000 - 6400
    assert plan.slots == left // 5000 < int(0.8 * x) // 5000
    assert (f"{plan.slots} expert slots", plan.slots * 5000) in plan.purposes


def test_r03_slots_follow_the_memory_there_is() -> None:
    """Once the trunk is in, every further expert's bytes are a further slot."""
    everything = sum(K3.layers) + K3.embed + K3.head + K3.experts * K3.slot + 5 * GB
    former = 0
    for share in (0.25, 0.5, 0.75, 1.0):
        experts = int(K3.experts * share)
        limit = everything - (K3.experts - experts) * K3.slot
        plan = make_plan(K3, Limits(limit))
        assert experts <= plan.slots <= experts + 5 * GB // K3.slot
        assert plan.slots > former
        assert plan.ring_bytes == 0
        former = plan.slots
    assert former == K3.experts
    plan = make_plan(K3, Limits(130 * GB))
    assert make_plan(K3, Limits(130 * GB + K3.slot)).slots == plan.slots + 1


def test_kimi_k3_with_12_gigabytes() -> None:
    """Nearly all of the trunk is streamed; every expert of a token still has a slot."""
    plan = make_plan(K3, Limits(12 * GB))
    check(plan, K3)
    assert plan.slots >= K3.top_k
    assert 5 * GB < plan.resident_bytes < 10 * GB
    assert not plan.embed_resident
    assert plan.total > 11 * GB


def test_kimi_k3_with_64_gigabytes() -> None:
    plan = make_plan(K3, Limits(64 * GB))
    check(plan, K3)
    assert plan.resident_bytes > 58 * GB
    assert 0 in plan.resident_layers, "the one large layer would need a large buffer"
    assert plan.ring_bytes <= MOE_KDA
    assert K3.top_k <= plan.slots < 150
    assert plan.total > 63.9 * GB


def test_kimi_k3_with_128_gigabytes() -> None:
    """The whole trunk is resident, and the rest are slots."""
    plan = make_plan(K3, Limits(128 * GB))
    check(plan, K3)
    assert len(plan.resident_layers) == 93
    assert plan.head_resident
    assert plan.embed_resident
    assert plan.ring_bytes == 0
    assert 600 < plan.slots < 800
    assert plan.limit - plan.total < K3.slot


def test_kimi_k3_does_not_fit_in_3_gigabytes() -> None:
    with pytest.raises(DoesNotFit, match=r"--ram \d+M or more") as caught:
        make_plan(K3, Limits(3 * GB))
    assert caught.value.missing == least(K3) - 3 * GB


def test_notes_are_kept() -> None:
    assert make_plan(K3, Limits(12 * GB, notes=("less than asked for",))).notes == (
        "less than asked for",
    )


# ---- latents ----

#: A million tokens of K3: 28.1 GB of latents.
LONG = replace(
    K3,
    state=449_372_160 + 28_100_000_000,
    latents=Latents(
        whole=28_100_000_000, open=7_077_888, carried=25_559_040, least=1_179_648, good=50_331_648
    ),
)


def latents_of(plan: Plan) -> int:
    return dict(plan.purposes)["latents, the newest, and buffers"]


def test_latents_stay_in_ram_where_they_fit() -> None:
    plan = make_plan(LONG, Limits(40 * GB))
    assert plan.latents is None and plan.all_latents == latents_of(plan) == 0
    assert plan == make_plan(replace(LONG, latents=None), Limits(40 * GB))
    assert make_plan(LONG, Limits(40 * GB, latents=29 * GB)) == plan


def test_latents_are_moved_to_disk_rather_than_refused() -> None:
    """As many stay as there is room for, and those that need RAM stay whatever happens."""
    with pytest.raises(DoesNotFit):
        make_plan(replace(LONG, latents=None), Limits(12 * GB))
    for ram in (5, 8, 12):
        plan = make_plan(LONG, Limits(ram * GB))
        assert plan.latents == latents_of(plan) >= 50_331_648 and plan.total <= ram * GB
        assert plan.all_latents == 28_100_000_000
        assert plan.state_bytes == 449_372_160 + 7_077_888


@pytest.mark.parametrize("missing", [1, 10**6, 10**9])
def test_what_is_missing_is_the_least_with_latents_on_disk(missing: int) -> None:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(LONG, Limits(0))
    least = caught.value.missing
    assert make_plan(LONG, Limits(least)).latents == 1_179_648
    with pytest.raises(DoesNotFit) as caught:
        make_plan(LONG, Limits(least - missing))
    assert caught.value.missing == missing


def test_latents_come_after_the_trunk_and_before_experts() -> None:
    ram = 200 * GB
    capped = make_plan(LONG, Limits(ram, latents=20 * GB))
    assert len(capped.resident_layers) == 93
    assert capped.latents is not None
    assert capped.latents + 7_077_888 + 25_559_040 == 20 * GB
    assert capped.slots > make_plan(LONG, Limits(ram)).slots
    tight = make_plan(LONG, Limits(100 * GB, latents=20 * GB))
    assert len(tight.resident_layers) < 93 and tight.latents is not None
    assert 50_331_648 <= tight.latents < 50_331_648 + MOE_KDA


def test_a_cap_that_cannot_be_kept_is_refused() -> None:
    assert LONG.latents is not None
    least = LONG.latents.least_cap()
    assert make_plan(LONG, Limits(40 * GB, latents=least)).latents == 1_179_648
    with pytest.raises(DoesNotFit, match="--latents 34M") as caught:
        make_plan(LONG, Limits(40 * GB, latents=least - 7))
    assert caught.value.missing == 7


def test_few_latents_are_not_worth_a_folder() -> None:
    held = Latents(whole=60 << 20, open=1000, carried=1000, least=1000, good=1000)
    few = replace(K3, latents=held)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(few, Limits(0))
    with pytest.raises(DoesNotFit):
        make_plan(few, Limits(caught.value.missing - 1))


@settings(max_examples=200)
@given(
    demand=demands(), spare=st.integers(0, 6000), cap=st.integers(0, 900), sizes=st.tuples(
        *[st.integers(0, 100)] * 3, st.integers(1, 100), st.integers(1, 200)
    )
)  # fmt: skip
def test_the_sum_holds_with_latents_on_disk(
    demand: Demand, spare: int, cap: int, sizes: tuple[int, int, int, int, int]
) -> None:
    more, open_, carried, least_, good = sizes
    held = Latents(open_ + carried + least_ + more, open_, carried, least_, max(least_, good))
    demand = replace(demand, state=demand.state + held.whole, latents=held)
    limits = Limits(least(demand) + spare, latents=cap)
    if cap < held.least_cap() and cap < held.whole:
        with pytest.raises(DoesNotFit):
            make_plan(demand, limits)
        return
    plan = make_plan(demand, limits)
    assert plan.total <= plan.limit
    assert (plan.latents is None) == (cap >= held.whole)
    if plan.latents is not None:
        assert least_ <= plan.latents <= cap - open_ - carried
