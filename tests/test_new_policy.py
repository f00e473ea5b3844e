"""The tutorial ``examples/new_policy.md``, word for word: its files, its commands, their output;
and policies and predictors that lie outside the package."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import k3offload
from k3offload import registry
from k3offload.errors import UsageError
from k3offload.scheduler.lease import victim
from k3offload.scheduler.replay import replay
from k3offload.tiers.base import PageId
from k3offload.trace_made import NANO, pattern, trace_of, write_trace
from tests.contract import test_policy, test_predict
from tests.helpers_engine import call

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The code blocks of Markdown: their language and what they hold."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield found[1], found[2]


def follow(text: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Do what a tutorial says, in this folder.  Returns the last state of each file."""
    files, printed = {}, ""
    for language, body in blocks(text):
        if language == "python":
            name = "policy_near.py" if "class Policy" in body else "predict_sure.py"
            files[name] = body
            Path(name).write_text(body)
        elif language == "sh":
            printed = ""
            for line in body.splitlines():
                program, *arguments = shlex.split(line)
                code, out, err = call(arguments, capsys)
                assert (program, code) == ("k3offload", 0), f"{line}: {err}"
                printed += out
        else:
            assert body == printed
    return files


def test_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    text = (EXAMPLES / "new_policy.md").read_text()
    files = follow(text, capsys)
    assert files == {name: (EXAMPLES / name).read_text() for name in files} and len(files) == 2
    assert "near" in Path("near.html").read_text()
    first = text[: text.index("## What the router says")]
    with pytest.raises(AssertionError):  # a figure that is no longer so
        follow(first.replace("293 MB", "294 MB"), capsys)


@pytest.mark.parametrize("check", test_policy.CHECKS)
def test_the_policy_keeps_the_contract(check: Callable[[Any], None]) -> None:
    check(registry.chosen("policy", str(EXAMPLES / "policy_near.py")))


@pytest.mark.parametrize("check", test_predict.CHECKS)
def test_the_predictor_keeps_the_contract(check: Callable[[Any], None]) -> None:
    make = registry.chosen("predict", str(EXAMPLES / "predict_sure.py"))
    check(make)
    assert any(test_predict.said(make))


# ---- files of one's own ----


def own(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


LRU = (ROOT / "scheduler" / "policy_lru.py").read_text().replace("..tiers", "k3offload.tiers")


def test_an_engine_takes_files(tmp_path: Path) -> None:
    """The same bits and the same bytes as with the policy of the package that it copies."""
    found = []
    for policy in ("lru", own(tmp_path, "policy_mine.py", LRU)):
        with k3offload.load("nano", cache="1M", policy=policy, predict="none") as engine:
            session = engine.session()
            session.append("In the beginning God created")
            found.append((session.logits().tolist(), engine.counts()["experts"].bytes))
    assert found[0] == found[1]
    predict = str(EXAMPLES / "predict_sure.py")
    with k3offload.load("nano", cache="1M", predict=predict) as engine:
        session = engine.session()
        session.append("In the beginning God created")
        for _ in range(4):
            session.append_sampled(int(session.logits().argmax()))
        session.logits()
        assert engine.counts()["experts"].prefetches


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = own(tmp_path, "policy_mine.py", LRU + "\nKIND = 1\n")
    first = registry.chosen("policy", path)
    assert registry.chosen("policy", path) is first
    own(tmp_path, "policy_mine.py", LRU + "\nKIND = 22\n")
    assert registry.chosen("policy", path) is not first


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("policy_mine.txt", "", "There is no policy"),
        ("mine.py", LRU, "Call it policy_NAME.py"),
        ("policy_my_own.py", LRU, "Call it policy_NAME.py"),
        ("policy_.py", LRU, "Call it policy_NAME.py"),
        ("policy_lru.py", LRU, "k3offload has a policy 'lru' already"),
        ("policy_mine.py", "import os\nx = nothing\n", "in line 2: NameError"),
        ("policy_mine.py", "class Policy\n", "in line 1: SyntaxError"),
        ("policy_mine.py", "from nowhere import x\n", "in line 1: ModuleNotFoundError"),
        ("policy_mine.py", "def Policy(slots): pass\n", "has no class Policy"),
        ("policy_mine.py", LRU.replace("def forget", "def forgot"), "has no forget"),
    ],
)
def test_files_that_are_refused(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own(tmp_path / "my", name, text)
    write_trace(tmp_path / "t", trace_of(pattern("uniform", 20), NANO.experts))
    code, out, err = call(["bench", "policies", tmp_path / "t", "--policy", path], capsys)
    assert code == 2 and said in err and name in err and not out
    with pytest.raises(UsageError, match=re.escape(said)):
        k3offload.load("nano", policy=path)


def test_names_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t", trace_of(pattern("uniform", 20), NANO.experts))
    paths = [own(tmp_path / part, "policy_mine.py", LRU) for part in ("a", "b")]
    missing = tmp_path / "policy_none.py"
    for option, given, said in (
        ("--policy", paths, "have the same name"),
        ("--policy", [missing], "no such file"),
        ("--predictor", [tmp_path / "predict_none.py"], "There is no predictor"),
        ("--predictor", paths[:1], "Call it predict_NAME.py"),
    ):
        more = [part for path in given for part in (option, path)]
        code, out, err = call(["bench", "policies", tmp_path / "t", *more], capsys)
        assert code == 2 and said in err and not out


class _Cheats:
    """Lets go of what is in use, or of what is not there."""

    def __init__(self, gone: PageId | None) -> None:
        self.pages: list[PageId] = []
        self.gone = gone

    def hit(self, page: PageId) -> None: ...

    def forget(self, page: PageId) -> None: ...

    def note(self, *news: Any) -> None: ...

    def insert(self, page: PageId) -> None:
        self.pages.append(page)

    def evict(self, busy: Any) -> PageId:
        return self.gone or next(page for page in self.pages if busy(page))


@pytest.mark.parametrize(("gone", "said"), [(None, "in use"), (PageId(9, 9), "not there")])
def test_a_policy_that_cheats_is_stopped(
    gone: PageId | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In replay, where it would beat MIN, and in an engine, where it would ruin the answer."""
    run = trace_of(pattern("uniform", 20), NANO.experts).leases()
    with pytest.raises(UsageError, match=said):
        replay(run, _Cheats(gone), 10)
    pages = {PageId(1, 0), PageId(1, 1)}
    cheat = _Cheats(gone)
    cheat.insert(PageId(1, 0))
    with pytest.raises(UsageError, match=said):
        victim(cheat, pages.__contains__, pages)
    monkeypatch.setattr("k3offload.engine.chosen", lambda *_: lambda slots: _Cheats(gone))
    with k3offload.load("nano", cache=10 * 14688, predict="none") as engine:
        session = engine.session()
        session.append("In the beginning God created the heaven")
        with pytest.raises(UsageError, match=said):
            session.logits()
