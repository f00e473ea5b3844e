"""``generate``: prompts from files, sessions that go on, prefixes that are kept (R12, R29)."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from k3offload.loading import load
from k3offload.progress import Meter
from tests.helpers_engine import call, greedy

pytest.importorskip("zarr")
TEXT = "And Jesus said unto him, " * 12
Capture = pytest.CaptureFixture[str]


def run(arguments: list[Any], capsys: Capture) -> dict[str, Any]:
    code, out, err = call(["generate", "nano", *arguments, "--json", "--ignore-end"], capsys)
    assert code == 0, err
    facts: dict[str, Any] = json.loads(out)
    return facts


def test_a_prompt_from_a_file(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "p.txt"
    place.write_text(TEXT + "é")
    wanted = run([TEXT + "é", "-n", 3], capsys)
    assert run(["--prompt-file", place, "-n", 3], capsys)["tokens"] == wanted["tokens"]
    with place.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(["--prompt-file", "-", "-n", 3], capsys)["tokens"] == wanted["tokens"]
    place.write_bytes(b"\xef\xbb\xbf" + place.read_bytes())  # a byte order mark is no text
    assert run(["--prompt-file", place, "-n", 3], capsys)["tokens"] == wanted["tokens"]
    assert wanted["seconds_to_first_token"] >= wanted["prefill_seconds"] > 0
    rate = wanted["computed_tokens"] / wanted["prefill_seconds"]
    assert wanted["prefill_tokens_per_second"] == pytest.approx(rate)
    assert wanted["computed_tokens"] == wanted["prompt_tokens"] and wanted["reused_tokens"] == 0
    with load("nano") as engine:
        rows = engine.spec.latent_bytes_per_token(2) * (wanted["prompt_tokens"] + 2)
        assert wanted["state_bytes"] == engine.spec.kda_state_bytes(2) + rows


REFUSED = [
    (["a", "--prompt-file", "p.txt"], 2, "two prompts"),
    ([], 2, "prompt is empty"),
    (["--prompt-file", "none.txt"], 1, "none.txt: No such file"),
    (["--prompt-file", "bad.txt"], 2, "bad.txt is not UTF-8: byte 1 is 0xff"),
    (["a", "--session", "no/where"], 2, "no is not a folder"),
    (["a", "--session", "p.txt"], 2, "p.txt is no folder"),
    (["a", "--session", "."], 2, "something else than a saved session"),
    (["a", "--session", "link"], 2, "link is no folder"),
    (["a", "--prefix-dir", ""], 2, "has no name"),
    (["a", "--prefix-disk", "1G"], 2, "--prefix-dir DIR"),
    (["a", "--session", "cut"], 1, "manifest.json is damaged"),
    (["a", "--prefix-dir", "d", "--prefix-disk", "much"], 2, "'much' is not a size"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED)
def test_refused(
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("x")
    Path("bad.txt").write_bytes(b"a\xff")
    Path("link").symlink_to("nothing")
    Path("cut").mkdir()
    Path("cut/manifest.json").write_text("{")
    got, _, err = call(["generate", "nano", *arguments, "-n", 1], capsys)
    assert got == code and words in err


def test_a_session_goes_on(capsys: Capture, tmp_path: Path) -> None:
    """Three calls are one conversation; the last has nothing to add and just goes on."""
    place, texts, made, prompt = tmp_path / "chat", [TEXT, "And he said,"], [], 0
    for number, more in enumerate(texts):
        facts = run([more, "-n", 5, "--session", place], capsys)
        made.append(facts["tokens"])
        if number:
            before = len(made[0]) - 1
            assert facts["reused_tokens"] == prompt + before
            assert facts["computed_tokens"] == facts["prompt_tokens"] + 1
        prompt = facts["prompt_tokens"]
    facts = run(["-n", 4, "--session", place], capsys)
    made.append(facts["tokens"])
    with load("nano") as engine, engine.session() as session:
        wanted: list[list[int]] = []
        for more, count in ((texts[0], 5), (texts[1], 5), ("", 4)):
            session.append(more)
            wanted.append([])
            for _ in range(count):
                wanted[-1].append(int(session.logits().argmax()))
                session.append_sampled(wanted[-1][-1])
    assert made == wanted


def test_a_session_that_cannot_be_saved_ends_with_its_text(capsys: Capture, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        code, out, err = call(
            ["generate", "nano", TEXT, "-n", 4, "--session", tmp_path / "s"], capsys
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and len(out) > 2 and "error: The session could not be saved" in err


def test_kept_prefixes(capsys: Capture, tmp_path: Path) -> None:
    place = tmp_path / "prefixes"
    first = run([TEXT + "one", "-n", 4, "--prefix-dir", place], capsys)
    again = run([TEXT + "another", "-n", 4, "--prefix-dir", place], capsys)
    assert first["reused_tokens"] == 0 and again["reused_tokens"] >= 64
    assert again["reused_tokens"] + again["computed_tokens"] == again["prompt_tokens"]
    assert again["plan"]["purposes"]["shared prefixes"] > 0
    with load("nano") as engine:
        assert again["tokens"] == greedy(engine, engine.encode(TEXT + "another"), 4)
    code, _, err = call(["generate", "nano", TEXT + "more", "-n", 2, "--prefix-dir", place], capsys)
    assert code == 0 and "first token after" in err
    assert f"{again['reused_tokens']} tokens reused" in err


def test_the_time_left_follows_the_last_sweeps() -> None:
    """Each sweep of 100 tokens takes longer; what is read is told."""
    said: list[str] = []
    now, read = [0.0], [0]
    meter = Meter(said.append, lambda: now[0])
    meter.read = lambda: read[0]
    for done, seconds in ((0, 10), (100, 20), (200, 40), (300, 0)):
        meter.prompt(done, 1000, 100)
        now[0] += seconds
        read[0] += 2_000_000
    meter.layer(0, 8)
    now[0] += 30
    meter.layer(4, 8)
    assert said == [
        "prompt: 300 of 1,000 tokens, 8 MB read, 2.5 tokens/s, 4 min 40 s left, layer 1 of 8",
        "prompt: 300 of 1,000 tokens, 8 MB read, 2.14 tokens/s, 5 min 3 s left, layer 5 of 8",
    ]
