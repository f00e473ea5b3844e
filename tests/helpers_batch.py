"""Batches without a model: what a document's answer is, and runs that write them.  A clock that the
sweeps of a model move."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k3offload.batch_lines import digest
from k3offload.batch_records import Records

if TYPE_CHECKING:
    from k3offload.engine import Engine

ABOUT: Final[dict[str, Any]] = {"version": "0.1.0", "model": {"name": "m"}, "prompt": "p"}
ODD: Final = {
    "plain": "an answer",
    "../../etc/passwd": "Grüße, 中文, 😀",
    "": "an id of nothing",
    "x" * 5000: "a long id\nwith lines\r\x85\u2028\u2029",
    "name \udcff.txt": "half a pair \ud83d, \0 and \x1b",
    "NUL": '"quoted" \\ {"id": 1}\n',
}


class Clock:
    """Seconds that pass in sweeps: ``each`` for one, and for every row that decodes or is a
    prompt's."""

    def __init__(self, each: float, decode: float, prompt: float) -> None:
        self.now, self._each, self._prices = 1000.0, each, (prompt, decode)

    def __call__(self) -> float:
        return self.now

    def drive(self, engine: Engine) -> None:
        first = engine.spec.moe_layers[0]

        def before_layer(layer: int) -> None:
            self.now += self._each * (layer == 0)

        def on_route(layer: int, group: Any, *routed: Any) -> None:
            if layer == first:
                self.now += (group.end - group.begin) * self._prices[group.decode]

        engine.hooks.before_layer, engine.hooks.on_route = before_layer, on_route


def of(text: str, prompt: str = "p") -> str:
    """The digest of a document."""
    return digest(text, prompt, {"max_tokens": 5})


def answer(id: str, text: str, prompt: str = "p") -> dict[str, Any]:
    """The record of a document, the same in every run."""
    return {"id": id, "digest": of(text, prompt), "text": text[::-1], "tokens": [len(text), 1.5]}


def many(count: int) -> dict[str, str]:
    """Documents of several lengths, by id."""
    return {f"document {i}": f"text {i} ü " * (1 + i * 7 % 11) for i in range(count)}


def batch(
    out: Path,
    documents: Mapping[str, str],
    *,
    at_once: int = 2,
    arrange: Callable[[list[str]], list[str]] = lambda ids: ids,
    swept: Callable[[], None] = lambda: None,
    prompt: str = "p",
    **how: Any,
) -> dict[str, int]:
    """A whole run: those to do, in the order that they are done, ``at_once`` a sweep.

    Each of them has kept a state first, in a folder, and used what an earlier run kept.
    """
    with Records.open(out, {**ABOUT, "prompt": prompt}, **how) as records:
        todo = [id for id, text in documents.items() if not records.done(id, of(text, prompt))]
        todo = arrange(todo)
        for i in range(0, len(todo), at_once):
            for id in todo[i : i + at_once]:
                digest = of(documents[id], prompt)
                kept = records.state(id)
                assert kept is None or (kept.id, kept.digest) == (id, digest)
                folder = records.state_folder(id)
                os.makedirs(folder / "deeper", exist_ok=True)
                (folder / "deeper" / "state").write_bytes(b"x")
                records.keep_state(id, digest, {"position": 7})
                records.add(answer(id, documents[id], prompt))
            records.flush()
            swept()
        return records.finish()


def manifest(out: Path) -> dict[str, Any]:
    """What the manifest beside ``out`` says."""
    found: dict[str, Any] = json.loads(out.with_name(f"{out.name}.run.json").read_bytes())
    return found


def lines(out: Path) -> list[dict[str, Any]]:
    """The records of ``out``, in order."""
    return [json.loads(line) for line in out.read_bytes().decode().split("\n")[:-1]]


def names(out: Path) -> set[str]:
    """What lies beside ``out``, and itself, behind its name."""
    return {path.name.removeprefix(out.name) for path in out.parent.iterdir()}
