"""The benchmark that compares guesses with perfect ones."""

from __future__ import annotations

import k3offload
from benchmarks.foresight import CONTEXT, WARM, measure
from k3offload.bench_engine import tokens_of


def test_perfect_guesses_come_true_and_leave_little_to_miss() -> None:
    count = CONTEXT + WARM + 36
    with k3offload.load("nano", cache="1M", context=count + 8) as engine:
        assert engine.spec.moe is not None
        layers, top_k = len(engine.spec.moe_layers), engine.spec.moe.top_k
        found = measure(engine, tokens_of(engine.tokenizer, None, count, 0), "combined")
        page = engine.checkpoint.expert_bytes
    assert list(found) == ["none", "combined", "perfect"]
    none, named, perfect = found.values()
    assert none["prefetched"] == 0 < named["prefetched"]
    assert perfect["useful"] > 0.98 * perfect["prefetched"] > 0
    assert named["useful"] < 0.98 * named["prefetched"]
    asked = perfect["bytes"] / page
    assert perfect["useful"] > 0.9 * asked > 0 and asked < layers * top_k
    assert all(f["seconds"] > 0 and 0 <= f["idle_ms"] <= f["seconds"] * 1e3 for f in found.values())
