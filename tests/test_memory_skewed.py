"""Memory where a sweep is at its largest: all tokens to the same experts, many sessions.

R02 (the budget is kept and used), R65 (closing frees), R70.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers_engine import checkpoint
from tests.helpers_memory import HEAD, MB, STREAMED, TRUNK, keeps_its_word, measure

#: experts of the released inner width; two of eight take every row of equal tokens
BROAD: dict[str, Any] = {
    "layers": 4, "hidden": 256, "experts": 8, "topk": 2, "latent": 256, "moe_inter": 3072,
    "expert_mode": "bytes", "vision": False,
}  # fmt: skip

RUN = (
    HEAD
    + """
with load(folder, **arguments["options"]) as engine:
    sessions = [engine.session() for _ in range(arguments["sessions"])]
    for number, session in enumerate(sessions):
        step = 0 if arguments["equal"] else number + 7
        session.append([(7 + step * i) % 256 for i in range(arguments["tokens"])])
    for _ in range(2):
        engine.advance(sessions)
        for session in sessions:
            session.append_sampled(5)
    plan = engine.plan
    print(json.dumps({"peak": peak_rss(), "plan": plan.total, "limit": plan.limit,
                      "rows": plan.sweep_rows, "beyond": engine.planned - plan.total}))
"""
)


@pytest.mark.parametrize(
    ("dtype", "threads", "equal"),
    [("bfloat16", 2, False), ("float32", 4, True)],
)
def test_4096_rows_of_one_expert_r02(dtype: str, threads: int, equal: bool) -> None:
    """Every expert's rows pass in groups: equal tokens take no more than different ones."""
    options = {"dtype": dtype, "threads": threads, "sweep": 4096, "context": 4160}
    found = measure(RUN, checkpoint(**BROAD), options=options, sessions=1, tokens=4096, equal=equal)
    assert found["rows"] == 4096 and not found["beyond"]
    keeps_its_word(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sixty_sessions_r02(dtype: str) -> None:
    options = {"dtype": dtype, "threads": 4, "context": 64, "sessions": 60, "sweep": 512}
    found = measure(
        RUN,
        checkpoint(**{**STREAMED, "layers": 3}),
        options=options,
        sessions=60,
        tokens=33,
        equal=False,
    )
    assert found["rows"] == 512 and not found["beyond"]
    keeps_its_word(found)


TWICE = (
    HEAD
    + """
plans, engines = [], []
for _ in range(3):
    engines.append(load(folder, context=64, sweep=64))
    plans.append(engines[-1].plan)
    with engines[-1].session() as session:
        session.append([1, 2, 3])
        session.logits()
    engines[-1].close()
print(json.dumps({"bases": [p.purposes[0][1] for p in plans], "total": plans[0].total,
                  "after": settled()}))
"""
)


def test_a_closed_engine_takes_no_memory_r65() -> None:
    """130 MB each, the variables still bound: the next load finds the memory free again."""
    found = measure(TWICE, checkpoint(**TRUNK))
    first, *later = found["bases"]
    assert found["total"] - first > 150 * MB
    assert all(abs(base - first) < 20 * MB for base in later), found
    assert found["after"] - first < 40 * MB, found
