"""``k3offload evaluate routing``: the figures by their definitions, and what is recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3offload.errors import ReadError
from k3offload.evaluate_routing import PREFIX, _record, made_up_texts, routing
from k3offload.loading import load
from k3offload.routing_figures import (
    balance,
    binomial_quantile,
    divergence,
    histogram,
    latency,
    most_used,
    shared_top,
    uniform_balance,
)
from k3offload.tiers.base import PageId
from k3offload.trace import Trace
from tests.helpers_broken import Broken
from tests.helpers_engine import call

LAYERS, EXPERTS, TOP_K = 3, 20, 4


def drawn(tokens: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[T, L, k]: distinct experts for each token, low numbers more often."""
    draw = np.random.default_rng(seed)
    weight = 1 / (1 + np.arange(EXPERTS))
    rows = [
        draw.choice(EXPERTS, TOP_K, replace=False, p=weight / weight.sum())
        for _ in range(tokens * LAYERS)
    ]
    return np.array(rows).reshape(tokens, LAYERS, TOP_K)


def test_histogram_and_balance() -> None:
    chosen = drawn(50)
    counts = histogram(chosen, EXPERTS)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            assert counts[layer, expert] == (chosen[:, layer] == expert).sum()
    found = balance(counts)
    entropies, tops, overloads = [], [], []
    for row in counts:
        shares = [n / row.sum() for n in row]
        entropies.append(-sum(s * math.log(s) for s in shares if s) / math.log(EXPERTS))
        tops.append(sum(sorted(shares)[-2:]))  # 10 % of 20
        overloads.append(max(row) / (row.sum() / EXPERTS))
    assert found.entropy == pytest.approx(np.mean(entropies))
    assert found.top_10 == pytest.approx(np.mean(tops))
    assert found.overload == pytest.approx(np.mean(overloads))
    assert found.worst_overload == pytest.approx(max(overloads))
    assert found.unused == pytest.approx((counts == 0).mean())


def test_extremes() -> None:
    even = balance(np.full((2, 200), 7))
    assert even.entropy == pytest.approx(1) and even.overload == pytest.approx(1)
    assert even.top_1 == pytest.approx(0.01) and even.top_10 == pytest.approx(0.1)
    one = np.zeros((2, 200), np.int64)
    one[:, 5] = 9
    alone = balance(one)
    assert (alone.entropy, alone.top_1, alone.overload, alone.unused) == (0, 1, 200, 0.995)


def test_who_chooses_at_random_looks_almost_even() -> None:
    few, many = (uniform_balance(n, 50, 5, 4, 0) for n in (20, 5000))
    assert few.entropy < many.entropy < 1 and few.overload > many.overload > 1
    assert many.entropy > 0.999
    assert uniform_balance(20, 50, 5, 4, 0) == few != uniform_balance(20, 50, 5, 4, 1)


def test_divergence() -> None:
    one, other = np.array([[8, 0, 0, 0]]), np.array([[0, 3, 0, 0]])
    assert divergence(one, one) == 0 and divergence(one, other) == pytest.approx(1)
    # half of each in common: H(1/4, 1/2, 1/4) - H(1/2, 1/2)
    mixed = divergence(np.array([[4, 4, 0, 0]]), np.array([[0, 5, 5, 0]]))
    assert mixed == pytest.approx(1.5 - 1)
    assert shared_top(one, other, 0.25) == 0 and shared_top(one, one, 0.25) == 1
    some = np.array([[5, 4, 0, 1]]), np.array([[0, 4, 3, 1]])
    assert shared_top(*some, 0.5) == 0.5


def test_latency_counts_what_is_not_held() -> None:
    chosen = drawn(80)
    held = most_used(histogram(chosen, EXPERTS), 0.25)
    assert held.sum() == LAYERS * EXPERTS // 4
    misses = [
        sum(not held[la, e] for la in range(LAYERS) for e in token[la]) for token in chosen.tolist()
    ]
    found = latency(chosen, held, 1000, 500.0)
    assert found.mean == pytest.approx(np.mean(misses) * 2)
    assert found.p99 == pytest.approx(np.quantile(misses, 0.99) * 2)
    assert found.uniform_mean == pytest.approx(LAYERS * TOP_K * 0.75 * 2)
    assert found.mean < found.uniform_mean  # it is the most used that are held
    everything = latency(chosen, np.ones_like(held), 1000, 500.0)
    assert everything.p99 == everything.uniform_p99 == 0


@pytest.mark.parametrize(
    ("n", "p"), [(12, 0.75), (400, 0.9), (5, 0.01), (5, 0.001), (3, 0.0), (3, 1.0)]
)
def test_binomial_quantile(n: int, p: float) -> None:
    q = binomial_quantile(n, p, 0.99)

    def below(k: int) -> float:
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))

    assert below(q) >= 0.99 - 1e-9 and (q == 0 or below(q - 1) < 0.99)


def test_what_is_recorded_is_what_the_routers_chose() -> None:
    """Against a listener of its own; the same seeds give the same, others something else."""
    texts = {"a": "In the beginning God created", "b": "0 1 2 3 4 5 6 7 8 9 10 11"}
    found = routing("nano", texts, tokens=12, new=5, seeds=2)
    with load("nano", context=64) as engine:
        for name, kind in zip(texts, found.kinds, strict=True):
            counts = np.zeros((len(found.layers), found.experts), np.int64)

            def on_route(
                layer: int, group: Any, experts: Any, weights: Any, scores: Any, to: Any = counts
            ) -> None:
                np.add.at(to[found.layers.index(layer)], experts.numpy().reshape(-1), 1)

            engine.hooks.on_route = on_route
            with engine.session() as session:
                session.append(engine.encode(texts[name])[:12])
                session.logits()
            assert (kind.counts == counts).all() and set(kind.counts.sum(1)) == {
                kind.tokens * found.top_k
            }
    assert [len(kind.sampled) for kind in found.kinds] == [2, 2]
    assert found.kinds[0].sampled[0] != found.kinds[0].sampled[1]
    alone = routing("nano", {"b": texts["b"]}, tokens=12, new=5, seeds=2)
    assert alone.kinds[0].sampled == found.kinds[1].sampled
    one = routing("nano", texts, tokens=12, new=2, seeds=1).kinds[0].sampled[0]
    assert one.unused == pytest.approx(1 - found.top_k / found.experts)  # one token, no prompt
    again = routing("nano", texts, tokens=12, new=5, seeds=2, cache="200k")
    assert again.to_dict() == found.to_dict()
    other = routing("nano", texts, tokens=12, new=5, seeds=2, seed=1)
    assert other.kinds[0].sampled[0] == found.kinds[0].sampled[1]
    assert (other.kinds[0].counts == found.kinds[0].counts).all()


def test_kinds_differ_more_than_halves_of_one() -> None:
    """What the comparison is for: digits go to other experts than text does."""
    made = made_up_texts()
    found = routing("nano", {k: made[k] for k in ("text", "digits")}, tokens=300, new=2, seeds=1)
    text, digits = found.kinds
    assert found.divergence[0][1] > 4 * max(text.halves, digits.halves)
    assert found.divergence[0][1] == pytest.approx(found.divergence[1][0])
    assert found.divergence[0][0] == 0 and found.shared[0][0] == 1
    assert digits.balance.entropy < text.balance.entropy < text.uniform.entropy


def test_made_up_texts_are_seeded_and_of_their_kinds() -> None:
    made = made_up_texts(3)
    assert made == made_up_texts(3) and made["code"] != made_up_texts(4)["code"]
    assert len(made) == 5 and min(map(len, made.values())) > 4 * PREFIX
    assert set(made["digits"]) == set("0123456789 \n") and made["code"].count("def ") == 200
    assert made["repeated"][:100] == made["repeated"][100:200]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("And he said unto them, Go ye into all the world.")
    two.write_text("if x < 3: return [y for y in range(10)]")
    base = ["evaluate", "routing", "nano", "--text", one, "--text", two, "--tokens", 10]
    base += ["--new", 3, "--seeds", 2, "--held", 0.5, "--disk-gbps", 2]
    code, out, err = call([*base, "--json"], capsys)
    assert code == 0, err
    facts = json.loads(out)
    assert [kind["name"] for kind in facts["kinds"]] == ["one.txt", "two.txt"]
    assert facts["disk"] == 2e9 and facts["held"] == 0.5
    rows = facts["kinds"][0]["counts"]
    assert len(rows) == len(facts["layers"]) and {sum(row) for row in rows} == {10 * facts["top_k"]}
    spread = facts["kinds"][0]["spread"]["entropy"]
    values = [s["entropy"] for s in facts["kinds"][0]["sampled"]]
    assert spread["mean"] == pytest.approx(np.mean(values))
    assert spread["deviation"] == pytest.approx(np.std(values, ddof=1))
    code, out, _ = call(base, capsys)
    assert code == 0 and out.count("one.txt") == 5 and "the 50% most used experts" in out


def test_a_byte_order_mark_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    plain.write_text("And he said unto them")
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    command = ["evaluate", "routing", "nano", "--text", plain, "--text", marked]
    code, out, err = call([*command, "--new", 2, "--seeds", 1, "--json"], capsys)
    assert code == 0, err
    one, two = json.loads(out)["kinds"]
    assert one["counts"] == two["counts"]


def test_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, same, bad = tmp_path / "one", tmp_path / "other" / "one", tmp_path / "bad"
    one.write_text("x")
    same.write_text("a b c d")
    bad.write_bytes(b"\xff")
    for arguments, words in (
        (["--new", 1], "--new is 1"),
        (["--seeds", 0], "--seeds is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--held", 2], "--held is 2"),
        (["--disk-gbps", 0], "--disk-gbps is 0"),
        (["--text", one, "--text", same], "same name"),
        (["--text", one], "one has fewer than two tokens"),
        (["--text", bad], "not UTF-8: byte 0"),
    ):
        code, _, err = call(["evaluate", "routing", "nano", *arguments], capsys)
        assert code == 2 and words in err, err


def test_an_answer_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that cannot be read, which only sampled tokens ask for."""
    text = "In the beginning God"

    def recorded() -> Trace:
        with load("nano", context=128) as engine:
            if lost is not None:
                broken.lose(engine.checkpoint, lost)
            tokens = engine.encode(text)[:4]
            return _record(engine, [tokens], 40, range(1), lambda text: None)

    lost, broken = None, Broken(monkeypatch)
    trace = recorded()
    prompt, sampled = (trace.chosen[trace.decode == decode] for decode in (False, True))
    lost = next(
        PageId(int(layer), int(expert))
        for place, layer in enumerate(trace.layers)
        for expert in sorted(set(sampled[:, place].flat) - set(prompt[:, place].flat))
    )
    with pytest.raises(ReadError):
        recorded()
