"""``k3offload batch`` killed at random moments and resumed: the same file, and what a kill costs.

    python -m benchmarks.batch_kill [--documents 40] [--kills 20] [--new 120] [--save-every 0.3]

The real command, with the embedded model.  It tells every sweep as a line of JSON; after each kill
what is on the drive (records, and positions of saved sessions) is counted in rows, a row for each
token that was computed.  Lost is what the killed run had computed less what it brought to the
drive, and it must not be more than the rows since the sweep after which it saved last, and those of
the sweep under way.  The last file must be that of a run that nobody killed, but for times.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run import machine, some_words, tell
from k3offload.session_manifest import read_manifest

#: The command, but every sweep is told and not one a second.
COMMAND = (
    "import sys, k3offload.batch_meter as meter; meter.EVERY = 0.0; "
    "from k3offload.cli import main; main(sys.argv[1:])"
)


@dataclass
class Ended:
    """What a run said, and how it ended: rows of each of its sweeps, and the sweep after which it
    saved last, 0 if it never did."""

    code: int
    rows: list[int]
    saved: int
    facts: dict[str, Any]

    @property
    def at_risk(self) -> int:
        """Rows that a kill may cost: since the last save, and of a sweep under way, which is no
        larger than the largest."""
        return sum(self.rows[self.saved :]) + max(self.rows, default=0)


def run(arguments: list[str], sweeps: int | None, pause: float) -> Ended:
    """The command, killed ``pause`` seconds after ``sweeps`` sweeps (of ``None``: never)."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "batch", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        lines: list[str] = []
        seen = 0
        while sweeps is not None and seen < sweeps and (line := process.stdout.readline()):
            lines.append(line)
            seen = json.loads(line)["sweep"]
        if sweeps is not None:
            time.sleep(pause)
            process.kill()
        rest, said = process.communicate()
    if process.returncode not in (0, -9):
        raise SystemExit(f"The command ended with {process.returncode}: {said}")
    lines += rest.splitlines()
    rows: dict[int, int] = {}
    facts: dict[str, Any] = {}
    saved = 0
    for line in lines:
        try:
            facts = json.loads(line)
        except ValueError:  # the last one, half written
            break
        if facts["sweep"]:
            rows[facts["sweep"]] = facts["rows"]
        saved = facts["saved_at_sweep"] or 0
    assert sorted(rows) == list(range(1, len(rows) + 1)), "a sweep was not told"
    return Ended(process.returncode, [rows[i + 1] for i in range(len(rows))], saved, facts)


def on_drive(out: Path) -> int:
    """Rows of all that is on the drive: a record's answer had its last token sampled and not
    computed; a state is as far as its position."""
    rows, done = 0, set()
    if out.exists():
        for line in out.read_bytes().split(b"\n")[:-1]:
            record = json.loads(line)
            done.add(record["id"])
            rows += record["usage"]["prompt_tokens"] + record["usage"]["new_tokens"] - 1
    for state in out.with_name(out.name + ".state").glob("*.json"):
        if json.loads(state.read_bytes())["id"] not in done:
            rows += read_manifest(state.with_suffix("")).position
    return rows


def records(out: Path) -> list[dict[str, Any]]:
    """The lines of ``out`` without times."""
    found = [json.loads(line) for line in out.read_bytes().splitlines()]
    for record in found:
        del record["timing"]
    return found


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures of an uninterrupted run and of one that was killed."""
    drawn, texts = random.Random(given.seed), folder / "in"
    texts.mkdir()
    for i in range(given.documents):
        words = some_words(drawn, drawn.randrange(4, 60))
        (texts / f"t{i:03}.txt").write_text(f"{i} {words}")
    how = [
        "nano", str(texts), "-n", str(given.new), "--sessions", "4", "--temperature", "0.8",
        "--seed", "3", "--ignore-end", "--json-progress", "--save-every", str(given.save_every),
    ]  # fmt: skip
    whole, out = folder / "whole.jsonl", folder / "out.jsonl"
    begin = time.perf_counter()
    alone = run([*how, "-o", str(whole)], None, 0)
    seconds = time.perf_counter() - begin
    lost, at_risk, sweeps, before = list[int](), list[int](), list[int](), 0
    each = len(alone.rows) // (given.kills + 1)  # so that something is left for the last run
    while True:
        more = len(lost) < given.kills
        moment = drawn.randrange(0, 2 * each) if more else None
        ended = run([*how, "-o", str(out), "--resume"], moment, drawn.random() / 20)
        if not more:
            break
        if ended.code == 0:
            raise SystemExit(f"All was done after {len(lost)} kills: give more --new.")
        now = on_drive(out)
        lost.append(before + sum(ended.rows) - now)
        at_risk.append(ended.at_risk)
        sweeps.append(len(ended.rows))
        if not lost[-1] <= at_risk[-1]:
            raise SystemExit(f"Kill {len(lost)} cost {lost[-1]} rows, not {at_risk[-1]} at most.")
        before = now
    if records(out) != records(whole):
        raise SystemExit("The file is not that of a run that nobody killed.")
    manifest = json.loads(out.with_name(out.name + ".run.json").read_bytes())
    return {
        "documents": given.documents,
        "kills": len(lost),
        "resumes": manifest["resumes"],
        "rows": sum(alone.rows),
        "seconds": seconds,
        "sweeps_before_each_kill": sweeps,
        "lost_rows": lost,
        "at_risk_rows": at_risk,
        "lost_share": sum(lost) / sum(alone.rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--new", type=int, default=120)
    parser.add_argument("--save-every", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k3-batch-") as folder:
        facts = measure(given, Path(folder))
    line = {"benchmark": "batch_kill", **machine(), "save_every": given.save_every, **facts}
    tell(line)


if __name__ == "__main__":
    main()
