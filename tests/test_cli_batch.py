"""The command ``batch``: a line for every document, the same after kills (R36, R38)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from k3offload import load
from k3offload.errors import SessionError
from tests.helpers_engine import call

WORDS = "and it came to pass that the people of the city went up in those days"


def texts(folder: Path, count: int) -> Path:
    """A folder of ``count`` short texts."""
    drawn, known = random.Random(2), WORDS.split()
    folder.mkdir()
    for i in range(count):
        words = " ".join(drawn.choice(known) for _ in range(drawn.randrange(4, 40)))
        (folder / f"t{i:02}.txt").write_text(f"{i} {words}")
    return folder


def records(out: Path) -> dict[str, dict[str, Any]]:
    """The lines of ``out`` by id, without how long they took."""
    found = {}
    for line in out.read_bytes().decode().splitlines():
        record = json.loads(line)
        del record["timing"]
        assert record["id"] not in found
        found[record["id"]] = record
    return found


def run(*arguments: Any, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "k3offload", "batch", *map(str, arguments)],
        env={**os.environ, **settings}, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip


def test_good_and_bad_documents_of_a_folder_r36(tmp_path: Path) -> None:
    folder, out = texts(tmp_path / "in", 3), tmp_path / "out.jsonl"
    (folder / "empty.txt").write_text("")
    (folder / "white.txt").write_text(" \n\t\n")
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfAnd the king")
    (folder / "utf16.txt").write_bytes("And the king".encode("utf-16"))
    (folder / "latin.txt").write_bytes(b"caf\xe9 and the king")
    (folder / "binary.txt").write_bytes(b"\x00\x01king")
    (folder / "long.txt").write_text("king " * 400)
    (folder / "link.txt").symlink_to(tmp_path / "nowhere")
    (folder / "sub").mkdir()
    (folder / "sub" / "t00.txt").write_text("the same stem")
    (folder / "smile \U0001f600\nname.txt").write_text("And the king")
    ended = run("nano", folder, "-o", out, "-n", 6, "--context", 200, LC_ALL="C", LANG="C")
    assert ended.returncode == 3, ended.stderr
    found = records(out)
    wrong = {name for name, record in found.items() if record["error"]}
    assert wrong == {"empty.txt", "white.txt", "latin.txt", "binary.txt", "long.txt", "link.txt"}
    assert len(found) == 13
    for name in wrong:
        assert found[name]["error"]["problem"] and found[name]["error"]["remedy"]
        assert name in ended.stderr
    assert found["bom.txt"]["text"] == found["utf16.txt"]["text"]
    assert all(r["usage"]["new_tokens"] for n, r in found.items() if n not in wrong)
    with load("nano") as engine, engine.session() as session:
        session.append((folder / "t01.txt").read_text())
        events = list(session.generate(6))
    assert found["t01.txt"]["text"] == "".join(getattr(event, "text", "") for event in events)
    manifest = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert manifest["finished"] and manifest["counts"]["failed"] == 6
    assert sorted(os.listdir(tmp_path)) == ["in", "out.jsonl", "out.jsonl.run.json"]


#: The command in forks of a process that has imported all it needs, and begun no thread.  Five are
#: killed when they have written some lines more, the sixth may end; prints the lines of the last.
KILLS = """
import os, random, signal, sys, time
from k3offload import cli, loading, run_batch
out, arguments, drawn, kills, most = sys.argv[1], sys.argv[2:], random.Random(8), 0, 0
def lines():
    return open(out, "rb").read().count(b"\\n") if os.path.exists(out) else 0
while True:
    begun = lines()
    if not (child := os.fork()):
        try:
            cli.main(arguments)
        except SystemExit as leave:
            os._exit(leave.code)
        os._exit(99)
    if kills == 5:
        assert os.waitpid(child, 0)[1] == 0
        break
    while lines() <= begun + 2:
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "it has ended"
        time.sleep(0.002)
    time.sleep(drawn.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    kills, most = kills + 1, max(most, lines())
    assert most == lines(), "what was done stays"
print(most)
"""


def test_killed_and_resumed_it_leaves_the_same_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = texts(tmp_path / "in", 40), tmp_path / "out.jsonl"
    how = ["-n", 40, "--sessions", 4, "--prompt", "{text} and", "--seed", 3, "--temperature", 0.7]
    whole = tmp_path / "whole.jsonl"
    assert call(["batch", "nano", folder, "-o", whole, *how], capsys)[0] == 0
    killed = ["batch", "nano", folder, "-o", out, *how, "--resume"]
    ended = subprocess.run(
        [sys.executable, "-c", KILLS, str(out), *map(str, killed)],
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert 10 <= int(ended.stdout) < 40
    assert records(out) == records(whole)
    assert list(records(out)) == sorted(records(out))


def lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def test_only_what_changed_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = texts(tmp_path / "in", 4), tmp_path / "out.jsonl"
    how = ["batch", "nano", folder, "-o", out, "-n", "4"]
    assert call(how, capsys)[0] == 0
    before = records(out)
    code, _, said = call(how, capsys)
    assert code == 2 and "--resume" in said
    (folder / "t02.txt").write_text("Another text")
    (folder / "t03.txt").unlink()
    code, told, _ = call([*how, "--resume", "--json"], capsys)
    assert code == 0
    counts = json.loads(told)["records"]
    assert (counts["documents"], counts["reused"], counts["dropped"]) == (3, 2, 1)
    after = records(out)
    assert {n: r for n, r in after.items() if n != "t02.txt"} == {
        n: before[n] for n in ("t00.txt", "t01.txt")
    }
    assert after["t02.txt"]["digest"] != before["t02.txt"]["digest"]
    code, told, _ = call([*how[:-1], "5", "--resume", "--json"], capsys)  # another setting
    assert json.loads(told)["records"]["reused"] == 0


def test_requests_and_progress_for_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions",
         "body": {"model": "k3", "prompt": "And the king", "max_tokens": 2}},
        {"id": "b", "prompt": "And the king"},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": "And the king", "logit_bias": {"5": 1}}},
    ]  # fmt: skip
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, told, _ = call(["batch", "nano", given, "-o", out, "-n", "5", "--json-progress"], capsys)
    assert code == 3
    found = records(out)
    assert [found[i]["usage"]["new_tokens"] for i in "ab"] == [2, 5]
    assert found["b"]["text"].startswith(found["a"]["text"])
    assert "logit_bias" in found["c"]["error"]["problem"]
    facts = [json.loads(line) for line in told.splitlines()]
    assert facts[-1]["documents"] == facts[-1]["of"] == 3
    assert facts[-1]["failed"] == 1
    assert facts[-1]["new_tokens"] == 7


def test_answers_follow_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = texts(tmp_path / "in", 2), tmp_path / "out.jsonl"
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["yes", "no"]}))
    assert call(["batch", "nano", folder, "-o", out, "--schema", schema], capsys)[0] == 0
    assert {json.loads(r["text"]) for r in records(out).values()} <= {"yes", "no"}
    before = out.read_bytes()
    for wrong, named in (("{", "schema"), ('{"not": {}}', "not")):
        schema.write_text(wrong)
        code, _, said = call(
            ["batch", "nano", folder, "-o", out, "--overwrite", "--schema", schema], capsys
        )
        assert code == 2 and named in said
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--prompt", "no place"], "{text}"),
        (["--prompt", "{text}.", "--prompt-file", "x"], "two prompts"),
        (["-n", "0"], "-n"),
        (["--sessions", "0"], "--sessions"),
        (["--id-field", "name"], "no table"),
        (["--context", "256"], "no room"),
        (["--save-every", "-1"], "--save-every"),
        (["--resume", "--overwrite"], "exclude"),
        (["-o", "nowhere/out.jsonl"], "not a folder"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(
    more: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = texts(tmp_path / "in", 1), tmp_path / "out.jsonl"
    code, _, said = call(["batch", "nano", folder, "-o", out, *more], capsys)
    assert code == 2 and named in said
    assert "memory plan" not in said
    assert not out.exists()


def test_an_answer_under_way_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One long answer that is killed in its middle; its seed was drawn."""
    pytest.importorskip("zarr")  # saved sessions need it
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"id": "long", "prompt": "And the king"}\n{"id": "b", "prompt": "And"}\n')
    how = ["nano", str(given), "-o", str(out), "-n", "1000", "--temperature", "0.8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "k3offload", "batch", *how, "--save-every", "0.2"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    notes = tmp_path / "out.jsonl.state"
    while process.poll() is None and len(list(notes.glob("*.json"))) < 2:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    code, told, _ = call(["batch", *how, "--resume", "--json"], capsys)
    assert code == 0
    facts = json.loads(told)
    found = records(out)
    assert facts["new_tokens"] < sum(r["usage"]["new_tokens"] for r in found.values())
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]
    seed = json.loads((tmp_path / "out.jsonl.run.json").read_text())["options"]["seed"]
    again = tmp_path / "again.jsonl"
    how[how.index("-o") + 1] = str(again)
    assert call(["batch", *how, "--seed", str(seed)], capsys)[0] == 0
    assert records(again) == found
    sweeps = [
        max(json.loads(line)["timing"]["sweeps"] for line in file.read_text().splitlines())
        for file in (out, again)
    ]
    # Those of both runs; a kill between a save and its note leaves out what lay between two saves.
    assert facts["sweep"] < sweeps[0] <= sweeps[1]


def test_what_it_writes_is_no_part_of_the_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = texts(tmp_path / "in", 3)
    out = folder / "a.jsonl"
    how = ["batch", "nano", folder, "-o", out, "-n", "3"]
    for more in ([], ["--resume"]):
        code, told, _ = call([*how, *more, "--json"], capsys)
        assert code == 0
        assert json.loads(told)["records"]["documents"] == 3
    assert json.loads(told)["records"]["reused"] == 3
    assert list(records(out)) == ["t00.txt", "t01.txt", "t02.txt"]


def test_what_was_too_long_is_tried_again_with_more_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = texts(tmp_path / "in", 1), tmp_path / "out.jsonl"
    (folder / "long.txt").write_text("king " * 100)
    how = ["batch", "nano", folder, "-o", out, "-n", "3"]
    code, told, _ = call([*how, "--context", "80", "--json"], capsys)
    facts = json.loads(told)
    assert code == 3 and facts["records"]["retry"] == facts["failed"] == 1
    code, told, _ = call([*how, "--context", "200", "--json", "--resume"], capsys)
    assert code == 0 and json.loads(told)["records"]["reused"] == 1
    assert records(out)["long.txt"]["text"]


def test_a_save_that_fails_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zarr")

    def full(*given: Any) -> None:
        raise SessionError("No room is left.", "Make room.")

    monkeypatch.setattr("k3offload.session.save", full)
    folder, out = texts(tmp_path / "in", 3), tmp_path / "out.jsonl"
    how = ["batch", "nano", folder, "-o", out, "-n", "8", "--save-every", "0.001"]
    code, _, said = call(how, capsys)
    assert code == 0 and "No room is left" in said
    assert len(records(out)) == 3


def test_a_batch_of_bad_documents_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(100):
        (folder / f"{i}.txt").write_text(" ")
    code, told, _ = call(["batch", "nano", folder, "-o", tmp_path / "out.jsonl", "--json"], capsys)
    facts = json.loads(told)
    assert code == 3 and facts["documents"] == facts["failed"] == 100
