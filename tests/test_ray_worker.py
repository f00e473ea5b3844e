"""What a worker of ``batch --ray`` does, and what is refused: no cluster is started here."""

from __future__ import annotations

import errno
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from k3offload.batch import Batch
from k3offload.batch_lines import digest
from k3offload.batch_meter import BatchMeter
from k3offload.batch_records import Records
from k3offload.cli_options import How, loading_options
from k3offload.documents import Document, read_documents
from k3offload.errors import BatchError, ReadError, UsageError
from k3offload.progress import Progress
from k3offload.run_batch import Task, digest_of
from k3offload.run_ray_worker import BLOCK, ROW, Answers, Asked, Reading, Row, Work
from k3offload.sampling import Sampling
from tests.helpers_engine import call
from tests.test_cli_batch import records, texts
from tests.test_cli_batch_labels import HEAD

TASK = Task("{text} and", 8, Sampling(seed=3, temperature=0.7))


def blocks(reading: Reading) -> list[list[Asked]]:
    return [pickle.loads(block) for block in reading.blocks()]


def test_blocks_hold_what_is_wanted_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts(tmp_path / "in", 7)
    monkeypatch.chdir(tmp_path)  # and back, whatever ``blocks`` does
    reading = Reading("in", {}, str(tmp_path), "all", bytes([1, 1, 0, 1, 1, 1]), 2)
    made = blocks(reading)
    ids = [[asked.document.id for asked in block] for block in made]
    assert ids == [["t00.txt", "t01.txt"], ["t03.txt", "t04.txt"], ["t05.txt"]]
    for asked in chain(*made):
        text = (tmp_path / "in" / asked.document.id).read_text()
        assert asked.document.text == text
        assert asked.digest == digest("all", text, {}, "")
    assert made == blocks(reading)  # a lost one is read again


def test_blocks_end_where_they_grow_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts(tmp_path / "in", 7)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("k3offload.run_ray_worker.TEXT", 150)
    made = blocks(Reading("in", {}, str(tmp_path), "", b"\1" * 7, 7))
    sizes = [sum(len(asked.document.text) for asked in block) for block in made]
    assert len(made) > 2 and sum(map(len, made)) == 7
    assert all(size <= 150 or len(block) == 1 for size, block in zip(sizes, made, strict=True))


def test_rows_of_a_table_keep_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions",
               "body": {"model": "m", "prompt": "hi", "max_tokens": 3}}  # fmt: skip
    messages = [{"role": "user", "content": "hi"}]
    chat = {**request, "custom_id": "b", "url": "/v1/chat/completions",
            "body": {"messages": messages}}  # fmt: skip
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(request)}\n{json.dumps(chat)}\n")
    ((document, _), (other, known)) = blocks(
        Reading("in.jsonl", {}, str(tmp_path), "", b"\1\1", 4)
    )[0]
    assert (document.id, document.text) == ("a", "hi")
    assert document.settings == {"model": "m", "max_tokens": 3}
    assert other.chat == {"messages": messages, "thinking": True}
    assert known != digest_of("", replace(other, chat={**other.chat, "thinking": False}))


@pytest.fixture(name="work")
def _work() -> Work:
    """On the embedded model."""
    run_ray = pytest.importorskip(
        "k3offload.run_ray", reason="needs Ray Data: pip install 'k3offload[ray]'"
    )
    loading = {**loading_options(How(threads=1))}
    sizes = {"context": 200, "sessions": 3, "answer": 8, "fewer": True}
    made = run_ray.work_of("nano", lambda *_: sizes, loading, TASK)
    assert isinstance(made, Work)
    return made


def rows(
    work: Work, reading: Reading, between: Callable[[], object] = lambda: None
) -> Iterator[Row]:
    """What Ray Data does, with one worker and in this process; ``between`` before the reading."""
    between()
    answers = Answers(work)
    for block in reading.blocks():
        for row in answers({BLOCK: [block]}):
            yield pickle.loads(row[ROW][0])


def run(
    work: Work, folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, block: int = 4,
    between: Callable[[], object] = lambda: None, **how: Any,
) -> dict[str, int]:  # fmt: skip
    """A run of ``run_ray`` over ``folder``."""
    from k3offload import run_ray

    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(run_ray, "_rows", lambda work, _, reading: rows(work, reading, between))
    reading = Reading(folder.name, {}, str(folder.parent))
    about = {"model": work.identity, "prompt": TASK.prompt, "options": TASK.options()}
    progress = Progress(quiet=True)
    with Records.open(out, about, **how) as found:
        return run_ray.run_ray(
            work, run_ray.Share(2, 1, 0), block, reading, read_documents(folder.name), found,
            progress, BatchMeter(progress, None, False),
        )  # fmt: skip


@pytest.mark.parametrize("block", [1, 4, 30])
def test_blocks_change_no_answer_and_no_digest(
    tmp_path: Path, block: int, work: Work, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder, out, alone = texts(tmp_path / "in", 9), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    (folder / "t03.txt").write_bytes(b"caf\xe9")
    (folder / "t05.txt").write_text("king " * 400)
    counts = run(work, folder, out, monkeypatch, block)
    assert (counts["done"], counts["failed"], counts["retry"]) == (9, 2, 1)
    how = ["--prompt", TASK.prompt, "-n", 8, "--seed", 3, "--temperature", 0.7, "--context", 200]
    assert call(["batch", "nano", "in", "-o", alone, *how], capsys)[0] == 3
    assert list(records(out).items()) == list(records(alone).items())
    call(["batch", "nano", "in", "-o", out, *how, "--resume", "--json"], capsys)
    (folder / "t07.txt").write_text("another text")
    counts = run(work, folder, alone, monkeypatch, block, resume=True)  # what it left, and here
    assert (counts["reused"], counts["stale"], counts["done"]) == (7, 2, 9)


def test_an_input_that_changes_meanwhile_is_an_error(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = texts(tmp_path / "in", 6), tmp_path / "out.jsonl"
    with pytest.raises(BatchError, match=r"^1 documents of the input changed.*--resume"):
        run(work, folder, out, monkeypatch, between=(folder / "t02.txt").unlink)
    assert len(records(out)) == 5
    assert run(work, folder, out, monkeypatch, resume=True)["done"] == 5
    (folder / "t03.txt").write_text("before")
    change = partial((folder / "t03.txt").write_text, "behind")
    with pytest.raises(BatchError, match=r"^1 documents of the input changed.*--resume"):
        run(work, folder, out, monkeypatch, between=change, resume=True)
    assert run(work, folder, out, monkeypatch, resume=True)["reused"] == 4


@pytest.mark.parametrize(
    "how",
    [
        ["--label", " a", "--label", " of the", "--label-end", ","],
        ["--label", " a", "--label", " of the", "--output-format", "openai"],
        ["-n", 5, "--seed", 3, "--output-format", "openai"],
        ["-n", 5, "--seed", 3, "--prompt", HEAD + "{text} and"],
    ],
)
def test_the_command_writes_what_it_writes_alone(
    tmp_path: Path, how: list[Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Labels, lines like OpenAI's, and a beginning that the prompts share."""
    run_ray = pytest.importorskip("k3offload.run_ray", reason="needs Ray Data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_ray, "cluster", lambda *_: nullcontext())
    monkeypatch.setattr(run_ray, "share", lambda *_: run_ray.Share(2, 1, 0))
    monkeypatch.setattr(run_ray, "_rows", lambda work, _, reading: rows(work, reading))
    folder, out, alone = texts(tmp_path / "in", 5), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    (folder / "t02.txt").write_bytes(b"caf\xe9")
    asked = ["batch", "nano", "in", "--threads", 1, "--json", *how]
    on_ray = ["--ray", "local", "--ray-block", 2]
    told = []
    for given in (["-o", out, *on_ray], ["-o", alone]):
        code, said, err = call([*asked, *given], capsys)
        assert code == 3, err
        told.append(json.loads(said))
    for name in ("records", "documents", "failed", "prompt_tokens", "new_tokens"):
        assert told[0][name] == told[1][name], name
    assert told[0]["sweep"] > 0 and told[0]["bytes_read"] == sum(told[0]["read"].values()) > 0
    assert list(lines_of(out).items()) == list(lines_of(alone).items())
    kept = alone.read_bytes()
    code, said, _ = call([*asked, *on_ray, "-o", alone, "--resume"], capsys)
    assert json.loads(said)["records"]["reused"] == 5 and alone.read_bytes() == kept


def lines_of(out: Path) -> dict[str, dict[str, Any]]:
    """``records`` without the time that stands in lines like OpenAI's."""
    found = records(out)
    for line in found.values():
        if line.get("response"):
            del line["response"]["body"]["created"]
    return found


@pytest.mark.parametrize("in_a_row", [True, False])
def test_a_worker_that_can_read_nothing_ends_the_run(
    tmp_path: Path, in_a_row: bool, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small its blocks are."""
    given, out = texts(tmp_path / "in", 20), tmp_path / "out.jsonl"
    run_on = Batch._finish
    seen = list[int]()

    def lost(batch: Batch, job: Any, done: Any) -> None:
        seen.append(job.index)
        if in_a_row or len(seen) % 5:
            done = replace(done, error=ReadError("expert 1 is gone.", "Mend it."))
        run_on(batch, job, done)

    monkeypatch.setattr(Batch, "_finish", lost)
    if not in_a_row:
        assert run(work, given, out, monkeypatch, block=2)["retry"] == 16
        return
    with pytest.raises(ReadError, match=r"^process \d+ on .*: expert 1 is gone\. Mend it\."):
        run(work, given, out, monkeypatch, block=2)
    assert len(records(out)) == 17


def test_a_worker_that_dies_gives_the_same_rows_again(work: Work) -> None:
    """Ray passes over those it has by their number, so number and order must not change."""
    lengths = [8, 1, 5, 2, 7, 1, 1, 6, 3, 1]
    documents = [
        Document(f"{i}", "a word", settings={"max_tokens": n}) for i, n in enumerate(lengths)
    ]
    block = pickle.dumps([Asked(document, f"d{i}") for i, document in enumerate(documents)])
    made = []
    for sessions in (1, 4):  # in the order of their end this would differ
        answers = Answers(replace(work, sizes={**work.sizes, "sessions": sessions}))
        got = [pickle.loads(row[ROW][0]).record for row in answers({BLOCK: [block]})]
        made.append([{k: v for k, v in record.items() if k != "timing"} for record in got])
    assert made[0] == made[1]
    assert [record["digest"] for record in made[0]] == [f"d{i}" for i in range(10)]


def test_what_ends_a_run_says_where_and_what(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = texts(tmp_path / "in", 2), tmp_path / "out.jsonl"
    other = replace(work, identity={**work.identity, "tokenizer": "x"})
    with pytest.raises(UsageError, match=r"^process \d+ on .*: the model .* differs: tokenizer\."):
        run(other, folder, out, monkeypatch)
    with pytest.raises(UsageError, match=r"^process \d+ on .*: .*elsewhere is not a folder"):
        run(replace(work, model="elsewhere"), folder, out, monkeypatch, resume=True)

    def broken(*_: Any) -> None:
        raise ReadError("shard 1 is gone.", "Mend it.")

    monkeypatch.setattr("k3offload.engine.Engine.run", broken)
    with pytest.raises(ReadError, match=r"^process \d+ on .*: shard 1 is gone\. Mend it\."):
        run(work, folder, out, monkeypatch, resume=True)

    def gone(*_: Any) -> None:
        raise OSError(errno.EIO, "broken drive", "/a/shard")

    monkeypatch.setattr("k3offload.engine.Engine.run", gone)
    with pytest.raises(ReadError, match=r"^process \d+ on .*: /a/shard: broken drive\. "):
        run(work, folder, out, monkeypatch, resume=True)
    assert records(out) == {}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (["--ray-workers", 2], "--ray-workers is about --ray"),
        (["--ray-block", 2], "--ray-block is about --ray"),
        (["--ray", "local", "--ray-workers", 0], "--ray-workers is 0"),
        (["--ray", "local", "--ray-block", 0], "--ray-block is 0"),
        (["--ray", "ray://head:10001"], "with --ray auto"),
        (["--ray", "local", "--save-every", 60], "--save-every"),
        (["--ray", "local", "--trace", "folder"], "--trace: workers record nothing"),
        (["--ray", "local", "--trace-with", "ahead"], "--trace: workers record nothing"),
        (["--ray", "local", "--device", "cuda:1"], "which GPU a worker gets is Ray's choice"),
        (["--ray", "local", "--dtype", "float8"], "float8"),
        (["--ray", "127.0.0.1:1"], "there is no Ray to connect to: ConnectionRefusedError"),
        (["--ray", "nonsense"], "there is no Ray to connect to"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, how: list[Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray.data", reason="needs Ray Data: pip install 'k3offload[ray]'")
    folder, out = texts(tmp_path / "in", 1), tmp_path / "out.jsonl"
    code, said, err = call(["batch", "nano", folder, "-o", out, *how], capsys)
    assert (code, said) == (2, "") and says in err, err
    assert not out.exists()


def test_without_ray_it_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "k3offload.run_ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    folder, out = texts(tmp_path / "in", 1), tmp_path / "out.jsonl"
    code, _, err = call(["batch", "nano", folder, "-o", out, "--ray", "local"], capsys)
    assert code == 2 and "pip install 'k3offload[ray]'" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("nodes", "workers", "how", "wanted"),
    [
        ([{"CPU": 4}, {"CPU": 8}, {}], None, {}, (2, 4, 0)),
        ([{"CPU": 4}, {"CPU": 8}], 1, {}, (1, 4, 0)),
        ([{"CPU": 4}, {"CPU": 8}], 3, {"ram": "1G"}, (3, 2, 0)),
        ([{"CPU": 4}, {"CPU": 8}], 3, {}, "--ram"),
        ([{"CPU": 1}], 2, {"ram": "1G"}, "--ray-workers 1 or less"),
        ([{}], None, {}, "offers a CPU"),
        ([{"CPU": 4}], None, {"device": "cuda"}, "offers a GPU"),
        ([{"CPU": 4}, {"CPU": 8, "GPU": 2}], None, {"device": "cuda"}, (1, 8, 1)),
        ([{"CPU": 4}, {"CPU": 8, "GPU": 2}], None, {}, (2, 4, 0)),
        ([{"CPU": 4, "GPU": 1}], None, {}, (1, 4, 1)),
        ([{"CPU": 4, "GPU": 1}], None, {"device": "cpu"}, (1, 4, 0)),
        ([{"CPU": 4, "GPU": 1}], 2, {"ram": "1G"}, "more than the 1 GPUs"),
    ],
)  # fmt: skip
def test_what_a_worker_claims(
    nodes: list[dict[str, float]], workers: int | None, how: dict[str, Any],
    wanted: tuple[int, int, int] | str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ray = pytest.importorskip("ray", reason="needs Ray Data: pip install 'k3offload[ray]'")
    run_ray = pytest.importorskip("k3offload.run_ray", reason="needs Ray Data")
    dead = {"Alive": False, "Resources": {"CPU": 1}}
    alive = [{"Alive": True, "Resources": node} for node in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: [dead, *alive])
    loading = loading_options(How(**how))
    if isinstance(wanted, tuple):
        assert run_ray.share(workers, loading) == wanted
    else:
        with pytest.raises(UsageError, match=wanted):
            run_ray.share(workers, loading)


def test_who_rounds_otherwise_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    run_ray = pytest.importorskip("k3offload.run_ray", reason="needs Ray Data")
    from k3offload.run_ray_worker import Opened

    known: dict[str, Opened] = {}
    with Progress() as progress:
        for who, isa in (("a", "amx"), ("b", "amx"), ("c", "avx2")):
            opened = Opened(who, 2, 1, "the plan", {"isa": isa, "device": {}})
            run_ray._say_opened(opened, known, progress)
    err = capsys.readouterr().err
    assert err.count("the plan") == 1 and err.count("warning") == 1
    assert "c computes with another isa than a" in err
    assert json.dumps(list(known)) == '["a", "b", "c"]'
