"""The command ``batch``: labels, lines like OpenAI's, a shared head, texts from files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from k3offload import load, score_labels
from tests.helpers_engine import call
from tests.test_cli_batch import records, texts

Capture = pytest.CaptureFixture[str]
HEAD = "Go on with what is written here, in the words of the book, and end when it ends.\n\n" * 8


def test_a_label_for_every_document(tmp_path: Path, capsys: Capture) -> None:
    folder, out = texts(tmp_path / "in", 3), tmp_path / "out.jsonl"
    (folder / "empty.txt").write_text("")
    listed = tmp_path / "labels.txt"
    listed.write_bytes(b"\xef\xbb\xbf earth\r\n\n heavens and all\n")
    how = ["batch", "nano", folder, "-o", out, "--prompt", "{text} of the", "--labels", listed]
    code, told, _ = call([*how, "--label", " sea", "--label-end", ".", "--json"], capsys)
    facts = json.loads(told)
    assert code == 3 and facts["failed"] == 1 and facts["new_tokens"] == 0
    found = records(out)
    assert found["empty.txt"]["error"] and "scores" not in found["empty.txt"]
    labels = [" sea", " earth", " heavens and all"]
    with load("nano") as engine:
        for name in ("t00.txt", "t01.txt", "t02.txt"):
            prompt = (folder / name).read_text() + " of the"
            (choice,) = score_labels(engine, [prompt], labels, ".")
            line = found[name]
            assert line["label"] == line["text"] == choice.best.label
            assert line["finish_reason"] == "label" and line["usage"]["new_tokens"] == 0
            assert line["scores"] == [
                {"label": s.label, "log_likelihood": s.log_likelihood, "probability": s.probability}
                for s in choice.scores
            ]
    kept = out.read_bytes()
    how += ["--resume", "--json", "--label-end", "."]
    code, told, _ = call([*how, "--label", " sea"], capsys)
    assert json.loads(told)["records"]["reused"] == 4 and out.read_bytes() == kept
    code, told, _ = call([*how, "--label", " land"], capsys)
    assert json.loads(told)["records"]["reused"] == 0
    assert records(out)["t00.txt"]["scores"][0]["label"] == " land"
    code, told, _ = call([*how[:-1], ",", "--label", " land"], capsys)
    assert json.loads(told)["records"]["reused"] == 0


def test_one_document_at_a_time_has_room_for_a_copy(tmp_path: Path, capsys: Capture) -> None:
    """As little memory as there can be: a state for the document, one for its labels."""
    folder = texts(tmp_path / "in", 2)
    how = ["batch", "nano", folder, "--sessions", "1", "--label", " heavens and", "--label", " a"]
    code, _, said = call([*how, "-o", tmp_path / "a.jsonl", "--ram", "1M"], capsys)
    assert code == 1 and "are missing" in said
    least = said.split("needs ")[1].split(" bytes")[0].replace(",", "")
    more = int(least) + 30_000_000  # what the process takes differs a little from time to time
    code, _, said = call([*how, "-o", tmp_path / "a.jsonl", "--ram", more], capsys)
    assert code == 0, said
    assert "\n1 documents at a time" in said
    assert call([*how, "-o", tmp_path / "b.jsonl"], capsys)[0] == 0
    assert records(tmp_path / "a.jsonl") == records(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--label", " a", "--temperature", "0.7"], "--temperature means nothing beside labels"),
        (["--label", " a", "--seed", "0"], "--seed means nothing"),
        (["--label", " a", "--ignore-end"], "--ignore-end means nothing"),
        (["--label", " a", "--stop", "x"], "--stop means nothing"),
        (["--label", " a", "-n", "256"], "-n means nothing"),
        (["--label", " a", "--schema", "x"], "--schema means nothing"),
        (["--label", " a", "--label", " a"], "the same tokens"),
        (["--label", " sea, and", "--context", "3"], "leaves no room in --context 3"),
        (["--label-end", "."], "--label-end means nothing without labels"),
        (["--labels", "/dev/null"], "/dev/null holds no label"),
        (["--output-format", "csv"], "--output-format is 'csv'"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(
    more: list[str], named: str, tmp_path: Path, capsys: Capture
) -> None:
    folder, out = texts(tmp_path / "in", 1), tmp_path / "out.jsonl"
    code, _, said = call(["batch", "nano", folder, "-o", out, *more], capsys)
    assert code == 2 and named in said
    assert "memory plan" not in said
    assert not out.exists()


def test_lines_of_openais_batch_api(tmp_path: Path, capsys: Capture) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked: list[dict[str, Any]] = [
        {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": prompt, "max_tokens": 5}}
        for i, prompt in enumerate(["And the king", "word " * 300, "In the beginning"])
    ]  # fmt: skip
    given.write_text("".join(json.dumps(line) + "\n" for line in asked))
    how = ["batch", "nano", given, "-o", out, "--json"]
    assert call([*how, "--context", "300"], capsys)[0] == 3
    plain = records(out)
    how += ["--output-format", "openai", "--resume"]
    code, told, _ = call([*how, "--context", "300"], capsys)
    assert code == 3 and json.loads(told)["records"]["reused"] == 0  # one shape in a file
    found = records(out)
    assert list(found) == ["request-0", "request-1", "request-2"]
    for name in ("request-0", "request-2"):
        line, old = found[name], plain[name]
        assert line["custom_id"] == name and line["error"] is None
        assert line["response"]["status_code"] == 200 and line["response"]["request_id"]
        body = line["response"]["body"]
        assert (body["object"], body["model"]) == ("text_completion", "nano")
        assert body["choices"] == [
            {"index": 0, "text": old["text"], "logprobs": None, "finish_reason": "length"}
        ]
        used = old["usage"]["prompt_tokens"]
        assert body["usage"] == {
            "prompt_tokens": used, "completion_tokens": 5, "total_tokens": used + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip
        assert isinstance(body["created"], int)
    assert len({f["response"]["body"]["id"] for f in found.values() if f["response"]}) == 2
    failed = found["request-1"]
    assert failed["response"] is None and failed["error"]["code"] == "TooLong"
    assert "context of 300" in failed["error"]["message"]
    kept = out.read_bytes().splitlines()
    code, told, _ = call([*how, "--context", "400"], capsys)  # what failed is tried again
    assert code == 0 and json.loads(told)["records"]["reused"] == 2
    lines = out.read_bytes().splitlines()
    assert lines[::2] == kept[::2] and json.loads(lines[1])["response"]["status_code"] == 200


def test_labels_in_lines_of_openais(tmp_path: Path, capsys: Capture) -> None:
    folder, out = texts(tmp_path / "in", 1), tmp_path / "out.jsonl"
    how = ["batch", "nano", folder, "-o", out, "--label", " a", "--label", " the"]
    assert call([*how, "--output-format", "openai"], capsys)[0] == 0
    (line,) = records(out).values()
    (choice,) = line["response"]["body"]["choices"]
    assert choice["text"] == line["label"] and choice["finish_reason"] == "stop"
    assert len(line["scores"]) == 2


def test_what_prompts_begin_with_is_computed_once(tmp_path: Path, capsys: Capture) -> None:
    """In memory, unless somebody named a folder: counted in the plan, and no answer changes."""
    folder, shared = texts(tmp_path / "in", 6), tmp_path / "shared.jsonl"
    how = ["batch", "nano", folder, "--sessions", "2", "-n", "6", "--prompt"]
    code, _, said = call([*how, HEAD + "{text}\nSo:", "-o", shared], capsys)
    assert code == 0
    assert "shared prefixes" in said
    with load("nano", context=512) as engine:
        head = len(engine.encode(HEAD)) // 64 * 64
        found = records(shared)
        alone = engine.batch(
            [HEAD + (folder / name).read_text() + "\nSo:" for name in found], max_new_tokens=6
        )
        for result, line in zip(alone, found.values(), strict=True):
            assert result.text == line["text"] and result.reused == 0
            assert line["usage"]["reused_tokens"] == head >= 128
            assert line["usage"]["prompt_tokens"] == result.prompt_tokens
    code, _, said = call([*how, HEAD[:80] + "{text}", "-o", tmp_path / "short.jsonl"], capsys)
    assert code == 0 and "shared prefixes" not in said  # less than a chunk
    assert not any(r["usage"]["reused_tokens"] for r in records(tmp_path / "short.jsonl").values())


def test_a_prompt_from_a_file_or_stdin(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, place = texts(tmp_path / "in", 1), tmp_path / "p.txt"
    place.write_bytes(b"\xef\xbb\xbf{text} and the k\xc3\xb6nig")
    found = []
    ways: list[list[Any]] = [
        ["--prompt", "{text} and the könig"], ["--prompt-file", place], ["--prompt-file", "-"],
    ]  # fmt: skip
    for i, how in enumerate(ways):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(place.read_bytes())))
        out = tmp_path / f"{i}.jsonl"
        given = ["batch", "nano", folder, "-o", out, "-n", "3", "--seed", "1", *how]
        assert call(given, capsys)[0] == 0
        found.append(records(out))
    assert found[0] == found[1] == found[2]
    place.write_bytes(b"{text} caf\xe9")
    for how in (["--prompt-file"], ["--label", " a", "--labels"], ["--schema"]):
        out = tmp_path / "none.jsonl"
        code, _, said = call(["batch", "nano", folder, "-o", out, *how, place], capsys)
        assert code == 2 and f"{place} is not UTF-8: byte 10 is 0xe9" in said
        assert not out.exists()
