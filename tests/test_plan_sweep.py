"""How long the plan makes a sweep: so that a prompt and its answer read least."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from k3offload.config import ROW_TILE, align_up
from k3offload.scheduler.plan import Demand, Limits, Plan, Use, make_plan, use_of
from tests.test_plan import GB, K3, check, demands, head_bytes, least


def reads(demand: Demand, plan: Plan, use: Use) -> float:
    """Bytes from disk for a prompt and its answer, added up from the plan alone."""
    streamed = sum(size for i, size in enumerate(demand.layers) if i not in plan.resident_layers)
    streamed += 0 if plan.head_resident else head_bytes(demand)
    missing = 1 - plan.slots / demand.experts if demand.experts else 0.0
    prompt = 0.0
    for _ in range(0, use.prompt, plan.sweep_rows):
        prompt += streamed + (demand.asked(plan.sweep_rows) if missing else 0.0)
    return prompt + use.answer * (streamed + missing * demand.asked(1))


@given(demands(), st.integers(0, 6000), st.integers(0, 3000), st.integers(0, 300))
@settings(max_examples=200, deadline=None)
def test_a_sweep_is_as_long_as_reads_least(
    demand: Demand, spare: int, prompt: int, answer: int
) -> None:
    demand = replace(demand, asked=lambda rows: 1000 * demand.slot * (1 - 0.99**rows))
    limit, use = least(demand) + spare, Use(prompt, answer)
    plan = make_plan(demand, Limits(limit, rows=None, use=use))
    check(plan, demand)
    assert plan.sweep_rows <= max(ROW_TILE, align_up(prompt, ROW_TILE))
    for rows in (64, 128, 512, 576, 1024, 1536, 3008):
        other = make_plan(demand, Limits(limit, rows=rows))
        if other.sweep_rows == 512 < prompt or other.sweep_rows == plan.sweep_rows:
            assert reads(demand, plan, use) <= reads(demand, other, use) * (1 + 1e-12)
    capped = make_plan(demand, Limits(limit, rows=640, use=use))
    assert capped.sweep_rows <= 640


def test_long_prompts_of_kimi_k3_take_long_sweeps() -> None:
    """An answer wants the trunk and the slots in memory, a prompt wants long sweeps; no longer than
    reading takes any time beside computing."""
    demand = replace(K3, asked=lambda rows: 92 * 896 * K3.slot * (1 - (1 - 16 / 896) ** rows))

    def rows(prompt: int, answer: int, longest: int | None = None) -> int:
        some = replace(demand, longest=longest)
        use = Use(prompt, answer)
        return make_plan(some, Limits(64 * GB, rows=None, use=use)).sweep_rows

    assert rows(300, 10) == 320
    assert rows(4096, 10) == 4096
    assert rows(32_768, 10) > 10_000 > rows(32_768, 3000) >= 512
    assert rows(32_768, 10, 5000) == 5056
    assert rows(0, 100) == 64


def test_sessions_share_sweeps() -> None:
    assert use_of(None, 64, sessions=60) == Use(3840, 32, 60)
    assert use_of(None, 1000, answer=100) == Use(900, 100)
    assert use_of(512, 1000) is None
